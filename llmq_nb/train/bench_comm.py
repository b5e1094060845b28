"""Bandwidth between ranks: a copy, and the collectives of a training step, by size.

    copy            rank 0 takes the tensor from rank 1
    all-gather      every rank has a shard and takes the others'
    reduce-scatter  every rank takes its run of all ranks' tensors and adds them up
    all-reduce      every rank takes all ranks' tensors and adds them up: for small vectors

Each is recorded into one graph over all ranks, some in a row, and replayed: as in a training step.
GB/s are of what a rank receives from others, in one direction, additions included.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from llmq_nb.comm.collectives import all_gather, rows
from llmq_nb.comm.copy_engine import CudaLink, make_links
from llmq_nb.comm.exchange import Exchange, Seat
from llmq_nb.comm.link import Pull
from llmq_nb.comm.topology import check_peers
from llmq_nb.comm.wire import split
from llmq_nb.core.device import (
    Device,
    allocate,
    create_event,
    create_stream,
    device_count,
    elapsed_seconds,
    free,
    open_device,
    record_event,
)
from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.core.graph import capture
from llmq_nb.core.tensor import Tensor
from llmq_nb.kernels.accumulate import accumulate_launch
from llmq_nb.kernels.elementwise import fill_normal_launch
from llmq_nb.plan.shards import STAGING_BYTES

SIZES = tuple(1 << k for k in range(16, 29, 2))
"""Bytes of a BF16 tensor: 64 KiB to 256 MiB."""
COLLECTIVES = ("copy", "all-gather", "reduce-scatter", "all-reduce")
RUNS = 5
"""Replays that are timed, after one that is not; the median counts."""
ITEM = 2
"""Bytes of a value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One figure. transport: "peer" (the GPU reads the other's memory) or "staged"."""

    collective: str
    transport: str
    nbytes: int
    seconds: float
    gb_per_s: float


def chosen_devices(text: str | None) -> list[int]:
    """The GPU of each rank from "0,1": every GPU, or twice the only one, if it is None. UserError
    if it is no list of two numbers or more."""
    if text is None:
        count = device_count()
        return list(range(count)) if count > 1 else [0, 0]
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) < 2 or min(found) < 0:
        mend = "write two numbers or more, such as 0,1; ranks may share a GPU: 0,0"
        raise UserError(f"no list of GPUs: {text!r}", where="--devices", mend=mend)
    return found


def measure_comm(
    ordinals: Sequence[int], *, sizes: Sequence[int] = SIZES, announce: Callable[[str], None]
) -> list[Row]:
    """All collectives, by peer copies where there are any, and staged. UserError, DeviceError."""
    devices = [open_device(ordinal) for ordinal in ordinals]
    peers = check_peers(devices, announce)
    ranks = len(devices)
    memory = _Memory(devices, max(sizes))
    out: list[Row] = []
    try:
        ways: dict[str, Any] = {"peer": peers, "staged": lambda i, j: False}
        if not any(peers(i, j) for i in range(ranks) for j in range(ranks) if i != j):
            del ways["peer"]
        for transport, direct in ways.items():
            links = make_links(devices, memory.streams, staging_bytes=STAGING_BYTES, direct=direct)
            bench = _Bench(memory, links)
            for nbytes in sizes:
                out += [bench.row(name, transport, nbytes) for name in COLLECTIVES]
            memory.synchronize()
            for link in links:
                link.close()
    finally:
        memory.close()
    return out


class _Memory:
    """Of each rank: a tensor, room for one of every rank, a result, a counter; a stream."""

    def __init__(self, devices: Sequence[Device], nbytes: int) -> None:
        self.devices, self.nbytes, self.ranks = devices, nbytes, len(devices)
        self.bases: list[tuple[Device, int]] = []
        self.streams: list[int] = []
        try:
            for device in devices:
                device.make_current()
                base = allocate((self.ranks + 2) * nbytes + 256)
                self.bases.append((device, base))
                stream = int(create_stream())
                self.streams.append(stream)
                n = ((self.ranks + 2) * nbytes + 256) // ITEM
                fill_normal_launch(
                    base, n=n, seed=1, tensor=len(self.bases), std=1.0, stream=stream
                )
            self.synchronize()
        except BaseException:
            self.close()
            raise

    def tensor(self, rank: int, n: int) -> Tensor:
        """A rank's own."""
        return Tensor(f"own {rank}", (n,), DType.BF16, self.bases[rank][1])

    def received(self, rank: int, n: int) -> Tensor:
        """Room for n values of every rank."""
        base = self.bases[rank][1] + self.nbytes
        return Tensor(f"received {rank}", (self.ranks, n), DType.BF16, base)

    def result(self, rank: int) -> int:
        """Address of the sum."""
        return self.bases[rank][1] + (self.ranks + 1) * self.nbytes

    def counter(self, rank: int) -> int:
        """Address of four bytes that count for nothing."""
        return self.result(rank) + self.nbytes

    def synchronize(self) -> None:
        for device in self.devices:
            device.synchronize()
        self.devices[0].make_current()

    def close(self) -> None:
        for device, base in self.bases:
            device.synchronize()
            free(base)


class _Bench:
    """The ranks over one set of links."""

    def __init__(self, memory: _Memory, links: Sequence[CudaLink]) -> None:
        self.memory, self.links, self.ranks = memory, links, memory.ranks
        seats = [Seat(x, d.make_current) for x, d in zip(links, memory.devices, strict=True)]
        self.exchange = Exchange(seats)

    def row(self, name: str, transport: str, nbytes: int) -> Row:
        """One figure."""
        pulls, n = self.pulls(name, nbytes // ITEM)
        others = [sum(p.nbytes for p in own if p.rank != r) for r, own in enumerate(pulls)]
        seconds = self.seconds(pulls, n, 16 if nbytes < 1 << 24 else 2)
        return Row(name, transport, nbytes, seconds, max(others) / seconds / 1e9)

    def pulls(self, name: str, n: int) -> tuple[list[list[Pull]], int]:
        """What each rank takes, and how many values it then adds up."""
        m, ranks = self.memory, range(self.ranks)
        whole, each = [m.tensor(r, n) for r in ranks], n // self.ranks // 8 * 8
        if name == "copy":
            first = Pull(m.received(0, n).address, whole[1].address, n * ITEM, 1)
            return [[first], *([] for _ in ranks[1:])], 0
        if name == "all-gather":
            shards = [tensor.rows(0, each) for tensor in whole]
            targets = [m.received(r, n).view(self.ranks * n) for r in ranks]
            return [all_gather(target, shards) for target in targets], 0
        if name == "all-reduce":
            return [rows(m.received(r, n), whole, first=0, count=n) for r in ranks], n
        return [rows(m.received(r, each), whole, first=r * each, count=each) for r in ranks], each

    def record(self, pulls: list[list[Pull]], n: int, repeats: int) -> None:
        """Some in a row, from rank 0's stream and back to it."""
        self.exchange.begin()
        for _ in range(repeats):
            self.exchange.share(split(pulls, range(self.ranks)))
            for r, device in enumerate(self.memory.devices if n else ()):
                device.make_current()
                self.add(r, n)
        for link, device in zip(self.links, self.memory.devices, strict=True):
            device.make_current()
            link.join()
        self.exchange.end()

    def add(self, rank: int, n: int) -> None:
        """The rank's sum of what it received."""
        m = self.memory
        accumulate_launch(
            m.result(rank), m.received(rank, n).address, ranks=self.ranks, stride=n * ITEM, n=n,
            start=True, counter=m.counter(rank), seed=1, tensor=1, stream=m.streams[rank],
        )  # fmt: skip

    def seconds(self, pulls: list[list[Pull]], n: int, repeats: int) -> float:
        """Of one collective."""
        self.record(pulls, n, 1)  # loads the kernel
        self.memory.synchronize()
        stream = self.memory.streams[0]
        graph = capture(stream, lambda: self.record(pulls, n, repeats), name="bench comm")
        times = []
        for _ in range(1 + RUNS):
            start, end = (create_event(timing=True) for _ in range(2))
            record_event(start, stream)
            graph.launch(stream)
            record_event(end, stream)
            times.append(elapsed_seconds(start, end))
        graph.close()
        return statistics.median(times[1:]) / repeats
