"""Phases in which all ranks take from each other, and the two ends of a step.

begin    the other ranks' streams start after rank 0's: one capture holds them all
share    every rank pulls what it lacks, from other machines too; nobody goes on before all have it
end      rank 0's stream goes on after all others
"""

import dataclasses
from collections.abc import Callable, Sequence

from llmq_nb.comm.link import Link
from llmq_nb.comm.wire import NoWire, Phase, Wire


@dataclasses.dataclass(frozen=True, slots=True)
class Seat:
    """One rank. activate: makes its device current."""

    link: Link
    activate: Callable[[], None]


class Exchange:
    """All ranks of this machine, in their order. wire: to the ranks of others."""

    def __init__(self, seats: Sequence[Seat], wire: Wire | None = None) -> None:
        self._seats, self._wire = seats, wire or NoWire()
        self._here = [seat.link.mark() for seat in seats]
        self._done = [seat.link.mark() for seat in seats]

    def begin(self) -> None:
        """Before a step."""
        first, *others = self._seats
        first.activate()
        first.link.record(self._here[0])
        for seat in others:
            seat.activate()
            seat.link.wait(self._here[0])
        for seat in self._seats:
            seat.link.reset()
        first.activate()

    def end(self) -> None:
        """After a step."""
        first, *others = self._seats
        for seat, mark in zip(others, self._here[1:], strict=True):
            seat.activate()
            seat.link.record(mark)
        first.activate()
        for mark in self._here[1:]:
            first.link.wait(mark)

    def share(self, phase: Phase) -> None:
        """What the ranks have done so far comes before, what they do later after all of it."""
        for seat, mark in zip(self._seats, self._here, strict=True):
            seat.activate()
            seat.link.record(mark)
        for seat, own, done in zip(self._seats, phase.pulls, self._done, strict=True):
            seat.activate()
            seat.link.pull(own, done=done, after=self._here)
        if phase.parcels:
            self._wire.exchange(phase.parcels, [seat.link.queue for seat in self._seats])
            for seat, done in zip(self._seats, self._done, strict=True):
                seat.activate()
                seat.link.set(done)
        for seat in self._seats:
            seat.activate()
            for done in self._done:
                seat.link.wait(done)
        self._seats[0].activate()
