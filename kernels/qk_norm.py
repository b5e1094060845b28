r"""QK norm: RMSNorm of every query and key head, out of place on a packed qkv buffer.

    rstd[n, h]   = 1 / sqrt(mean_d(x[n, h, d]^2) + eps)
    y[n, h, d]   = x[n, h, d] * rstd[n, h] * weight[d]       weight: q_weight for h < H, k_weight
    for the rest m[n, h]      = mean_d(weight[d] dy[n, h, d] x[n, h, d]) * rstd[n, h]
    dx[n, h, d]  = rstd[n, h] (weight[d] dy[n, h, d] - x[n, h, d] rstd[n, h] m[n, h])
    dweight[d] (+)= sum over n and the heads of that weight of dy x rstd

Value heads are copied.

Shapes   x, y, dx, dy: (N, (H + 2 G) D) row-major, rows [H query; G key; G value heads]; rstd: (N, H
         + G); weights (D,); scratch: (2, BLOCKS, D). D a power of two from 16 to 256. y is not x
         (backward reads x); dx may be dy.
Dtypes   bfloat16 or float32 (`dtype`); dweight bfloat16 or float32 (`grad_dtype`); rstd, scratch
         float32.
Errors   A head lies on D / 8 lanes, 8 fused adds each and log2(D / 8) levels: rstd is good to
         (8 + 5 + 4) / 2 * 2^-24 + 2^-22; y adds two products, one rounding. dx: six operations, one
         rounding. dweight: (items / (BLOCKS * GROUPS) + 2 * GROUPS + 50) * 2^-24 of sum |terms|,
         one rounding. Fixed grid and order: bitwise reproducible.
Cost     forward reads and writes qkv once; backward reads dy and x, writes dx.
Source   Henry et al. 2020, arXiv:2010.04245; as RMSNorm per head in Qwen3. Written from the
         equations.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.column_sum import BLOCKS, column_sum_launch
from llmq_nb.kernels.compile import DEFAULT, CompileCase, Options
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    ffma,
    ldg32f,
    lds32f,
    rsqrt,
    shfl_xorf,
    smem_addr,
    stg32f,
    sts32f,
)
from llmq_nb.kernels.vector import PIECE, vector

THREADS = 256
CELLS = THREADS * PIECE
TWO_BLOCKS = Options(min_blocks=2)  # backward took 169 registers on sm_89
AHEAD = 1  # heads of a lane group in flight together, in backward; two spill on sm_89
ZERO, ONE = np.float32(0.0), np.float32(1.0)
FORWARD_SIGNATURE = (*(types.uint64,) * 5, types.int64, types.float32)
BACKWARD_SIGNATURE = (*(types.uint64,) * 7, types.int64)


def _make_head_sum(LANES: int) -> Any:
    """Device function: sum over the LANES lanes of a head, to each of them. All 32 lanes must
    call."""
    LEVELS = LANES.bit_length() - 1

    @cuda.jit(device=True)
    def head_sum(value):
        for level in range(LEVELS):
            value = value + shfl_xorf(value, 1 << level)
        return value

    return head_sum


def make_qk_norm_forward(H: int, G: int, D: int, dtype: str):
    """Kernel for one head layout; arguments are device addresses."""
    v = vector(dtype)
    WORDS, BYTES, load_cs, load_nc, store = v.words, v.bytes, v.load_cs, v.load_nc, v.store
    low, high, set_pair = v.low, v.high, v.set_pair
    HEADS, NORMED = H + 2 * G, H + G
    LANES = D // PIECE
    head_sum = _make_head_sum(LANES)
    INV_D = np.float32(1.0 / D)

    def qk_norm_forward(y, rstd, x, q_weight, k_weight, pieces, eps):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        item = i // LANES  # a head of a row
        row = item // HEADS
        head = item - row * HEADS
        lane = i - item * LANES
        a = cuda.local.array((1, WORDS), dtype=types.uint32)
        w = cuda.local.array((1, WORDS), dtype=types.uint32)
        load_cs(a, 0, x + i * (PIECE * BYTES), i < pieces)
        weight = q_weight if head < H else k_weight
        load_nc(w, 0, weight + lane * (PIECE * BYTES), head < NORMED)
        total = ZERO
        for j in range(4):
            total = ffma(low(a, 0, j), low(a, 0, j), total)
            total = ffma(high(a, 0, j), high(a, 0, j), total)
        r = rsqrt(ffma(head_sum(total), INV_D, eps))
        if head < NORMED:
            for j in range(4):
                set_pair(
                    w, 0, j, low(a, 0, j) * r * low(w, 0, j), high(a, 0, j) * r * high(w, 0, j)
                )
            store(y + i * (PIECE * BYTES), w, 0, i < pieces)
            if lane == 0 and i < pieces:
                stg32f(rstd + (row * NORMED + head) * 4, r)
        else:
            store(y + i * (PIECE * BYTES), a, 0, i < pieces)

    return qk_norm_forward


def make_qk_norm_backward(H: int, G: int, D: int, dtype: str):
    """Stage one for one head layout: dx, and partial sums of both weight gradients."""
    v = vector(dtype)
    WORDS, BYTES, load_cs, load_nc, store = v.words, v.bytes * PIECE, v.load_cs, v.load_nc, v.store
    low, high, set_pair = v.low, v.high, v.set_pair
    HEADS, NORMED = H + 2 * G, H + G
    LANES = D // PIECE
    GROUPS = THREADS // LANES  # heads that a block works on at once
    STEP = BLOCKS * GROUPS
    K_SCRATCH = BLOCKS * D * 4
    head_sum = _make_head_sum(LANES)
    INV_D = np.float32(1.0 / D)

    def qk_norm_backward(dx, scratch, dy, x, q_weight, k_weight, rstd, items):
        shared = smem_addr(cuda.shared.array(CELLS, dtype=types.float32))
        t = cuda.threadIdx.x
        lane, group = t % LANES, t // LANES
        w = cuda.local.array((2, WORDS), dtype=types.uint32)
        g = cuda.local.array((AHEAD, WORDS), dtype=types.uint32)
        h = cuda.local.array((AHEAD, WORDS), dtype=types.uint32)
        dw = cuda.local.array((2, 8), dtype=types.float32)
        load_nc(w, 0, q_weight + lane * BYTES, True)
        load_nc(w, 1, k_weight + lane * BYTES, True)
        for k in range(8):
            dw[0, k], dw[1, k] = ZERO, ZERO
        first = np.int64(cuda.blockIdx.x) * GROUPS
        while first < items:  # the same for the block: every lane reaches the sums
            for u in range(AHEAD):
                i = ((first + u * STEP) + group) * LANES + lane
                load_cs(g, u, dy + i * BYTES, first + u * STEP + group < items)
                load_cs(h, u, x + i * BYTES, first + u * STEP + group < items)
            for u in range(AHEAD):
                item = first + u * STEP + group
                row = item // HEADS
                head = item - row * HEADS
                normed = item < items and head < NORMED
                is_q = ONE if head < H else ZERO
                is_k = ONE - is_q
                r = ldg32f(rstd + (row * NORMED + head) * 4) if normed else ZERO
                total = ZERO
                for j in range(4):
                    w0 = low(w, 0, j) * is_q + low(w, 1, j) * is_k
                    w1 = high(w, 0, j) * is_q + high(w, 1, j) * is_k
                    a, b = low(g, u, j) * low(h, u, j), high(g, u, j) * high(h, u, j)
                    total = ffma(w0, a, ffma(w1, b, total))
                    dw[0, 2 * j] = ffma(a, r * is_q, dw[0, 2 * j])
                    dw[0, 2 * j + 1] = ffma(b, r * is_q, dw[0, 2 * j + 1])
                    dw[1, 2 * j] = ffma(a, r * is_k, dw[1, 2 * j])
                    dw[1, 2 * j + 1] = ffma(b, r * is_k, dw[1, 2 * j + 1])
                m = -(head_sum(total) * INV_D * r * r)
                if normed:  # else the gradient of a value head passes through
                    for j in range(4):
                        w0 = low(w, 0, j) * is_q + low(w, 1, j) * is_k
                        w1 = high(w, 0, j) * is_q + high(w, 1, j) * is_k
                        a = ffma(low(h, u, j), m, w0 * low(g, u, j)) * r
                        b = ffma(high(h, u, j), m, w1 * high(g, u, j)) * r
                        set_pair(g, u, j, a, b)
                store(dx + (item * LANES + lane) * BYTES, g, u, item < items)
            first += AHEAD * STEP
        for q in range(2):
            cuda.syncthreads()  # the other weight's sums have been read
            for k in range(8):
                sts32f(shared + (group * D + lane * PIECE + k) * 4, dw[q, k])
            cuda.syncthreads()  # every group's sums are there
            if t < D:
                value = ZERO
                for k in range(GROUPS):
                    value = value + lds32f(shared + (k * D + t) * 4)
                stg32f(scratch + q * K_SCRATCH + (np.int64(cuda.blockIdx.x) * D + t) * 4, value)

    return qk_norm_backward


# ---- launch ------------------------------------------------------------------------------------
def qk_norm_forward_launch(
    y: int, rstd: int, x: int, q_weight: int, k_weight: int, *, rows: int, H: int, G: int, D: int,
    eps: float, dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write y and rstd from x (rows, (H + 2 G) D), device addresses."""
    k = kernel(make_qk_norm_forward, FORWARD_SIGNATURE, threads=THREADS, H=H, G=G, D=D, dtype=dtype)
    pieces = rows * (H + 2 * G) * D // PIECE
    k(stream, (cdiv(pieces, THREADS),), y, rstd, x, q_weight, k_weight, pieces, eps)


def qk_norm_backward_launch(
    dx: int, dq_weight: int, dk_weight: int, dy: int, x: int, q_weight: int, k_weight: int,
    rstd: int, *, scratch: int, rows: int, H: int, G: int, D: int, accumulate: bool,
    dtype: str = "bf16", grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write dx and both weight gradients. scratch: qk_norm_backward_scratch(D) bytes. dx may be
    dy."""
    k = kernel(
        make_qk_norm_backward, BACKWARD_SIGNATURE, threads=THREADS, options=TWO_BLOCKS, H=H, G=G,
        D=D, dtype=dtype,
    )  # fmt: skip
    items = rows * (H + 2 * G)
    k(stream, (BLOCKS,), dx, scratch, dy, x, q_weight, k_weight, rstd, items)
    for out, partial in ((dq_weight, scratch), (dk_weight, scratch + BLOCKS * D * 4)):
        column_sum_launch(
            out, partial, C=D, accumulate=accumulate, grad_dtype=grad_dtype, stream=stream
        )


def qk_norm_backward_scratch(D: int) -> int:
    """Bytes of scratch memory."""
    return 2 * BLOCKS * D * 4


# ---- users -------------------------------------------------------------------------------------
def _layout(qkv: Any, heads: int, kv_heads: int, name: str) -> tuple[Any, int]:
    a = describe(qkv, dtype=DType.BF16, name=name)
    width = a.shape[-1] if a.shape else 0
    D, rest = divmod(width, heads + 2 * kv_heads)
    if rest or D not in (16, 32, 64, 128, 256):
        raise ValueError(
            f"{name} has rows of {width}, which {heads} + 2 * {kv_heads} heads do not share as "
            "16, 32, 64, 128 or 256 each"
        )
    return a, D


def forward(
    qkv: Any, q_weight: Any, k_weight: Any, *, heads: int, kv_heads: int, eps: float
) -> tuple[Any, Any]:
    """Normalise the query and key heads of a bfloat16 GPU array (..., (heads + 2 kv_heads) D).

    q_weight, k_weight: (D,). Returns (y, rstd); value heads are copied. ValueError on other shapes.

    >>> y, rstd = qk_norm.forward(qkv, q_weight, k_weight, heads=16, kv_heads=8, eps=1e-6)
    """
    a, D = _layout(qkv, heads, kv_heads, "qkv")
    weights = [
        describe(w, dtype=DType.BF16, shape=(D,), name=n).address
        for w, n in ((q_weight, "q_weight"), (k_weight, "k_weight"))
    ]
    y = empty_like(a)
    rstd = empty_like(a, shape=(*a.shape[:-1], heads + kv_heads), dtype=DType.FP32)
    qk_norm_forward_launch(
        describe(y, dtype=DType.BF16).address, describe(rstd, dtype=DType.FP32).address, a.address,
        *weights, rows=a.size // a.shape[-1], H=heads, G=kv_heads, D=D, eps=eps,
        stream=current_stream(a),
    )  # fmt: skip
    return y, rstd


def backward(
    dy: Any, qkv: Any, q_weight: Any, k_weight: Any, rstd: Any, *, heads: int, kv_heads: int
) -> tuple[Any, Any, Any]:
    """Gradient of qk_norm.forward: returns (dqkv, dq_weight, dk_weight) for bfloat16 GPU arrays.

    >>> dqkv, dq_weight, dk_weight = qk_norm.backward(dy, qkv, qw, kw, rstd, heads=16, kv_heads=8)
    """
    a, D = _layout(qkv, heads, kv_heads, "qkv")
    b = describe(dy, dtype=DType.BF16, shape=a.shape, name="dy")
    weights = [
        describe(w, dtype=DType.BF16, shape=(D,), name=n).address
        for w, n in ((q_weight, "q_weight"), (k_weight, "k_weight"))
    ]
    shape = (*a.shape[:-1], heads + kv_heads)
    r = describe(rstd, dtype=DType.FP32, shape=shape, name="rstd")
    dqkv, dq_weight, dk_weight = empty_like(a), empty_like(a, shape=(D,)), empty_like(a, shape=(D,))
    dqkv_, dq_, dk_ = (describe(o, dtype=DType.BF16).address for o in (dqkv, dq_weight, dk_weight))
    scratch = describe(empty_like(a, shape=(2, BLOCKS, D), dtype=DType.FP32), dtype=DType.FP32)
    qk_norm_backward_launch(
        dqkv_, dq_, dk_, b.address, a.address, weights[0], weights[1], r.address,
        scratch=scratch.address,
        rows=a.size // a.shape[-1], H=heads, G=kv_heads, D=D, accumulate=False,
        stream=current_stream(a),
    )  # fmt: skip
    return dqkv, dq_weight, dk_weight


# ---- cost --------------------------------------------------------------------------------------
def qk_norm_bytes(
    N: int, H: int, G: int, D: int, *, backward: bool = False, itemsize: int = 2
) -> int:
    """Read x (and dy), write y (or dx): whole rows, and rstd."""
    return (3 if backward else 2) * N * (H + 2 * G) * D * itemsize + 4 * N * (H + G)


# ---- reference ---------------------------------------------------------------------------------
def qk_norm_forward_ref(
    qkv: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, H: int, G: int, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """float64 NumPy oracle on qkv (N, (H + 2 G) D): (y, rstd)."""
    x = qkv.astype(np.float64).reshape(len(qkv), H + 2 * G, -1)
    rstd = 1 / np.sqrt((x**2).mean(-1) + eps)[:, : H + G]
    weight = np.concatenate([np.tile(q_weight, (H, 1)), np.tile(k_weight, (G, 1))])
    y = x.copy()
    y[:, : H + G] = x[:, : H + G] * rstd[..., None] * weight.astype(np.float64)
    return y.reshape(qkv.shape), rstd


def qk_norm_backward_ref(
    dy: np.ndarray, qkv: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, rstd: np.ndarray,
    H: int, G: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """float64 NumPy oracle: (dqkv, dq_weight, dk_weight)."""
    heads = (len(qkv), H + 2 * G, -1)
    g, x = (a.astype(np.float64).reshape(heads)[:, : H + G] for a in (dy, qkv))
    r = rstd.astype(np.float64)[..., None]
    weight = np.concatenate([np.tile(q_weight, (H, 1)), np.tile(k_weight, (G, 1))])
    weight = weight.astype(np.float64)
    m = (weight * g * x).mean(-1, keepdims=True) * r
    dx = dy.astype(np.float64).reshape(heads)
    dx[:, : H + G] = r * (weight * g - x * r * m)
    terms = g * x * r
    return dx.reshape(qkv.shape), terms[:, :H].sum((0, 1)), terms[:, H:].sum((0, 1))


COMPILE_CASES = [
    CompileCase(
        factory, {"H": H, "G": G, "D": D, "dtype": dtype}, signature, THREADS, options=options
    )
    for factory, signature, options in (
        (make_qk_norm_forward, FORWARD_SIGNATURE, DEFAULT),
        (make_qk_norm_backward, BACKWARD_SIGNATURE, TWO_BLOCKS),
    )
    for H, G, D, dtype in ((16, 8, 128, "bf16"), (14, 2, 64, "bf16"), (16, 8, 128, "fp32"))
]
