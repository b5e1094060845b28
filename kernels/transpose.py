r"""Transposition of a bfloat16 matrix.

    y[c, r] = x[r, c]

Shapes   x: (R, C) row-major, y: (C, R); R and C multiples of 8. y is not x.
Dtypes   bfloat16 (any 16-bit type: bits are moved).
Errors   Exact.
Cost     Read once, written once, both in 16-byte accesses: a 64 x 64 tile goes through shared
         memory, pairs of rows packed into words, with an XOR swizzle of 16-byte chunks (no bank
         conflicts either way).
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ldg128_cs, lds128, prmt, smem_addr, stg128, sts32

THREADS, TILE = 256, 64
TILE_BYTES = 2 * TILE  # of a column of the tile: a row in shared memory
TILE_WORDS = TILE * TILE // 2
PIECE = 8
ZERO_BITS = np.uint32(0)
LOW_HALVES, HIGH_HALVES = np.uint32(0x5410), np.uint32(0x7632)
SIGNATURE = (types.uint64, types.uint64, types.int32, types.int32)


def make_transpose():
    """Thread (pair, chunk) owns rows 2 pair, 2 pair + 1 and columns 8 chunk ... 8 chunk + 7 of a
    tile."""

    def transpose(y, x, R, C):
        tile = smem_addr(cuda.shared.array(TILE_WORDS, dtype=types.uint32))
        t = cuda.threadIdx.x
        chunk, pair = t & 7, t >> 3
        row0, column0 = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
        row, column = row0 + 2 * pair, column0 + chunk * PIECE
        a = cuda.local.array(4, dtype=types.uint32)
        b = cuda.local.array(4, dtype=types.uint32)
        if row < R and column < C:  # R is even, so both rows exist
            source = x + (np.int64(row) * C + column) * 2
            a[0], a[1], a[2], a[3] = ldg128_cs(source)
            b[0], b[1], b[2], b[3] = ldg128_cs(source + np.int64(C) * 2)
        else:
            for j in range(4):
                a[j], b[j] = ZERO_BITS, ZERO_BITS
        # word `pair` of column c lies in 16-byte chunk pair / 4, swizzled by c / 8, which is
        # `chunk`
        word = tile + chunk * PIECE * TILE_BYTES + (((pair >> 2) ^ chunk) << 4) + ((pair & 3) << 2)
        for j in range(4):
            sts32(word + 2 * j * TILE_BYTES, prmt(a[j], b[j], LOW_HALVES))
            sts32(word + (2 * j + 1) * TILE_BYTES, prmt(a[j], b[j], HIGH_HALVES))
        cuda.syncthreads()  # the whole tile is there
        for i in range(2):
            c = i * 32 + pair
            piece = lds128(tile + c * TILE_BYTES + ((chunk ^ (c >> 3)) << 4))
            if column0 + c < C and row0 + chunk * PIECE < R:
                stg128(y + (np.int64(column0 + c) * R + row0 + chunk * PIECE) * 2, piece)

    return transpose


def transpose_launch(y: int, x: int, *, R: int, C: int, stream: Any) -> None:
    """Write y (C, R) from x (R, C), device addresses."""
    k = kernel(make_transpose, SIGNATURE, threads=THREADS)
    k(stream, (cdiv(C, TILE), cdiv(R, TILE)), y, x, R, C)


def transpose(x: Any) -> Any:
    """The transpose of a bfloat16 GPU array (R, C), both multiples of 8. ValueError on other
    shapes.

    >>> y = transpose.transpose(x)
    """
    a = describe(x, dtype=DType.BF16, shape=(None, None), name="x")
    R, C = a.shape
    if R % PIECE or C % PIECE:
        raise ValueError(f"x has shape {a.shape}; both must be multiples of {PIECE}")
    y = empty_like(a, shape=(C, R))
    transpose_launch(
        describe(y, dtype=DType.BF16).address, a.address, R=R, C=C, stream=current_stream(a)
    )
    return y


# ---- cost --------------------------------------------------------------------------------------
def transpose_bytes(R: int, C: int) -> int:
    """Read and write every element."""
    return 4 * R * C


# ---- reference ---------------------------------------------------------------------------------
def transpose_ref(x: np.ndarray) -> np.ndarray:
    """NumPy."""
    return np.ascontiguousarray(x.T)


COMPILE_CASES = [CompileCase(make_transpose, {}, SIGNATURE, THREADS)]
