"""Copies of one rank from any rank's memory into its own, beside its compute stream.

A `Link` has one queue, in order. Marks are points in a queue or in a compute stream; a mark may be
waited for by any rank, after it was set (ranks are driven by one thread, phase by phase). Stores
know no more of CUDA than this (`copy_engine.py`); over NumPy they run with `ImmediateLink`.
"""

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from llmq_nb.core.tensor import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Pull:
    """nbytes from an address in rank `rank`'s memory, or in pinned host memory, to one's own."""

    target: int
    source: int
    nbytes: int
    rank: int
    host: bool = False


class Link(Protocol):
    """One rank's end."""

    @property
    def queue(self) -> Any:
        """The stream of the copies, for a kernel that follows them; None: there are no streams."""
        ...

    def mark(self) -> Any:
        """A point to wait for; it means nothing before it is set."""
        ...

    def record(self, mark: Any) -> None:
        """Set it at the present end of this rank's compute stream."""
        ...

    def set(self, mark: Any, *, after: Sequence[Any] = ()) -> None:
        """Set it at the present end of the queue, after the marks `after`."""
        ...

    def pull(self, pulls: Sequence[Pull], *, done: Any = None, after: Sequence[Any] = ()) -> None:
        """Start after this rank's compute stream's work so far and the marks `after`. Sets done."""
        ...

    def wait(self, mark: Any) -> None:
        """What this rank's compute stream is given from now on starts after the mark."""
        ...

    def join(self) -> None:
        """What it is given from now on starts after the whole queue."""
        ...

    def reset(self) -> None:
        """Begin anew with nothing in flight."""
        ...


class ImmediateLink:
    """Copies done as they are asked for: how the cpu engine runs several ranks."""

    queue = None

    def mark(self) -> Any:
        return None

    def record(self, mark: Any) -> None:
        pass

    def set(self, mark: Any, *, after: Sequence[Any] = ()) -> None:
        pass

    def pull(self, pulls: Sequence[Pull], *, done: Any = None, after: Sequence[Any] = ()) -> None:
        for pull in pulls:
            ctypes.memmove(pull.target, pull.source, pull.nbytes)

    def wait(self, mark: Any) -> None:
        pass

    def join(self) -> None:
        pass

    def reset(self) -> None:
        pass


def immediate_links(ranks: int) -> list[Link]:
    """One for each rank."""
    return [ImmediateLink() for _ in range(ranks)]


class LinkTransfer:
    """A link as a store that stages weights uses it: what comes to the device comes from ranks."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def mark(self) -> Any:
        return self._link.mark()

    def to_device(self, copies: Sequence[Any], *, done: Any, after: Any = None) -> None:
        self._link.pull(copies, done=done, after=() if after is None else (after,))

    def wait(self, mark: Any) -> None:
        self._link.wait(mark)

    def free(self, staging: Tensor) -> None:
        """Nothing to do."""

    def join(self) -> None:
        self._link.join()

    def reset(self) -> None:
        self._link.reset()
