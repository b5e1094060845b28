"""`config.json`, read strictly: what is not implemented is an error by name, never ignored.

    read_model_config    config.json -> ModelConfig, both RoPE spellings
    unread_keys          keys that were neither read nor known to be harmless: one warning line
    write_model_config   ModelConfig -> a config.json that transformers 4 and 5 load

RoPE is spelled `rope_theta` + `rope_scaling` before transformers 5 and `rope_parameters` from then
on. A file may have both if they agree. An absent key means the default of the family's config class
(`llmq_nb.model.families`). A sliding window that no sequence outgrows changes nothing, so it is
accepted and becomes the model's largest position.

Source   configuration_*.py, configuration_utils.py and modeling_rope_utils.py of transformers 5.24.
"""

import json
import os
from pathlib import Path
from typing import Any

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.core.files import atomic_file, json_bytes
from llmq_nb.io.config_json import model_config_json
from llmq_nb.io.config_keys import HARMLESS, READ, ROPE, UNSUPPORTED, Reader
from llmq_nb.model.config import Family, Llama3Rope, ModelConfig
from llmq_nb.model.families import FAMILIES, FamilyFacts

CONFIG_NAME = "config.json"
_FULL = "full_attention"


def read_model_config(folder: str | os.PathLike[str], *, seq_len: int | None = None) -> ModelConfig:
    """The model that `config.json` in `folder` (or that file itself) describes.

    seq_len: longest sequence that will be used [tokens]; a sliding window must not be shorter. None
    takes the model's largest position. UserError for anything missing, mistyped or unimplemented.
    """
    reader = _open(folder)
    family = _family(reader)
    facts = FAMILIES[family]
    _refuse_unsupported(reader, family)
    H, C = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    V = reader.integer("vocab_size")
    max_position = reader.integer("max_position_embeddings", facts.default_max_position)
    theta, scaling = _rope(reader, max_position)
    window = _window(reader, facts)
    if window is not None:
        if window < (max_position if seq_len is None else seq_len):
            raise reader.error(
                f"sliding window of {window} tokens, sequences of {seq_len or max_position}",
                f"sliding-window attention is not implemented: set seq_len to {window} or less",
            )
        max_position = min(max_position, window)
    bos = _single_id(reader, "bos_token_id", facts.default_bos, V)
    fields: dict[str, Any] = dict(
        family=family,
        C=C,
        F=reader.integer("intermediate_size"),
        L=reader.integer("num_hidden_layers"),
        H=H,
        G=_key_value_heads(reader, facts, H),
        D=_head_dim(reader, facts, C, H),
        V=V,
        tied=reader.boolean("tie_word_embeddings", False),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=max_position,
        qkv_bias=facts.qkv_bias,
        qk_norm=facts.qk_norm,
        init_std=reader.number("initializer_range", 0.02),
        bos_ids=() if bos is None else (bos,),
        eos_ids=reader.token_ids("eos_token_id", facts.default_eos, V),
        pad_id=_single_id(reader, "pad_token_id", None, V),
    )
    try:
        return ModelConfig(**fields)
    except UserError as error:
        raise reader.error(error.what, error.mend) from error


def unread_keys(folder: str | os.PathLike[str]) -> list[str]:
    """Keys of `config.json` that nothing here knows, sorted: worth one line of warning."""
    return sorted(set(_open(folder).data) - READ - HARMLESS - set(UNSUPPORTED))


def write_model_config(
    config: ModelConfig,
    folder: str | os.PathLike[str],
    dtype: DType = DType.BF16,
    quantization: dict[str, Any] | None = None,
) -> None:
    """Write `config.json` for weights stored as `dtype` (fp32 or bf16).

    quantization: its quantization_config. UserError if transformers has no class for this shape.
    """
    data = model_config_json(config, dtype)
    if quantization is not None:
        data["quantization_config"] = quantization
    with atomic_file(Path(folder) / CONFIG_NAME) as file:
        file.write(json_bytes(data))


def _open(folder: str | os.PathLike[str]) -> Reader:
    path = Path(folder)
    path = path / CONFIG_NAME if path.is_dir() else path
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}",
            mend="a model folder holds config.json and *.safetensors",
        ) from error
    except ValueError as error:
        raise UserError(f"not JSON ({error})", where=str(path)) from error
    if not isinstance(data, dict):
        raise UserError("no JSON object", where=str(path), mend="expected {...}")
    return Reader(data, str(path))


def _family(reader: Reader) -> Family:
    """From `architectures` and `model_type`; at least one, and they must agree."""
    names = reader.data.get("architectures") or []
    model_type = reader.data.get("model_type")
    known = ", ".join(facts.architecture for facts in FAMILIES.values())
    if not isinstance(names, list) or len(names) > 1:
        raise reader.error(f"architectures {names!r}", "must be a list of one name")
    for family, facts in FAMILIES.items():
        if names == [facts.architecture] or (not names and model_type == facts.model_type):
            if model_type not in (facts.model_type, None):
                raise reader.error(
                    f"model_type '{model_type}' with architecture '{names[0]}'",
                    "the two do not belong together",
                )
            return family
    what = f"architecture '{names[0]}'" if names else f"model_type {model_type!r}"
    raise reader.error(f"unknown {what}", f"implemented: {known}")


def _refuse_unsupported(reader: Reader, family: Family) -> None:
    """Every key of a feature that is not implemented must be absent or have its neutral value."""
    for key, (neutral, feature) in UNSUPPORTED.items():
        if key == "attention_bias" and family == "qwen2":
            continue  # its class does not read the key: QKV bias always, never one on o_proj
        if key == "quantization_config" and _is_scaled_fp8(reader.data.get(key)):
            continue
        value = reader.data.get(key)
        if value is None or value in ([], {}):
            continue
        # 0 == False in Python, so a switch must be a switch and a number a number
        if any(value == off and (value is off) >= isinstance(value, bool) for off in neutral):
            continue
        raise reader.error(f"{key} = {json.dumps(value)[:60]}", f"{feature} is not implemented")
    act = reader.data.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise reader.error(f"hidden_act = {act!r}", "only silu (SwiGLU) is implemented")


def _is_scaled_fp8(quantization: Any) -> bool:
    """Whether weights are e4m3 codes with one scale each, as our exports have them."""
    if not isinstance(quantization, dict):
        return False
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size", 0)
    return method == "fp8" and block is None


def _key_value_heads(reader: Reader, facts: FamilyFacts, H: int) -> int:
    if reader.data.get("num_key_value_heads", 0) is None:
        return H
    return reader.integer("num_key_value_heads", facts.default_key_value_heads or H)


def _head_dim(reader: Reader, facts: FamilyFacts, C: int, H: int) -> int:
    if reader.data.get("head_dim") is not None:
        return reader.integer("head_dim")
    if facts.default_head_dim is not None and "head_dim" not in reader.data:
        return facts.default_head_dim
    if C % H:
        raise reader.error(f"hidden size {C} and {H} query heads", "give head_dim")
    return C // H


def _rope(reader: Reader, max_position: int) -> tuple[float, Llama3Rope | None]:
    """(theta, scaling) from either spelling; both only if they say the same."""
    old, new = reader.table("rope_scaling"), reader.table("rope_parameters")
    found: list[tuple[float | None, Llama3Rope | None]] = []
    if new is not None:
        found.append((new.optional_number("rope_theta"), _scaling(new, max_position)))
    if old is not None:
        found.append((old.optional_number("rope_theta"), _scaling(old, max_position)))
    thetas = {theta for theta, _ in found if theta is not None}
    if (top := reader.optional_number("rope_theta")) is not None:
        thetas.add(top)
    if len(thetas) > 1 or len({scaling for _, scaling in found}) > 1:
        raise reader.error(
            "rope_parameters disagrees with rope_theta and rope_scaling", "keep one spelling"
        )
    scaling = found[0][1] if found else None
    outer = reader.data.get("original_max_position_embeddings")
    if scaling is not None and outer not in (None, scaling.original_max_position):
        raise reader.error(
            f"original_max_position_embeddings is {outer} and {scaling.original_max_position}",
            "keep the one beside the RoPE factors",
        )
    # 10000 is what all four classes take when no spelling names it
    return (thetas.pop() if thetas else 10000.0), scaling


def _scaling(rope: Reader, max_position: int) -> Llama3Rope | None:
    kind = rope.data.get("rope_type", rope.data.get("type", "default"))
    if unknown := sorted(set(rope.data) - ROPE):
        raise rope.error(f"unknown RoPE key '{unknown[0]}'", "not implemented")
    if rope.data.get("partial_rotary_factor", 1.0) not in (1, None):
        raise rope.error("partial_rotary_factor", "rotating a part of a head is not implemented")
    if kind == "default" or kind is None:
        return None
    if kind != "llama3":
        raise rope.error(f"rope_type '{kind}'", "implemented: default and llama3")
    return Llama3Rope(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
    )


def _window(reader: Reader, facts: FamilyFacts) -> int | None:
    """Tokens of the sliding window that some layer would use, or None."""
    data = reader.data
    types = data.get("layer_types")
    if types is not None:
        unknown = set(map(str, types)) - {_FULL, "sliding_attention"}
        if unknown:
            raise reader.error(f"layer_types has '{min(unknown)}'", "not implemented")
        if len(types) != reader.integer("num_hidden_layers"):
            raise reader.error(f"{len(types)} layer_types", "must be one for each layer")
        if "sliding_attention" not in types and not facts.windowed:
            return None
    elif not facts.windowed and not reader.boolean("use_sliding_window", False):
        return None
    window = data.get("sliding_window", facts.default_window)
    if window is None:
        if types is not None and "sliding_attention" in types:
            raise reader.error("sliding layers without sliding_window", "give its size")
        return None
    if types is None and not facts.windowed:
        first = data.get("max_window_layers", 28)  # layers from this one on slide
        if isinstance(first, int) and first >= reader.integer("num_hidden_layers"):
            return None
    return reader.integer("sliding_window", facts.default_window)


def _single_id(reader: Reader, key: str, default: int | None, V: int) -> int | None:
    if reader.data.get(key) == -1:  # "none" in files of the first Llama
        return None
    ids = reader.token_ids(key, default, V)
    if len(ids) > 1:
        raise reader.error(f"{key} = {list(ids)}", "must be one id or null")
    return ids[0] if ids else None
