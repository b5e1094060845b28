"""NCCL as the wire between GPUs of machines: sends and receives on the queues of the copies.

Only parcels go through it, never a sum: NCCL adds in an order that hangs on the network, ours is
the ranks' (gradients.py). All parcels of a phase are one group, of all GPUs of this machine, so the
order in which two machines come to them does not matter, and a recorded graph holds them like
copies. Everything of nccl4py is in this file. A communicator's ranks are the run's ranks.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from llmq_nb.comm.cluster import Cluster
from llmq_nb.comm.wire import Parcel
from llmq_nb.core.device import (
    Device,
    DeviceError,
    allocate,
    check,
    create_stream,
    driver,
    free,
    pci_bus_id,
    synchronize_stream,
)
from llmq_nb.core.errors import UserError
from llmq_nb.kernels.launch import is_preparing

BYTE = 1
"""ncclUint8"""
WORD = 4
"""Bytes that each pair sends at the start."""


class NcclWire:
    """`wire.Wire` over a communicator of all ranks, of which each GPU of this machine has an end.

    first: the number of this machine's first rank. Raises DeviceError where NCCL fails.
    """

    def __init__(self, nccl: Any, ends: Sequence[Any], first: int) -> None:
        self._nccl, self._ends, self._first = nccl, ends, first

    def exchange(self, parcels: Sequence[Parcel], queues: Sequence[Any]) -> None:
        if is_preparing():
            return
        with called(self._nccl, "sending between machines"):
            self._nccl.group_start()
            try:
                for p in parcels:
                    place = p.here - self._first
                    call = self._nccl.send if p.sends else self._nccl.recv
                    call(p.address, p.nbytes, BYTE, p.there, self._ends[place], queues[place])
            finally:
                self._nccl.group_end()

    def close(self) -> None:
        for end in self._ends:
            self._nccl.comm_destroy(end)
        self._ends = ()


def open_wire(cluster: Cluster, devices: Sequence[Device]) -> NcclWire:
    """Between the GPUs of all machines, as many on each; every pair was heard from.

    Raises UserError where NCCL is missing or two ranks have one GPU.
    """
    nccl = bindings()
    _check_apart(cluster, devices)
    token = cluster.first(lambda: bytes(nccl.get_unique_id()))
    local, ranks = cluster.local(len(devices)), cluster.size * len(devices)
    ends = join(nccl, token, ranks, local, devices)
    wire = NcclWire(nccl, ends, local.start)
    greet(wire, ranks, local, devices)
    devices[0].make_current()
    return wire


def bindings() -> Any:
    """nccl4py's functions, over a library that is there. UserError."""
    try:
        import nccl.bindings.nccl as nccl  # pyright: ignore[reportMissingImports]

        nccl.get_version()
    except (ImportError, RuntimeError) as error:  # a package, or libnccl.so that it looks for
        what = f"GPUs of several machines need NCCL ({str(error).strip()})"
        mend = "pip install -e '.[cluster]' nvidia-nccl-cu13 (or -cu12)"
        raise UserError(what, mend=mend) from None
    return nccl


def join(nccl: Any, token: bytes, ranks: int, local: range, devices: Sequence[Device]) -> list[Any]:
    """This machine's ends of a communicator of all ranks: each waits for all, so each has a
    thread."""
    ends: list[Any] = [None] * len(devices)
    errors: list[BaseException] = []

    def one(place: int) -> None:
        try:
            devices[place].make_current()
            with called(nccl, f"joining NCCL as rank {local[place]} of {ranks}"):
                ends[place] = nccl.comm_init_rank_scalable(
                    ranks, local[place], 1, bytearray(token), 0
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return ends


def greet(wire: NcclWire, ranks: int, local: range, devices: Sequence[Device]) -> None:
    """Every rank sends its number to those of other machines and looks at what came: connections
    are made now, and not while a graph is recorded. Raises DeviceError where something else came.
    """
    parcels, queues, rooms = [], [], []
    for rank, device in zip(local, devices, strict=True):
        device.make_current()
        queues.append(int(create_stream()))
        rooms.append(allocate((ranks + 1) * WORD))
        sent = np.full(ranks + 1, 0xFFFFFFFF, np.uint32)
        sent[ranks] = rank
        check(driver().cuMemcpyHtoD(rooms[-1], sent.ctypes.data, sent.nbytes), "writing a number")
    for source in range(ranks):
        for target in range(ranks):
            if (source in local) != (target in local):
                sends = source in local
                room = rooms[(source if sends else target) - local.start]
                address = room + WORD * (ranks if sends else source)
                parcels.append(Parcel(source, target, address, WORD, sends))
    wire.exchange(parcels, queues)
    expected = np.array([r for r in range(ranks) if r not in local], np.uint32)
    for rank, device, queue, room in zip(local, devices, queues, rooms, strict=True):
        device.make_current()
        synchronize_stream(queue)
        found = np.empty(ranks, np.uint32)
        check(driver().cuMemcpyDtoH(found.ctypes.data, room, found.nbytes), "reading numbers")
        check(driver().cuStreamDestroy(queue), "cuStreamDestroy")
        free(room)
        others = np.delete(found, np.arange(local.start, local.stop))
        if not np.array_equal(others, expected):
            raise DeviceError("NCCL", f"NCCL brings rank {rank} {others}, sent was {expected}")


@contextmanager
def called(nccl: Any, what: str) -> Iterator[None]:
    """NCCL's errors as ours."""
    try:
        yield
    except nccl.NCCLError as error:
        raise DeviceError("NCCL", f"{what}: {str(error).strip()}") from error


def _check_apart(cluster: Cluster, devices: Sequence[Device]) -> None:
    """Raise UserError where processes on one machine took the same GPU."""
    taken: dict[tuple[str, str], int] = {}
    own = [(cluster.name, pci_bus_id(device)) for device in devices]
    for process, gpus in enumerate(cluster.gather(own)):
        for gpu in gpus:
            other = taken.setdefault(gpu, process)
            if other != process:
                what = f"processes {other} and {process} both took GPU {gpu[1]} of {gpu[0]}"
                mend = "start one process a machine, or give each its own: CUDA_VISIBLE_DEVICES"
                raise UserError(what, where="several machines", mend=mend)
