r"""Fused classifier: loss, lse and, in place, the gradient of the logits. The sums over rows:
reduce_loss.py.

    lse[n]  = log sum_{v < V} exp(logits[n, v])
    loss[n] = lse[n] - logits[n, target[n]] + z lse[n]^2              (0 where the target is -100)
    dlogits[n, v] = inv_supervised (softmax[n, v] (1 + 2 z lse[n]) - [v = target[n]])

A row whose target is -100 gets a gradient of zeros, and an lse like any other. Columns V..Vp-1
count for nothing and get gradient 0. Without `gradient`, z is 0 and the logits are left alone. A
target outside the vocabulary makes the loss NaN.

Shapes   logits: (N, Vp) row-major, Vp a multiple of 16, Vp >= V >= 1; loss, lse: (N,); targets:
         (N,).
Dtypes   logits bfloat16 or float32 (`dtype`); loss, lse, inv_supervised (one value in device
         memory, so that a graph can hold the launch) float32; targets int32.
Errors   exp is ex2 (2 ulp) of one fused multiply-add: each term carries
         (|x| + |max|) 2^-24 + 2^-22. A thread adds V / THREADS terms, then 10 levels:
         lse: (V / THREADS + 16) 2^-24 + (3 + |max| + log2 sum) 2^-22 absolute. dlogits: the same
         relative to inv_supervised * softmax, two products, one rounding.
         Fixed order, no atomics: bitwise reproducible.
Cost     Reads the logits once and writes them once. A block owns a row: the first SHARED pieces of
         each thread stay in shared memory, the rest is read again, last first, from the L2 cache
         that the first pass has just filled.
Source   Milakov & Gimelshein 2018, arXiv:1805.02867 (one-pass maximum and sum).
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import Array, current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase, Options
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    ex2,
    ffma,
    fmax,
    ldg16,
    ldg32,
    ldg32f,
    lds64f,
    lds128,
    lg2,
    sel_eq,
    smem_addr,
    stg32f,
    sts64f,
    sts128,
    u2f,
)
from llmq_nb.kernels.reduce import warp_max, warp_sum
from llmq_nb.kernels.vector import PIECE, vector

BATCH = 4
"""Pieces that a thread has in flight."""
MERGE_BYTES = 256  # a maximum and a sum for each of up to 32 warps, before the pieces
IGNORED = np.uint32(0xFFFFFF9C)  # -100
LOWEST = np.float32(-1e30)  # start of a maximum: finite, so that LOWEST - LOWEST is 0
LOG2E, LN2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
ZERO, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
NAN_BITS, ZERO_BITS = np.uint32(0x7FC00000), np.uint32(0)
MINUS_INFINITY = {"bf16": np.uint32(0xFF80FF80), "fp32": np.uint32(0xFF800000)}
SIGNATURE = (*(types.uint64,) * 5, types.int32, types.int32, types.float32)


def tile_of(V: int, dtype: str = "bf16") -> tuple[int, int]:
    """(threads, pieces that each keeps in shared memory) for a vocabulary."""
    # 151936 columns on an H200: 1024 threads and 4 pieces 91 % of copy, 512 and 12 pieces 82 %
    threads = 1024 if V > 16384 else 128
    needed = BATCH * cdiv(V // PIECE, threads * BATCH)
    return threads, min(needed, 4 if threads == 1024 else 12) if dtype == "bf16" else 0


def shared_bytes(threads: int, shared: int) -> int:
    """Dynamic shared memory, for bfloat16 pieces."""
    return MERGE_BYTES + shared * threads * PIECE * 2


def options_of(threads: int) -> Options:
    """At least 1024 threads a multiprocessor: one block's reductions hide behind another's
    loads."""
    return Options(min_blocks=1024 // threads)


@cache
def _make_parts(dtype: str) -> tuple[Any, Any, Any]:
    """Device functions (absorb, emit, keep_below) for one storage format."""
    v = vector(dtype)
    WORDS, BYTES, low, high = v.words, v.bytes, v.low, v.high
    set_pair, store_cs = v.set_pair, v.store_cs
    OUTSIDE = MINUS_INFINITY[dtype]
    BF16 = dtype == "bf16"

    @cuda.jit(device=True)
    def absorb(tile, state):
        """Take BATCH pieces into state = (maximum, sum of exp(x - maximum))."""
        top = state[0]
        for i in range(BATCH):
            for j in range(4):
                top = fmax(fmax(top, low(tile, i, j)), high(tile, i, j))
        c = -(top * LOG2E)
        even, odd = state[1] * ex2((state[0] - top) * LOG2E), ZERO
        for i in range(BATCH):
            for j in range(4):
                even = even + ex2(ffma(low(tile, i, j), LOG2E, c))
                odd = odd + ex2(ffma(high(tile, i, j), LOG2E, c))
        state[0], state[1] = top, even + odd

    @cuda.jit(device=True)
    def emit(tile, i, start, piece, inside, c, coefficient, target, factor):
        """Piece i of the tile, number `piece` of the row, becomes its gradient in memory."""
        e = cuda.local.array(8, dtype=types.float32)
        for j in range(4):
            e[2 * j] = ex2(ffma(low(tile, i, j), LOG2E, c)) * coefficient
            e[2 * j + 1] = ex2(ffma(high(tile, i, j), LOG2E, c)) * coefficient
        if piece == target >> 3:
            for k in range(8):
                e[k] = e[k] - sel_eq(k, target & 7, factor, ZERO)
        for j in range(4):
            set_pair(tile, i, j, e[2 * j], e[2 * j + 1])
        store_cs(start + np.int64(piece) * (PIECE * BYTES), tile, i, inside)

    @cuda.jit(device=True)
    def keep_below(tile, i, column, V, gradient):
        """Elements of the piece that starts at `column` and lie at V or beyond: minus infinity,
        or 0 in a gradient."""
        outside = ZERO_BITS if gradient else OUTSIDE
        for w in range(WORDS):
            if BF16:
                if column + 2 * w >= V:
                    tile[i, w] = outside
                elif column + 2 * w + 1 >= V:
                    tile[i, w] = np.uint32(
                        (tile[i, w] & np.uint32(0xFFFF)) | (outside & np.uint32(0xFFFF0000))
                    )
            elif column + w >= V:
                tile[i, w] = outside

    return absorb, emit, keep_below


def make_merge(THREADS: int):
    """Device function merge(state, shared): the (maximum, sum) of every thread's, to every
    thread."""
    WARPS = THREADS // 32

    @cuda.jit(device=True)
    def merge(state, shared):
        lane = cuda.threadIdx.x & 31
        top = warp_max(state[0])
        total = warp_sum(state[1] * ex2((state[0] - top) * LOG2E))
        if lane == 0:
            sts64f(shared + (cuda.threadIdx.x >> 5) * 8, top, total)
        cuda.syncthreads()  # every warp's pair is there
        top, total = LOWEST, ZERO
        if lane < WARPS:
            top, total = lds64f(shared + lane * 8)
        state[0] = warp_max(top)
        state[1] = warp_sum(total * ex2((top - state[0]) * LOG2E))

    return merge


def make_cross_entropy(warps: int, shared: int, gradient: bool, dtype: str):
    """Kernel for one tile (see tile_of); arguments are device addresses, see SIGNATURE."""
    v = vector(dtype)
    WORDS, BYTES, load, load_cs, store_cs = v.words, v.bytes, v.load, v.load_cs, v.store_cs
    absorb, emit, keep_below = _make_parts(dtype)
    THREADS, SHARED, GRADIENT = warps * 32, shared, gradient
    merge = make_merge(THREADS)
    BF16, STEP = dtype == "bf16", PIECE * BYTES
    SHARED_BATCHES = SHARED // BATCH
    OUTSIDE = MINUS_INFINITY[dtype]

    @cuda.jit(device=True)
    def load_logits(tile, i, start, piece, whole):
        load(tile, i, start + np.int64(piece) * STEP, piece < whole)
        if piece >= whole:
            for w in range(WORDS):
                tile[i, w] = OUTSIDE

    @cuda.jit(device=True)
    def load_broken(tile, start, whole, V):
        """The piece that V cuts, alone in a batch."""
        for i in range(1, BATCH):
            for w in range(WORDS):
                tile[i, w] = OUTSIDE
        load(tile, 0, start + np.int64(whole) * STEP, True)
        keep_below(tile, 0, whole * PIECE, V, False)

    def cross_entropy(logits, loss, lse, targets, inv_supervised, V, Vp, z):
        t = cuda.threadIdx.x
        row = np.int64(cuda.blockIdx.x)
        start = logits + row * Vp * BYTES
        area = smem_addr(cuda.shared.array(0, dtype=types.uint32))
        cached = area + MERGE_BYTES + t * 16
        whole = V // PIECE  # pieces without columns at V or beyond
        state = cuda.local.array(2, dtype=types.float32)
        tile = cuda.local.array((BATCH, WORDS), dtype=types.uint32)
        state[0], state[1] = LOWEST, ZERO

        for b in range(SHARED_BATCHES):
            for i in range(BATCH):
                load_logits(tile, i, start, t + (b * BATCH + i) * THREADS, whole)
            for i in range(BATCH):
                words = (tile[i, 0], tile[i, 1], tile[i, 2], tile[i, 3])
                sts128(cached + (b * BATCH + i) * (THREADS * 16), words)
            absorb(tile, state)
        first = t + SHARED * THREADS
        while first < whole:
            for i in range(BATCH):
                load_logits(tile, i, start, first + i * THREADS, whole)
            absorb(tile, state)
            first += BATCH * THREADS
        if t == 0 and whole * PIECE < V:
            load_broken(tile, start, whole, V)
            absorb(tile, state)

        target = ldg32(targets + row * 4)
        supervised = target != IGNORED
        merge(state, area)
        row_lse = ffma(lg2(state[1]), LN2, state[0])
        if t == 0:
            at_target = u2f(NAN_BITS)
            if target < V:
                if BF16:
                    at_target = u2f(ldg16(start + np.int64(target) * 2) << 16)
                else:
                    at_target = ldg32f(start + np.int64(target) * 4)
            row_loss = row_lse - at_target + z * row_lse * row_lse
            stg32f(loss + row * 4, row_loss if supervised else ZERO)
            stg32f(lse + row * 4, row_lse)
        if GRADIENT:
            cuda.syncthreads()  # thread 0 has read the target's logit: it may be overwritten
            # after the broken piece only zeros follow; a row without gradient is all zeros
            zeros = (t + whole + 1) if supervised else t
            for w in range(WORDS):
                tile[0, w] = ZERO_BITS
            while zeros < Vp // PIECE:
                store_cs(start + np.int64(zeros) * STEP, tile, 0, True)
                zeros += THREADS
            if supervised:
                factor = ldg32f(inv_supervised)
                a = factor * (ONE + TWO * z * row_lse) / state[1]
                c = -(state[0] * LOG2E)
                at = np.int32(target)
                while first >= t + (SHARED + BATCH) * THREADS:
                    first -= BATCH * THREADS
                    for i in range(BATCH):
                        p = first + i * THREADS
                        load_cs(tile, i, start + np.int64(p) * STEP, p < whole)
                    for i in range(BATCH):
                        p = first + i * THREADS
                        emit(tile, i, start, p, p < whole, c, a, at, factor)
                for b in range(SHARED_BATCHES):
                    for i in range(BATCH):
                        p = t + (b * BATCH + i) * THREADS
                        source = cached + (b * BATCH + i) * (THREADS * 16)
                        tile[0, 0], tile[0, 1], tile[0, 2], tile[0, 3] = lds128(source)
                        emit(tile, 0, start, p, p < whole, c, a, at, factor)
                if t == 0 and whole * PIECE < Vp:
                    load_broken(tile, start, whole, V)
                    emit(tile, 0, start, whole, False, c, a, at, factor)
                    keep_below(tile, 0, whole * PIECE, V, True)
                    store_cs(start + np.int64(whole) * STEP, tile, 0, True)

    return cross_entropy


def cross_entropy_launch(
    logits: int, loss: int, lse: int, targets: int, inv_supervised: int, *, rows: int, V: int,
    Vp: int, gradient: bool, z_loss: float = 0.0, dtype: str = "bf16",
    tile: tuple[int, int] | None = None, stream: Any,
) -> None:  # fmt: skip
    """Write loss and lse, and with `gradient` the logits' gradient over them, in stream order.

    inv_supervised: address of one float32 (0 without gradient). tile: for the bench, else
    tile_of(V)."""
    threads, shared = tile or tile_of(V, dtype)
    shared = shared if gradient else 0  # nothing is read again
    k = kernel(
        make_cross_entropy, SIGNATURE, threads=threads, smem=shared_bytes(threads, shared),
        options=options_of(threads), warps=threads // 32, shared=shared,
        gradient=gradient, dtype=dtype,
    )  # fmt: skip
    z = z_loss if gradient else 0.0
    k(stream, (rows,), logits, loss, lse, targets, inv_supervised, V, Vp, z)


def _described(logits: Any, targets: Any, vocab: int | None) -> tuple[Array, Array, int, int]:
    a = describe(logits, dtype=DType.BF16, name="logits")
    Vp = a.shape[-1] if a.shape else 0
    V = Vp if vocab is None else vocab
    if Vp == 0 or Vp % 16:
        raise ValueError(f"logits have shape {a.shape}; the last extent must be a multiple of 16")
    if not 1 <= V <= Vp:
        raise ValueError(f"vocab is {V}, must be 1 to {Vp}, the last extent of logits")
    t = describe(targets, dtype=DType.INT32, shape=a.shape[:-1], name="targets")
    return a, t, V, Vp


def _run(
    logits: Any, targets: Any, scale: int, vocab: int | None, gradient: bool, z_loss: float
) -> tuple[Any, Any]:
    a, t, V, Vp = _described(logits, targets, vocab)
    outputs = [empty_like(a, shape=t.shape, dtype=DType.FP32) for _ in range(2)]
    loss, lse = (describe(o, dtype=DType.FP32).address for o in outputs)
    cross_entropy_launch(
        a.address, loss, lse, t.address, scale, rows=t.size, V=V, Vp=Vp, gradient=gradient,
        z_loss=z_loss, stream=current_stream(a),
    )  # fmt: skip
    return outputs[0], outputs[1]


def forward(logits: Any, targets: Any, *, vocab: int | None = None) -> tuple[Any, Any]:
    """Loss and lse of every row of bfloat16 logits; float32, shaped like targets.

    logits: (..., Vp), Vp a multiple of 16; targets: (...) int32, -100 where there is no loss.
    vocab: columns that count, default all. ValueError on other shapes or dtypes.

    >>> loss, lse = cross_entropy.forward(logits, targets)
    """
    return _run(logits, targets, 0, vocab, False, 0.0)


def backward(
    logits: Any, targets: Any, scale: Any, *, vocab: int | None = None, z_loss: float = 0.0
) -> tuple[Any, Any]:
    """`forward` that also overwrites the logits with d(scale sum(loss)) / d(logits).

    scale: one float32 on the GPU, such as 1 / supervised tokens. z_loss: factor of lse^2.

    >>> loss, lse = cross_entropy.backward(logits, targets, scale)    # logits are the gradient now
    """
    factor = describe(scale, dtype=DType.FP32, shape=(1,), name="scale").address
    return _run(logits, targets, factor, vocab, True, z_loss)


# ---- cost --------------------------------------------------------------------------------------
def cross_entropy_bytes(N: int, Vp: int, *, gradient: bool = True, itemsize: int = 2) -> int:
    """Least DRAM traffic: read the logits (and write them), read targets, write loss and lse."""
    return N * Vp * itemsize * (2 if gradient else 1) + 12 * N


# ---- reference ---------------------------------------------------------------------------------
def cross_entropy_ref(
    logits: np.ndarray, targets: np.ndarray, V: int, inv_supervised: float, z_loss: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float64 NumPy oracle: (loss, lse, dlogits), the three equations."""
    x = logits[:, :V].astype(np.float64)
    top = x.max(axis=1)
    lse = top + np.log(np.exp(x - top[:, None]).sum(axis=1))
    supervised = targets != -100
    onehot = np.arange(V) == targets[:, None]
    loss = np.where(supervised, lse - (x * onehot).sum(axis=1) + z_loss * lse**2, 0.0)
    softmax = np.exp(x - lse[:, None])
    grad = inv_supervised * (softmax * (1 + 2 * z_loss * lse[:, None]) - onehot)
    out = np.zeros(logits.shape)
    out[:, :V] = np.where(supervised[:, None], grad, 0.0)
    return loss, lse, out


COMPILE_CASES = [
    CompileCase(
        make_cross_entropy,
        {"warps": tile[0] // 32, "shared": tile[1], "gradient": g, "dtype": dtype},
        SIGNATURE,
        tile[0],
        smem=shared_bytes(*tile),
        options=options_of(tile[0]),
    )
    for V, g, dtype in [
        (272, True, "bf16"),
        (151936, True, "bf16"),
        (151936, False, "bf16"),
        (151936, True, "fp32"),
    ]
    for tile in [(tile_of(V, dtype)[0], tile_of(V, dtype)[1] if g else 0)]
]
