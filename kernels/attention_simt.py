r"""Attention in float32 without tensor cores, for tests (equations: attention.py).

One warp a row, each lane D / 32 of its elements; no tiles, no shared memory, no speed goal.

Shapes   as attention.py, q_stride and kv_stride in bytes.
Dtypes   everything float32.
Errors   Every sum in float32: a dot product of D / 32 fused adds a lane and five levels, a row of t
         keys adds t terms in order. ex2.approx and lg2.approx: 2^-22 each.
Source   Dao 2023, arXiv:2307.08691, eqs. of section 2. Written from the equations.
"""

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.attention_tiles import FIRST_MAXIMUM, LN2, LOG2E, ZERO, first_key, queries_end
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.ptx import ex2, ffma, fmax, ldg32f, lg2, stg32f
from llmq_nb.kernels.reduce import warp_sum

FORWARD_SIGNATURE = (types.uint64,) * 6 + (types.int32,) * 7 + (types.float32,)
DQ_SIGNATURE = (types.uint64,) * 8 + (types.int32,) * 8 + (types.float32,)
DKDV_SIGNATURE = (types.uint64,) * 9 + (types.int32,) * 8 + (types.float32,)
THREADS = 128
ONE = np.float32(1.0)


@cuda.jit(device=True)
def _dot(x, y):
    """Product of two rows whose elements the lanes share out."""
    total = ZERO
    for i in range(x.size):
        total = ffma(x[i], y[i], total)
    return warp_sum(total)


def _make_row(LANE_WIDTH: int):
    @cuda.jit(device=True)
    def load_row(x, address):
        for i in range(LANE_WIDTH):
            x[i] = ldg32f(address + (i * 32 + (cuda.threadIdx.x & 31)) * 4)

    @cuda.jit(device=True)
    def store_row(address, x, factor):
        for i in range(LANE_WIDTH):
            stg32f(address + (i * 32 + (cuda.threadIdx.x & 31)) * 4, x[i] * factor)

    return load_row, store_row


def make_attention_forward_fp32(D: int):
    """Kernel for out and lse; row = (b, h, t)."""
    WIDTH = D // 32
    load_row, store_row = _make_row(WIDTH)

    def attention_forward_fp32(
        out, lse, q, k, v, segment_start, rows, T, H, group, q_stride, kv_stride, causal, scale
    ):
        row = cuda.blockIdx.x * (THREADS // 32) + (cuda.threadIdx.x >> 5)
        if row < rows:  # whole warps leave together
            t = row % T
            h = row // T % H
            base = np.int64(row // T // H) * T
            x = cuda.local.array(WIDTH, dtype=np.float32)
            y = cuda.local.array(WIDTH, dtype=np.float32)
            acc = cuda.local.array(WIDTH, dtype=np.float32)
            load_row(x, q + (base + t) * q_stride + h * D * 4)
            for i in range(WIDTH):
                acc[i] = ZERO
            largest = FIRST_MAXIMUM
            total = ZERO
            last = t if causal else T - 1
            for s in range(first_key(segment_start, base + t), last + 1):
                at = (base + s) * kv_stride + h // group * D * 4
                load_row(y, k + at)
                score = _dot(x, y) * scale * LOG2E
                top = fmax(largest, score)
                shrink = ex2(largest - top)
                p = ex2(score - top)
                largest = top
                total = ffma(total, shrink, p)
                load_row(y, v + at)
                for i in range(WIDTH):
                    acc[i] = ffma(acc[i], shrink, p * y[i])
            store_row(out + ((base + t) * H + h) * D * 4, acc, ONE / total)
            if (cuda.threadIdx.x & 31) == 0:
                stg32f(lse + np.int64(row) * 4, (largest + lg2(total)) * LN2)

    return attention_forward_fp32


def make_attention_dq_fp32(D: int):
    """Kernel for dQ; row = (b, h, t)."""
    WIDTH = D // 32
    load_row, store_row = _make_row(WIDTH)

    def attention_dq_fp32(
        dq, q, k, v, dout, out, lse, segment_start, rows, T, H, group, q_stride, kv_stride,
        dq_stride, causal, scale,
    ):  # fmt: skip
        row = cuda.blockIdx.x * (THREADS // 32) + (cuda.threadIdx.x >> 5)
        if row < rows:
            t = row % T
            h = row // T % H
            base = np.int64(row // T // H) * T
            x = cuda.local.array(WIDTH, dtype=np.float32)
            y = cuda.local.array(WIDTH, dtype=np.float32)
            dy = cuda.local.array(WIDTH, dtype=np.float32)
            acc = cuda.local.array(WIDTH, dtype=np.float32)
            load_row(x, q + (base + t) * q_stride + h * D * 4)
            load_row(dy, dout + ((base + t) * H + h) * D * 4)
            load_row(y, out + ((base + t) * H + h) * D * 4)
            delta = _dot(dy, y)
            row_lse = ldg32f(lse + np.int64(row) * 4)
            for i in range(WIDTH):
                acc[i] = ZERO
            last = t if causal else T - 1
            for s in range(first_key(segment_start, base + t), last + 1):
                at = (base + s) * kv_stride + h // group * D * 4
                load_row(y, v + at)
                dp = _dot(dy, y)
                load_row(y, k + at)
                ds = ex2((_dot(x, y) * scale - row_lse) * LOG2E) * (dp - delta)
                for i in range(WIDTH):
                    acc[i] = ffma(ds, y[i], acc[i])
            store_row(dq + (base + t) * dq_stride + h * D * 4, acc, scale)

    return attention_dq_fp32


def make_attention_dkdv_fp32(D: int):
    """Kernel for dK and dV; row = (b, g, s), all query heads of the group in order."""
    WIDTH = D // 32
    load_row, store_row = _make_row(WIDTH)

    def attention_dkdv_fp32(
        dk, dv, q, k, v, dout, out, lse, segment_start, rows, T, H, group, q_stride, kv_stride,
        dkv_stride, causal, scale,
    ):  # fmt: skip
        row = cuda.blockIdx.x * (THREADS // 32) + (cuda.threadIdx.x >> 5)
        if row < rows:
            s = row % T
            g = row // T % (H // group)
            b = row // T // (H // group)
            base = np.int64(b) * T
            key = cuda.local.array(WIDTH, dtype=np.float32)
            value = cuda.local.array(WIDTH, dtype=np.float32)
            x = cuda.local.array(WIDTH, dtype=np.float32)
            dy = cuda.local.array(WIDTH, dtype=np.float32)
            dkey = cuda.local.array(WIDTH, dtype=np.float32)
            dvalue = cuda.local.array(WIDTH, dtype=np.float32)
            load_row(key, k + (base + s) * kv_stride + g * D * 4)
            load_row(value, v + (base + s) * kv_stride + g * D * 4)
            for i in range(WIDTH):
                dkey[i] = ZERO
                dvalue[i] = ZERO
            end = queries_end(segment_start, base, s, T)
            for h in range(g * group, (g + 1) * group):
                for t in range(s if causal else 0, end):
                    load_row(dy, dout + ((base + t) * H + h) * D * 4)
                    load_row(x, out + ((base + t) * H + h) * D * 4)
                    dp = _dot(dy, value) - _dot(dy, x)
                    load_row(x, q + (base + t) * q_stride + h * D * 4)
                    row_lse = ldg32f(lse + ((np.int64(b) * H + h) * T + t) * 4)
                    p = ex2((_dot(x, key) * scale - row_lse) * LOG2E)
                    for i in range(WIDTH):
                        dvalue[i] = ffma(p, dy[i], dvalue[i])
                        dkey[i] = ffma(p * dp, x[i], dkey[i])
            store_row(dk + (base + s) * dkv_stride + g * D * 4, dkey, scale)
            store_row(dv + (base + s) * dkv_stride + g * D * 4, dvalue, ONE)

    return attention_dkdv_fp32


COMPILE_CASES = [
    CompileCase(factory, {"D": D}, signature, THREADS)
    for factory, signature in (
        (make_attention_forward_fp32, FORWARD_SIGNATURE),
        (make_attention_dq_fp32, DQ_SIGNATURE),
        (make_attention_dkdv_fp32, DKDV_SIGNATURE),
    )
    for D in (64, 128)
]
