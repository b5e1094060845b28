r"""Transposition of a bfloat16 matrix.

    y[c, r] = x[r, c]

Shapes   x: (R, C) row-major, y: (C, R); R and C multiples of 8. y is not x.
Dtypes   bfloat16 (any 16-bit type: bits are moved).
Errors   Exact.
Cost     Read once, written once, both in 16-byte accesses: a tile goes through shared memory, pairs
         of rows packed into words, with an XOR swizzle of 16-byte chunks (no bank conflicts either
         way).
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ldg128_cs, lds128, prmt, smem_addr, stg128_cs, sts32

THREADS = 256
ROWS, COLUMNS = 128, 128
"""Of a tile, multiples of 64: 2 * COLUMNS bytes are read in a row, 2 * ROWS written."""
PART = 64  # the threads take a tile in parts of 64 x 64, all loads before the first use
PIECE = 8
ZERO_BITS = np.uint32(0)
LOW_HALVES, HIGH_HALVES = np.uint32(0x5410), np.uint32(0x7632)
SIGNATURE = (types.uint64, types.uint64, types.int32, types.int32)


def make_transpose():
    """Thread (pair, chunk) owns rows 2 pair, 2 pair + 1 and columns 8 chunk ... 8 chunk + 7 of each
    part of a tile."""
    PARTS_DOWN, PARTS = ROWS // PART, ROWS * COLUMNS // (PART * PART)
    COLUMN_BYTES = 2 * ROWS  # of a column of the tile: a row in shared memory
    CHUNKS = ROWS // PIECE  # 16-byte chunks of a column
    OUT_STEP = THREADS // CHUNKS  # columns that the block writes at a time
    TURNS = COLUMNS // OUT_STEP
    TILE_WORDS = ROWS * COLUMNS // 2

    def transpose(y, x, R, C):
        tile = smem_addr(cuda.shared.array(TILE_WORDS, dtype=types.uint32))
        t = cuda.threadIdx.x
        chunk, pair = t & 7, t >> 3
        row0, column0 = cuda.blockIdx.y * ROWS, cuda.blockIdx.x * COLUMNS
        a = cuda.local.array((PARTS, 4), dtype=types.uint32)
        b = cuda.local.array((PARTS, 4), dtype=types.uint32)
        for i in range(PARTS):
            row = row0 + i % PARTS_DOWN * PART + 2 * pair
            column = column0 + i // PARTS_DOWN * PART + chunk * PIECE
            if row < R and column < C:  # R is even, so both rows exist
                source = x + (np.int64(row) * C + column) * 2
                a[i, 0], a[i, 1], a[i, 2], a[i, 3] = ldg128_cs(source)
                b[i, 0], b[i, 1], b[i, 2], b[i, 3] = ldg128_cs(source + np.int64(C) * 2)
            else:
                for j in range(4):
                    a[i, j], b[i, j] = ZERO_BITS, ZERO_BITS
        # word k of column c lies in 16-byte chunk k / 4, swizzled by the low bits of c / 8, which
        # are `chunk`
        for i in range(PARTS):
            k = i % PARTS_DOWN * (PART // 2) + pair
            word = tile + (i // PARTS_DOWN * PART + chunk * PIECE) * COLUMN_BYTES
            word += (((k >> 2) ^ chunk) << 4) + ((k & 3) << 2)
            for j in range(4):
                sts32(word + 2 * j * COLUMN_BYTES, prmt(a[i, j], b[i, j], LOW_HALVES))
                sts32(word + (2 * j + 1) * COLUMN_BYTES, prmt(a[i, j], b[i, j], HIGH_HALVES))
        cuda.syncthreads()  # the whole tile is there
        own = t % CHUNKS  # 16 bytes of a column
        for i in range(TURNS):
            c = i * OUT_STEP + t // CHUNKS
            piece = lds128(tile + c * COLUMN_BYTES + ((own ^ ((c >> 3) & 7)) << 4))
            if column0 + c < C and row0 + own * PIECE < R:
                stg128_cs(y + (np.int64(column0 + c) * R + row0 + own * PIECE) * 2, piece)

    return transpose


def transpose_launch(y: int, x: int, *, R: int, C: int, stream: Any) -> None:
    """Write y (C, R) from x (R, C), device addresses."""
    k = kernel(make_transpose, SIGNATURE, threads=THREADS)
    k(stream, (cdiv(C, COLUMNS), cdiv(R, ROWS)), y, x, R, C)


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
