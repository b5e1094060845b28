"""MPI as several processes use it: values around a step (cluster.py), parcels in it (wire.py).

Everything of mpi4py is in this file. Three communicators keep apart what may be in flight at once:
values, whole arrays, parcels. A wait looks again and again instead of blocking: signals are
handled, and a process whose peer works for minutes (it evaluates, it makes data) uses no core,
where MPI would spin.
"""

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI  # pyright: ignore[reportMissingImports]: only with [cluster]
from numpy.typing import NDArray

from llmq_nb.comm.cluster import Failed
from llmq_nb.comm.wire import Parcel

AT_ONCE = 1 << 30
"""Bytes of a message: MPI before version 4 counts in 32 bits."""
SHORTEST_SLEEP, LONGEST_SLEEP = 2e-5, 5e-3
"""Seconds between two looks; each is 1.5 times as long as the one before."""
HEADER = struct.Struct("<iq")
"""Status and length of a process's value."""


class MpiPost:
    """`cluster.Post` over MPI."""

    def __init__(self, world: MPI.Comm) -> None:
        self.index, self.size = world.Get_rank(), world.Get_size()
        self.world, self._values, self._arrays = world, world.Dup(), world.Dup()

    def gather(self, status: int, data: bytes, seconds: float | None = None) -> Sequence[bytes]:
        headers = bytearray(HEADER.size * self.size)
        own = HEADER.pack(status, len(data))
        _wait(self._values.Iallgather([own, MPI.BYTE], [headers, MPI.BYTE]).Test, seconds)
        found = list(HEADER.iter_unpack(headers))
        failed = {process: code for process, (code, _) in enumerate(found) if code}
        if failed:
            raise Failed(failed)
        lengths = [length for _, length in found]
        starts = [sum(lengths[:process]) for process in range(self.size)]
        out = bytearray(sum(lengths))
        whole = [out, (lengths, starts), MPI.BYTE]
        _wait(self._values.Iallgatherv([data, MPI.BYTE], whole).Test)
        return [bytes(out[a : a + n]) for a, n in zip(starts, lengths, strict=True)]

    def broadcast(self, array: NDArray[np.uint8], root: int) -> None:
        for start in range(0, array.size, AT_ONCE):
            piece = array[start : start + AT_ONCE]
            _wait(self._arrays.Ibcast([piece, MPI.BYTE], root).Test)

    def wire(self, ranks: int) -> "MpiWire":
        return MpiWire(self.world.Dup(), ranks)

    def abort(self, code: int) -> None:
        self.world.Abort(code)


class MpiWire:
    """`wire.Wire` between host memories: how the cpu engine reaches other machines."""

    def __init__(self, comm: MPI.Comm, ranks: int) -> None:
        """ranks: of each machine."""
        self._comm, self._ranks = comm, ranks

    def exchange(self, parcels: Sequence[Parcel], queues: Sequence[Any]) -> None:
        requests = []
        for parcel in parcels:
            peer = parcel.there // self._ranks
            for start in range(0, parcel.nbytes, AT_ONCE):
                nbytes = min(AT_ONCE, parcel.nbytes - start)
                memory = MPI.memory.fromaddress(parcel.address + start, nbytes)
                call = self._comm.Isend if parcel.sends else self._comm.Irecv
                requests.append(call([memory, MPI.BYTE], peer))
        _wait(lambda: MPI.Request.Testall(requests))

    def close(self) -> None:
        """Nothing to do: MPI ends with the process."""


def _wait(done: Callable[[], bool], seconds: float | None = None) -> None:
    """Until it is done. Raises TimeoutError."""
    start, pause = time.monotonic(), SHORTEST_SLEEP
    while not done():
        if seconds is not None and time.monotonic() - start > seconds:
            raise TimeoutError
        time.sleep(pause)
        pause = min(LONGEST_SLEEP, 1.5 * pause)


def open_post() -> MpiPost:
    """Of all processes that the launcher started."""
    return MpiPost(MPI.COMM_WORLD)
