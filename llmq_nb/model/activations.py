"""What a block leaves for its backward, and the gradients that flow through it.

Which of these are kept for every layer and which share one buffer is the plan's business
(`llmq_nb.plan.buffers`, from `llmq_nb.model.recompute`); the block writes them all the same.
"""

import dataclasses

from llmq_nb.core.tensor import Tensor


@dataclasses.dataclass(slots=True)
class BlockActivations:
    """In forward order; N = B * T rows.

    heads: what attention reads, (N, (H + 2 G) D); the same tensor as qkv unless the family has QK
    norm.
    attn_out and down are read once by the next norm and shared by all layers.
    """

    residual: Tensor  # (N, C) input of the block
    attn_rstd: Tensor  # (N,)
    attn_in: Tensor  # (N, C) normed residual
    qkv: Tensor  # (N, (H + 2 G) D)
    qk_rstd: Tensor | None  # (N, H + G)
    heads: Tensor
    lse: Tensor  # (B, H, T)
    attn: Tensor  # (N, H D)
    attn_out: Tensor  # (N, C)
    residual_mid: Tensor  # (N, C) residual + attn_out
    mlp_rstd: Tensor  # (N,)
    mlp_in: Tensor  # (N, C) normed residual_mid
    gate_up: Tensor  # (N, 2 F)
    act: Tensor  # (N, F)
    down: Tensor  # (N, C) added to residual_mid by the next norm


@dataclasses.dataclass(slots=True)
class HeadActivations:
    """The final norm and the LM head; `logits` holds one chunk of rows."""

    residual: Tensor  # (N, C)
    rstd: Tensor  # (N,)
    head_in: Tensor  # (N, C) normed residual
    logits: Tensor  # (rows of a chunk, V)
    loss: Tensor  # (N,)
    lse: Tensor  # (N,)
    total: Tensor  # (2,) sum of losses / supervised, largest lse


@dataclasses.dataclass(slots=True)
class Gradients:
    """Gradients of one block's activations.

    All layers share the memory; only the FP8 slots are a layer's own. The residual stream's
    gradient is updated in place from the head down: residual, residual_mid and residual_in are one
    buffer, named by what it holds (one absmax each).
    """

    residual: Tensor  # (N, C) of the block's output
    residual_mid: Tensor  # (N, C) of residual + attn_out
    residual_in: Tensor  # (N, C) of the block's input: `residual` of the block below
    norm_in: Tensor  # (N, C) of attn_in, mlp_in and head_in in turn
    heads: Tensor  # (N, (H + 2 G) D)
    qkv: Tensor  # the same tensor as heads unless the family has QK norm
    attn: Tensor  # (N, H D)
    gate_up: Tensor  # (N, 2 F)
    act: Tensor  # (N, F)
