"""Independent float64 oracles: what every engine and kernel is compared with.

    layers            embedding, rmsnorm, residual_rmsnorm, linear, swiglu, cross_entropy
    attention_layer   qk_norm, rope, attention
    model             model_loss_and_gradients under Hugging Face names
    optimizer         adamw, global_norm, clip_factor
    rounding          FP8 and BF16 codes, stochastic rounding, quantize
    philox            philox4x32

`from tests import oracles; oracles.rmsnorm(...)`. Nothing here imports llmq_nb, so that a mistake
there cannot hide here; tests/test_oracles.py checks it all against transformers' recorded results,
central differences and published values.
"""

from tests.oracles.attention_layer import (
    attention,
    attention_backward,
    join_qkv,
    qk_norm,
    qk_norm_backward,
    rope,
    rope_backward,
    rope_frequencies,
    split_qkv,
)
from tests.oracles.layers import (
    IGNORE,
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_rows,
    embedding,
    embedding_backward,
    linear,
    linear_backward,
    residual_rmsnorm,
    residual_rmsnorm_backward,
    rmsnorm,
    rmsnorm_backward,
    swiglu,
    swiglu_backward,
)
from tests.oracles.model import model_logits, model_loss, model_loss_and_gradients
from tests.oracles.optimizer import adamw, clip_factor, global_norm
from tests.oracles.philox import philox4x32
from tests.oracles.rounding import (
    bf16,
    decode,
    encode,
    encode_stochastic,
    quantize,
    round_nearest,
    round_stochastic,
)

__all__ = [
    "IGNORE",
    "adamw",
    "attention",
    "attention_backward",
    "bf16",
    "clip_factor",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_rows",
    "decode",
    "embedding",
    "embedding_backward",
    "encode",
    "encode_stochastic",
    "global_norm",
    "join_qkv",
    "linear",
    "linear_backward",
    "model_logits",
    "model_loss",
    "model_loss_and_gradients",
    "philox4x32",
    "qk_norm",
    "qk_norm_backward",
    "quantize",
    "residual_rmsnorm",
    "residual_rmsnorm_backward",
    "rmsnorm",
    "rmsnorm_backward",
    "rope",
    "rope_backward",
    "rope_frequencies",
    "round_nearest",
    "round_stochastic",
    "split_qkv",
    "swiglu",
    "swiglu_backward",
]
