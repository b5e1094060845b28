"""The plan's host memory, pinned in chunks and mapped for the GPU.

A chunk holds whole buffers, so a copy never crosses from one to the next. The driver's own
allocation takes (and clears) pages on one core, about 1 GiB/s on an H200's host: so all cores take
the pages first, and the driver registers them.
"""

import contextlib
import ctypes
import mmap
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llmq_nb.core.arena import ALIGNMENT
from llmq_nb.core.device import DeviceError, check, driver
from llmq_nb.core.errors import UserError
from llmq_nb.core.host import pinnable_bytes
from llmq_nb.core.pinned import MAPPED, PORTABLE, Pinned
from llmq_nb.core.sizes import format_bytes

TELL = 16 << 30
"""Bytes between two progress lines: some seconds of pinning."""
HUGE_PAGE = 2 << 20
PIECE = 64 << 20
"""Bytes whose pages one thread takes at a time."""
MEND = (
    "give the container more memory, under WSL2 raise memory in .wslconfig, or offload less"
    " (ulimit -l rarely matters)"
)


class Registered:
    """nbytes of zeros, page-locked and mapped at one address for host and device, until `close`.

    Raises DeviceError where the driver refuses, or maps it elsewhere; OSError without memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # what is left over for the alignment keeps two chunks from being neighbours
        self._map = mmap.mmap(-1, nbytes + HUGE_PAGE)
        with contextlib.suppress(OSError, AttributeError):  # small pages do too
            self._map.madvise(mmap.MADV_HUGEPAGE)
        start = np.frombuffer(self._map, np.uint8).ctypes.data
        self.address = -(-start // HUGE_PAGE) * HUGE_PAGE
        take_pages(self.address, nbytes)
        try:
            flags = PORTABLE | MAPPED
            result = driver().cuMemHostRegister(self.address, nbytes, flags)
            check(result, f"pinning {format_bytes(nbytes)}")
        except DeviceError:
            self._map.close()
            raise
        try:
            _check_address(self.address)
        except DeviceError:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back; nothing is in flight."""
        if self.address:
            check(driver().cuMemHostUnregister(self.address), "cuMemHostUnregister")
            self._map.close()
            self.address = 0


def take_pages(address: int, nbytes: int) -> None:
    """Write zeros on all cores, which makes the system hand out the pages."""
    pieces = range(0, nbytes, PIECE)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        # ctypes lets go of the interpreter's lock
        list(pool.map(lambda p: ctypes.memset(address + p, 0, min(PIECE, nbytes - p)), pieces))


def _check_address(address: int) -> None:
    seen = int(check(driver().cuMemHostGetDevicePointer(address, 0), "mapping pinned memory"))
    if seen != address:
        code = "CUDA_ERROR_NOT_SUPPORTED"
        raise DeviceError(code, "pinned memory has another address on the device")


class HostMemory:
    """chunks: (start, end) offsets, as `Plan.host_chunks` gives them. Zeros. UserError.

    limit: most bytes to pin. announce: takes a line of progress. write_combined: past the host's
    caches; the driver must allocate that itself, on one core.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[int, int]],
        *,
        limit: int | None = None,
        write_combined: bool = False,
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._starts = [start for start, _ in chunks]
        self._memory: list[Pinned | Registered] = []
        self._write_combined = write_combined
        total = sum(end - start for start, end in chunks)
        check_pinnable(total, limit, pinnable_bytes())
        begin, done, told = time.perf_counter(), 0, 0
        for start, end in chunks:
            if done == 0 or done - told >= TELL:
                announce(f"pinning host memory: {format_bytes(done)} of {format_bytes(total)}")
                told = done
            self._memory.append(self._pin(end - start, done, total))
            done += end - start
        self.seconds = time.perf_counter() - begin
        """Time that pinning took."""

    @property
    def nbytes(self) -> int:
        """What is pinned."""
        return sum(memory.nbytes for memory in self._memory)

    def address(self, offset: int) -> int:
        """Of an offset in the plan's host memory, for host and device alike."""
        index = bisect_right(self._starts, offset) - 1
        return self._memory[index].address + offset - self._starts[index]

    def close(self) -> None:
        """Give the memory back; nothing is in flight."""
        for memory in self._memory:
            memory.close()
        self._memory.clear()

    def _pin(self, nbytes: int, done: int, total: int) -> Pinned | Registered:
        if not self._write_combined:
            with contextlib.suppress(DeviceError, OSError):  # then the driver's own allocation
                return Registered(nbytes)
        try:
            # the gap keeps two chunks from being neighbours, which copies would join
            memory = Pinned(nbytes + ALIGNMENT, mapped=True, write_combined=self._write_combined)
            self._memory.append(memory)
            _check_address(memory.address)
        except DeviceError as error:
            self.close()
            what = (
                f"host pinned memory: asked for {format_bytes(total)}, got {format_bytes(done)}"
                f" ({error.code})"
            )
            raise UserError(what, where="memory.offload", mend=MEND) from error
        take_pages(memory.address, nbytes)
        return self._memory.pop()


def check_pinnable(total: int, limit: int | None, available: int | None) -> None:
    """Raise UserError where the plan's host memory is more than the limit or the machine allows."""
    if limit is not None and total > limit:
        raise UserError(
            f"out of host pinned memory: {format_bytes(total - limit)} short"
            f" (needs {format_bytes(total)}, memory.host_limit {format_bytes(limit)})",
            where="the plan",
            mend="raise memory.host_limit or offload less",
        )
    if available is not None and total > available:
        raise UserError(
            f"out of host pinned memory: {format_bytes(total - available)} short"
            f" (needs {format_bytes(total)}, available {format_bytes(available)})",
            where="the plan",
            mend=MEND,
        )
