"""Copies between device and pinned host memory, beside the work of the compute stream.

A `Transfer` has two queues, to the device and to the host, each in order. A copy starts after all
work that the compute stream was given before the call, so the memory that it reads is written and
the memory that it writes is free. Marks are points in a queue, for whoever must wait. Stores know
no more of CUDA than this (`cuda_transfer.py`); over NumPy they run with `ImmediateTransfer`.
"""

import ctypes
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from llmq_nb.core.arena import ALIGNMENT
from llmq_nb.core.tensor import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """nbytes at two addresses, in whichever direction."""

    device: int
    host: int
    nbytes: int


class Fetch(Protocol):
    """One store's copies to its device."""

    def mark(self) -> Any:
        """A point to wait for; it means nothing before a copy sets it."""
        ...

    def to_device(self, copies: Sequence[Any], *, done: Any, after: Any = None) -> None:
        """Start after the compute stream's work so far, and after the mark `after`. Sets done."""
        ...

    def wait(self, mark: Any) -> None:
        """What the compute stream is given from now on starts after the mark."""
        ...

    def free(self, staging: Tensor) -> None:
        """Nobody may read the staging buffer until it is written again."""
        ...

    def join(self) -> None:
        """What the compute stream is given from now on starts after all copies."""
        ...

    def reset(self) -> None:
        """Begin anew with nothing in flight."""
        ...


class Transfer(Fetch, Protocol):
    """One store's copies on one device, both ways."""

    def to_host(self, copies: Sequence[Copy], *, done: Any, after: Any = None) -> None:
        """As `to_device`, in the other direction."""
        ...


class ImmediateTransfer:
    """Copies done as they are asked for: how the cpu engine runs the stores in tests.

    A free staging buffer is filled with NaN, so that a late reader shows.
    """

    def mark(self) -> Any:
        return None

    def to_device(self, copies: Sequence[Copy], *, done: Any, after: Any = None) -> None:
        for copy in copies:
            ctypes.memmove(copy.device, copy.host, copy.nbytes)

    def to_host(self, copies: Sequence[Copy], *, done: Any, after: Any = None) -> None:
        for copy in copies:
            ctypes.memmove(copy.host, copy.device, copy.nbytes)

    def wait(self, mark: Any) -> None:
        pass

    def free(self, staging: Tensor) -> None:
        ctypes.memset(staging.address, 0xFF, staging.nbytes)  # NaN in every format

    def join(self) -> None:
        pass

    def reset(self) -> None:
        pass


def copies_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Copy, ...]:
    """Copies of (device, host) tensors of equal size; neighbours in both places become one.

    Between neighbours lies alignment padding at most, which is copied along: a block whose tensors
    lie alike in both places is one copy.
    """
    out: list[Copy] = []
    for device, host in pairs:
        new = Copy(device.address, host.address, device.nbytes)
        if out:
            last = out[-1]
            step = new.device - last.device
            padding = step - last.nbytes
            if step == new.host - last.host and 0 <= padding < ALIGNMENT:
                out[-1] = dataclasses.replace(last, nbytes=step + new.nbytes)
                continue
        out.append(new)
    return tuple(out)
