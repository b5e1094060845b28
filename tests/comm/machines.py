"""Several machines in one process: a thread for each, whose words and parcels pass through queues.

A stand-in for `comm/mpi.py`, over the same interfaces: what it carries is copied when it is sent,
and what was not sent never arrives. A machine that fails ends the others (`TIMEOUT` at the latest).
"""

import ctypes
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmq_nb.comm.cluster import Cluster, Failed
from llmq_nb.comm.wire import Parcel, Wire

T = TypeVar("T")
TIMEOUT = 60.0
"""Seconds: nothing here takes as long."""


class Hall:
    """Where all machines meet. lanes: what one sent another and was not received yet."""

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, 0
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.slots: list[Any] = [None] * size
        self.lanes: dict[tuple[int, int], queue.Queue[bytes]] = defaultdict(queue.Queue)

    def meet(self, index: int, value: Any) -> list[Any]:
        """The values of all."""
        self.slots[index] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadPost:
    """`cluster.Post` for one thread."""

    def __init__(self, hall: Hall, index: int) -> None:
        self.hall, self.index, self.size = hall, index, hall.size

    def gather(self, status: int, data: bytes, seconds: float | None = None) -> Sequence[bytes]:
        found = self.hall.meet(self.index, (status, data))
        failed = {process: code for process, (code, _) in enumerate(found) if code}
        if failed:
            raise Failed(failed)
        return [data for _, data in found]

    def broadcast(self, array: NDArray[np.uint8], root: int) -> None:
        array[:] = self.hall.meet(self.index, array.copy())[root]

    def wire(self, ranks: int) -> Wire:
        return ThreadWire(self.hall, ranks)

    def abort(self, code: int) -> None:
        self.hall.barrier.abort()


class ThreadWire:
    """`wire.Wire` between the threads."""

    def __init__(self, hall: Hall, ranks: int) -> None:
        self.hall, self.ranks = hall, ranks

    def exchange(self, parcels: Sequence[Parcel], queues: Sequence[Any]) -> None:
        machine = [(p.here // self.ranks, p.there // self.ranks) for p in parcels]
        for p, (here, there) in zip(parcels, machine, strict=True):
            if p.sends:
                self.hall.lanes[here, there].put(ctypes.string_at(p.address, p.nbytes))
                self.hall.sent += p.nbytes
        for p, (here, there) in zip(parcels, machine, strict=True):
            if not p.sends:
                data = self.hall.lanes[there, here].get(timeout=TIMEOUT)
                assert len(data) == p.nbytes, f"{len(data)} bytes came for {p}"
                ctypes.memmove(p.address, data, p.nbytes)

    def close(self) -> None:
        pass


def on_machines(size: int, work: Callable[[Cluster], T]) -> tuple[list[T], Hall]:
    """What `work` gives on each of so many machines, all at once; raises the first one's error."""
    hall, results, errors = Hall(size), [None] * size, [None] * size  # type: ignore[var-annotated]

    def machine(index: int) -> None:
        try:
            results[index] = work(Cluster(ThreadPost(hall, index), f"machine {index}"))  # type: ignore
        except BaseException as error:
            errors[index] = error  # type: ignore
            hall.barrier.abort()

    threads = [threading.Thread(target=machine, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: list[Any] = [error for error in errors if error is not None]
    # a broken barrier is what the others see of it
    for error in sorted(found, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    assert not any(not lane.empty() for lane in hall.lanes.values()), "a parcel nobody took"
    return results, hall  # type: ignore[return-value]
