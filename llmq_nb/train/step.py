"""The training step: micro-steps that add up gradients, then one update.

This is the order of the work and nothing else. It runs eagerly on the cpu engine; on a GPU it is
recorded once into graphs and replayed. Ranks go in lock-step, layer by layer.
"""

from collections.abc import Sequence

from llmq_nb.train.rank import Rank


def micro_step(ranks: Sequence[Rank], *, first: bool) -> None:
    """Forward and backward of one micro-batch. first: gradients start anew, else they add up."""
    _forward(ranks)
    for rank in ranks:
        rank.model.head_loss(gradient=True, accumulate=not first)
    for layer in reversed(range(ranks[0].model.config.L)):
        for rank in ranks:
            rank.model.backward(layer, accumulate=not first)
    for rank in ranks:
        rank.model.embed_backward(accumulate=not first)


def optimizer_step(ranks: Sequence[Rank]) -> None:
    """Norm, clip factor and update. Nothing is written if the norm is not finite."""
    for rank in ranks:
        rank.ops.clear_weight_absmax()
        rank.ops.global_norm(rank.norms, rank.norm_total, [s.gradient for s in rank.states])
        for s in rank.states:
            rank.ops.adamw(
                s.master,
                s.weight,
                s.m,
                s.v,
                s.gradient,
                rank.norm_total,
                tensor_id=s.tensor_id,
                decayed=s.parameter.decayed,
                m_scale=s.m_scale,
            )


def evaluation_step(ranks: Sequence[Rank]) -> None:
    """Forward of one micro-batch: the losses of its rows."""
    _forward(ranks)
    for rank in ranks:
        rank.model.head_loss(gradient=False)


def _forward(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.model.embed()
    for layer in range(ranks[0].model.config.L):
        for rank in ranks:
            rank.model.forward(layer)
