"""config.json against published files, transformers' files and each refusal by name (Q10)."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.io.config_keys import UNSUPPORTED
from llmq_nb.io.hf_config import read_model_config, unread_keys, write_model_config
from llmq_nb.model.config import Llama3Rope, ModelConfig
from llmq_nb.model.families import PRESETS
from tests.io.folders import make_config

FIXTURES = Path(__file__).parents[1] / "fixtures" / "transformers"

# Every key of the published files that is not about provenance, retyped from them.
COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
QWEN25_14B = COMMON | {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064},
    **{"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48},
    **{"num_attention_heads": 40, "num_key_value_heads": 8, "max_window_layers": 48},
    **{"max_position_embeddings": 131072, "sliding_window": 131072, "use_sliding_window": False},
    **{"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "tie_word_embeddings": False},
    **{"bos_token_id": 151643, "eos_token_id": 151643},
}
QWEN3_4B = COMMON | {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936},
    **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "head_dim": 128},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_window_layers": 36},
    **{"max_position_embeddings": 40960, "sliding_window": None, "use_sliding_window": False},
    **{"rms_norm_eps": 0.000001, "rope_theta": 1000000, "rope_scaling": None},
    **{"tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0},
    **{"bos_token_id": 151643, "eos_token_id": 151645},
}
LLAMA31_8B = COMMON | {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    **{"rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False},
    **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    **{"bos_token_id": 128000, "eos_token_id": 128001},
    "rope_scaling": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
    },
}
SMOLLM2_135M = COMMON | {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152},
    **{"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192},
    **{"rms_norm_eps": 1e-05, "rope_theta": 100000, "rope_scaling": None, "mlp_bias": False},
    **{"attention_bias": False, "tie_word_embeddings": True, "is_llama_config": True},
    **{"rope_interleaved": False, "initializer_range": 0.041666666666666664},
    **{"bos_token_id": 0, "eos_token_id": 0, "pretraining_tp": 1},
}
MISTRAL: dict[str, Any] = {
    **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32768},
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768},
    **{"rms_norm_eps": 1e-05, "rope_theta": 1e6, "sliding_window": None},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
PUBLISHED = {
    "qwen2.5-14b": QWEN25_14B,
    "qwen3-4b": QWEN3_4B,
    "llama-3.1-8b": LLAMA31_8B,
    "smollm2-135m": SMOLLM2_135M,
    "mistral-7b-v0.3": MISTRAL,
}


def read(folder: Path, data: object, **changes: Any) -> ModelConfig:
    save(folder, data)
    return read_model_config(folder, **changes)


def save(folder: Path, data: object) -> None:
    (folder / "config.json").write_text(json.dumps(data))


def without(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k not in keys}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_give_the_presets(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, PUBLISHED[name]) == PRESETS[name]
    assert unread_keys(tmp_path) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_5_spelling_means_the_same(tmp_path: Path, name: str) -> None:
    old = PUBLISHED[name]
    scaling = old.get("rope_scaling") or {"rope_type": "default"}
    new = without(old, "rope_theta", "rope_scaling", "torch_dtype") | {
        "dtype": "bfloat16",
        "rope_parameters": {**scaling, "rope_theta": old["rope_theta"]},
    }
    assert read(tmp_path, new) == PRESETS[name]
    assert unread_keys(tmp_path) == []


def test_llama3_scaling_is_read_not_ignored(tmp_path: Path) -> None:
    """Q10: without it Llama 3.1 trains with the wrong rotation."""
    expected = Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )
    assert read(tmp_path, LLAMA31_8B).rope_scaling == expected


def test_both_spellings_must_agree(tmp_path: Path) -> None:
    both = LLAMA31_8B | {"rope_parameters": {**LLAMA31_8B["rope_scaling"], "rope_theta": 500000.0}}
    assert read(tmp_path, both) == PRESETS["llama-3.1-8b"]
    for wrong in ({"rope_theta": 10000.0}, {"rope_theta": 5e5, "factor": 4.0}):
        both["rope_parameters"] = {**LLAMA31_8B["rope_scaling"], **wrong}
        with pytest.raises(UserError, match="rope_parameters disagrees"):
            read(tmp_path, both)


@pytest.mark.parametrize("folder", sorted(p.name for p in FIXTURES.iterdir() if p.is_dir()))
def test_files_saved_by_transformers_are_read_whole(folder: str) -> None:
    for path in (FIXTURES / folder).glob("config*.json"):
        data = json.loads(path.read_text())
        config = read_model_config(path)
        rope = data.get("rope_parameters") or {**(data["rope_scaling"] or {}), **data}
        assert unread_keys(path) == []
        assert config.family == data["model_type"]
        assert (config.C, config.F, config.L) == tuple(
            data[f"{k}"] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
        assert (config.H, config.G) == (data["num_attention_heads"], data["num_key_value_heads"])
        assert config.D == data.get("head_dim", config.C // config.H)
        assert config.tied == data["tie_word_embeddings"]
        assert config.rope_theta == rope["rope_theta"]
        assert (config.rope_scaling is not None) == (rope.get("rope_type") == "llama3")


def test_the_fixtures_are_there() -> None:
    assert len(list(FIXTURES.glob("*/config.json"))) >= 9


# What an absent key means: the defaults of transformers' config classes.
NEEDED = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size")
NEEDED += ("num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (QWEN25_14B | {"num_attention_heads": 32}, (32, 160, 32768, (), ())),
        (QWEN3_4B, (32, 128, 32768, (), ())),
        (LLAMA31_8B, (32, 128, 2048, (1,), (2,))),
        (MISTRAL | {"sliding_window": None}, (8, 128, 131072, (1,), (2,))),
    ],
    ids=["qwen2", "qwen3", "llama", "mistral"],
)
def test_absent_keys_take_the_familys_defaults(
    tmp_path: Path, base: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    kept = {k: v for k, v in base.items() if k in (*NEEDED, "sliding_window")}
    config = read(tmp_path, kept)
    got = (config.G, config.D, config.max_position, config.bos_ids, config.eos_ids)
    assert got == expected
    assert (config.tied, config.norm_eps, config.rope_theta) == (False, 1e-6, 10000.0)
    assert config.init_std == 0.02 and config.pad_id is None


@pytest.mark.parametrize("key", NEEDED[2:])
def test_sizes_are_needed(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match=f"no '{key}' in .*config.json"):
        read(tmp_path, without(LLAMA31_8B, key))


@pytest.mark.parametrize(
    ("eos", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ()), ([], ())], ids=str
)
def test_eos_is_an_id_a_list_or_null(tmp_path: Path, eos: Any, ids: tuple[int, ...]) -> None:
    assert read(tmp_path, LLAMA31_8B | {"eos_token_id": eos}).eos_ids == ids


@pytest.mark.parametrize(("pad", "pad_id"), [(None, None), (-1, None), (5, 5)])
def test_pad_may_be_null(tmp_path: Path, pad: int | None, pad_id: int | None) -> None:
    assert read(tmp_path, LLAMA31_8B | {"pad_token_id": pad}).pad_id == pad_id


def test_null_key_value_heads_are_as_many_as_query_heads(tmp_path: Path) -> None:
    assert read(tmp_path, MISTRAL | {"num_key_value_heads": None}).G == 32


def test_head_dim_may_be_explicit_or_derived(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA31_8B | {"head_dim": 64}).D == 64
    assert read(tmp_path, LLAMA31_8B | {"head_dim": None}).D == 128
    with pytest.raises(UserError, match="hidden size 4096 and 24 query heads.*give head_dim"):
        read(tmp_path, LLAMA31_8B | {"num_attention_heads": 24})


NOT_NEUTRAL: dict[str, Any] = {
    "quantization_config": {"quant_method": "fp8"},
    "auto_map": {"AutoModelForCausalLM": "modeling_x.X"},
    "no_rope_layers": [1, 1, 0],
    "vision_config": {"hidden_size": 8},
}


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_an_unimplemented_feature_is_refused_by_name(tmp_path: Path, key: str) -> None:
    """Q10: LLMQ passed over such keys without a word."""
    value = NOT_NEUTRAL.get(key, True if UNSUPPORTED[key][0][:1] == (False,) else 0.5)
    with pytest.raises(UserError, match=f"{key} = .*config.json: .* is not implemented"):
        read(tmp_path, LLAMA31_8B | {key: value})
    for neutral in (None, *UNSUPPORTED[key][0]):
        assert read(tmp_path, LLAMA31_8B | {key: neutral}) == PRESETS["llama-3.1-8b"]


def test_qwen2_has_its_bias_whatever_attention_bias_says(tmp_path: Path) -> None:
    for value in (True, False):
        assert read(tmp_path, QWEN25_14B | {"attention_bias": value}).qkv_bias


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA31_8B, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LLAMA31_8B, {"architectures": ["Qwen3MoeForCausalLM"]}, "'Qwen3MoeForCausalLM'"),
        (LLAMA31_8B, {"architectures": ["LlamaModel"]}, "unknown architecture 'LlamaModel'"),
        (LLAMA31_8B, {"architectures": ["A", "B"]}, "must be a list of one"),
        (LLAMA31_8B, {"architectures": None, "model_type": "phi3"}, "model_type 'phi3'"),
        (LLAMA31_8B, {"model_type": "mistral"}, "do not belong together"),
        (LLAMA31_8B, {"hidden_size": "4096"}, "hidden_size = '4096'"),
        (LLAMA31_8B, {"num_hidden_layers": True}, "num_hidden_layers = True"),
        (LLAMA31_8B, {"num_hidden_layers": 0}, "must be a positive integer"),
        (LLAMA31_8B, {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5'"),
        (LLAMA31_8B, {"rms_norm_eps": 0}, "must be positive"),
        (LLAMA31_8B, {"tie_word_embeddings": "no"}, "must be true or false"),
        (LLAMA31_8B, {"eos_token_id": 128256}, "eos_token_id = 128256.*0 to 128255"),
        (LLAMA31_8B, {"eos_token_id": [1, "2"]}, "eos_token_id"),
        (LLAMA31_8B, {"bos_token_id": [1, 2]}, "bos_token_id = .* one id or null"),
        (LLAMA31_8B, {"num_key_value_heads": 5}, "32 query heads, 5 key/value.*config.json"),
        (LLAMA31_8B, {"intermediate_size": 1000}, "feed-forward size 1000.*multiple of 16"),
        (LLAMA31_8B, {"rope_scaling": [1]}, "rope_scaling = .* must be an object"),
        (LLAMA31_8B, {"original_max_position_embeddings": 4096}, "is 4096 and 8192"),
        (QWEN3_4B, {"head_dim": 0}, "head_dim = 0"),
    ],
)
def test_a_wrong_value_is_named(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, base | change)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type 'yarn'"),
        ({"type": "linear", "factor": 2.0}, "rope_type 'linear'"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type 'dynamic'"),
        ({"rope_type": "longrope"}, "rope_type 'longrope'"),
        ({"rope_type": "llama3", "factor": 8.0}, "no 'low_freq_factor'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_theta": 1e4}}, "unknown RoPE key 'full_attention'"),
        ({"rope_type": "default", "mrope_section": [1]}, "unknown RoPE key 'mrope_section'"),
    ],
)
def test_unknown_rope_is_refused(
    tmp_path: Path, key: str, rope: dict[str, Any], message: str
) -> None:
    data = without(LLAMA31_8B, "rope_scaling", "rope_theta") | {key: rope}
    with pytest.raises(UserError, match=message):
        read(tmp_path, data)


@pytest.mark.parametrize(
    ("base", "change", "window"),
    [
        (MISTRAL, {"sliding_window": 4096}, 4096),
        (without(MISTRAL, "sliding_window"), {}, 4096),  # the class's default
        (QWEN25_14B, {"use_sliding_window": True, "max_window_layers": 20}, None),
        (QWEN25_14B, {"sliding_window": 512, "use_sliding_window": True}, None),
        (QWEN3_4B, {"use_sliding_window": True, "max_window_layers": 0}, None),
        (
            QWEN25_14B,
            {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 47},
            512,
        ),
        (
            QWEN3_4B,
            {
                "sliding_window": 512,
                "layer_types": ["full_attention"] * 35 + ["sliding_attention"],
            },
            512,
        ),
        (LLAMA31_8B, {"sliding_window": 2048}, 2048),
    ],
)
def test_a_window_is_accepted_only_up_to_its_size(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], window: int | None
) -> None:
    if window is None:  # as wide as the model, on no layer, or null
        config = read(tmp_path, base | change)
        assert config.max_position == base["max_position_embeddings"]
        return
    for seq_len in (None, window + 1):
        with pytest.raises(UserError, match=f"sliding window of {window} tokens.*not implemented"):
            read(tmp_path, base | change, seq_len=seq_len)
    assert read(tmp_path, base | change, seq_len=window).max_position == window


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["full_attention"] * 35 + ["linear_attention"], "'linear_attention'.*not implemented"),
        (["full_attention"] * 35, "35 layer_types"),
        (["full_attention"] * 35 + ["sliding_attention"], "without sliding_window"),
    ],
)
def test_layer_types_are_checked(tmp_path: Path, types: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, QWEN3_4B | {"layer_types": types})


def test_unknown_keys_are_reported(tmp_path: Path) -> None:
    save(tmp_path, LLAMA31_8B | {"zeta": 1, "alpha": None})
    assert unread_keys(tmp_path) == ["alpha", "zeta"]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not JSON"), ("[]", "no JSON object"), (None, "cannot read")]
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_model_config(tmp_path)
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_what_we_write_we_read(tmp_path: Path, name: str, dtype: DType) -> None:
    write_model_config(PRESETS[name], tmp_path, dtype)
    assert read_model_config(tmp_path) == PRESETS[name]
    assert unread_keys(tmp_path) == []
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["torch_dtype"] == {"bf16": "bfloat16", "fp32": "float32"}[dtype]
    # either spelling alone says everything
    for keys in (("rope_parameters",), ("rope_theta", "rope_scaling")):
        assert read(tmp_path, without(data, *keys)) == PRESETS[name]


def test_several_eos_ids_and_pad_survive(tmp_path: Path) -> None:
    config = dataclasses.replace(PRESETS["qwen3-0.6b"], eos_ids=(5, 6), pad_id=7, bos_ids=())
    write_model_config(config, tmp_path)
    assert read_model_config(tmp_path) == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (make_config("llama", qkv_bias=True), "qkv_bias=True"),
        (make_config("qwen3", qk_norm=False), "qk_norm=False"),
        (make_config("llama", C=48, H=5, G=5), "hidden size 48 and 5 query heads"),
        (make_config("llama", bos_ids=(1, 2)), "bos ids"),
    ],
)
def test_a_shape_that_transformers_lacks_is_not_written(
    tmp_path: Path, config: ModelConfig, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write_model_config(config, tmp_path)
    assert list(tmp_path.iterdir()) == []
