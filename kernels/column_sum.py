r"""Second stage of a two-stage column sum: out[c] (+)= sum_p partial[p, c], p in a fixed order.

The first stage (bias.py, qk_norm.py, rmsnorm_backward.py) leaves PARTIALS rows of partial sums;
PARTIALS is a constant, never a function of the card, so the bits are the same everywhere.

Shapes   partial: (PARTIALS, stride) float32, of which `columns` are summed; out: (columns,), or its
         first `split` with the others in a second array.
Dtypes   out bfloat16 or float32 (`dtype`).
Errors   32 groups of PARTIALS / 32 sequential additions, then 32 in order: PARTIALS / 32 + 32
         float32 additions, one more with accumulate, one rounding.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
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

COLUMNS, WARPS = 32, 32  # a block owns 32 columns, a warp every 32nd partial sum
CELLS = COLUMNS * WARPS
ZERO = np.float32(0.0)
SIGNATURE = (*(types.uint64,) * 3, *(types.int32,) * 3)


def make_column_sum(partials: int, accumulate: bool, dtype: str):
    """Kernel for a number of partial sums, a multiple of 32; arguments: see SIGNATURE."""
    TURNS = partials // WARPS
    ACCUMULATE, BF16, SIZE = accumulate, dtype == "bf16", 2 if dtype == "bf16" else 4

    def column_sum(out, second, partial, columns, split, stride):
        shared = smem_addr(cuda.shared.array(CELLS, dtype=types.float32))
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        column = cuda.blockIdx.x * COLUMNS + lane
        target = out + column * SIZE
        if column >= split:
            target = second + (column - split) * SIZE
        old = ZERO
        if ACCUMULATE and warp == 0 and column < columns:  # now: it comes from afar
            old = bf_lo(ldg16(target)) if BF16 else ldg32f(target)
        total = ZERO
        if column < columns:
            for k in range(TURNS):
                row = np.int64(warp + k * WARPS)
                total = total + ldg32f(partial + (row * stride + column) * 4)
        sts32f(shared + (warp * COLUMNS + lane) * 4, total)
        cuda.syncthreads()  # every warp's sum is there
        if warp == 0 and column < columns:
            total = ZERO
            for k in range(WARPS):
                total = total + lds32f(shared + (k * COLUMNS + lane) * 4)
            if ACCUMULATE:
                total = old + total
            if BF16:
                stg16(target, bf16x2(total, ZERO))
            else:
                stg32f(target, total)

    return column_sum


def column_sum_launch(
    out: int, partial: int, *, partials: int, columns: int, stride: int, accumulate: bool,
    dtype: str = "bf16", second: int = 0, split: int | None = None, stream: Any,
) -> None:  # fmt: skip
    """Write (or add to) out, device addresses, in stream order. stride: floats from one row of
    partial sums to the next. Columns from `split` on go to `second`."""
    k = kernel(
        make_column_sum, SIGNATURE, threads=CELLS, partials=partials, accumulate=accumulate,
        dtype=dtype,
    )  # fmt: skip
    split = columns if split is None else split
    k(stream, (cdiv(columns, COLUMNS),), out, second, partial, columns, split, stride)


COMPILE_CASES = [
    CompileCase(make_column_sum, {"partials": p, "accumulate": a, "dtype": d}, SIGNATURE, CELLS)
    for p, a, d in [(128, True, "bf16"), (128, False, "bf16"), (512, True, "fp32")]
]
