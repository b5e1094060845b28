r"""Gradient of a bias: the sum of a matrix over its rows.

    dbias[m] (+)= sum_n dy[n, m]

Shapes   dy: (N, M) row-major, M a multiple of 8; dbias: (M,); scratch: (PARTIALS, M).
Dtypes   dy bfloat16 or float32 (`dtype`); dbias bfloat16 or float32 (`grad_dtype`); scratch
         float32.
Errors   Partial sum p owns the rows p, p + PARTIALS, ... in eight interleaved sums of a block:
         N / (8 PARTIALS) + 8 + PARTIALS / 32 + 33 float32 additions, one rounding. PARTIALS is a
         constant: bitwise reproducible on any card.
Cost     Reads dy once; 8 * PARTIALS * M bytes of partial sums beside it.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.column_sum import column_sum_launch
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import SIMULATED, lds32f, smem_addr, stg32f, sts32f
from llmq_nb.kernels.vector import PIECE, vector

THREADS = 256
COLUMNS = 32 * PIECE  # of a block
WARPS = THREADS // 32  # rows of a block at a time, a warp each
UNROLL = 8
PARTIALS = 32 if SIMULATED else 64
"""Row groups of stage one; never a function of the card. (Simulated blocks cost milliseconds.)"""
CELLS = WARPS * COLUMNS
ZERO = np.float32(0.0)
SIGNATURE = (types.uint64, types.uint64, types.int32, types.int32)


def make_bias_backward(partials: int, dtype: str):
    """Stage one. Grid: (groups of 256 columns, partials); arguments: see SIGNATURE."""
    GROUPS = partials
    v = vector(dtype)
    WORDS, BYTES, load_cs, low, high = v.words, v.bytes, v.load_cs, v.low, v.high

    def bias_backward(scratch, dy, rows, M):
        shared = smem_addr(cuda.shared.array(CELLS, dtype=types.float32))
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        column = cuda.blockIdx.x * COLUMNS + lane * PIECE
        tile = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        sums = cuda.local.array(8, dtype=types.float32)
        for k in range(8):
            sums[k] = ZERO
        first = np.int64(cuda.blockIdx.y + warp * GROUPS)
        while first < rows:
            for u in range(UNROLL):
                row = first + u * (WARPS * GROUPS)
                inside = row < rows and column < M
                load_cs(tile, u, dy + (row * M + column) * BYTES, inside)
            for u in range(UNROLL):
                for j in range(4):
                    sums[2 * j] = sums[2 * j] + low(tile, u, j)
                    sums[2 * j + 1] = sums[2 * j + 1] + high(tile, u, j)
            first += UNROLL * WARPS * GROUPS
        for k in range(8):  # column k of every lane together: no bank is met twice
            sts32f(shared + (warp * COLUMNS + k * 32 + lane) * 4, sums[k])
        cuda.syncthreads()  # every warp's sums are there
        own = cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x  # one column a thread
        cell = (cuda.threadIdx.x & 7) * 32 + (cuda.threadIdx.x >> 3)
        if own < M:
            total = ZERO
            for w in range(WARPS):
                total = total + lds32f(shared + (w * COLUMNS + cell) * 4)
            stg32f(scratch + (np.int64(cuda.blockIdx.y) * M + own) * 4, total)

    return bias_backward


def bias_backward_launch(
    dbias: int, dy: int, *, scratch: int, rows: int, M: int, accumulate: bool, dtype: str = "bf16",
    grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write (or add to) dbias, device addresses, in stream order.

    scratch: bias_backward_scratch(M) bytes."""
    k = kernel(make_bias_backward, SIGNATURE, threads=THREADS, partials=PARTIALS, dtype=dtype)
    k(stream, (cdiv(M, COLUMNS), PARTIALS), scratch, dy, rows, M)
    column_sum_launch(
        dbias, scratch, partials=PARTIALS, columns=M, stride=M, accumulate=accumulate,
        dtype=grad_dtype, stream=stream,
    )  # fmt: skip


def bias_backward_scratch(M: int) -> int:
    """Bytes of scratch memory."""
    return PARTIALS * M * 4


def backward(dy: Any) -> Any:
    """Sum of a bfloat16 GPU array (..., M) over all but its last axis: (M,), M a multiple of 8.

    >>> dbias = bias.backward(dy)
    """
    a = describe(dy, dtype=DType.BF16, name="dy")
    M = a.shape[-1] if a.shape else 0
    if M == 0 or M % PIECE:
        raise ValueError(f"dy has shape {a.shape}; its last extent must be a multiple of {PIECE}")
    dbias = empty_like(a, shape=(M,))
    scratch = empty_like(a, shape=(PARTIALS, M), dtype=DType.FP32)
    bias_backward_launch(
        describe(dbias, dtype=DType.BF16).address, a.address,
        scratch=describe(scratch, dtype=DType.FP32).address, rows=a.size // M, M=M,
        accumulate=False, stream=current_stream(a),
    )  # fmt: skip
    return dbias


# ---- cost --------------------------------------------------------------------------------------
def bias_backward_bytes(N: int, M: int, *, itemsize: int = 2) -> int:
    """Read dy once, write dbias."""
    return (N * M + M) * itemsize


# ---- reference ---------------------------------------------------------------------------------
def bias_backward_ref(dy: np.ndarray) -> np.ndarray:
    """float64 NumPy oracle."""
    return dy.reshape(-1, dy.shape[-1]).astype(np.float64).sum(axis=0)


COMPILE_CASES = [
    CompileCase(make_bias_backward, {"partials": PARTIALS, "dtype": d}, SIGNATURE, THREADS)
    for d in ("bf16", "fp32")
]
