"""The keys of `config.json`: which are read, which change nothing, which must not be there.

A key outside the three sets is reported (`unread_keys`), because nothing here can say what it does.
"""

import dataclasses
from typing import Any

from llmq_nb.core.errors import UserError

READ = frozenset(
    {
        *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
        *("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
        *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "original_max_position_embeddings"),
    }
)
ROPE = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
        *("original_max_position_embeddings", "partial_rotary_factor"),
    }
)
"""Keys of `rope_scaling` and `rope_parameters`."""

HARMLESS = frozenset(
    {
        # where the file comes from
        *("_name_or_path", "_model_name_or_path", "name_or_path", "transformers_version"),
        *("_commit_hash", "transformers.js_config", "is_llama_config", "unsloth_version"),
        *("unsloth_fixed", "torch_dtype", "dtype"),
        # how a library runs or caches it
        *("use_cache", "_attn_implementation", "attn_implementation", "return_dict"),
        *("_attn_implementation_autoset", "output_attentions", "output_hidden_states"),
        *("pretraining_tp", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder"),
        # other tokens, other tasks, generation
        *("unk_token_id", "sep_token_id", "decoder_start_token_id", "id2label", "label2id"),
        *("problem_type", "num_labels", "finetuning_task", "task_specific_params"),
        *("temperature", "top_k", "top_p", "do_sample", "max_length", "repetition_penalty"),
    }
)

_OFF: tuple[Any, ...] = (False,)
_ZERO: tuple[Any, ...] = (0, 0.0)
_ONE: tuple[Any, ...] = (1, 1.0)

UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_bias": (_OFF, "a bias on all four attention projections"),
    "qkv_bias": (_OFF, "a QKV bias outside qwen2"),
    "mlp_bias": (_OFF, "a bias in the feed-forward layers"),
    "quantization_config": ((), "reading quantised weights other than FP8 with one scale a tensor"),
    "compression_config": ((), "reading compressed weights"),
    "auto_map": ((), "code that comes with a model"),
    "num_experts": (_ZERO, "mixture of experts"),
    "num_local_experts": (_ZERO, "mixture of experts"),
    "n_routed_experts": (_ZERO, "mixture of experts"),
    "num_experts_per_tok": (_ZERO, "mixture of experts"),
    "moe_intermediate_size": (_ZERO, "mixture of experts"),
    "attention_dropout": (_ZERO, "dropout"),
    "hidden_dropout": (_ZERO, "dropout"),
    "resid_pdrop": (_ZERO, "dropout"),
    "embd_pdrop": (_ZERO, "dropout"),
    "partial_rotary_factor": (_ONE, "rotating a part of a head"),
    "rope_interleaved": (_OFF, "interleaved rotary pairs"),
    "use_mrope": (_OFF, "multimodal rotary positions"),
    "no_rope_layers": ((), "layers without rotary positions"),
    "rope_local_base_freq": ((), "rotary frequencies by layer"),
    "use_qk_norm": (_OFF, "QK norm outside qwen3"),
    "qk_layernorm": (_OFF, "QK norm outside qwen3"),
    "clip_qkv": ((), "clipping of queries, keys and values"),
    "attn_logit_softcapping": ((), "soft-capped attention scores"),
    "final_logit_softcapping": ((), "soft-capped logits"),
    "logit_scale": (_ONE, "scaled logits"),
    "logits_scaling": (_ONE, "scaled logits"),
    "attention_multiplier": ((), "scaled attention scores"),
    "embedding_multiplier": (_ONE, "scaled embeddings"),
    "residual_multiplier": (_ONE, "scaled residuals"),
    "scale_emb": (_ONE, "scaled embeddings"),
    "attention_chunk_size": ((), "attention in chunks"),
    "kv_lora_rank": ((), "latent attention"),
    "q_lora_rank": ((), "latent attention"),
    "per_layer_config": ((), "layers of different shapes"),
    "block_configs": ((), "layers of different shapes"),
    "cross_attention_layers": ((), "cross attention"),
    "vision_config": ((), "vision"),
    "audio_config": ((), "audio"),
}
"""key -> (values that switch the feature off, name of the feature). None, [] and {} always do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Typed access to a JSON object; every error names the key, the value and the file."""

    data: dict[str, Any]
    where: str

    def error(self, what: str, mend: str) -> UserError:
        """To raise: it names this file."""
        return UserError(what, where=self.where, mend=mend)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. UserError if it is absent and has no default."""
        value = self.data.get(key, default)
        if key not in self.data and default is None:
            raise self.error(f"no '{key}'", "the key is needed")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{key} = {value!r}", "must be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number. UserError if it is absent and has no default."""
        value = self.data.get(key, default)
        if key not in self.data and default is None:
            raise self.error(f"no '{key}'", "the key is needed")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"{key} = {value!r}", "must be a number")
        if not 0 < value < float("inf"):
            raise self.error(f"{key} = {value!r}", "must be positive and finite")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A positive finite number, or None if absent or null."""
        return None if self.data.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false; absent and null mean the default."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} = {value!r}", "must be true or false")
        return value

    def table(self, key: str) -> "Reader | None":
        """A JSON object, or None if absent, null or empty."""
        value = self.data.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key} = {value!r}", "must be an object")
        return Reader(value, f"{key} of {self.where}")

    def token_ids(self, key: str, default: int | None, V: int) -> tuple[int, ...]:
        """An id, a list of ids or null, each below the vocabulary size V."""
        value = self.data.get(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < V:
                raise self.error(f"{key} = {value!r}", f"must be null or ids of 0 to {V - 1}")
        return tuple(ids)
