"""A `Link` of one GPU: copies by its copy engines on a stream of its own, from any rank's memory.

    direct    queue of the reader       DtoD DtoD ...
    staged    stream at the source      out 0 | out 1 | out 2 ...      to pinned memory, in chunks
              queue of the reader               in 0 | in 1 | in 2     out 2 waits until 0 is in

Direct copies read the other GPU's memory (or another rank's of the same GPU). Where that is not
possible each pair of ranks has two chunk buffers in pinned host memory, used by turns.

Everything is forked from the ranks' compute streams and joined back by events, so one capture holds
the copies of all GPUs. An event is recorded on streams of the GPU that it was made on only.
While steps are only prepared nothing is copied, recorded or waited for.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmq_nb.comm.link import Pull
from llmq_nb.comm.topology import check_peers
from llmq_nb.core.device import (
    Device,
    check,
    create_event,
    create_stream,
    driver,
    record_event,
    wait_event,
)
from llmq_nb.core.pinned import Pinned
from llmq_nb.kernels.launch import is_preparing

LEAST_CHUNK = 1 << 20
"""Smaller ones cost more in events than they gain."""
CHUNKS = 4
"""What is sent at once is cut into so many chunks at least: the ways out and in overlap."""
ALIGNMENT = 256
"""Bytes: where a piece begins in a chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A part of a pull that passes through a chunk, from byte `place` of it on."""

    place: int
    target: int
    source: int
    nbytes: int


def cut(pulls: Sequence[Pull], limit: int) -> list[list[Piece]]:
    """Pulls as chunks of at most `limit` bytes, in order."""
    out: list[list[Piece]] = []
    place = limit
    for pull in pulls:
        done = 0
        while done < pull.nbytes:
            if place >= limit:
                out.append([])
                place = 0
            nbytes = min(pull.nbytes - done, limit - place)
            out[-1].append(Piece(place, pull.target + done, pull.source + done, nbytes))
            done += nbytes
            place += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return out


class Lane:
    """The way from one rank's memory to another's through pinned host memory."""

    def __init__(self, source: Device, reader: Device, nbytes: int) -> None:
        self._source, self._reader = source, reader
        self.chunk = nbytes // 2 // ALIGNMENT * ALIGNMENT
        self._memory = Pinned(2 * self.chunk, mapped=True)
        self._buffers = (self._memory.address, self._memory.address + self.chunk)
        with current(source):
            self._out = int(create_stream())
            self._full = (create_event(), create_event())
        with current(reader):
            self._empty = (create_event(), create_event())
        self.reset()

    def reset(self) -> None:
        """Both chunk buffers are free."""
        self._turn, self._used = 0, [False, False]

    def begin(self, marks: Sequence[Any]) -> None:
        """What is sent from now on starts after the marks."""
        for mark in marks:
            wait_event(self._out, mark)

    def send(self, pieces: Sequence[Piece], queue: int) -> None:
        """One chunk, to the reader's queue; the reader is current before and after."""
        turn, buffer = self._turn, self._buffers[self._turn]
        d = driver()
        self._source.make_current()
        if self._used[turn]:
            wait_event(self._out, self._empty[turn])
        for p in pieces:
            result = d.cuMemcpyDtoHAsync(buffer + p.place, p.source, p.nbytes, self._out)
            check(result, "copying to the host")
        record_event(self._full[turn], self._out)
        self._reader.make_current()
        wait_event(queue, self._full[turn])
        for p in pieces:
            result = d.cuMemcpyHtoDAsync(p.target, buffer + p.place, p.nbytes, queue)
            check(result, "copying to the device")
        record_event(self._empty[turn], queue)
        self._turn, self._used[turn] = 1 - turn, True

    def close(self) -> None:
        """Free the buffers; nothing may be in flight."""
        self._memory.close()


class CudaLink:
    """One rank's end. lanes: by the source rank, where it cannot be read directly."""

    def __init__(
        self, device: Device, compute: int, *, rank: int, ranks: int, lanes: Mapping[int, Lane]
    ) -> None:
        self._device, self._compute = device, compute
        self._rank, self._ranks, self._lanes = rank, ranks, lanes
        with current(device):
            self._queue, self._point = int(create_stream()), create_event()
        self._used = False

    @property
    def queue(self) -> int:
        """The stream of the copies."""
        return self._queue

    def mark(self) -> Any:
        with current(self._device):
            return create_event()

    def record(self, mark: Any) -> None:
        if not is_preparing():
            record_event(mark, self._compute)

    def set(self, mark: Any, *, after: Sequence[Any] = ()) -> None:
        if is_preparing():
            return
        if not self._used:  # a capture does not hold the queue yet
            self._fork()
        for other in after:
            wait_event(self._queue, other)
        record_event(mark, self._queue)

    def pull(self, pulls: Sequence[Pull], *, done: Any = None, after: Sequence[Any] = ()) -> None:
        """This rank's device is current afterwards. Targets of one call do not overlap."""
        if is_preparing():
            return
        self._device.make_current()
        self._fork()
        for mark in after:
            wait_event(self._queue, mark)
        # each rank begins with another source, or all would read the same one at a time
        some = [pull for pull in pulls if pull.nbytes]
        ordered = sorted(some, key=lambda p: (p.rank - self._rank) % self._ranks)
        staged: dict[int, list[Pull]] = {}
        for pull in ordered:
            if pull.rank in self._lanes and not pull.host:
                staged.setdefault(pull.rank, []).append(pull)
            else:
                self._copy(pull)
        self._pull_staged(staged, (self._point, *after))
        if done is not None:
            record_event(done, self._queue)

    def wait(self, mark: Any) -> None:
        if not is_preparing():
            wait_event(self._compute, mark)

    def join(self) -> None:
        if self._used:
            record_event(self._point, self._queue)
            wait_event(self._compute, self._point)
        self.reset()

    def reset(self) -> None:
        self._used = False
        for lane in self._lanes.values():
            lane.reset()

    def close(self) -> None:
        """Free the pinned memory; nothing may be in flight."""
        for lane in self._lanes.values():
            lane.close()

    def _fork(self) -> None:
        """The queue goes on after the compute stream's work so far."""
        record_event(self._point, self._compute)
        wait_event(self._queue, self._point)
        self._used = True

    def _copy(self, pull: Pull) -> None:
        d = driver()
        call = d.cuMemcpyHtoDAsync if pull.host else d.cuMemcpyDtoDAsync
        check(call(pull.target, pull.source, pull.nbytes, self._queue), "copying between ranks")

    def _pull_staged(self, staged: Mapping[int, Sequence[Pull]], marks: Sequence[Any]) -> None:
        """A chunk of each source by turns, so that all of them send at once."""
        ways: list[list[tuple[Lane, list[Piece]]]] = []
        for rank, pulls in staged.items():
            lane, total = self._lanes[rank], sum(pull.nbytes for pull in pulls)
            limit = min(lane.chunk, max(LEAST_CHUNK, _aligned(-(-total // CHUNKS))))
            lane.begin(marks)
            ways.append([(lane, pieces) for pieces in cut(pulls, limit)])
        for chunks in itertools.zip_longest(*ways):
            for lane, pieces in filter(None, chunks):
                lane.send(pieces, self._queue)


def make_links(
    devices: Sequence[Device],
    streams: Sequence[int],
    *,
    staging_bytes: int,
    direct: Callable[[int, int], bool] | None = None,
    announce: Callable[[str], None] = print,
) -> list[CudaLink]:
    """A link for each rank, beside its compute stream. Ranks may share a device.

    direct(i, j): whether rank i may read rank j's memory itself; None: as `check_peers` finds
    (a run with several links a rank checks once and passes the matrix). staging_bytes:
    pinned for every ordered pair of ranks that may not, at least two chunks of 256 bytes.
    """
    ranks = len(devices)
    if direct is None:
        direct = check_peers(devices, announce)
    out = []
    for i, (device, stream) in enumerate(zip(devices, streams, strict=True)):
        lanes = {
            j: Lane(source, device, staging_bytes)
            for j, source in enumerate(devices)
            if i != j and not direct(i, j)
        }
        out.append(CudaLink(device, int(stream), rank=i, ranks=ranks, lanes=lanes))
    return out


@contextlib.contextmanager
def current(device: Device) -> Iterator[None]:
    """A device's context, then again what was current before."""
    before = check(driver().cuCtxGetCurrent(), "cuCtxGetCurrent")
    device.make_current()
    try:
        yield
    finally:
        check(driver().cuCtxSetCurrent(before), "cuCtxSetCurrent")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
