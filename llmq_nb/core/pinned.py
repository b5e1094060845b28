"""Page-locked host memory as NumPy arrays: what asynchronous copies read and write."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.device import check, driver
from llmq_nb.core.sizes import format_bytes

PORTABLE, MAPPED, WRITE_COMBINED = 1, 2, 4
"""CU_MEMHOSTALLOC_PORTABLE: pinned for every context; _DEVICEMAP; _WRITECOMBINED."""


class Pinned:
    """nbytes of page-locked memory, kept until `close`.

    mapped: kernels of every device reach it, by the host's own address (unified addresses).
    write_combined: past the host's caches, where its own reads are slow.
    """

    def __init__(self, nbytes: int, *, mapped: bool = False, write_combined: bool = False) -> None:
        self.nbytes = nbytes
        flags = PORTABLE | MAPPED if mapped else 0
        flags |= WRITE_COMBINED if write_combined else 0
        what = f"pinning {format_bytes(nbytes)}"
        self.address = int(check(driver().cuMemHostAlloc(nbytes, flags), what))
        memory = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array(memory)

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A view from a byte offset on."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return self.bytes[offset : offset + size].view(kind).reshape(shape)

    def close(self) -> None:
        """Give the memory back; no view of it may be used afterwards."""
        if self.address:
            check(driver().cuMemFreeHost(self.address), "cuMemFreeHost")
            self.address = 0
