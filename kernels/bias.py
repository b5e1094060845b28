r"""Bias gradient: the column sums of dy.

    dbias[c] (+)= sum_n dy[n, c]

Shapes   dy: (N, C) row-major, C a multiple of 8; dbias: (C,); scratch: (BLOCKS, C).
Dtypes   dy: bfloat16 or float32 (`dtype`); dbias: bfloat16 or float32 (`grad_dtype`), added to when
         `accumulate`; scratch float32.
Errors   Row n belongs to warp n mod (BLOCKS * WARPS) of the grid: at most N / ROW_STEP + 4
         additions there, 8 warps, then column_sum.py: (N / ROW_STEP + 62) * 2^-24 of sum |dy|, one
         rounding.
         BLOCKS is a constant: bitwise reproducible on any card. (Forward bias is cuBLASLt's
         epilogue.)
Cost     Reads dy once; 8 * BLOCKS * C bytes of partial sums beside it.
Source   Derivative of y = x W^T + b.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.column_sum import BLOCKS, column_sum_launch, column_sum_scratch
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import lds32f, smem_addr, stg32f, sts32f
from llmq_nb.kernels.vector import PIECE, vector

WARPS, THREADS = 8, 256
COLUMNS = 32 * PIECE  # of a block: one piece a lane
CELLS = WARPS * COLUMNS
ROW_STEP = BLOCKS * WARPS
UNROLL = 4  # rows whose loads are in flight together
ZERO = np.float32(0.0)
SIGNATURE = (*(types.uint64,) * 2, types.int32, types.int32)


def make_bias_backward(dtype: str):
    """Stage one: partial sums of every BLOCKS-th group of eight rows."""
    v = vector(dtype)
    WORDS, BYTES, load_cs, low, high = v.words, v.bytes, v.load_cs, v.low, v.high

    def bias_backward(scratch, dy, rows, C):
        shared = smem_addr(cuda.shared.array(CELLS, dtype=types.float32))
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        column = cuda.blockIdx.x * COLUMNS + lane * PIECE
        tile = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        total = cuda.local.array(8, dtype=types.float32)
        for k in range(8):
            total[k] = ZERO
        row = cuda.blockIdx.y * WARPS + warp
        while row < rows:
            for u in range(UNROLL):
                at = row + u * ROW_STEP
                inside = at < rows and column < C
                load_cs(tile, u, dy + (np.int64(at) * C + column) * BYTES, inside)
            for u in range(UNROLL):
                for j in range(4):
                    total[2 * j] = total[2 * j] + low(tile, u, j)
                    total[2 * j + 1] = total[2 * j + 1] + high(tile, u, j)
            row += UNROLL * ROW_STEP
        for k in range(8):  # value k of all lanes lies together: no bank conflicts
            sts32f(shared + (warp * COLUMNS + k * 32 + lane) * 4, total[k])
        cuda.syncthreads()  # every warp's sums are there
        mine = (cuda.threadIdx.x & 7) * 32 + (cuda.threadIdx.x >> 3)  # of column threadIdx.x
        column = cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x
        if column < C:
            value = ZERO
            for w in range(WARPS):
                value = value + lds32f(shared + (w * COLUMNS + mine) * 4)
            stg32f(scratch + (np.int64(cuda.blockIdx.y) * C + column) * 4, value)

    return bias_backward


def bias_backward_launch(
    dbias: int, dy: int, *, scratch: int, rows: int, C: int, accumulate: bool, dtype: str = "bf16",
    grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write (or add to) dbias (C) the column sums of dy (rows, C). scratch:
    bias_backward_scratch(C) bytes."""
    k = kernel(make_bias_backward, SIGNATURE, threads=THREADS, dtype=dtype)
    k(stream, (cdiv(C, COLUMNS), BLOCKS), scratch, dy, rows, C)
    column_sum_launch(
        dbias, scratch, C=C, accumulate=accumulate, grad_dtype=grad_dtype, stream=stream
    )


def bias_backward_scratch(C: int) -> int:
    """Bytes of scratch memory."""
    return column_sum_scratch(C)


def backward(dy: Any) -> Any:
    """Gradient of a bias that was added to every row: the column sums of a bfloat16 GPU array (...,
    C).

    C a multiple of 8. ValueError on other shapes or dtypes.

    >>> dbias = bias.backward(dy)
    """
    a = describe(dy, dtype=DType.BF16, name="dy")
    C = a.shape[-1] if a.shape else 0
    if C == 0 or C % PIECE:
        raise ValueError(f"dy has shape {a.shape}; its last extent must be a multiple of {PIECE}")
    dbias = empty_like(a, shape=(C,))
    scratch = empty_like(a, shape=(BLOCKS, C), dtype=DType.FP32)
    bias_backward_launch(
        describe(dbias, dtype=DType.BF16).address, a.address, rows=a.size // C, C=C,
        scratch=describe(scratch, dtype=DType.FP32).address, accumulate=False,
        stream=current_stream(a),
    )  # fmt: skip
    return dbias


# ---- cost --------------------------------------------------------------------------------------
def bias_backward_bytes(N: int, C: int, *, itemsize: int = 2) -> int:
    """Read dy once."""
    return N * C * itemsize


# ---- reference ---------------------------------------------------------------------------------
def bias_backward_ref(dy: np.ndarray) -> np.ndarray:
    """float64 NumPy oracle."""
    return dy.astype(np.float64).reshape(-1, dy.shape[-1]).sum(axis=0)


COMPILE_CASES = [
    CompileCase(make_bias_backward, {"dtype": d}, SIGNATURE, THREADS) for d in ("bf16", "fp32")
]
