"""The training step: micro-steps that add up gradients, then one update.

This is the order of the work and nothing else. It runs eagerly on the cpu engine; on a GPU it is
recorded once into graphs and replayed. Ranks go in lock-step, layer by layer.
"""

from collections.abc import Iterator, Sequence

from llmq_nb.train.rank import Rank


def micro_step(ranks: Sequence[Rank], *, first: bool, last: bool = True) -> None:
    """Forward and backward of one micro-batch a rank.

    first: gradients start anew, else they add up. last: of the optimizer step; where each rank adds
    up its own gradients, they are summed over ranks now.
    """
    _begin(ranks)
    if group := ranks[0].group:
        group.reduction.begin(first=first, last=last)
    _forward(ranks, backward=True)
    for rank in _each(ranks):
        rank.model.head_loss(gradient=True, accumulate=not first)
    for layer in reversed(range(ranks[0].model.config.L)):
        for rank in _each(ranks):
            rank.model.backward(layer, accumulate=not first)
    for rank in _each(ranks):
        rank.model.embed_backward(accumulate=not first)
    if group:
        group.reduction.finish()
    _finish(ranks)


def optimizer_step(ranks: Sequence[Rank]) -> None:
    """Norm, clip factor and update. Nothing is written if the norm is not finite."""
    _begin(ranks)
    for rank in _each(ranks):
        rank.ops.clear_weight_absmax()
        rank.ops.global_norm(rank.norms, rank.norm_total, rank.gradients)
    if group := ranks[0].group:
        group.share(group.norms)
        for rank in _each(ranks):
            assert rank.all_norms is not None
            rank.ops.combine_norms(rank.norms, rank.norm_total, rank.all_norms)
    for rank in _each(ranks):
        for s in rank.updates:
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
    if group:
        for rank in _each(ranks):
            for s in rank.states:
                rank.ops.updated(s.weight)
        _combine_absmax(ranks)
        group.share(group.weights)
    for rank in _each(ranks):
        for weight in rank.recoded:
            rank.ops.update_weight(weight)
    _finish(ranks)


def refresh_weights(ranks: Sequence[Rank]) -> None:
    """Absmax and kept codes of weights that something else than an optimizer step wrote."""
    if not ranks[0].fp8_weights:
        return
    _begin(ranks)
    for rank in _each(ranks):
        rank.ops.refresh_weights(rank.fp8_weights)
    if ranks[0].group:
        _combine_absmax(ranks)
        for rank in _each(ranks):
            for weight in rank.recoded:
                rank.ops.update_weight(weight)
    _finish(ranks)


def evaluation_step(ranks: Sequence[Rank]) -> None:
    """Forward of one micro-batch: the losses of its rows."""
    _begin(ranks)
    _forward(ranks, backward=False)
    for rank in _each(ranks):
        rank.model.head_loss(gradient=False)
    _finish(ranks)


def _combine_absmax(ranks: Sequence[Rank]) -> None:
    """A weight's absmax is that of all shards of it."""
    group = ranks[0].group
    if group and group.slots:
        group.share(group.slots)
        for rank in _each(ranks):
            assert rank.slots is not None and rank.all_slots is not None
            rank.ops.combine_absmax(rank.slots, rank.all_slots)


def _each(ranks: Sequence[Rank]) -> Iterator[Rank]:
    """The ranks in turn, each with its device current."""
    for rank in ranks:
        rank.activate()
        yield rank


def _begin(ranks: Sequence[Rank]) -> None:
    if group := ranks[0].group:
        group.exchange.begin()
    for rank in _each(ranks):
        rank.begin()


def _finish(ranks: Sequence[Rank]) -> None:
    for rank in _each(ranks):
        rank.finish()
    if group := ranks[0].group:
        group.exchange.end()


def _forward(ranks: Sequence[Rank], *, backward: bool) -> None:
    for rank in _each(ranks):
        rank.model.embed()
    for layer in range(ranks[0].model.config.L):
        for rank in _each(ranks):
            rank.model.forward(layer, backward=backward)
