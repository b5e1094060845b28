"""The plan's host memory, pinned in chunks and mapped for the GPU.

A chunk holds whole buffers, so a copy never crosses from one to the next.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from llmq_nb.core.arena import ALIGNMENT
from llmq_nb.core.device import DeviceError, check, driver
from llmq_nb.core.errors import UserError
from llmq_nb.core.host import pinnable_bytes
from llmq_nb.core.pinned import Pinned
from llmq_nb.core.sizes import format_bytes

TELL = 8 << 30
"""Bytes between two progress lines: some seconds of pinning."""
MEND = (
    "give the container more memory, under WSL2 raise memory in .wslconfig, or offload less"
    " (ulimit -l rarely matters)"
)


class HostMemory:
    """chunks: (start, end) offsets, as `Plan.host_chunks` gives them. Zeros. UserError.

    limit: most bytes to pin. announce: takes a line of progress.
    """

    def __init__(
        self,
        chunks: Sequence[tuple[int, int]],
        *,
        limit: int | None = None,
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._starts = [start for start, _ in chunks]
        self._memory: list[Pinned] = []
        total = sum(end - start for start, end in chunks)
        check_pinnable(total, limit, pinnable_bytes())
        done = told = 0
        for start, end in chunks:
            if done == 0 or done - told >= TELL:
                announce(f"pinning host memory: {format_bytes(done)} of {format_bytes(total)}")
                told = done
            self._memory.append(self._pin(end - start, done, total))
            done += end - start

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

    def _pin(self, nbytes: int, done: int, total: int) -> Pinned:
        try:
            # the gap keeps two chunks from being neighbours, which copies would join
            memory = Pinned(nbytes + ALIGNMENT, mapped=True)
        except DeviceError as error:
            self.close()
            what = (
                f"host pinned memory: asked for {format_bytes(total)}, got {format_bytes(done)}"
                f" ({error.code})"
            )
            raise UserError(what, where="memory.offload", mend=MEND) from error
        seen = int(check(driver().cuMemHostGetDevicePointer(memory.address, 0), "mapping memory"))
        if seen != memory.address:
            code = "CUDA_ERROR_NOT_SUPPORTED"
            raise DeviceError(code, "pinned memory has another address on the device")
        check(driver().cuMemsetD8(memory.address, 0, nbytes), "clearing pinned memory")
        return memory


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
