"""Page-locked host memory as NumPy arrays: what asynchronous copies read and write."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.device import check, driver


class Pinned:
    """nbytes of page-locked memory, kept until `close`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = int(check(driver().cuMemHostAlloc(nbytes, 0), f"pinning {nbytes} bytes"))
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
