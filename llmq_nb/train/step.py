"""The training step: micro-steps that add up gradients, then one update.

This is the order of the work and nothing else. It runs eagerly on the cpu engine; on a GPU it is
recorded once into graphs and replayed. Ranks go in lock-step, layer by layer.
"""

from collections.abc import Sequence

from llmq_nb.train.rank import Rank


def micro_step(ranks: Sequence[Rank], *, first: bool) -> None:
    """Forward and backward of one micro-batch. first: gradients start anew, else they add up."""
    _begin(ranks)
    _forward(ranks, backward=True)
    for rank in ranks:
        rank.model.head_loss(gradient=True, accumulate=not first)
    for layer in reversed(range(ranks[0].model.config.L)):
        for rank in ranks:
            rank.model.backward(layer, accumulate=not first)
    for rank in ranks:
        rank.model.embed_backward(accumulate=not first)
    _finish(ranks)


def optimizer_step(ranks: Sequence[Rank]) -> None:
    """Norm, clip factor and update. Nothing is written if the norm is not finite."""
    _begin(ranks)
    for rank in ranks:
        rank.ops.clear_weight_absmax()
        rank.ops.global_norm(rank.norms, rank.norm_total, [s.gradient for s in rank.states])
        sliced = set()
        for s in rank.updates:
            if not s.whole:
                sliced.add(s.parameter.name)
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
                first=s.first,
            )
        for s in rank.states:
            if s.parameter.name in sliced:  # its absmax is that of all slices
                rank.ops.update_weight(s.weight)
    _finish(ranks)


def evaluation_step(ranks: Sequence[Rank]) -> None:
    """Forward of one micro-batch: the losses of its rows."""
    _begin(ranks)
    _forward(ranks, backward=False)
    for rank in ranks:
        rank.model.head_loss(gradient=False)
    _finish(ranks)


def _begin(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.begin()


def _finish(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.finish()


def _forward(ranks: Sequence[Rank], *, backward: bool) -> None:
    for rank in ranks:
        rank.model.embed()
    for layer in range(ranks[0].model.config.L):
        for rank in ranks:
            rank.model.forward(layer, backward=backward)
