"""One rank's model: the embedding, the blocks and the chunked head, forward and backward.

The methods are the phases of a micro-step; `llmq_nb.train.step` calls them over all ranks in
lock-step (a gradient's reduction needs every rank's contribution before it is ordered). Units are
gathered one ahead of their use.
"""

import dataclasses

from llmq_nb.core.tensor import Tensor
from llmq_nb.model.activations import BlockActivations, Gradients, HeadActivations
from llmq_nb.model.block import block_backward, block_forward
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.ops import Inputs, Ops
from llmq_nb.model.recompute import recompute_block
from llmq_nb.model.weights import ResidentResiduals, ResidualStore, Unit, WeightStore


@dataclasses.dataclass(slots=True)
class Transformer:
    """config: the shape. blocks, g: each layer's activations and gradients.

    dropped: activations that backward computes again. adds_up: whether gradients add up in their
    buffers over micro-steps; else each micro-step's are handed over on their release. caches: keys
    and values of each layer, where forward goes on from what came before (generation).
    """

    config: ModelConfig
    ops: Ops
    inputs: Inputs
    weights: WeightStore
    gradients: WeightStore
    blocks: list[BlockActivations]
    head: HeadActivations
    g: list[Gradients]
    dropped: frozenset[str]
    residuals: ResidualStore = dataclasses.field(default_factory=ResidentResiduals)
    adds_up: bool = True
    caches: list[Tensor] | None = None

    def embed(self) -> None:
        """The first residual: the embeddings of the tokens. Every pass begins here."""
        self.ops.clear_absmax()
        table = self.weights.get("embedding").table
        self.weights.gather(0)
        self.residuals.write(0)
        self.ops.embedding(self.blocks[0].residual, self.inputs.tokens, table)
        self.weights.release("embedding")

    def forward(self, layer: int, *, backward: bool = False) -> None:
        """One block. backward: whether its backward will follow."""
        w = self.weights.get(layer)
        self.weights.gather(self._after(layer))
        self.residuals.write(layer)
        previous = self.blocks[layer - 1] if layer else None
        cache = None if self.caches is None else self.caches[layer]
        block_forward(self.blocks[layer], w, self.ops, self.inputs.segment_start, previous, cache)
        if backward:
            self.residuals.keep(layer)
        self.weights.release(layer)

    def head_loss(self, *, gradient: bool, accumulate: bool = False) -> None:
        """The final norm and the LM head in chunks; the losses, and the gradient of the residual.

        The logits of one chunk exist at a time: they become their own gradient in place.
        """
        ops, h, last = self.ops, self.head, self.blocks[-1]
        w = self.weights.get("head")
        adds = accumulate and self.adds_up
        if gradient:  # backward begins with the last block
            self.weights.gather(self.config.L - 1)
            if adds:
                self.gradients.gather(self.config.L - 1)
        ops.residual_rmsnorm(
            h.residual, h.head_in, h.rstd, last.residual_mid, last.down, w.final_norm
        )
        dw = self.gradients.get("head") if gradient else None
        targets = self.inputs.targets.view(self.inputs.targets.size)
        for start in range(0, h.loss.size, h.logits.shape[0]):
            rows = (start, min(start + h.logits.shape[0], h.loss.size))
            logits, head_in = h.logits.rows(0, rows[1] - rows[0]), h.head_in.rows(*rows)
            ops.linear(logits, head_in, w.table)
            ops.cross_entropy(
                logits,
                h.loss.rows(*rows),
                h.lse.rows(*rows),
                targets.rows(*rows),
                gradient=gradient,
            )
            if dw is not None:
                ops.linear_backward(
                    self.g[-1].norm_in.rows(*rows),
                    dw.table,
                    None,
                    logits,
                    head_in,
                    w.table,
                    accumulate=adds or start > 0,
                )
        ops.reduce_loss(h.total, h.loss, h.lse, accumulate=accumulate)
        if dw is not None:
            ops.rmsnorm_backward(
                self.g[-1].residual,
                dw.final_norm,
                self.g[-1].norm_in,
                None,
                h.residual,
                w.final_norm,
                h.rstd,
                accumulate=adds,
            )
            self.gradients.release("head")
        self.weights.release("head")

    def logits_of(self, row: int, count: int = 1) -> Tensor:
        """Logits of `count` rows after all blocks' `forward`: (count, V), in the head's buffer."""
        h, last = self.head, self.blocks[-1]
        w = self.weights.get("head")
        self.ops.residual_rmsnorm(
            h.residual, h.head_in, h.rstd, last.residual_mid, last.down, w.final_norm
        )
        logits = h.logits.rows(0, count)
        self.ops.linear(logits, h.head_in.rows(row, row + count), w.table)
        self.weights.release("head")
        return logits

    def backward(self, layer: int, *, accumulate: bool) -> None:
        """One block's gradients; what forward dropped is computed again first."""
        accumulate = accumulate and self.adds_up
        if accumulate:
            self.gradients.gather(layer)
        w, dw, a = self.weights.get(layer), self.gradients.get(layer), self.blocks[layer]
        self.residuals.get(layer)
        self.weights.gather(layer - 1 if layer else "embedding")
        if layer:
            self.residuals.gather(layer - 1)
            if accumulate:
                self.gradients.gather(layer - 1)
        recompute_block(a, w, self.ops, self.inputs.segment_start, self.dropped)
        block_backward(
            self.g[layer], dw, a, w, self.ops, self.inputs.segment_start, accumulate=accumulate
        )
        self.residuals.release(layer)
        self.gradients.release(layer)
        self.weights.release(layer)

    def embed_backward(self, *, accumulate: bool) -> None:
        """The table's gradient; a tied table already holds the head's."""
        dtable = self.gradients.get("embedding").table
        self.ops.embedding_backward(
            dtable,
            self.g[0].residual_in,
            self.inputs.tokens,
            self.inputs.order,
            accumulate=(accumulate and self.adds_up) or self.config.tied,
        )
        self.gradients.release("embedding")

    def _after(self, layer: int) -> Unit:
        return layer + 1 if layer + 1 < self.config.L else "head"
