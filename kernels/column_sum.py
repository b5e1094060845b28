r"""Column sums of partial results, in a fixed order: stage two of every weight gradient that is a
sum over rows.

    out[c] (+)= sum_k partial[k, c],   k < BLOCKS

Shapes   partial: (BLOCKS, C) row-major; out: (C,).
Dtypes   partial: float32; out: bfloat16 or float32 (`grad_dtype`), added to when `accumulate`.
Errors   A warp adds BLOCKS / 32 terms, then one lane the 32 warps' sums: (BLOCKS / 32 + 33) * 2^-24
         of sum |terms|, one rounding to the format of out. Bitwise reproducible.
Cost     8 * BLOCKS * C bytes, written by stage one and read here; they fit the L2 of most cards.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    SIMULATED,
    bf16x2,
    bf_lo,
    ldg16,
    ldg32f,
    lds32f,
    smem_addr,
    stg16,
    stg32f,
    sts32f,
)

BLOCKS = 32 if SIMULATED else 512
"""Row groups of stage one; a constant, so that no sum depends on the card. (A simulated block costs
milliseconds, so there are fewer of them.)"""
COLUMNS, WARPS = 32, 32  # a block owns 32 columns, a warp every 32nd partial sum of them
CELLS = COLUMNS * WARPS
PARTIALS = BLOCKS // WARPS
ZERO = np.float32(0.0)
SIGNATURE = (types.uint64, types.uint64, types.int32)


def make_column_sum(accumulate: bool, grad_dtype: str):
    """Kernel for one format of out; arguments are device addresses and C."""
    ACCUMULATE, BF16 = accumulate, grad_dtype == "bf16"

    def column_sum(out, partial, C):
        shared = smem_addr(cuda.shared.array(CELLS, dtype=types.float32))
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        column = cuda.blockIdx.x * COLUMNS + lane
        total = ZERO
        if column < C:
            for k in range(PARTIALS):
                total = total + ldg32f(partial + (np.int64(warp + k * WARPS) * C + column) * 4)
        sts32f(shared + (warp * COLUMNS + lane) * 4, total)
        cuda.syncthreads()  # every warp's sum is there
        if warp == 0 and column < C:
            total = ZERO
            for k in range(WARPS):
                total = total + lds32f(shared + (k * COLUMNS + lane) * 4)
            if BF16:
                if ACCUMULATE:
                    total = total + bf_lo(ldg16(out + column * 2))
                stg16(out + column * 2, bf16x2(total, ZERO))
            else:
                if ACCUMULATE:
                    total = total + ldg32f(out + column * 4)
                stg32f(out + column * 4, total)

    return column_sum


def column_sum_launch(
    out: int, partial: int, *, C: int, accumulate: bool, grad_dtype: str = "bf16", stream: Any
) -> None:
    """Write (or add to) out (C) the sums of partial (BLOCKS, C), device addresses."""
    constants = {"accumulate": accumulate, "grad_dtype": grad_dtype}
    k = kernel(make_column_sum, SIGNATURE, threads=CELLS, **constants)
    k(stream, (cdiv(C, COLUMNS),), out, partial, C)


def column_sum_scratch(C: int) -> int:
    """Bytes of the partial sums."""
    return BLOCKS * C * 4


COMPILE_CASES = [
    CompileCase(make_column_sum, {"accumulate": a, "grad_dtype": d}, SIGNATURE, CELLS)
    for a, d in ((False, "bf16"), (True, "bf16"), (False, "fp32"), (True, "fp32"))
]
