"""Which activations backward computes again, and how: the block's own lines, on the same inputs.

    norm        attn_in, mlp_in             from the residuals
    swiglu      act                         from gate_up
    ffn         gate_up and act             from mlp_in
    qkv         qkv (and heads)             from attn_in
    attention   attn, lse and all of qkv    from attn_in
    block       everything but the residual stream at the block's input

Every operation is deterministic, so a recomputed tensor has the bits it had: losses do not change.
"""

from collections.abc import Iterable

from llmq_nb.config import Recompute
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.activations import BlockActivations
from llmq_nb.model.block import attention_output, project_heads
from llmq_nb.model.ops import Ops
from llmq_nb.model.weights import Weights

DROPPED: dict[Recompute, frozenset[str]] = {
    "norm": frozenset({"attn_in", "mlp_in"}),
    "swiglu": frozenset({"act"}),
    "ffn": frozenset({"gate_up", "act"}),
    "qkv": frozenset({"qkv", "heads"}),
    "attention": frozenset({"qkv", "heads", "lse", "attn"}),
    "block": frozenset(
        {"attn_rstd", "attn_in", "qkv", "qk_rstd", "heads", "lse", "attn"}
        | {"residual_mid", "mlp_rstd", "mlp_in", "gate_up", "act"}
    ),
}


def dropped_activations(recompute: Iterable[Recompute]) -> frozenset[str]:
    """Fields of BlockActivations that are not kept from forward to backward."""
    return frozenset().union(*(DROPPED[r] for r in recompute))


def recompute_block(
    a: BlockActivations, w: Weights, ops: Ops, segment_start: Tensor, dropped: frozenset[str]
) -> None:
    """Write the dropped fields of `a` again, in forward order."""
    if "attn_in" in dropped:
        ops.rmsnorm(a.attn_in, a.attn_rstd, a.residual, w.attn_norm)
    if "qkv" in dropped:
        project_heads(a, w, ops, segment_start)
    if "attn" in dropped:
        ops.attention(a.attn, a.lse, a.heads, segment_start)
    if "residual_mid" in dropped:
        attention_output(a, w, ops)
    elif "mlp_in" in dropped:
        ops.rmsnorm(a.mlp_in, a.mlp_rstd, a.residual_mid, w.mlp_norm)
    if "gate_up" in dropped:  # and then act
        ops.linear_swiglu_again(a.act, a.gate_up, a.mlp_in, w.gate_up)
    elif "act" in dropped:
        ops.swiglu_again(a.act, a.gate_up)
