r"""RMSNorm backward, with the residual stream's gradient added in the same pass.

    m[n]      = mean_c(weight[c] * dy[n, c] * x[n, c]) * rstd[n]
    dx[n, c]  = rstd[n] * (weight[c] * dy[n, c] - x[n, c] * rstd[n] * m[n]) + dresidual[n, c]
    dweight[c] (+)= sum_n dy[n, c] * x[n, c] * rstd[n]
    absmax    = max |dx|                                        (optional; of the rounded dx)

x is what the forward pass normalised (residual_out in the fused form). dweight is added to when
`accumulate`, in the same rounding.

Shapes   dx, dy, dresidual, x: (N, C) row-major; weight, dweight: (C,); rstd: (N,); scratch:
         (blocks, C), see `tile_of`.
Dtypes   bfloat16 or float32 (`dtype`); dweight bfloat16 or float32 (`grad_dtype`); rstd, scratch
         float32.
Errors   m: 8 * PIECES fused adds, 5 + WARPS levels. dx: six operations, one rounding, relative to
         rstd * (|weight dy| + |x| rstd mean|...|) + |dresidual|. dweight: each of the blocks'
         partial sums (column_sum.py) takes N / blocks adds, then 16 + 32 more: (N / blocks + 50) *
         2^-24 of sum |terms|, one rounding. Block b owns rows (or pairs) b, b + blocks, ...; blocks
         depends on C alone, so the order of every sum is fixed: bitwise reproducible on any card.
Cost     Reads dy, x, dresidual once, writes dx once; 8 * blocks * C bytes of partial sums beside
         it. The second launch takes about 4 us, whatever N is.
Source   Derivative of Zhang & Sennrich 2019, eq. 4. Written from the equation.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import Array, current_stream, describe, empty_like
from llmq_nb.kernels.column_sum import column_sum_launch
from llmq_nb.kernels.compile import CompileCase, Options
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    SIMULATED,
    cp_commit,
    ffma,
    ldg32f,
    lds32f,
    smem_addr,
    stg128f,
    sts32f,
)
from llmq_nb.kernels.reduce import warp_sum
from llmq_nb.kernels.ring import ring
from llmq_nb.kernels.vector import PIECE, vector

RING_BYTES = 96 * 1024
"""Shared memory that the rows in flight may take; every card gives a block that much."""
ZERO, NO_BITS = np.float32(0.0), np.uint32(0)
SIGNATURE = (types.uint64,) * 8 + (types.int32,)


@dataclass(frozen=True, slots=True)
class Tile:
    """How stage one is cut, a function of C and the storage format alone."""

    threads: int
    rows: int
    """Rows that a block takes at a time."""
    stages: int
    """How many times that many rows are on their way."""
    blocks: int
    """Row groups; a constant of C, so that no sum depends on the card."""
    resident: int
    """Blocks that a multiprocessor should hold, so that a large card takes all of them at once."""

    def constants(self) -> dict[str, int]:
        return {
            "block": self.threads, "rows": self.rows, "stages": self.stages, "blocks": self.blocks
        }  # fmt: skip

    def smem(self, arrays: int, C: int, itemsize: int) -> int:
        """Bytes of the ring and of two rows of warps' sums."""
        row = arrays * self.threads * cdiv(C, self.threads * PIECE) * PIECE * itemsize
        return self.stages * self.rows * row + 2 * self.rows * self.threads // 32 * 4


def tile_of(C: int, dtype: str = "bf16") -> Tile:
    """One piece of a row a thread up to C = 4096, two up to 8192."""
    pieces = cdiv(C, 512 * PIECE)
    threads = 32 * cdiv(C, 32 * PIECE * pieces)
    rows = 2 if threads <= 128 else 1
    row = 3 * threads * pieces * PIECE * DType(dtype).itemsize
    stages = max(1, min(3 if rows == 1 else 2, RING_BYTES // (rows * row)))
    resident = 4 if C <= 1536 else 3 if C <= 2560 else 2 if C <= 4096 else 1
    # a simulated block costs milliseconds, so there are fewer of them
    return Tile(threads, rows, stages, 32 if SIMULATED else 128 * resident, resident)


def make_rmsnorm_backward(
    C: int, residual: bool, absmax: bool, dtype: str, block: int, rows: int, stages: int,
    blocks: int,
):  # fmt: skip
    """Stage one for one hidden size; arguments are device addresses (0 where unused).

    Rows go through a ring in shared memory where each thread reads what it copied itself, so that
    their way from memory needs neither registers nor barriers."""
    v = vector(dtype)
    WORDS, BYTES, load_nc, store, low, high = v.words, v.bytes, v.load_nc, v.store, v.low, v.high
    set_pair, track, absmax_update = v.set_pair, v.track, v.absmax_update
    THREADS, ROWS, STAGES, WARPS, BLOCKS = block, rows, stages, block // 32, blocks
    PIECES = cdiv(C, PIECE * THREADS)
    TILES = PIECES * ROWS  # piece i of row r is number r * PIECES + i
    STEP = THREADS * PIECE
    RESIDUAL, ABSMAX = residual, absmax
    INV_C = np.float32(1.0 / C)
    ARRAY = TILES * STEP * BYTES  # in the ring
    STAGE = (3 if residual else 2) * ARRAY
    RING, PARTIAL = STAGES * STAGE, ROWS * WARPS * 4
    r_ = ring(dtype, stages)
    copy, take, wait = r_.copy, r_.take, r_.wait

    @cuda.jit(device=True)
    def fetch(own, array, first, column, rows):
        """Start this thread's pieces of ROWS rows of one array on their way."""
        for q in range(ROWS):
            start = array + (np.int64(first + q) * C + column) * BYTES
            for i in range(PIECES):
                inside = first + q < rows and column + i * STEP < C
                copy(own + (q * PIECES + i) * STEP * BYTES, start + i * STEP * BYTES, inside)

    @cuda.jit(device=True)
    def block_sum(total, partial):
        for q in range(ROWS):
            total[q] = warp_sum(total[q])
        if WARPS > 1:
            if (cuda.threadIdx.x & 31) == 0:
                for q in range(ROWS):
                    sts32f(partial + (q * WARPS + (cuda.threadIdx.x >> 5)) * 4, total[q])
            cuda.syncthreads()  # the sums are there; those of the rows before are in the other half
            for q in range(ROWS):
                total[q] = lds32f(partial + q * WARPS * 4)
                for k in range(1, WARPS):
                    total[q] = total[q] + lds32f(partial + (q * WARPS + k) * 4)

    def rmsnorm_backward(dx, scratch, slot, dy, dresidual, x, weight, rstd, rows):
        column = cuda.threadIdx.x * PIECE
        ring = smem_addr(cuda.shared.array(0, dtype=types.uint32))
        own = ring + column * BYTES
        w = cuda.local.array((PIECES, WORDS), dtype=types.uint32)
        g = cuda.local.array((TILES, WORDS), dtype=types.uint32)  # dy, then dx
        h = cuda.local.array((TILES, WORDS), dtype=types.uint32)  # x
        d = cuda.local.array((TILES, WORDS), dtype=types.uint32)  # dresidual
        r = cuda.local.array(ROWS, dtype=types.float32)
        following = cuda.local.array(ROWS, dtype=types.float32)  # rstd of the rows after these
        total = cuda.local.array(ROWS, dtype=types.float32)
        dw = cuda.local.array((PIECES, 8), dtype=types.float32)
        first = cuda.blockIdx.x * ROWS
        for s in range(STAGES):
            ahead = first + s * (BLOCKS * ROWS)
            fetch(own + s * STAGE, dy, ahead, column, rows)
            fetch(own + s * STAGE + ARRAY, x, ahead, column, rows)
            if RESIDUAL:
                fetch(own + s * STAGE + 2 * ARRAY, dresidual, ahead, column, rows)
            cp_commit()
        for q in range(ROWS):
            following[q] = ldg32f(rstd + np.int64(first + q) * 4) if first + q < rows else ZERO
        for i in range(PIECES):
            load_nc(w, i, weight + (column + i * STEP) * BYTES, column + i * STEP < C)
            for k in range(8):
                dw[i, k] = ZERO
        running = NO_BITS
        stage, parity = 0, 0
        while first < rows:  # the same for the whole block, so every thread reaches the barriers
            for q in range(ROWS):
                r[q] = following[q]
                ahead = first + BLOCKS * ROWS + q
                following[q] = ldg32f(rstd + np.int64(ahead) * 4) if ahead < rows else ZERO
            wait()  # the oldest rows are there
            for t in range(TILES):
                at = own + stage + t * STEP * BYTES
                take(g, t, at)
                take(h, t, at + ARRAY)
                if RESIDUAL:
                    take(d, t, at + 2 * ARRAY)
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
            ahead = first + STAGES * (BLOCKS * ROWS)
            fetch(own + stage, dy, ahead, column, rows)
            fetch(own + stage + ARRAY, x, ahead, column, rows)
            if RESIDUAL:
                fetch(own + stage + 2 * ARRAY, dresidual, ahead, column, rows)
            cp_commit()
            block_sum(total, ring + RING + parity)
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
            stage = 0 if stage == RING - STAGE else stage + STAGE
            parity = PARTIAL - parity
        if ABSMAX:
            absmax_update(slot, running)
        for i in range(PIECES):
            if column + i * STEP < C:
                out = scratch + (np.int64(cuda.blockIdx.x) * C + column + i * STEP) * 4
                for k in range(0, 8, 4):
                    stg128f(out + k * 4, (dw[i, k], dw[i, k + 1], dw[i, k + 2], dw[i, k + 3]))

    return rmsnorm_backward


def rmsnorm_backward_launch(
    dx: int, dweight: int, dy: int, dresidual: int, x: int, weight: int, rstd: int, *, scratch: int,
    rows: int, C: int, accumulate: bool, absmax: int = 0, dtype: str = "bf16",
    grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write dx and dweight, in stream order. dresidual 0: none. dx may be dy or dresidual.

    scratch: rmsnorm_backward_scratch(C) bytes. accumulate: add to dweight instead of writing it."""
    constants = {"C": C, "residual": bool(dresidual), "absmax": bool(absmax), "dtype": dtype}
    tile = tile_of(C, dtype)
    smem = tile.smem(3 if dresidual else 2, C, DType(dtype).itemsize)
    k = kernel(
        make_rmsnorm_backward, SIGNATURE, threads=tile.threads, smem=smem,
        options=Options(min_blocks=tile.resident), **constants, **tile.constants(),
    )  # fmt: skip
    k(stream, (tile.blocks,), dx, scratch, absmax, dy, dresidual, x, weight, rstd, rows)
    column_sum_launch(
        dweight, scratch, partials=tile.blocks, columns=C, stride=C, accumulate=accumulate,
        dtype=grad_dtype, stream=stream,
    )  # fmt: skip


def rmsnorm_backward_scratch(C: int) -> int:
    """Bytes of scratch memory."""
    return 4 * tile_of(C).blocks * C


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
    scratch = empty_like(a, shape=(tile_of(C).blocks, C), dtype=DType.FP32)
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
        {"C": C, "residual": True, "absmax": True, "dtype": d, **tile_of(C, d).constants()},
        SIGNATURE,
        tile_of(C, d).threads,
        smem=tile_of(C, d).smem(3, C, DType(d).itemsize),
        options=Options(min_blocks=tile_of(C, d).resident),
    )
    for C, d in [
        (896, "bf16"),
        (1536, "bf16"),
        (2048, "bf16"),
        (4096, "bf16"),
        (5120, "bf16"),
        (896, "fp32"),
    ]
]
