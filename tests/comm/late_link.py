"""Links whose copies are done as late, or as early, as they may be, and that look for races.

The real copies run beside the compute streams, at some time between the call that starts them and
the wait for their mark. Over NumPy compute runs as it is asked for; `late` copies when somebody
waits (a source that was written again too early shows), `early` copies at the call (a source that
is not written yet shows), `mixed` throws a coin. What is to be overwritten is NaN from the moment
on at which the copy may begin, so a reader that does not wait, or reads for too long, shows too.

But the ranks' compute streams run side by side as well, and here one after the other: what rank 1
does is late enough for rank 0 by chance. So every stream keeps a vector clock of what it knows to
be done. A rank's compute writes its own memory only; where bytes that are copied have changed, its
clock must hold the copies that read them, and the next copy's clock must hold the change.

    links = LateRanks(late)              # or early, mixed(seed); call it with the number of ranks,
    engine = CpuEngine(..., links)       # as often as each rank has links
    on_queue(ops)                        # of each rank: `accumulate` follows the copies
"""

import ctypes
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from llmq_nb.comm.link import Link, Pull

Work = Callable[[], object]
Clock = dict[Any, int]
"""How far each stream is known to have come: ranks (compute) and links (queues)."""


def joined(clocks: Iterable[Clock]) -> Clock:
    """What all of them know."""
    out: Clock = {}
    for clock in clocks:
        for stream, count in clock.items():
            out[stream] = max(count, out.get(stream, 0))
    return out


@dataclasses.dataclass
class Region:
    """Bytes that are copied from a rank. changed: by which stream, and when; reads: by which queue,
    when, and what was known to be done by then."""

    rank: int
    bytes: memoryview
    sum: int
    changed: tuple[Any, int] | None = None
    reads: list[tuple[Any, int, Clock]] = dataclasses.field(default_factory=list)

    def look(self, stream: Any, count: int, clock: Clock) -> None:
        """Whatever changed since the last look was written by a stream that knew `clock`."""
        found = zlib.crc32(self.bytes)
        if found == self.sum:
            return
        later = [read for read in self.reads if read[2].get(stream, 0) >= count]
        for queue, when, known in self.reads:
            if known.get(stream, 0) < count and clock.get(queue, 0) < when:
                raise AssertionError(
                    f"race: rank {self.rank} writes what {queue} may not have copied yet"
                )
        self.sum, self.changed, self.reads = found, (stream, count), later

    def check(self, queue: Any, clock: Clock) -> None:
        """A copy that knows `clock` reads it."""
        if self.changed is not None:
            stream, when = self.changed
            known = clock.get(stream, 0) >= when
            assert known, f"race: {queue} copies what rank {self.rank} may not have written yet"


class LateRanks:
    """All ranks. when(): for each link, whether what was just queued is done at once."""

    def __init__(self, when: Callable[[], Callable[[], bool]]) -> None:
        self._when = when
        self.clocks: list[Clock] = []
        """Of the compute streams."""
        self.regions: dict[tuple[int, int], Region] = {}

    def __call__(self, ranks: int) -> list[Link]:
        """One more link for each rank."""
        for rank in range(len(self.clocks), ranks):
            self.clocks.append({rank: 1})
        return [LateLink(self, rank, self._when()) for rank in range(ranks)]

    def look(self, rank: int) -> None:
        """Find what the rank's compute has written; before its clock changes."""
        clock = self.clocks[rank]
        for region in self.regions.values():
            if region.rank == rank:
                region.look(rank, clock[rank], clock)

    def region(self, pull: Pull) -> Region:
        """Of a pull's source."""
        key = pull.source, pull.nbytes
        if key not in self.regions:
            memory = memoryview((ctypes.c_uint8 * pull.nbytes).from_address(pull.source))
            self.regions[key] = Region(pull.rank, memory, zlib.crc32(memory))
        return self.regions[key]

    def calm(self) -> None:
        """All ranks are done: who wrote what before counts no more."""
        for region in self.regions.values():
            region.sum, region.changed, region.reads = zlib.crc32(region.bytes), None, []


class Mark:
    """A point of a link's queue (count), or of a compute stream, where everything is done at once
    (0). clock: what is done when it is reached."""

    def __init__(self) -> None:
        self.link: LateLink | None = None
        self.count, self.clock = 0, {}

    def put(self, link: "LateLink", count: int, clock: Clock) -> None:
        self.link, self.count, self.clock = link, count, dict(clock)

    def now(self) -> tuple["LateLink", int, Clock]:
        """What it means now: it may be set again later."""
        assert self.link is not None, "a wait for a mark that was never set"
        return self.link, self.count, self.clock


class LateLink:
    """One of a rank's links. soon(): whether what was just queued is done at once."""

    def __init__(self, ranks: LateRanks, rank: int, soon: Callable[[], bool]) -> None:
        self._ranks, self._rank, self._soon = ranks, rank, soon
        self._work: list[Work] = []
        self._done = 0
        self._clock: Clock = {}
        """What is done when the queue is."""

    def __repr__(self) -> str:
        return f"a link of rank {self._rank}"

    @property
    def queue(self) -> "LateLink":
        """Takes work that follows the copies, by `run`."""
        return self

    def run(self, work: Work, *, after: Sequence[tuple["LateLink", int, Clock]] = ()) -> None:
        """Put work at the end of the queue."""
        count = len(self._work) + 1
        self._clock = joined([self._clock, {self: count}, *(clock for *_, clock in after)])
        clock = self._clock

        def step() -> None:
            _reach(after)
            self._ranks.look(self._rank)
            work()
            self._look(count, clock)

        self._work.append(step)
        if self._soon():
            self._catch_up(count)

    def mark(self) -> Mark:
        return Mark()

    def record(self, mark: Mark) -> None:
        self._ranks.look(self._rank)
        clock = self._ranks.clocks[self._rank]
        mark.put(self, 0, clock)
        clock[self._rank] += 1

    def set(self, mark: Mark, *, after: Sequence[Mark] = ()) -> None:
        self.run(lambda: None, after=[other.now() for other in after])
        mark.put(self, len(self._work), self._clock)

    def pull(self, pulls: Sequence[Pull], *, done: Any = None, after: Sequence[Mark] = ()) -> None:
        before = [mark.now() for mark in after]
        self._fork()
        count = len(self._work) + 1
        clock = joined([self._clock, *(clock for *_, clock in before)])
        if all(link._done >= n for link, n, _ in before):
            self._spoil([pull for pull in pulls if pull.target != pull.source], count, clock)
        regions = [self._ranks.region(pull) for pull in pulls if pull.nbytes]

        def check() -> None:
            for region in regions:
                self._ranks.look(region.rank)
                region.check(self, clock)

        def copy() -> None:
            check()
            for pull in pulls:
                ctypes.memmove(pull.target, pull.source, pull.nbytes)

        check()
        for region in regions:
            region.reads.append((self, count, clock))
        self.run(copy, after=before)
        if done is not None:
            done.put(self, len(self._work), self._clock)

    def wait(self, mark: Mark) -> None:
        point = mark.now()
        _reach([point])
        self._learn(point[2])

    def join(self) -> None:
        self._catch_up(len(self._work))
        self._learn(self._clock)

    def reset(self) -> None:
        assert self._done == len(self._work), "copies are in flight between two steps"
        self._ranks.calm()

    def _fork(self) -> None:
        """The queue goes on after what compute was given so far."""
        self._ranks.look(self._rank)
        own = self._ranks.clocks[self._rank]
        self._clock = joined([self._clock, own])
        own[self._rank] += 1

    def _learn(self, clock: Clock) -> None:
        """Compute goes on after what the clock says."""
        self._ranks.look(self._rank)
        self._ranks.clocks[self._rank] = joined([self._ranks.clocks[self._rank], clock])

    def _look(self, count: int, clock: Clock) -> None:
        """Find what the queue has written."""
        for region in self._ranks.regions.values():
            if region.rank == self._rank:
                region.look(self, count, clock)

    def _spoil(self, pulls: Sequence[Pull], count: int, clock: Clock) -> None:
        """NaN where the pulls write, right after what is in the queue."""

        def poison() -> None:
            self._ranks.look(self._rank)
            for pull in pulls:
                ctypes.memset(pull.target, 0xFF, pull.nbytes)
            self._look(count, clock)

        if self._done == len(self._work):
            poison()
        else:
            last = self._work[-1]
            self._work[-1] = lambda: (last(), poison())

    def _catch_up(self, count: int) -> None:
        while self._done < count:
            self._done += 1
            self._work[self._done - 1]()


def _reach(points: Sequence[tuple[LateLink, int, Clock]]) -> None:
    for link, count, _ in points:
        link._catch_up(count)


def late() -> Callable[[], bool]:
    """Nothing before it must be."""
    return lambda: False


def early() -> Callable[[], bool]:
    """Everything at the call."""
    return lambda: True


def mixed(seed: int) -> Callable[[], Callable[[], bool]]:
    """Now or later, by chance."""
    rng = np.random.default_rng(seed)
    return lambda: lambda: bool(rng.random() < 0.5)


def on_queue(ops: Any) -> None:
    """Let a rank's `accumulate` follow the copies of the queue that it is given."""
    accumulate = ops.accumulate

    def queued(*args: Any, queue: Any = None, **kwargs: Any) -> None:
        if queue is None:
            accumulate(*args, **kwargs)
        else:
            queue.run(lambda: accumulate(*args, **kwargs))

    ops.accumulate = queued


def late_links(ranks: int, when: Callable[[], Callable[[], bool]] = late) -> list[Link]:
    """One link for each rank: all that they have."""
    return LateRanks(when)(ranks)
