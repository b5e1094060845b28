"""Optimizer states on the disk, brought to memory in slices, updated there and written back.

    read     0 1 2 3 ...         slice k + 1 is read while k is updated
    update     0 1 2 3 ...
    write        0 1 2 3 ...     and k - 1 is written

Three staging buffers by turns, a thread that reads and one that writes. A slice is one stretch of
the file, whichever states it holds. None of this can be recorded in a graph: the update is launched
slice by slice, and the host waits for the disk.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from llmq_nb.offload.disk import WHAT, ScratchFile

Item = TypeVar("Item")


class Fence(Protocol):
    """Tells the host when the device is done with a staging buffer."""

    @property
    def launches(self) -> bool:
        """Whether updates are made; False while steps are only prepared."""
        ...

    def record(self, turn: int) -> None:
        """The update of what is in buffer `turn` was launched."""
        ...

    def wait(self, turn: int) -> None:
        """Wait, on any thread, until it is done."""
        ...


class Done:
    """On the host an update is done when its call returns."""

    launches = True

    def record(self, turn: int) -> None:
        pass

    def wait(self, turn: int) -> None:
        pass


@dataclasses.dataclass(frozen=True, slots=True)
class DiskSlice(Generic[Item]):
    """item: what the update is given. nbytes 0: it needs nothing of the disk."""

    item: Item
    turn: int = 0
    address: int = 0
    nbytes: int = 0
    offset: int = 0


class DiskStates(Generic[Item]):
    """Iterates over the items of all slices, each in memory when it is given out.

    file: None where steps are only prepared. count: of staging buffers.
    """

    idle = True
    """Nothing is on its way between two steps."""

    def __init__(
        self, slices: Sequence[DiskSlice[Item]], file: ScratchFile | None, fence: Fence, count: int
    ) -> None:
        self._slices, self._file, self._fence, self._count = slices, file, fence, count

    @property
    def items(self) -> list[Item]:
        """Of all slices, nothing of the disk in them."""
        return [part.item for part in self._slices]

    def __iter__(self) -> Iterator[Item]:
        if self._file is None or not self._fence.launches:
            yield from (part.item for part in self._slices)
            return
        staged = [part for part in self._slices if part.nbytes]
        reader, writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        complete = False
        try:
            reads = [reader.submit(self._read, part, None) for part in staged[: self._count]]
            writes: list[Future[None]] = []
            for part in self._slices:
                if not part.nbytes:
                    yield part.item
                    continue
                index = len(writes)
                reads[index].result()
                yield part.item
                self._fence.record(part.turn)
                writes.append(writer.submit(self._write, part))
                if index + self._count < len(staged):
                    after = staged[index + self._count]
                    reads.append(reader.submit(self._read, after, writes[index]))
            for write in writes:
                write.result()
            complete = True
        finally:
            if not complete:  # some slices are of this step, some of the last one
                self._file.fail(f"an update of {WHAT} ended half-way")
            reader.shutdown(cancel_futures=True)
            writer.shutdown(cancel_futures=True)

    def reset(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def _read(self, part: DiskSlice[Item], emptied: Future[None] | None) -> None:
        if emptied is not None:
            emptied.result()
        assert self._file is not None
        self._file.read(part.address, part.nbytes, part.offset)

    def _write(self, part: DiskSlice[Item]) -> None:
        assert self._file is not None
        self._fence.wait(part.turn)
        self._file.write(part.address, part.nbytes, part.offset)
