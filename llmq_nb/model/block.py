"""One transformer block, forward and backward: the equations, against the `Ops` interface.

    h = x + Wout Attention(RoPE(Wqkv RMSNorm(x) + b))
    y = h + Wdown SwiGLU(Wgate_up RMSNorm(h))

The last addition of a block is fused into the norm that reads its sum: block l leaves h
(`residual_mid`) and the MLP's output (`down`), and the next block's first norm (or the final one)
adds them.
"""

from llmq_nb.core.tensor import Tensor
from llmq_nb.model.activations import BlockActivations, Gradients
from llmq_nb.model.ops import Ops
from llmq_nb.model.weights import Weights


def block_forward(
    a: BlockActivations,
    w: Weights,
    ops: Ops,
    segment_start: Tensor,
    previous: BlockActivations | None,
    cache: Tensor | None = None,
) -> None:
    """Write all of `a`. previous: the block before, or None where a.residual is the embedding.

    cache: keys and values of what came before these tokens, (B, S, 2 G D); they are added to it.
    """
    if previous is None:
        ops.rmsnorm(a.attn_in, a.attn_rstd, a.residual, w.attn_norm)
    else:
        ops.residual_rmsnorm(
            a.residual, a.attn_in, a.attn_rstd, previous.residual_mid, previous.down, w.attn_norm
        )
    project_heads(a, w, ops, segment_start)
    if cache is None:
        ops.attention(a.attn, a.lse, a.heads, segment_start)
    else:
        ops.cached_attention(a.attn, a.heads, cache, segment_start)
    attention_output(a, w, ops)

    ops.linear_swiglu(a.act, a.gate_up, a.mlp_in, w.gate_up)
    ops.linear(a.down, a.act, w.down)


def project_heads(a: BlockActivations, w: Weights, ops: Ops, segment_start: Tensor) -> None:
    """Queries, keys and values of the normed input, normed (where the family does) and rotated."""
    ops.linear(a.qkv, a.attn_in, w.qkv, w.qkv_bias)
    if w.q_norm is not None and w.k_norm is not None and a.qk_rstd is not None:
        ops.qk_norm(a.heads, a.qk_rstd, a.qkv, w.q_norm, w.k_norm)
    ops.rope(a.heads, segment_start)


def attention_output(a: BlockActivations, w: Weights, ops: Ops) -> None:
    """h = x + Wout attn, and the norm that the MLP reads."""
    ops.linear(a.attn_out, a.attn, w.out)
    ops.residual_rmsnorm(a.residual_mid, a.mlp_in, a.mlp_rstd, a.residual, a.attn_out, w.mlp_norm)


def block_backward(
    g: Gradients,
    dw: Weights,
    a: BlockActivations,
    w: Weights,
    ops: Ops,
    segment_start: Tensor,
    *,
    accumulate: bool,
) -> None:
    """The forward's list reversed: from g.residual to g.residual_in. dw: (+)=."""
    # y = h + Wdown act: the residual's gradient is also the product's
    ops.linear_swiglu_backward(
        g.gate_up, g.act, dw.down, g.residual, a.act, w.down, a.gate_up, accumulate=accumulate
    )
    ops.linear_backward(
        g.norm_in, dw.gate_up, None, g.gate_up, a.mlp_in, w.gate_up, accumulate=accumulate
    )
    # dh = dy + the norm's gradient, in place
    ops.rmsnorm_backward(
        g.residual_mid,
        dw.mlp_norm,
        g.norm_in,
        g.residual,
        a.residual_mid,
        w.mlp_norm,
        a.mlp_rstd,
        accumulate=accumulate,
    )
    ops.linear_backward(g.attn, dw.out, None, g.residual_mid, a.attn, w.out, accumulate=accumulate)
    ops.attention_backward(g.heads, g.attn, a.attn, a.lse, a.heads, segment_start)
    ops.rope_backward(g.heads, segment_start)
    if w.q_norm is not None and w.k_norm is not None and a.qk_rstd is not None:
        assert dw.q_norm is not None and dw.k_norm is not None
        ops.qk_norm_backward(
            g.qkv,
            dw.q_norm,
            dw.k_norm,
            g.heads,
            a.qkv,
            w.q_norm,
            w.k_norm,
            a.qk_rstd,
            accumulate=accumulate,
        )
    ops.linear_backward(
        g.norm_in, dw.qkv, dw.qkv_bias, g.qkv, a.attn_in, w.qkv, accumulate=accumulate
    )
    # dx = dh + the norm's gradient, in place
    ops.rmsnorm_backward(
        g.residual_in,
        dw.attn_norm,
        g.norm_in,
        g.residual_mid,
        a.residual,
        w.attn_norm,
        a.attn_rstd,
        accumulate=accumulate,
    )
