"""Links whose copies are done as late, or as early, as they may be: they show a missing order.

The real copies run beside the compute streams, at some time between the call that starts them and
the wait for their mark. Over NumPy compute runs as it is asked for; `late` copies when somebody
waits (a source that was written again too early shows), `early` copies at the call (a source that
is not written yet shows), `mixed` throws a coin. What is to be overwritten is NaN from the moment
on at which the copy may begin, so a reader that does not wait, or reads for too long, shows too.

    links = late_links(ranks)                    # or late_links(ranks, early), mixed(seed)
    on_queue(ops)                                # of each rank: `accumulate` follows the copies
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmq_nb.comm.link import Link, Pull

Work = Callable[[], None]


class Mark:
    """A point of a link's queue; of its compute stream, where everything is done at once: 0."""

    def __init__(self) -> None:
        self.link: LateLink | None = None
        self.count = 0

    def put(self, link: "LateLink", count: int) -> None:
        self.link, self.count = link, count

    def now(self) -> tuple["LateLink", int]:
        """What must have run; the mark may be set again afterwards."""
        assert self.link is not None, "a wait for a mark that was never set"
        return self.link, self.count


class LateLink:
    """One rank's end. soon(): whether what was just queued is done at once."""

    def __init__(self, soon: Callable[[], bool]) -> None:
        self._soon = soon
        self._work: list[Work] = []
        self._done = 0

    @property
    def queue(self) -> "LateLink":
        """Takes work that follows the copies, by `run`."""
        return self

    def run(self, work: Work) -> None:
        """Put work at the end of the queue."""
        self._work.append(work)
        if self._soon():
            self._catch_up(len(self._work))

    def mark(self) -> Mark:
        return Mark()

    def record(self, mark: Mark) -> None:
        mark.put(self, 0)

    def set(self, mark: Mark, *, after: Sequence[Mark] = ()) -> None:
        before = [other.now() for other in after]
        self.run(lambda: _reach(before))
        mark.put(self, len(self._work))

    def pull(self, pulls: Sequence[Pull], *, done: Any = None, after: Sequence[Mark] = ()) -> None:
        before = [mark.now() for mark in after]
        if all(link._done >= count for link, count in before):
            self._spoil([pull for pull in pulls if pull.target != pull.source])

        def copy() -> None:
            _reach(before)
            for pull in pulls:
                ctypes.memmove(pull.target, pull.source, pull.nbytes)

        self.run(copy)
        if done is not None:
            done.put(self, len(self._work))

    def wait(self, mark: Mark) -> None:
        _reach([mark.now()])

    def join(self) -> None:
        self._catch_up(len(self._work))

    def reset(self) -> None:
        assert self._done == len(self._work), "copies are in flight between two steps"

    def _spoil(self, pulls: Sequence[Pull]) -> None:
        """NaN where the pulls write, right after what is in the queue."""

        def poison() -> None:
            for pull in pulls:
                ctypes.memset(pull.target, 0xFF, pull.nbytes)

        if self._done == len(self._work):
            poison()
        else:
            last = self._work[-1]
            self._work[-1] = lambda: (last(), poison()) and None

    def _catch_up(self, count: int) -> None:
        while self._done < count:
            self._done += 1
            self._work[self._done - 1]()


def _reach(points: Sequence[tuple[LateLink, int]]) -> None:
    for link, count in points:
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


def late_links(ranks: int, when: Callable[[], Callable[[], bool]] = late) -> list[Link]:
    """One for each rank."""
    return [LateLink(when()) for _ in range(ranks)]


def on_queue(ops: Any) -> None:
    """Let a rank's `accumulate` follow the copies of the queue that it is given."""
    accumulate = ops.accumulate

    def queued(*args: Any, queue: Any = None, **kwargs: Any) -> None:
        if queue is None:
            accumulate(*args, **kwargs)
        else:
            queue.run(lambda: accumulate(*args, **kwargs))

    ops.accumulate = queued
