r"""RMSNorm forward, alone or fused with the residual addition before it. Backward:
rmsnorm_backward.py.

    residual_out[n, c] = residual[n, c] + x[n, c]              (fused form; norms residual_out)
    rstd[n] = 1 / sqrt(mean_c(x[n, c]^2) + eps)                [1 / unit of x]
    y[n, c] = x[n, c] * rstd[n] * weight[c]                    [unit of weight]
    absmax  = max_{n, c} |y[n, c]|                             (optional; of the rounded y)

Shapes   x, residual, residual_out, y: (N, C) row-major; weight: (C,); rstd: (N,). C a multiple of
         8.
Dtypes   x, y, weight, residual: bfloat16 or float32 (`dtype`); rstd, absmax: float32.
         absmax holds 0, or an earlier maximum of the same tensor, before.
Errors   A lane adds C / LANES squares by fused multiply-adds, then at most 5 + 4 levels, float32:
         |rel err of rstd| <= (C / LANES + 13) / 2 * 2^-24 + 2^-22 (rsqrt.approx). y: that, two
         products, one rounding to the storage format. residual_out rounds once: exact.
         Fixed order, integer maximum: bitwise reproducible.
Cost     Reads x (and residual) and weight once, writes y, rstd (and residual_out) once; a row stays
         in registers: of one warp up to C = 2048, of a block of four beyond.
Source   Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4. Written from the equation.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ffma, rsqrt, stg32f
from llmq_nb.kernels.reduce import make_block_sum, warp_sum
from llmq_nb.kernels.rmsnorm_backward import backward, rmsnorm_backward_launch  # noqa: F401
from llmq_nb.kernels.vector import PIECE, vector

THREADS = 128
WARP_ROW_LIMIT = (
    2048  # beyond, a row takes the whole block: C = 4096, fused, took 255 registers a lane
)
ZERO = np.float32(0.0)  # a bare 0.0 is float64 to Numba
NO_BITS = np.uint32(0)
SIGNATURE = (types.uint64,) * 7 + (types.int32, types.float32)


def lanes_of(C: int) -> int:
    """Threads that share a row."""
    return 32 if C <= WARP_ROW_LIMIT else THREADS


def make_rmsnorm_forward(C: int, residual: bool, absmax: bool, dtype: str):
    """Kernel for one hidden size; arguments are device addresses (0 where unused), see
    SIGNATURE."""
    v = vector(dtype)
    WORDS, BYTES = v.words, v.bytes
    load_cs, load_nc, store, low, high = v.load_cs, v.load_nc, v.store, v.low, v.high
    set_pair, track, absmax_update = v.set_pair, v.track, v.absmax_update
    block_sum = make_block_sum(THREADS)
    LANES = lanes_of(C)
    ROWS_PER_BLOCK = THREADS // LANES
    ONE_WARP = LANES == 32
    PIECES = cdiv(C, PIECE * LANES)  # that a lane holds
    STEP = LANES * PIECE  # columns from one piece of a lane to its next
    RESIDUAL, ABSMAX = residual, absmax
    INV_C = np.float32(1.0 / C)

    def rmsnorm_forward(y, rstd, slot, residual_out, residual_in, x, weight, rows, eps):
        lane = cuda.threadIdx.x % LANES
        row = cuda.blockIdx.x * ROWS_PER_BLOCK + cuda.threadIdx.x // LANES
        if row < rows:  # whole warps leave together, so warp_sum is safe
            column = lane * PIECE
            start = (np.int64(row) * C + column) * BYTES
            a = cuda.local.array((PIECES, WORDS), dtype=types.uint32)
            b = cuda.local.array((PIECES, WORDS), dtype=types.uint32)
            for i in range(PIECES):
                load_cs(a, i, x + start + i * STEP * BYTES, column + i * STEP < C)
                if RESIDUAL:
                    load_cs(b, i, residual_in + start + i * STEP * BYTES, column + i * STEP < C)
            total = cuda.local.array(1, dtype=types.float32)
            total[0] = ZERO
            for i in range(PIECES):
                for j in range(4):
                    if RESIDUAL:
                        set_pair(
                            a, i, j, low(a, i, j) + low(b, i, j), high(a, i, j) + high(b, i, j)
                        )
                    total[0] = ffma(low(a, i, j), low(a, i, j), total[0])
                    total[0] = ffma(high(a, i, j), high(a, i, j), total[0])
                if RESIDUAL:
                    store(residual_out + start + i * STEP * BYTES, a, i, column + i * STEP < C)
            if ONE_WARP:
                total[0] = warp_sum(total[0])
            else:
                block_sum(total)
            r = rsqrt(ffma(total[0], INV_C, eps))

            running = NO_BITS
            for i in range(PIECES):
                inside = column + i * STEP < C
                load_nc(b, i, weight + (column + i * STEP) * BYTES, inside)
                for j in range(4):
                    set_pair(
                        a, i, j, low(a, i, j) * r * low(b, i, j), high(a, i, j) * r * high(b, i, j)
                    )
                    if ABSMAX:
                        running = track(running, a, i, j)
                store(y + start + i * STEP * BYTES, a, i, inside)
            if ABSMAX:
                absmax_update(slot, running)
            if lane == 0:
                stg32f(rstd + np.int64(row) * 4, r)

    return rmsnorm_forward


def rmsnorm_forward_launch(
    y: int, rstd: int, x: int, weight: int, *, rows: int, C: int, eps: float, absmax: int = 0,
    dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write y and rstd (and raise absmax) from x and weight, device addresses, in stream order."""
    constants = {"C": C, "residual": False, "absmax": bool(absmax), "dtype": dtype}
    k = kernel(make_rmsnorm_forward, SIGNATURE, threads=THREADS, **constants)
    grid = (cdiv(rows * lanes_of(C), THREADS),)
    k(stream, grid, y, rstd, absmax, 0, 0, x, weight, rows, eps)


def residual_rmsnorm_forward_launch(
    residual_out: int, y: int, rstd: int, residual: int, x: int, weight: int, *, rows: int, C: int,
    eps: float, absmax: int = 0, dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write residual_out = residual + x, then y and rstd of that (residual_out may be residual or
    x)."""
    constants = {"C": C, "residual": True, "absmax": bool(absmax), "dtype": dtype}
    k = kernel(make_rmsnorm_forward, SIGNATURE, threads=THREADS, **constants)
    grid = (cdiv(rows * lanes_of(C), THREADS),)
    k(stream, grid, y, rstd, absmax, residual_out, residual, x, weight, rows, eps)


def forward(x: Any, weight: Any, *, eps: float, residual: Any = None) -> tuple[Any, ...]:
    """RMSNorm of a bfloat16 GPU array (DLPack or __cuda_array_interface__) on its current stream.

    x: (..., C), weight: (C,), C a multiple of 8. Returns (y, rstd), rstd (...) float32 for
    `backward`; with `residual` (shaped like x) returns (residual + x, y, rstd) of the sum.
    ValueError on other shapes or dtypes.

    >>> y, rstd = rmsnorm.forward(x, weight, eps=1e-6)
    """
    a = describe(x, dtype=DType.BF16, name="x")
    C = a.shape[-1] if a.shape else 0
    if C == 0 or C % PIECE:
        raise ValueError(f"x has shape {a.shape}; its last extent must be a multiple of {PIECE}")
    w = describe(weight, dtype=DType.BF16, shape=(C,), name="weight")
    y, rstd = empty_like(a), empty_like(a, shape=a.shape[:-1], dtype=DType.FP32)
    y_, rstd_ = describe(y, dtype=DType.BF16).address, describe(rstd, dtype=DType.FP32).address
    common: dict[str, Any] = {"rows": a.size // C, "C": C, "eps": eps, "stream": current_stream(a)}
    if residual is None:
        rmsnorm_forward_launch(y_, rstd_, a.address, w.address, **common)
        return y, rstd
    b = describe(residual, dtype=DType.BF16, shape=a.shape, name="residual").address
    total = empty_like(a)
    total_ = describe(total, dtype=DType.BF16).address
    residual_rmsnorm_forward_launch(total_, y_, rstd_, b, a.address, w.address, **common)
    return total, y, rstd


# ---- cost --------------------------------------------------------------------------------------
def rmsnorm_forward_bytes(N: int, C: int, *, residual: bool = False, itemsize: int = 2) -> int:
    """Least DRAM traffic: read x (and residual) and weight, write y (and residual_out) and rstd."""
    return (N * C * (4 if residual else 2) + C) * itemsize + 4 * N


# ---- reference ---------------------------------------------------------------------------------
def rmsnorm_forward_ref(
    x: np.ndarray, weight: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """float64 NumPy oracle: (y, rstd), the two equations and nothing else."""
    x64, weight64 = x.astype(np.float64), weight.astype(np.float64)
    rstd = 1.0 / np.sqrt((x64**2).mean(axis=-1) + eps)
    return x64 * rstd[..., None] * weight64, rstd


COMPILE_CASES = [
    CompileCase(
        make_rmsnorm_forward,
        {"C": C, "residual": residual, "absmax": True, "dtype": dtype},
        SIGNATURE,
        THREADS,
    )
    for C, residual, dtype in [
        (896, True, "bf16"),
        (1536, False, "bf16"),
        (4096, True, "bf16"),
        (5120, True, "bf16"),
        (8192, False, "bf16"),
        (896, True, "fp32"),
    ]
]
