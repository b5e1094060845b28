"""Gradients of several ranks become one sum, cut into shards: copies and an accumulating kernel.

    rank 0   backward(l)  written .               backward(l - 1)
    rank 1      backward(l)  written .               backward(l - 1)
    queue 0                     pull own run from 0, 1 | accumulate | next run ...
    queue 1                     pull own run from 0, 1 | accumulate | next run ...

When the last rank has released a unit, every rank pulls its shard of it, run by run, from all ranks
into a receive buffer and adds the runs up in the order of the ranks. That happens on a queue beside
the rank's compute stream: compute waits only where a staging buffer is to be written again, and at
the end of the step. No floating-point atomics, no order that depends on time: the bits are fixed.

Where gradients are not sharded the same happens once, in the last micro-step, and the shard is the
rank's own part of its whole gradient.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from llmq_nb.comm.link import Link, Pull
from llmq_nb.core.tensor import Tensor

W = TypeVar("W")
Unit = Any
"""A block's index, the embedding or the head."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A part of one rank's shard of a tensor. pulls: its contributions, from every rank.

    received: (ranks, elements), where they go; the first shard.size of a row count. first: the
    run's first element in the whole tensor.
    """

    pulls: tuple[Pull, ...]
    received: Tensor
    shard: Tensor
    tensor_id: int
    first: int


@dataclasses.dataclass(slots=True)
class End:
    """One rank's end. runs: by unit. activate: makes its device current.

    accumulate: (run, whether the shard starts anew), on the link's queue.
    """

    link: Link
    runs: Mapping[Unit, Sequence[Run]]
    accumulate: Callable[[Run, bool], None]
    activate: Callable[[], None]


class GradientReduction:
    """All ranks' ends. every: whether each micro-step is reduced, or the last one only."""

    def __init__(self, ends: Sequence[End], turns: Mapping[Unit, int], *, every: bool) -> None:
        """turns: the staging buffer of each unit that has one."""
        self._ends, self._turns, self._every = ends, turns, every
        self._written = [end.link.mark() for end in ends]
        self._taken = [[end.link.mark() for end in ends] for _ in set(turns.values())]
        self.begin(first=True, last=True)

    def begin(self, *, first: bool, last: bool) -> None:
        """Before a micro-step: nothing is in flight. first: the sums start anew."""
        self._first, self._now = first or not self._every, self._every or last
        self._taking = [False] * len(self._taken)

    def ready(self, rank: int, unit: Unit) -> None:
        """The rank is about to write the unit's gradients: wait until all have taken the last."""
        turn = self._turns.get(unit)
        if turn is not None and self._taking[turn]:
            for mark in self._taken[turn]:
                self._ends[rank].link.wait(mark)

    def written(self, rank: int, unit: Unit) -> None:
        """The rank has written them; the last rank sets off the copies."""
        if not self._now:
            return
        self._ends[rank].link.record(self._written[rank])
        if rank < len(self._ends) - 1:
            return
        turn = self._turns.get(unit)
        for index, end in enumerate(self._ends):
            end.activate()
            for run in end.runs.get(unit, ()):
                end.link.pull(run.pulls, done=None, after=self._written)
                end.accumulate(run, self._first)
            if turn is not None:
                end.link.set(self._taken[turn][index], after=self._written)
        if turn is not None:
            self._taking[turn] = True
        self._ends[rank].activate()

    def finish(self) -> None:
        """What follows on the compute streams waits for all sums."""
        for end in self._ends:
            end.activate()
            end.link.join()


class SharedGradients(Generic[W]):
    """One rank's gradient store over a `GradientReduction`. units: memory that backward writes."""

    def __init__(self, reduction: GradientReduction, rank: int, units: Mapping[Unit, W]) -> None:
        self._reduction, self._rank, self._units = reduction, rank, units

    def gather(self, unit: Unit) -> None:
        """Nothing to do: sums are made where the shards are."""

    def get(self, unit: Unit) -> W:
        self._reduction.ready(self._rank, unit)
        return self._units[unit]

    def release(self, unit: Unit) -> None:
        self._reduction.written(self._rank, unit)
