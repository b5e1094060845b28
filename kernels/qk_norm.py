r"""RMSNorm of every query and key head; values are copied. Backward: the same file.

    rstd[n, h] = 1 / sqrt(mean_d(qkv[n, h, d]^2) + eps)             for h < H + G
    heads[n, h, d] = qkv[n, h, d] * rstd[n, h] * weight[d]          q_weight if h < H, else k_weight
    heads[n, h, d] = qkv[n, h, d]                                   for h >= H + G

    m[n, h] = rstd * mean_d(dheads * weight * qkv)
    dqkv    = rstd * (dheads * weight - qkv * rstd * m)     (values: dqkv = dheads)
    dq_weight[d] (+)= sum_{n, h < H} dheads * qkv * rstd,   dk_weight likewise over the key heads
    absmax  = max |dqkv|                                    (optional; of the rounded dqkv)

Shapes   qkv, heads, dheads, dqkv: (N, (H + 2 G) D) row-major; rstd: (N, H + G); weights: (D,);
         scratch: (BLOCKS, 2 D). D a power of two from 8 to 256.
Dtypes   qkv, heads, weights, dheads, dqkv bfloat16 or float32 (`dtype`); rstd float32; weight
         gradients bfloat16 or float32 (`grad_dtype`); absmax as in rmsnorm.py.
Errors   A lane adds 8 squares, then log2(D / 8) levels: |rel err of rstd| <= (8 + log2(D / 8) + 4)
         / 2 * 2^-24 + 2^-22. heads: two products, one rounding. dqkv: the same sums, five
         operations, one rounding. Weight gradients: N (H + 2 G) D / (8 THREADS BLOCKS) + 4
         additions in a thread, then 8 THREADS / D, 16 and 33 more, one rounding.
         BLOCKS is a constant: bitwise reproducible on any card.
Cost     Reads and writes each element once; a head is D / 8 neighbouring lanes.
Source   Henry et al. 2020, arXiv:2010.04245 (normalised queries and keys); RMSNorm: rmsnorm.py.
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
from llmq_nb.kernels.ptx import (
    SIMULATED,
    cp_commit,
    cp_wait0,
    ffma,
    inc,
    ldg32f,
    lds32f,
    rsqrt,
    shfl_xorf,
    smem_addr,
    stg32f,
    sts32f,
)
from llmq_nb.kernels.ring import ring
from llmq_nb.kernels.vector import PIECE, vector

THREADS, UNROLL = 256, 2
STAGES = 4
"""Rows of a head that its threads have under way."""
BLOCKS = 32 if SIMULATED else 512
"""Partial sums of the weight gradients; never a function of the card. (Simulated blocks cost
milliseconds.)"""
ZERO, NO_BITS = np.float32(0.0), np.uint32(0)
FORWARD_SIGNATURE = (*(types.uint64,) * 5, types.int64, types.float32)
BACKWARD_SIGNATURE = (*(types.uint64,) * 8, types.int64)


def lanes_of(D: int) -> int:
    """Threads that share a head."""
    return D // PIECE


def ring_bytes(dtype: str) -> int:
    """Shared memory of the backward pass."""
    return 2 * STAGES * THREADS * PIECE * vector(dtype).bytes


def make_head_sum(LANES: int):
    """Device function head_sum(value): the sum over the LANES neighbouring lanes of a head."""
    LEVELS = LANES.bit_length() - 1

    @cuda.jit(device=True)
    def head_sum(value):
        for level in range(LEVELS):
            value = value + shfl_xorf(value, (LANES // 2) >> level)
        return value

    return head_sum


def make_qk_norm_forward(H: int, G: int, D: int, dtype: str):
    """Kernel for one arrangement of heads; arguments are device addresses, see FORWARD_SIGNATURE.

    pieces: of the whole of qkv."""
    v = vector(dtype)
    WORDS, BYTES, load_cs, load_nc, store = v.words, v.bytes, v.load_cs, v.load_nc, v.store
    low, high, set_pair = v.low, v.high, v.set_pair
    LANES, HEADS, NORMED, QUERIES = lanes_of(D), H + 2 * G, H + G, H
    STEP = PIECE * BYTES
    INV_D = np.float32(1.0 / D)
    head_sum = make_head_sum(LANES)

    def qk_norm_forward(heads, rstd, qkv, q_weight, k_weight, pieces, eps):
        t = cuda.threadIdx.x
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + t
        tile = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        w = cuda.local.array((2, WORDS), dtype=types.uint32)  # of queries, of keys
        column = (t & (LANES - 1)) * STEP
        for u in range(UNROLL):
            i = first + u * THREADS
            load_cs(tile, u, qkv + i * STEP, i < pieces)
        load_nc(w, 0, q_weight + column, True)
        load_nc(w, 1, k_weight + column, True)
        for u in range(UNROLL):
            i = first + u * THREADS
            unit = i // LANES  # a head of a row
            head = np.int32(unit % HEADS)
            total = ZERO
            for j in range(4):
                total = ffma(low(tile, u, j), low(tile, u, j), total)
                total = ffma(high(tile, u, j), high(tile, u, j), total)
            r = rsqrt(ffma(head_sum(total), INV_D, eps))  # every lane, values too
            if head < NORMED:
                for j in range(4):
                    a, b = low(w, 1, j), high(w, 1, j)
                    if head < QUERIES:
                        a, b = low(w, 0, j), high(w, 0, j)
                    set_pair(tile, u, j, low(tile, u, j) * r * a, high(tile, u, j) * r * b)
                if (t & (LANES - 1)) == 0 and i < pieces:
                    stg32f(rstd + (unit // HEADS * NORMED + head) * 4, r)
            store(heads + i * STEP, tile, u, i < pieces)

    return qk_norm_forward


def make_qk_norm_backward(H: int, G: int, D: int, blocks: int, absmax: bool, dtype: str):
    """Stage one for one arrangement of heads; arguments: see BACKWARD_SIGNATURE.

    The LANES threads of a head keep it, one row after the other: the grid takes AT_A_TIME rows at a
    time, and what is left of its last row idles."""
    v = vector(dtype)
    WORDS, BYTES, load_nc, store = v.words, v.bytes, v.load_nc, v.store
    low, high, set_pair, track, absmax_update = (
        v.low, v.high, v.set_pair, v.track, v.absmax_update
    )  # fmt: skip
    LANES, HEADS, NORMED, QUERIES = lanes_of(D), H + 2 * G, H + G, H
    UNITS = THREADS // LANES  # heads that a block has
    AT_A_TIME = blocks * UNITS // HEADS
    STEP, STATISTICS = AT_A_TIME * HEADS * D * BYTES, AT_A_TIME * NORMED * 4
    ABSMAX = absmax
    INV_D = np.float32(1.0 / D)
    head_sum = make_head_sum(LANES)
    r_ = ring(dtype, STAGES)
    copy, take, wait = r_.copy, r_.take, r_.wait
    ARRAY = THREADS * PIECE * BYTES  # in the ring
    END = 2 * STAGES * ARRAY

    def qk_norm_backward(dqkv, scratch, slot, dheads, qkv, q_weight, k_weight, rstd, rows):
        t = cuda.threadIdx.x
        lane, own = t & (LANES - 1), t // LANES
        unit = cuda.blockIdx.x * UNITS + own
        head, row = unit % HEADS, unit // HEADS
        normed, limit = head < NORMED, rows if row < AT_A_TIME else 0
        shared = smem_addr(cuda.shared.array(0, dtype=types.uint32))
        g = cuda.local.array((1, WORDS), dtype=types.uint32)  # dheads, then dqkv
        x = cuda.local.array((1, WORDS), dtype=types.uint32)
        w = cuda.local.array((1, WORDS), dtype=types.uint32)
        dw = cuda.local.array(8, dtype=types.float32)
        at = (np.int64(unit) * D + lane * PIECE) * BYTES
        statistic = rstd + (np.int64(row) * NORMED + head) * 4
        stage = shared + t * PIECE * BYTES
        for s in range(STAGES):
            there = row + s * AT_A_TIME < limit
            copy(stage + 2 * s * ARRAY, dheads + at + s * STEP, there)
            copy(stage + (2 * s + 1) * ARRAY, qkv + at + s * STEP, there and normed)
            cp_commit()
        following = ldg32f(statistic) if row < limit and normed else ZERO  # rstd of the next row
        load_nc(w, 0, (q_weight if head < QUERIES else k_weight) + lane * PIECE * BYTES, True)
        for k in range(8):
            dw[k] = ZERO
        running = NO_BITS
        first, turn = 0, 0
        while first < rows:  # the same for every thread
            statistic += STATISTICS
            r, there = following, first + row < limit
            ahead = first + AT_A_TIME + row < limit
            following = ldg32f(statistic) if ahead and normed else ZERO
            wait()  # the oldest row is there
            take(g, 0, stage + turn)
            take(x, 0, stage + turn + ARRAY)
            total = ZERO
            for j in range(4):
                total = ffma(low(g, 0, j) * low(w, 0, j), low(x, 0, j), total)
                total = ffma(high(g, 0, j) * high(w, 0, j), high(x, 0, j), total)
            ahead = first + STAGES * AT_A_TIME + row < limit
            copy(stage + turn, dheads + at + STAGES * STEP, ahead)
            copy(stage + turn + ARRAY, qkv + at + STAGES * STEP, ahead and normed)
            cp_commit()
            m = -(head_sum(total) * INV_D * r * r)
            if normed:
                for j in range(4):
                    dw[2 * j] = ffma(low(g, 0, j) * low(x, 0, j), r, dw[2 * j])
                    dw[2 * j + 1] = ffma(high(g, 0, j) * high(x, 0, j), r, dw[2 * j + 1])
                    p = r * ffma(low(g, 0, j), low(w, 0, j), low(x, 0, j) * m)
                    q = r * ffma(high(g, 0, j), high(w, 0, j), high(x, 0, j) * m)
                    set_pair(g, 0, j, p, q)
            if ABSMAX:
                for j in range(4):
                    running = track(running, g, 0, j)
            store(dqkv + at, g, 0, there)
            at += STEP
            first += AT_A_TIME
            turn = 0 if turn == END - 2 * ARRAY else turn + 2 * ARRAY
        if ABSMAX:
            absmax_update(slot, running)

        cp_wait0()
        cuda.syncthreads()  # nobody copies into the ring any more: it takes the sums
        for k in range(8):
            sts32f(shared + (own * D + lane * PIECE + k) * 4, dw[k])
        cuda.syncthreads()  # the sums of every head are there
        column = t
        while column < 2 * D:  # of the queries, then of the keys
            total, unit = ZERO, np.uint32(0)
            head = cuda.blockIdx.x * UNITS % HEADS
            while unit < UNITS:  # unrolled it would take more registers than the rows above
                if (head < QUERIES) == (column < D) and head < NORMED:
                    total = total + lds32f(shared + np.int64(unit * D + column % D) * 4)
                head = 0 if head + 1 == HEADS else head + 1
                unit = inc(unit)
            stg32f(scratch + (cuda.blockIdx.x * (2 * D) + column) * 4, total)
            column += THREADS

    return qk_norm_backward


def qk_norm_forward_launch(
    heads: int, rstd: int, qkv: int, q_weight: int, k_weight: int, *, rows: int, H: int, G: int,
    D: int, eps: float, dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write heads and rstd, device addresses, in stream order."""
    k = kernel(make_qk_norm_forward, FORWARD_SIGNATURE, threads=THREADS, H=H, G=G, D=D, dtype=dtype)
    pieces = rows * (H + 2 * G) * lanes_of(D)
    grid = (cdiv(pieces, THREADS * UNROLL),)
    k(stream, grid, heads, rstd, qkv, q_weight, k_weight, pieces, eps)


def qk_norm_backward_launch(
    dqkv: int, dq_weight: int, dk_weight: int, dheads: int, qkv: int, q_weight: int, k_weight: int,
    rstd: int, *, scratch: int, rows: int, H: int, G: int, D: int, accumulate: bool,
    absmax: int = 0, dtype: str = "bf16", grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write dqkv (which may be dheads) and write (or add to) the weights' gradients.

    scratch: qk_norm_backward_scratch(D) bytes."""
    k = kernel(
        make_qk_norm_backward, BACKWARD_SIGNATURE, threads=THREADS, smem=ring_bytes(dtype),
        H=H, G=G, D=D, blocks=BLOCKS, absmax=bool(absmax), dtype=dtype,
    )  # fmt: skip
    k(stream, (BLOCKS,), dqkv, scratch, absmax, dheads, qkv, q_weight, k_weight, rstd, rows)
    column_sum_launch(
        dq_weight, scratch, partials=BLOCKS, columns=2 * D, stride=2 * D, second=dk_weight,
        split=D, accumulate=accumulate, dtype=grad_dtype, stream=stream,
    )  # fmt: skip


def qk_norm_backward_scratch(D: int) -> int:
    """Bytes of scratch memory."""
    return BLOCKS * 2 * D * 4


def _described(qkv: Any, q_weight: Any, k_weight: Any, H: int, G: int) -> tuple[Array, int, Any]:
    a = describe(qkv, dtype=DType.BF16, name="qkv")
    weights = [describe(q_weight, dtype=DType.BF16, shape=(None,), name="q_weight")]
    D = weights[0].size
    weights.append(describe(k_weight, dtype=DType.BF16, shape=(D,), name="k_weight"))
    if not 8 <= D <= 256 or D & (D - 1):
        raise ValueError(f"head_dim is {D}, must be a power of two from 8 to 256")
    if not a.shape or a.shape[-1] != (H + 2 * G) * D:
        raise ValueError(f"qkv has shape {a.shape}; its last extent must be {(H + 2 * G) * D}")
    return a, D, [w.address for w in weights]


def forward(
    qkv: Any, q_weight: Any, k_weight: Any, *, H: int, G: int, eps: float
) -> tuple[Any, Any]:
    """(heads, rstd) of packed bfloat16 qkv (..., (H + 2 G) D) = [q; k; v]; weights: (D,).

    H query heads, G key/value heads. rstd: (..., H + G) float32. ValueError on other shapes.

    >>> heads, rstd = qk_norm.forward(qkv, q_weight, k_weight, H=16, G=8, eps=1e-6)
    """
    a, D, weights = _described(qkv, q_weight, k_weight, H, G)
    heads = empty_like(a)
    rstd = empty_like(a, shape=(*a.shape[:-1], H + G), dtype=DType.FP32)
    qk_norm_forward_launch(
        describe(heads, dtype=DType.BF16).address, describe(rstd, dtype=DType.FP32).address,
        a.address, *weights, rows=a.size // a.shape[-1], H=H, G=G, D=D, eps=eps,
        stream=current_stream(a),
    )  # fmt: skip
    return heads, rstd


def backward(
    dheads: Any, qkv: Any, q_weight: Any, k_weight: Any, rstd: Any, *, H: int, G: int
) -> tuple[Any, Any, Any]:
    """Gradient of `forward`: (dqkv, dq_weight, dk_weight). dheads: shaped like qkv.

    >>> dqkv, dq, dk = qk_norm.backward(dheads, qkv, q_weight, k_weight, rstd, H=16, G=8)
    """
    a, D, weights = _described(qkv, q_weight, k_weight, H, G)
    g = describe(dheads, dtype=DType.BF16, shape=a.shape, name="dheads")
    r = describe(rstd, dtype=DType.FP32, shape=(*a.shape[:-1], H + G), name="rstd")
    outputs = [empty_like(a), empty_like(a, shape=(D,)), empty_like(a, shape=(D,))]
    scratch = empty_like(a, shape=(BLOCKS, 2 * D), dtype=DType.FP32)
    addresses = [describe(o, dtype=DType.BF16).address for o in outputs]
    addresses += [g.address, a.address, *weights, r.address]
    qk_norm_backward_launch(
        *addresses, scratch=describe(scratch, dtype=DType.FP32).address,
        rows=a.size // a.shape[-1], H=H, G=G, D=D, accumulate=False, stream=current_stream(a),
    )  # fmt: skip
    return outputs[0], outputs[1], outputs[2]


# ---- cost --------------------------------------------------------------------------------------
def qk_norm_forward_bytes(N: int, H: int, G: int, D: int, *, itemsize: int = 2) -> int:
    """Read qkv, write heads and rstd."""
    return 2 * N * (H + 2 * G) * D * itemsize + 4 * N * (H + G)


def qk_norm_backward_bytes(N: int, H: int, G: int, D: int, *, itemsize: int = 2) -> int:
    """Read dheads, queries and keys, rstd; write dqkv."""
    return N * D * itemsize * (2 * (H + 2 * G) + H + G) + 4 * N * (H + G)


# ---- reference ---------------------------------------------------------------------------------
def qk_norm_forward_ref(
    qkv: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, H: int, G: int, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """float64 NumPy oracle: (heads (N, H + 2 G, D), rstd (N, H + G))."""
    D = q_weight.size
    x = qkv.astype(np.float64).reshape(-1, H + 2 * G, D)
    weight = np.stack([q_weight] * H + [k_weight] * G).astype(np.float64)
    rstd = 1.0 / np.sqrt((x[:, : H + G] ** 2).mean(axis=-1) + eps)
    heads = x.copy()
    heads[:, : H + G] = x[:, : H + G] * rstd[..., None] * weight
    return heads, rstd


def qk_norm_backward_ref(
    dheads: np.ndarray, qkv: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray,
    rstd: np.ndarray, H: int, G: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """float64 NumPy oracle: (dqkv (N, H + 2 G, D), dq_weight, dk_weight)."""
    D = q_weight.size
    dy, x = (a.astype(np.float64).reshape(-1, H + 2 * G, D) for a in (dheads, qkv))
    weight = np.stack([q_weight] * H + [k_weight] * G).astype(np.float64)
    r = rstd.astype(np.float64)[..., None]
    normed = slice(0, H + G)
    dx = dy.copy()
    m = (dy[:, normed] * weight * x[:, normed]).mean(axis=-1, keepdims=True) * r
    dx[:, normed] = r * (dy[:, normed] * weight - x[:, normed] * r * m)
    terms = (dy[:, normed] * x[:, normed] * r).sum(axis=0)
    return dx, terms[:H].sum(axis=0), terms[H:].sum(axis=0)


_SHAPES = [(16, 8, 128), (14, 2, 64)]
COMPILE_CASES = [
    CompileCase(
        make_qk_norm_forward, {"H": H, "G": G, "D": D, "dtype": d}, FORWARD_SIGNATURE, THREADS
    )
    for H, G, D in _SHAPES
    for d in ("bf16", "fp32")
] + [
    CompileCase(
        make_qk_norm_backward,
        {"H": H, "G": G, "D": D, "blocks": BLOCKS, "absmax": True, "dtype": d},
        BACKWARD_SIGNATURE,
        THREADS,
        smem=ring_bytes(d),
    )
    for H, G, D in _SHAPES
    for d in ("bf16", "fp32")
]
