"""Weights of folders that the safetensors library wrote: exact bytes, or one line of reason.

Q11: a missing tensor is never left uninitialised, `lm_head.weight` of a tied model and rotary
buffers are understood, anything else is an error.
"""

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.io.hf_config import read_model_config
from llmq_nb.io.safetensors_io import TensorSpec, write_safetensors
from llmq_nb.io.weights import WeightFiles, check_weights, load_weights
from llmq_nb.model.parameters import layer_parameters, model_parameters
from tests.io.folders import (
    BF16,
    FAMILIES,
    Tensors,
    library_load,
    library_save,
    make_config,
    random_tensors,
    save_folder,
)

FIXTURES = Path(__file__).parents[1] / "fixtures" / "transformers"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYER = "model.layers.1."


def fused(tensors: Tensors, name: str) -> np.ndarray:
    """The parameter as rows of Hugging Face tensors: qkv = [q; k; v], gate_up = [gate; up]."""
    if ".qkv." in name:
        parts = [name.replace(".qkv.", f".{n}_proj.") for n in "qkv"]
    elif ".gate_up." in name:
        parts = [name.replace(".gate_up.", f".{n}_proj.") for n in ("gate", "up")]
    else:
        parts = [name]
    return np.concatenate([tensors[part] for part in parts])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_lands_in_its_rows(
    tmp_path: Path, family: str, tied: bool, shards: int
) -> None:
    tensors = random_tensors(family, tied, BF16)
    folder = save_folder(tmp_path / "in", tensors, shards)
    loaded = {p.name: a for p, a in load_weights(folder, make_config(family, tied))}
    rows = 0
    for name, array in loaded.items():
        expected = fused(tensors, name)
        assert array.dtype == BF16 and array.flags.c_contiguous and array.flags.writeable
        assert array[: len(expected)].tobytes() == expected.tobytes()
        padding = array[len(expected) :]
        assert len(padding) == (11 if name in (TABLE, HEAD) else 0)  # 37 rows become 48
        assert not padding.view(np.uint16).any()
        rows += len(expected)
    assert rows == sum(len(t) for t in tensors.values())  # none was left out


def test_stored_formats_are_kept_or_rounded_once(tmp_path: Path) -> None:
    tensors = random_tensors("qwen2", True, np.float32)
    tensors[LAYER + "self_attn.k_proj.weight"] = tensors[LAYER + "self_attn.k_proj.weight"].astype(
        BF16
    )
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float16)
    folder, config = save_folder(tmp_path / "in", tensors), make_config("qwen2", True)
    for p, array in load_weights(folder, config):
        # bf16 and float16 are float32 values: mixed and half parameters widen exactly
        expected = fused({n: t.astype(np.float32) for n, t in tensors.items()}, p.name)
        assert array.dtype == np.float32
        assert np.array_equal(array[: len(expected)], expected)
    for p, array in load_weights(folder, config, dtype=DType.BF16):
        expected = fused({n: t.astype(np.float32) for n, t in tensors.items()}, p.name)
        assert array.dtype == BF16
        assert array[: len(expected)].tobytes() == expected.astype(BF16).tobytes()


def test_a_layer_can_be_loaded_alone(tmp_path: Path) -> None:
    tensors, config = random_tensors("llama", False, BF16), make_config("llama")
    folder = save_folder(tmp_path / "in", tensors)
    wanted = layer_parameters(config, 1)
    loaded = list(load_weights(folder, config, wanted))
    assert [p for p, _ in loaded] == wanted
    assert all(a.tobytes() == fused(tensors, p.name).tobytes() for p, a in loaded)


@pytest.mark.parametrize("folder", sorted(p.name for p in FIXTURES.iterdir() if p.is_dir()))
def test_folders_saved_by_transformers_load(folder: str) -> None:
    stored = {n: raw for n, (_, _, raw) in library_load(FIXTURES / folder).items()}
    config = read_model_config(FIXTURES / folder)
    for p, array in load_weights(FIXTURES / folder, config):
        raw = b"".join(stored[view.hf_name] for view in p.views)
        assert array.tobytes()[: len(raw)] == raw and not any(array.tobytes()[len(raw) :])


def test_memory_is_two_parameters_whatever_the_depth(tmp_path: Path) -> None:
    config = make_config("llama", True, C=256, F=512, L=8, V=1024)
    rng = np.random.default_rng(0)
    tensors: Tensors = {
        view.hf_name: rng.standard_normal((view.stop - view.start, *p.shape[1:]), np.float32)
        for p in model_parameters(config)
        for view in p.views
    }
    folder = save_folder(tmp_path / "in", tensors, 2)
    total = sum(t.nbytes for t in tensors.values())
    del tensors
    largest = 1024 * 256 * 4
    tracemalloc.start()
    try:
        for _, array in load_weights(folder, config):
            assert array.any()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # the loop's array, the one being read and `any`'s temporary of a quarter; headers and objects
    assert peak < 2.25 * largest + 2**18 < total / 4


def change(tensors: Tensors, **changes: np.ndarray | None) -> Tensors:
    """Replace (or with None remove) tensors; `__` in a name stands for a dot."""
    named = {name.replace("__", "."): t for name, t in changes.items()}
    kept = {n: t for n, t in tensors.items() if n not in named}
    return kept | {n: t for n, t in named.items() if t is not None}


Q_PROJ = "model__layers__1__self_attn__q_proj__weight"
ROPE = "model__layers__0__self_attn__rotary_emb__inv_freq"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q_PROJ: None}, "missing tensor model.layers.1.self_attn.q_proj.weight in "),
        (
            {Q_PROJ: None, "model__norm__weight": None},
            "missing tensor model.layers.1.self_attn.q_proj.weight and 1 more",
        ),
        ({"lm_head__weight": None}, 'missing tensor lm_head.*"tie_word_embeddings": true'),
        (
            {"model__layers__0__self_attn__o_proj__bias": np.zeros(32, np.float32)},
            "unexpected tensor model.layers.0.self_attn.o_proj.bias in .*model.safetensors",
        ),
        ({"model__layers__2__input_layernorm__weight": np.ones(32, "f4")}, "unexpected.*layers.2"),
        (
            {Q_PROJ: np.zeros((64, 31), np.float32)},
            r"q_proj.weight has shape \[64, 31\] in .*asks for \[64, 32\]",
        ),
        ({Q_PROJ: np.zeros((32, 64), np.float32)}, r"shape \[32, 64\].*\[64, 32\]"),
        ({"model__embed_tokens__weight": np.zeros((48, 32), "f4")}, r"\[48, 32\].*\[37, 32\]"),
    ],
)
def test_a_wrong_set_of_tensors_is_an_error_before_any_is_read(
    tmp_path: Path, changes: dict[str, np.ndarray | None], message: str
) -> None:
    """Q11: missing as much as unexpected."""
    tensors = change(random_tensors("llama", False, np.float32), **changes)
    folder = save_folder(tmp_path / "in", tensors)
    with pytest.raises(UserError, match=message):
        check_weights(folder, make_config("llama"))
    with pytest.raises(UserError, match=message):
        load_weights(folder, make_config("llama"))  # not iterated


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    codes = np.zeros((32,), ml_dtypes.float8_e4m3fn)
    tensors: Tensors = {
        **random_tensors("llama", False, np.float32),
        "model.norm.weight": codes,
    }
    specs = [TensorSpec(n, t.dtype, t.shape) for n, t in tensors.items()]
    (tmp_path / "in").mkdir()
    write_safetensors(tmp_path / "in" / "model.safetensors", specs, tensors.__getitem__)
    with pytest.raises(UserError, match="model.norm.weight is stored as float8_e4m3fn"):
        check_weights(tmp_path / "in", make_config("llama"))


def test_a_model_saved_without_its_head_is_explained(tmp_path: Path) -> None:
    tensors = random_tensors("llama", False, np.float32)
    bare = {n.removeprefix("model."): t for n, t in tensors.items() if n != HEAD}
    folder = save_folder(tmp_path / "in", bare)
    with pytest.raises(UserError, match="save the ForCausalLM model"):
        check_weights(folder, make_config("llama"))


def test_rotary_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors("llama", False, np.float32)
    buffers = {ROPE: np.ones(8, "f4"), "model__rotary_emb__inv_freq": np.ones(8, "f4")}
    folder = save_folder(tmp_path / "in", change(tensors, **buffers))
    names = [p.name for p, _ in load_weights(folder, make_config("llama"))]
    assert names == [p.name for p in model_parameters(make_config("llama"))]


@pytest.mark.parametrize("head_dtype", [np.float32, BF16], ids=str)
def test_a_tied_model_may_store_its_head_if_it_is_the_embedding(
    tmp_path: Path, head_dtype: np.dtype
) -> None:
    tensors = random_tensors("qwen2", True, BF16)
    tensors[HEAD] = tensors[TABLE].astype(head_dtype)
    config = make_config("qwen2", True)
    loaded = dict(load_weights(save_folder(tmp_path / "same", tensors), config))
    assert HEAD not in {p.name for p in loaded}
    tensors[HEAD][36, 31] += 1
    folder = save_folder(tmp_path / "other", tensors)
    check_weights(folder, config)  # headers alone cannot tell
    with pytest.raises(UserError, match="lm_head.weight differs.*tie_word_embeddings"):
        load_weights(folder, config)
    tensors[HEAD] = np.zeros((36, 32), head_dtype)
    with pytest.raises(UserError, match=r"lm_head.weight has shape \[36, 32\]"):
        check_weights(save_folder(tmp_path / "short", tensors), config)


@pytest.mark.parametrize("differs", [0, 500, 1183], ids="element {}".format)
def test_every_chunk_of_a_tied_head_is_compared(tmp_path: Path, differs: int) -> None:
    tensors = random_tensors("qwen2", True, BF16)
    tensors[HEAD] = tensors[TABLE].copy()
    assert WeightFiles(save_folder(tmp_path / "same", tensors)).equal(HEAD, TABLE, chunk=100)
    tensors[HEAD].reshape(-1)[differs] += 1
    assert not WeightFiles(save_folder(tmp_path / "off", tensors)).equal(HEAD, TABLE, chunk=100)


def sharded(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "in", random_tensors("llama", False, np.float32), 3)


def edit_index(folder: Path, **changes: object) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del index["weight_map"][key]
        else:
            index["weight_map"][key] = value
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SECOND = "model-00002-of-00003.safetensors"


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / SECOND).unlink()
    with pytest.raises(UserError, match=f"missing shard {SECOND} in .*one of 3 shards"):
        check_weights(folder, make_config("llama"))


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-1])
    with pytest.raises(UserError, match=f"truncated: {len(data) - 1} of {len(data)}.*{SECOND}"):
        check_weights(folder, make_config("llama"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q_PROJ: "none.safetensors"}, "missing shard none.safetensors"),
        ({Q_PROJ: "../in/" + SECOND}, "shard name '../in/model-00002"),
        ({Q_PROJ: None}, "tensor model.layers.1.self_attn.q_proj.weight of .* is not listed"),
        ({"extra": SECOND}, f"tensor extra is not in its shard {SECOND}"),
        ({Q_PROJ: 3}, "unreadable index"),
    ],
)
def test_an_index_that_disagrees_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = sharded(tmp_path)
    edit_index(folder, **changes)
    with pytest.raises(UserError, match=message):
        check_weights(folder, make_config("llama"))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 1}'])
def test_a_broken_index_is_one_line(tmp_path: Path, text: str) -> None:
    folder = sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="unreadable index .*index.json") as caught:
        check_weights(folder, make_config("llama"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "no model.safetensors and no model.safetensors.index.json"),
        (("pytorch_model.bin",), "pickled weights are not read"),
        ((SECOND,), "it lists the shards"),
    ],
)
def test_a_folder_without_weights_says_what_is_missing(
    tmp_path: Path, files: tuple[str, ...], message: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=message):
        check_weights(tmp_path, make_config("llama"))
    with pytest.raises(UserError, match="no such model folder"):
        check_weights(tmp_path / "nowhere", make_config("llama"))


def test_one_file_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    tensors = random_tensors("llama", False, np.float32, seed=9)
    library_save(folder / "model.safetensors", tensors)
    for p, array in load_weights(folder, make_config("llama")):
        expected = fused(tensors, p.name)
        assert array[: len(expected)].tobytes() == expected.tobytes()
