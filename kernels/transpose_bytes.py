r"""Transposition of a matrix of bytes: FP8 codes, row-major to what a data gradient reads.

    y[c, r] = x[r, c] for r < R, 0 in the padding

Shapes   x: (R, C) row-major, C a multiple of 16; y: (C, Rp), Rp = R rounded up to 16. y is not x.
Dtypes   any of one byte: bits are moved.
Errors   Exact.
Cost     Read once, written once, in 16-byte accesses: the tile of quantize.py, without arithmetic.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ldg128_cs
from llmq_nb.kernels.quantize import CHUNK, THREADS, TILE, make_write_tile, padded_rows

ZERO_BITS = np.uint32(0)
SIGNATURE = (types.uint64, types.uint64, types.int32, types.int32)


def make_transpose_bytes():
    """Thread (group, chunk) owns 4 rows x 16 columns of a 128 x 128 tile."""
    write_tile = make_write_tile(False, True)

    def transpose_bytes(y, x, R, C):
        row = cuda.blockIdx.y * TILE + (cuda.threadIdx.x >> 3) * 4
        column = cuda.blockIdx.x * TILE + (cuda.threadIdx.x & 7) * CHUNK
        code = cuda.local.array((4, 4), dtype=types.uint32)
        source = x + np.int64(min(column, C - CHUNK))  # beyond an edge something is read again
        for i in range(4):
            line = source + np.int64(min(row + i, R - 1)) * C
            code[i, 0], code[i, 1], code[i, 2], code[i, 3] = ldg128_cs(line)
            if row + i >= R:
                for j in range(4):
                    code[i, j] = ZERO_BITS
        write_tile(y, y, code, R, C)

    return transpose_bytes


# ---- launch ------------------------------------------------------------------------------------
def transpose_bytes_launch(y: int, x: int, *, R: int, C: int, stream: Any) -> None:
    """Write y (C, padded_rows(R)) from x (R, C), device addresses."""
    k = kernel(make_transpose_bytes, SIGNATURE, threads=THREADS)
    k(stream, (cdiv(C, TILE), cdiv(R, TILE)), y, x, R, C)


# ---- users -------------------------------------------------------------------------------------
def transpose(x: Any, *, dtype: str = "e4m3") -> Any:
    """The transpose of a GPU array (R, C) of FP8 codes, C a multiple of 16.

    Returns (C, R rounded up to 16), zeros in the columns from R on. ValueError on other shapes.

    >>> y = transpose_bytes.transpose(quantize.quantize(x, elementwise.absmax(x))[0])
    """
    a = describe(x, dtype=DType(dtype), shape=(None, None), name="x")
    R, C = a.shape
    if R == 0 or C == 0 or C % CHUNK:
        raise ValueError(f"x has shape {a.shape}; must be (R, C) with C a multiple of {CHUNK}")
    y = empty_like(a, shape=(C, padded_rows(R)), dtype=DType(dtype))
    address = describe(y, dtype=DType(dtype)).address
    transpose_bytes_launch(address, a.address, R=R, C=C, stream=current_stream(a))
    return y


# ---- cost --------------------------------------------------------------------------------------
def transpose_bytes_bytes(R: int, C: int) -> int:
    """Read and write every byte."""
    return R * C + C * padded_rows(R)


# ---- reference ---------------------------------------------------------------------------------
def transpose_bytes_ref(x: np.ndarray) -> np.ndarray:
    """NumPy, of uint8 (R, C)."""
    y = np.zeros((x.shape[1], padded_rows(x.shape[0])), np.uint8)
    y[:, : x.shape[0]] = x.T
    return y


COMPILE_CASES = [CompileCase(make_transpose_bytes, {}, SIGNATURE, THREADS)]
