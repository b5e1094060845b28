"""Gradients of several ranks become one sum, cut into shards: copies and an accumulating kernel.

    rank 0   backward(l)  written .               backward(l - 1)
    rank 1      backward(l)  written .               backward(l - 1)
    queue 0                     pull own run from 0, 1 | accumulate | next run ...
    queue 1                     pull own run from 0, 1 | accumulate | next run ...

When the last rank has released a unit, every rank pulls its shard of it, run by run, from all ranks
into a receive buffer and adds the runs up in the order of the ranks. That happens on a queue beside
the rank's compute stream: compute waits only where a staging buffer is to be written again, and at
the end of the step. No floating-point atomics, no order that depends on time: the bits are fixed.

Of ranks on other machines the runs come as parcels, between the copies and the sum (wire.py).

Where gradients are not sharded the same happens once, in the last micro-step, and the shard is the
rank's own part of its whole gradient.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from llmq_nb.comm.link import Link, Pull
from llmq_nb.comm.wire import NoWire, Phase, Wire, split
from llmq_nb.core.tensor import Tensor

W = TypeVar("W")
Unit = Any
"""A block's index, the embedding or the head."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A part of one rank's shard of a tensor. pulls: its contributions, from every rank of all.

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
    """One rank's end. activate: makes its device current.

    accumulate: (run, whether the shard starts anew), on the link's queue.
    """

    link: Link
    accumulate: Callable[[Run, bool], None]
    activate: Callable[[], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """The n-th run of every rank's shard of a unit. runs: of this machine's; None: it has fewer."""

    phase: Phase
    runs: tuple[Run | None, ...]


def sums_of(runs: Sequence[Mapping[Unit, Sequence[Run]]], local: range) -> dict[Unit, list[Sum]]:
    """The sums of each unit, from the runs of all ranks, as the machine of `local` makes them."""
    out: dict[Unit, list[Sum]] = {}
    for unit in runs[0]:
        for turn in itertools.zip_longest(*(own[unit] for own in runs)):
            phase = split([run.pulls if run else () for run in turn], local)
            out.setdefault(unit, []).append(Sum(phase, tuple(turn[r] for r in local)))
    return out


class GradientReduction:
    """All ends of a machine. every: whether each micro-step is reduced, or the last one only."""

    def __init__(
        self,
        ends: Sequence[End],
        sums: Mapping[Unit, Sequence[Sum]],
        turns: Mapping[Unit, int],
        *,
        every: bool,
        wire: Wire | None = None,
    ) -> None:
        """sums: of each unit. turns: the staging buffer of each unit that has one."""
        self._ends, self._sums, self._turns, self._every = ends, sums, turns, every
        self._wire = wire or NoWire()
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
        for each in self._sums.get(unit, ()):
            self._sum(each)
        turn = self._turns.get(unit)
        if turn is not None:
            for index, end in enumerate(self._ends):
                end.activate()
                end.link.set(self._taken[turn][index], after=self._written)
            self._taking[turn] = True
        self._ends[rank].activate()

    def _sum(self, each: Sum) -> None:
        """Copies, parcels, and the ranks' parts added up."""
        crosses = bool(each.phase.parcels)
        for end, run, pulls in zip(self._ends, each.runs, each.phase.pulls, strict=True):
            if run is not None or crosses:  # what is only sent is waited for as well
                end.activate()
                end.link.pull(pulls, done=None, after=self._written)
        if crosses:
            self._wire.exchange(each.phase.parcels, [end.link.queue for end in self._ends])
        for end, run in zip(self._ends, each.runs, strict=True):
            if run is not None:
                end.activate()
                end.accumulate(run, self._first)

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
