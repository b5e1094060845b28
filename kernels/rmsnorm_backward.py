r"""RMSNorm backward, with the residual stream's gradient added in the same pass.

    m[n]      = mean_c(weight[c] * dy[n, c] * x[n, c]) * rstd[n]
    dx[n, c]  = rstd[n] * (weight[c] * dy[n, c] - x[n, c] * rstd[n] * m[n]) + dresidual[n, c]
    dweight[c] (+)= sum_n dy[n, c] * x[n, c] * rstd[n]
    absmax    = max |dx|                                        (optional; of the rounded dx)

x is what the forward pass normalised (residual_out in the fused form). dweight is added to when
`accumulate`, in the same rounding.

Shapes   dx, dy, dresidual, x: (N, C) row-major; weight, dweight: (C,); rstd: (N,); scratch:
         (BLOCKS, C).
Dtypes   bfloat16 or float32 (`dtype`); dweight bfloat16 or float32 (`grad_dtype`); rstd, scratch
         float32.
Errors   m: 8 * PIECES fused adds, 5 + WARPS levels. dx: six operations, one rounding, relative to
         rstd * (|weight dy| + |x| rstd mean|...|) + |dresidual|. dweight: each of the BLOCKS
         partial sums (column_sum.py) takes N / BLOCKS adds, then 16 + 32 more: (N / BLOCKS + 50) *
         2^-24 of sum |terms|, one rounding. Block b owns rows (or pairs) b, b + BLOCKS, ...; BLOCKS
         is a constant, so the order of every sum is fixed: bitwise reproducible on any card.
Cost     Reads dy, x, dresidual once, writes dx once; 8 * BLOCKS * C bytes of partial sums beside
         it.
Source   Derivative of Zhang & Sennrich 2019, eq. 4. Written from the equation.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import Array, current_stream, describe, empty_like
from llmq_nb.kernels.column_sum import column_sum_launch
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import SIMULATED, ffma, ldg32f, stg32f
from llmq_nb.kernels.reduce import make_block_sum
from llmq_nb.kernels.vector import PIECE, vector

BLOCKS = 32 if SIMULATED else 512
"""Row groups of stage one; a constant, so that no sum depends on the card. (A simulated block costs
milliseconds, so there are fewer of them.)"""
ZERO, NO_BITS = np.float32(0.0), np.uint32(0)
SIGNATURE = (types.uint64,) * 8 + (types.int32,)


def threads_of(C: int) -> int:
    """Threads of stage one: two pieces of a row each from C = 4096 on, whole warps."""
    return min(32 * cdiv(C, 32 * PIECE), 256 if C <= 4096 else 512)


def rows_of(C: int) -> int:
    """Rows in flight in a block: their loads overlap and share one barrier. Two rows of C = 5120
    spill."""
    return 2 if C <= 2048 else 1


def make_rmsnorm_backward(C: int, residual: bool, absmax: bool, dtype: str):
    """Stage one for one hidden size; arguments are device addresses (0 where unused)."""
    v = vector(dtype)
    WORDS, BYTES = v.words, v.bytes
    load_cs, load_nc, store, low, high = v.load_cs, v.load_nc, v.store, v.low, v.high
    set_pair, track, absmax_update = v.set_pair, v.track, v.absmax_update
    THREADS, ROWS = threads_of(C), rows_of(C)
    block_sum = make_block_sum(THREADS, ROWS)
    PIECES = cdiv(C, PIECE * THREADS)
    TILES = PIECES * ROWS  # piece i of row r is number r * PIECES + i
    STEP = THREADS * PIECE
    RESIDUAL, ABSMAX = residual, absmax
    INV_C = np.float32(1.0 / C)

    def rmsnorm_backward(dx, scratch, slot, dy, dresidual, x, weight, rstd, rows):
        column = cuda.threadIdx.x * PIECE
        w = cuda.local.array((PIECES, WORDS), dtype=types.uint32)
        g = cuda.local.array((TILES, WORDS), dtype=types.uint32)  # dy, then dx
        h = cuda.local.array((TILES, WORDS), dtype=types.uint32)  # x
        d = cuda.local.array((TILES, WORDS), dtype=types.uint32)  # dresidual
        r = cuda.local.array(ROWS, dtype=types.float32)
        total = cuda.local.array(ROWS, dtype=types.float32)
        dw = cuda.local.array((PIECES, 8), dtype=types.float32)
        for i in range(PIECES):
            load_nc(w, i, weight + (column + i * STEP) * BYTES, column + i * STEP < C)
            for k in range(8):
                dw[i, k] = ZERO
        running = NO_BITS
        first = cuda.blockIdx.x * ROWS
        while first < rows:  # the same for the whole block, so every thread reaches the barriers
            for q in range(ROWS):
                start = (np.int64(first + q) * C + column) * BYTES
                there = first + q < rows
                r[q] = ldg32f(rstd + np.int64(first + q) * 4) if there else ZERO
                for i in range(PIECES):
                    inside = there and column + i * STEP < C
                    load_cs(g, q * PIECES + i, dy + start + i * STEP * BYTES, inside)
                    load_cs(h, q * PIECES + i, x + start + i * STEP * BYTES, inside)
                    if RESIDUAL:
                        load_cs(d, q * PIECES + i, dresidual + start + i * STEP * BYTES, inside)
            for q in range(ROWS):
                total[q] = ZERO
                for i in range(PIECES):
                    t = q * PIECES + i
                    for j in range(4):
                        a = low(g, t, j) * low(h, t, j)
                        b = high(g, t, j) * high(h, t, j)
                        total[q] = ffma(low(w, i, j), a, total[q])
                        total[q] = ffma(high(w, i, j), b, total[q])
                        dw[i, 2 * j] = ffma(a, r[q], dw[i, 2 * j])
                        dw[i, 2 * j + 1] = ffma(b, r[q], dw[i, 2 * j + 1])
            cuda.syncthreads()  # the previous rows' sums have been read: block_sum may write again
            block_sum(total)
            for q in range(ROWS):
                start = (np.int64(first + q) * C + column) * BYTES
                m = -(total[q] * INV_C * r[q] * r[q])
                for i in range(PIECES):
                    t = q * PIECES + i
                    for j in range(4):
                        a = ffma(low(h, t, j), m, low(w, i, j) * low(g, t, j)) * r[q]
                        b = ffma(high(h, t, j), m, high(w, i, j) * high(g, t, j)) * r[q]
                        if RESIDUAL:
                            a += low(d, t, j)
                            b += high(d, t, j)
                        set_pair(g, t, j, a, b)
                        if ABSMAX:
                            running = track(running, g, t, j)
                    inside = first + q < rows and column + i * STEP < C
                    store(dx + start + i * STEP * BYTES, g, t, inside)
            first += BLOCKS * ROWS
        if ABSMAX:
            absmax_update(slot, running)
        for i in range(PIECES):
            if column + i * STEP < C:
                out = scratch + (np.int64(cuda.blockIdx.x) * C + column + i * STEP) * 4
                for k in range(8):
                    stg32f(out + k * 4, dw[i, k])

    return rmsnorm_backward


def rmsnorm_backward_launch(
    dx: int, dweight: int, dy: int, dresidual: int, x: int, weight: int, rstd: int, *, scratch: int,
    rows: int, C: int, accumulate: bool, absmax: int = 0, dtype: str = "bf16",
    grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write dx and dweight, in stream order. dresidual 0: none. dx may be dy or dresidual.

    scratch: rmsnorm_backward_scratch(C) bytes. accumulate: add to dweight instead of writing it."""
    constants = {"C": C, "residual": bool(dresidual), "absmax": bool(absmax), "dtype": dtype}
    k = kernel(make_rmsnorm_backward, SIGNATURE, threads=threads_of(C), **constants)
    k(stream, (BLOCKS,), dx, scratch, absmax, dy, dresidual, x, weight, rstd, rows)
    column_sum_launch(
        dweight, scratch, partials=BLOCKS, columns=C, stride=C, accumulate=accumulate,
        dtype=grad_dtype, stream=stream,
    )  # fmt: skip


def rmsnorm_backward_scratch(C: int) -> int:
    """Bytes of scratch memory."""
    return 4 * BLOCKS * C


def backward(dy: Any, x: Any, weight: Any, rstd: Any, *, dresidual: Any = None) -> tuple[Any, Any]:
    """Gradient of rmsnorm.forward for bfloat16 GPU arrays: returns (dx, dweight).

    dy, x: (..., C), weight: (C,), rstd: (...) float32 from `forward`. dresidual, shaped like x, is
    added to dx (the gradient that reaches x around the norm). ValueError on other shapes or dtypes.

    >>> dx, dweight = rmsnorm.backward(dy, x, weight, rstd)
    """
    a = describe(x, dtype=DType.BF16, name="x")
    C = a.shape[-1] if a.shape else 0
    if C == 0 or C % PIECE:
        raise ValueError(f"x has shape {a.shape}; its last extent must be a multiple of {PIECE}")
    inputs = [
        describe(dy, dtype=DType.BF16, shape=a.shape, name="dy"),
        None if dresidual is None
        else describe(dresidual, dtype=DType.BF16, shape=a.shape, name="dresidual"),
        a,
        describe(weight, dtype=DType.BF16, shape=(C,), name="weight"),
        describe(rstd, dtype=DType.FP32, shape=a.shape[:-1], name="rstd"),
    ]  # fmt: skip
    dx, dweight = empty_like(a), empty_like(a, shape=(C,))
    scratch = empty_like(a, shape=(BLOCKS, C), dtype=DType.FP32)
    outputs: list[Array | None] = [describe(o, dtype=DType.BF16) for o in (dx, dweight)]
    rmsnorm_backward_launch(
        *(0 if o is None else o.address for o in outputs + inputs),
        scratch=describe(scratch, dtype=DType.FP32).address,
        rows=a.size // C, C=C, accumulate=False, stream=current_stream(a),
    )  # fmt: skip
    return dx, dweight


# ---- cost --------------------------------------------------------------------------------------
def rmsnorm_backward_bytes(N: int, C: int, *, residual: bool = True, itemsize: int = 2) -> int:
    """Least DRAM traffic: read dy, x (and dresidual), rstd, weight; write dx and dweight."""
    return (N * C * (4 if residual else 3) + 2 * C) * itemsize + 4 * N


# ---- reference ---------------------------------------------------------------------------------
def rmsnorm_backward_ref(
    dy: np.ndarray,
    dresidual: np.ndarray | None,
    x: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """float64 NumPy oracle: (dx, dweight), the equations above and nothing else."""
    dy64, x64, w64, r = (a.astype(np.float64) for a in (dy, x, weight, rstd[..., None]))
    m = (w64 * dy64 * x64).mean(axis=-1, keepdims=True) * r
    dx = r * (w64 * dy64 - x64 * r * m)
    if dresidual is not None:
        dx = dx + dresidual.astype(np.float64)
    return dx, (dy64 * x64 * r).reshape(-1, x.shape[-1]).sum(axis=0)


COMPILE_CASES = [
    CompileCase(
        make_rmsnorm_backward,
        {"C": C, "residual": True, "absmax": True, "dtype": dtype},
        SIGNATURE,
        threads_of(C),
    )
    for C, dtype in [(896, "bf16"), (1536, "bf16"), (4096, "bf16"), (5120, "bf16"), (896, "fp32")]
]
