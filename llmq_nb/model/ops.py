"""The operations that a model is written in. One mathematics, two engines.

`block.py` and `transformer.py` call nothing but this interface; `engine_cpu` (NumPy) and the cuda
engine implement it. Outputs come first, then inputs, then keyword scalars. An engine is built for
one model and one rank and binds what never changes: head counts, eps, RoPE tables, formats, the
stream.

Letters  N = B * T rows, C hidden, F feed-forward, H query heads, G key/value heads, D head_dim,
         V vocabulary.
Rounding Arithmetic is float32; every output is rounded once to its storage format.
FP8      A product is FP8 if its weight has an `fp8` slot: then x and dy have one too, and each is
         scaled by its own absmax. An operation raises the absmax of the slots of its outputs; a
         product quantises its operands. Layouts and scratch are the engine's.
"""

import dataclasses
from typing import Any, Protocol

from llmq_nb.core.tensor import Tensor


@dataclasses.dataclass(slots=True)
class Inputs:
    """What a micro-step reads, in fixed buffers: int32 tensors of (B, T) and the step's scalars.

    order: stable argsort of the flattened tokens, for the embedding's backward.
    """

    tokens: Tensor
    targets: Tensor
    segment_start: Tensor
    order: Tensor


@dataclasses.dataclass(slots=True)
class Scalars:
    """Values that change from step to step; a graph reads them from a device buffer.

    inv_supervised: 1 / supervised tokens of the whole step. correction1, 2: 1 - beta^(step + 1).
    update: step * grad_accumulation + micro_step, the last word of the random counter.
    """

    learning_rate: float = 0.0
    inv_supervised: float = 0.0
    correction1: float = 1.0
    correction2: float = 1.0
    update: int = 0


class Ops(Protocol):
    """One rank's operations, in stream order."""

    def set_scalars(self, scalars: Scalars) -> None:
        """The values that the following operations use. (Recorded steps get theirs by copies.)"""
        ...

    def clear_absmax(self) -> None:
        """Forget the absmax of activations and gradients: that of a micro-batch is its own."""
        ...

    def clear_weight_absmax(self) -> None:
        """Forget the absmax of the weights, before all of them are updated."""
        ...

    def refresh_weights(self, weights: list[Tensor]) -> None:
        """Find the absmax (and kept codes) of weights that something else than `adamw` wrote."""
        ...

    def update_weight(self, weight: Tensor) -> None:
        """Write the kept codes of a weight whose slices were updated one by one."""
        ...

    def updated(self, weight: Tensor) -> None:
        """After `adamw` of a rank's shard: its absmax is in its slot."""
        ...

    def embedding(self, x: Tensor, tokens: Tensor, table: Tensor) -> None:
        """x[n] = table[tokens[n]]. x: (N, C), table: (V, C)."""
        ...

    def embedding_backward(
        self, dtable: Tensor, dx: Tensor, tokens: Tensor, order: Tensor, *, accumulate: bool
    ) -> None:
        """dtable[t] (+)= sum of dx[n] over tokens[n] == t, in the order of n, rounded once."""
        ...

    def rmsnorm(self, y: Tensor, rstd: Tensor, x: Tensor, weight: Tensor) -> None:
        """y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps). x, y: (N, C), rstd: (N,)."""
        ...

    def residual_rmsnorm(
        self,
        residual_out: Tensor,
        y: Tensor,
        rstd: Tensor,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
    ) -> None:
        """residual_out = residual + x (rounded), then y, rstd = rmsnorm of it."""
        ...

    def rmsnorm_backward(
        self,
        dx: Tensor,
        dweight: Tensor,
        dy: Tensor,
        dresidual: Tensor | None,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """dx = dresidual + the norm's gradient; dweight (+)= sum dy x rstd. In place is fine."""
        ...

    def qk_norm(
        self, heads: Tensor, rstd: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor
    ) -> None:
        """RMSNorm over D of every query and key head; values are copied. rstd: (N, H + G)."""
        ...

    def qk_norm_backward(
        self,
        dqkv: Tensor,
        dq_weight: Tensor,
        dk_weight: Tensor,
        dheads: Tensor,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        rstd: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """Through the norm of each head, (N, (H + 2 G) D) each; the gradients of v are copied.

        dq_weight, dk_weight: (D,), (+)= the sum over rows and heads.
        """
        ...

    def rope(self, heads: Tensor, segment_start: Tensor) -> None:
        """Rotate queries and keys in place by their position t - segment_start[t]."""
        ...

    def rope_backward(self, dheads: Tensor, segment_start: Tensor) -> None:
        """Rotate the gradients back, in place."""
        ...

    def attention(self, out: Tensor, lse: Tensor, heads: Tensor, segment_start: Tensor) -> None:
        """out = softmax(q k^T / sqrt(D)) v, causal within a document.

        heads: (N, (H + 2 G) D) as [q; k; v], out: (N, H D), lse: (B, H, T) float32.
        """
        ...

    def cached_attention(
        self, out: Tensor, heads: Tensor, cache: Tensor, segment_start: Tensor
    ) -> None:
        """`attention` over all that `cache` has of a text, which the new tokens are added to.

        cache: (B, S, 2 G D), row p the [k; v] of the token at position p = t - segment_start[t],
        which sees positions 0 .. p. Tokens from position S on are not kept.
        """
        ...

    def attention_backward(
        self,
        dheads: Tensor,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        heads: Tensor,
        segment_start: Tensor,
    ) -> None:
        """dheads from dout, with P = exp(S - lse) computed again; shapes as in `attention`.

        dS = P (dP - D), D = sum over the head's values of dout out.
        """
        ...

    def linear(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        """y = x weight^T + bias. x: (N, K), weight: (M, K), y: (N, M)."""
        ...

    def linear_backward(
        self,
        dx: Tensor,
        dweight: Tensor,
        dbias: Tensor | None,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """dx = dy weight, dweight (+)= dy^T x, dbias (+)= sum_n dy (never from the FP8 codes)."""
        ...

    def linear_swiglu(self, y: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor) -> None:
        """gate_up = x weight^T, y = gate / (1 + exp(-gate)) * up. x: (N, C), weight: (2 F, C),
        gate_up: (N, 2 F) as [gate, up]; y: (N, F), from the rounded gate_up."""
        ...

    def linear_swiglu_again(self, y: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor) -> None:
        """`linear_swiglu` in recomputation, with the same bits; y as in `swiglu_again`."""
        ...

    def swiglu_again(self, y: Tensor, gate_up: Tensor) -> None:
        """y again, from gate_up. Its absmax is known: an engine may leave its codes alone."""
        ...

    def linear_swiglu_backward(
        self,
        dgate_up: Tensor,
        dact: Tensor,
        dweight: Tensor,
        dy: Tensor,
        act: Tensor,
        weight: Tensor,
        gate_up: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        """Back through y = act weight^T and act = SwiGLU(gate_up), in this order: dweight (+)= dy^T
        act; dact = dy weight, rounded; dup = dact silu(gate), dgate = dact up silu'(gate).

        dact is room: an engine may leave it unwritten. weight: (C, F), dy: (N, C), others as in
        `linear_swiglu`.
        """
        ...

    def cross_entropy(
        self, logits: Tensor, loss: Tensor, lse: Tensor, targets: Tensor, *, gradient: bool
    ) -> None:
        """Per row: loss = lse - logits[target] + z lse^2, 0 where the target is -100; lse always.

        gradient: logits become d(loss * inv_supervised) / d(logits) in place, masked rows all zero.
        Without it z is 0 and the logits are left alone. Columns beyond the vocabulary count for
        nothing.
        """
        ...

    def reduce_loss(self, total: Tensor, loss: Tensor, lse: Tensor, *, accumulate: bool) -> None:
        """total[0] (+)= sum(loss) * inv_supervised, total[1] = max(total[1], lse). Fixed order."""
        ...

    def global_norm(self, norms: Tensor, total: Tensor, grads: list[Tensor]) -> None:
        """norms[i] = |grads[i]|; total = (norm, clip factor, 1 if finite else 0). Fixed order."""
        ...

    def adamw(
        self,
        master: Tensor,
        weight: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        total: Tensor,
        *,
        tensor_id: int,
        decayed: bool,
        m_scale: Tensor | None = None,
        first: int = 0,
    ) -> None:
        """One AdamW update with `total`'s clip factor; writes nothing if total says not finite.

        weight may share master's memory. Storage below float32 is rounded stochastically. first: of
        a slice, its first element in the parameter, a multiple of 1024.
        """
        ...

    def fill_normal(self, x: Tensor, *, std: float, tensor_id: int, first: int = 0) -> None:
        """x = std * standard normal of the element's counter. first: x's first element in the
        parameter, a multiple of 1024."""
        ...

    def accumulate(
        self,
        shard: Tensor,
        contributions: Tensor,
        *,
        tensor_id: int,
        first_element: int,
        start: bool,
        queue: Any = None,
    ) -> None:
        """shard (+)= sum of all ranks' contributions in their order, rounded stochastically once.

        contributions: (ranks, at least shard.size). start: the shard starts anew. first_element: of
        the shard in its parameter, a multiple of 1024. queue: run there, not in stream order.
        """
        ...

    def combine_norms(self, norms: Tensor, total: Tensor, gathered: Tensor) -> None:
        """`global_norm`'s outputs from the norms of all ranks' shards, (ranks, parameters)."""
        ...

    def combine_absmax(self, slots: Tensor, gathered: Tensor) -> None:
        """Each slot's absmax is the largest of all ranks': (n, 4) from (ranks, n, 4)."""
        ...

    def read(self, tensor: Tensor) -> Any:
        """The content as a NumPy array (waits for the stream)."""
        ...

    def write(self, tensor: Tensor, array: Any) -> None:
        """Set the content from a NumPy array, rounded to nearest."""
        ...
