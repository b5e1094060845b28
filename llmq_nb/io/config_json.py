"""What a `config.json` of ours says: every key that has a default is written out.

Source   configuration_*.py of transformers 5.24; `rope_theta`, `rope_scaling` and `torch_dtype` are
         for transformers 4, which `rope_parameters` and `dtype` replaced.
"""

from typing import Any

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.families import FAMILIES

_DTYPE_NAMES = {DType.FP32: "float32", DType.BF16: "bfloat16"}


def model_config_json(config: ModelConfig, dtype: DType) -> dict[str, Any]:
    """What `write_model_config` writes. Every key that has a default is written out."""
    facts = FAMILIES[config.family]
    if (config.qkv_bias, config.qk_norm) != (facts.qkv_bias, facts.qk_norm):
        raise UserError(
            f"a {config.family} model with qkv_bias={config.qkv_bias}, qk_norm={config.qk_norm}",
            mend=f"{facts.architecture} has qkv_bias={facts.qkv_bias}, qk_norm={facts.qk_norm}",
        )
    if config.family == "llama" and config.C % config.H:
        raise UserError(
            f"a llama model with hidden size {config.C} and {config.H} query heads",
            mend="transformers wants a multiple",
        )
    if len(config.bos_ids) > 1:
        raise UserError(f"bos ids {config.bos_ids}", mend="transformers takes one")
    data: dict[str, Any] = {
        "architectures": [facts.architecture],
        "model_type": facts.model_type,
        "vocab_size": config.V,
        "hidden_size": config.C,
        "intermediate_size": config.F,
        "num_hidden_layers": config.L,
        "num_attention_heads": config.H,
        "num_key_value_heads": config.G,
        "head_dim": config.D,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": config.bos_ids[0] if config.bos_ids else None,
        "eos_token_id": _one_or_many(config.eos_ids),
        "pad_token_id": config.pad_id,
        "torch_dtype": _DTYPE_NAMES[dtype],  # transformers 5 reads it as `dtype`
        **_rope_json(config),
    }
    if facts.default_window is not None:
        data["sliding_window"] = None
        if not facts.windowed:
            data["use_sliding_window"] = False
    if config.family in ("llama", "qwen3"):
        data["attention_bias"] = False
    if config.family == "llama":
        data["mlp_bias"] = False
    return data


def _one_or_many(ids: tuple[int, ...]) -> int | list[int] | None:
    return list(ids) if len(ids) > 1 else (ids[0] if ids else None)


def _rope_json(config: ModelConfig) -> dict[str, Any]:
    """Both spellings: transformers 4 reads the first pair, 5 reads either."""
    if config.rope_scaling is None:
        parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
        scaling = None
    else:
        rope = config.rope_scaling
        scaling = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position,
        }
        parameters = {**scaling, "rope_theta": config.rope_theta}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }
