r"""Attention of new tokens over cached keys and values: what generation runs.

    p(b, t)          = t - segment_start[b, t]              the token's position, as rope takes it
    cache[b, p]      = [k; v] of the token                  first, for all tokens with p < S
    out[b, t, h]     = sum_s softmax_s(q[b, t, h] . k[b, s, h / group] / sqrt(D)) v[b, s, h / group]
                       over s = 0 .. min(p, S - 1)

So segment_start = -p begins a piece of a text at position p, and rows of different lengths lie in
one batch: what a row has beyond its end is written at positions that nothing reads before it is
written again.

Shapes   heads: (B, T, (H + 2 G) D) row-major, a row is [q; k; v]; cache: (B, S, 2 G D); out:
         (B, T, H D); segment_start: (B, T). D = 8, 16, ..., 256; group = H / G.
Dtypes   heads, cache, out: bfloat16 or float32 (`dtype`); segment_start: int32.
Errors   float32 inside, probabilities too. A score is D / 8 chains of 8 fused adds and a tree; a
         sum over s goes in order within each of the block's chains (32 for D 64), which then join
         in a tree. ex2.approx: 2^-22. One rounding of out. A fixed order, no atomics: bitwise
         reproducible.
Cost     A block for each new token and query head; a key and a value are read once by each. The
         cache is read H / G times from the L2 cache; no speed goal for long prompts.
Source   Dao et al. 2023, "Flash-Decoding" (the split over keys); Dao 2023, arXiv:2307.08691
         (joining two parts of a softmax). Written from the equations.
"""

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.attention_tiles import FIRST_MAXIMUM, ZERO
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ex2, ffma, fmax, ldg32, lds32f, rcp, shfl_xorf, smem_addr, sts32f
from llmq_nb.kernels.vector import PIECE, vector

WARPS = 8
THREADS = WARPS * 32
LOG2E = math.log2(math.e)
STORE_SIGNATURE = (*(types.uint64,) * 3, *(types.int32,) * 3)
SIGNATURE = (*(types.uint64,) * 4, *(types.int32,) * 2, types.float32)


def make_cache_store(H: int, G: int, D: int, dtype: str):
    """Kernel that copies the keys and values of new tokens into the cache."""
    v = vector(dtype)
    WORDS, BYTES, load, store = v.words, v.bytes, v.load, v.store
    ROW = 2 * G * D // PIECE  # pieces
    HEADS_ROW, KEYS = (H + 2 * G) * D, H * D

    def cache_store(cache, heads, segment_start, rows, T, S):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        n = i // ROW
        if n < rows:
            column = (i - n * ROW) * PIECE
            t = n % T
            p = t - np.int32(ldg32(segment_start + n * 4))
            tile = cuda.local.array((1, WORDS), dtype=types.uint32)
            load(tile, 0, heads + (n * HEADS_ROW + KEYS + column) * BYTES, p < S)
            at = (n // T * S + p) * (ROW * PIECE) + column
            store(cache + at * BYTES, tile, 0, p < S)

    return cache_store


def make_attention_cached(H: int, G: int, D: int, dtype: str):
    """Kernel for out: a block is one token's head, LANES lanes hold a key's row."""
    v = vector(dtype)
    WORDS, BYTES, load, store, low, high = v.words, v.bytes, v.load, v.store, v.low, v.high
    set_pair = v.set_pair
    GROUP = H // G
    LANES = D // PIECE
    CHAINS = 32 // LANES  # keys that a warp looks at together
    LEVELS = LANES.bit_length() - 1
    JOINS = CHAINS.bit_length() - 1
    HEADS_ROW, CACHE_ROW = (H + 2 * G) * D, 2 * G * D
    SLOT = D + 2  # floats that a warp leaves: largest, total, D sums
    SHARED = WARPS * SLOT

    def attention_cached(out, heads, cache, segment_start, T, S, scale):
        n = np.int64(cuda.blockIdx.x) // H
        h = cuda.blockIdx.x % H
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        column = (lane & (LANES - 1)) * PIECE
        p = np.int32(n % T) - np.int32(ldg32(segment_start + n * 4))
        keys = min(p + 1, S)
        x = cuda.local.array((1, WORDS), dtype=types.uint32)
        y = cuda.local.array((2, WORDS), dtype=types.uint32)
        q = cuda.local.array(PIECE, dtype=np.float32)
        acc = cuda.local.array(PIECE, dtype=np.float32)
        load(x, 0, heads + (n * HEADS_ROW + h * D + column) * BYTES, True)
        for j in range(4):
            q[2 * j] = low(x, 0, j) * scale
            q[2 * j + 1] = high(x, 0, j) * scale
            acc[2 * j] = ZERO
            acc[2 * j + 1] = ZERO
        largest = FIRST_MAXIMUM
        total = ZERO
        base = cache + (n // T * S * CACHE_ROW + h // GROUP * D + column) * BYTES
        first = warp * CHAINS
        while first < keys:  # alike for all lanes of a warp: they shuffle inside
            s = first + lane // LANES
            inside = s < keys
            at = base + np.int64(s) * (CACHE_ROW * BYTES)
            load(y, 0, at, inside)
            load(y, 1, at + G * D * BYTES, inside)
            score = ZERO
            for j in range(4):
                score = ffma(q[2 * j], low(y, 0, j), score)
                score = ffma(q[2 * j + 1], high(y, 0, j), score)
            for level in range(LEVELS):
                score = score + shfl_xorf(score, 1 << level)
            top = fmax(largest, score) if inside else largest
            shrink = ex2(largest - top)
            e = ex2(score - top) if inside else ZERO
            largest = top
            total = ffma(total, shrink, e)
            for j in range(4):
                acc[2 * j] = ffma(acc[2 * j], shrink, e * low(y, 1, j))
                acc[2 * j + 1] = ffma(acc[2 * j + 1], shrink, e * high(y, 1, j))
            first += WARPS * CHAINS
        for level in range(JOINS):
            offset = LANES << level
            other = shfl_xorf(largest, offset)
            top = fmax(largest, other)
            mine, theirs = ex2(largest - top), ex2(other - top)
            total = total * mine + shfl_xorf(total, offset) * theirs
            for j in range(PIECE):
                acc[j] = acc[j] * mine + shfl_xorf(acc[j], offset) * theirs
            largest = top
        partial = smem_addr(cuda.shared.array(SHARED, dtype=types.float32))
        if lane < LANES:
            slot = partial + warp * SLOT * 4
            if lane == 0:
                sts32f(slot, largest)
                sts32f(slot + 4, total)
            for j in range(PIECE):
                sts32f(slot + (2 + column + j) * 4, acc[j])
        cuda.syncthreads()  # every warp's part is there
        if cuda.threadIdx.x < LANES:
            top = lds32f(partial)
            for w in range(1, WARPS):
                top = fmax(top, lds32f(partial + w * SLOT * 4))
            total = ZERO
            for j in range(PIECE):
                acc[j] = ZERO
            for w in range(WARPS):
                slot = partial + w * SLOT * 4
                part = ex2(lds32f(slot) - top)  # 0 of a warp without keys
                total = ffma(lds32f(slot + 4), part, total)
                for j in range(PIECE):
                    acc[j] = ffma(lds32f(slot + (2 + column + j) * 4), part, acc[j])
            inverse = rcp(total)
            for j in range(4):
                set_pair(x, 0, j, acc[2 * j] * inverse, acc[2 * j + 1] * inverse)
            store(out + ((n * H + h) * D + column) * BYTES, x, 0, True)

    return attention_cached


# ---- launch ------------------------------------------------------------------------------------
def attention_cached_launch(
    out: int, cache: int, heads: int, segment_start: int, *, B: int, T: int, S: int, H: int, G: int,
    D: int, dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write the new keys and values into cache (B, S, 2 G D), then out (B, T, H D)."""
    constants = {"H": H, "G": G, "D": D, "dtype": str(dtype)}
    rows = B * T
    k = kernel(make_cache_store, STORE_SIGNATURE, THREADS, **constants)
    grid = cdiv(rows * 2 * G * D // PIECE, THREADS)
    k(stream, (grid,), cache, heads, segment_start, rows, T, S)
    k = kernel(make_attention_cached, SIGNATURE, THREADS, **constants)
    scale = LOG2E / math.sqrt(D)
    k(stream, (rows * H,), out, heads, cache, segment_start, T, S, scale)


# ---- users -------------------------------------------------------------------------------------
def forward(qkv: Any, cache: Any, segment_start: Any, *, heads: int, kv_heads: int) -> Any:
    """Attention of rotated bfloat16 qkv (B, T, (heads + 2 kv_heads) D), which the cache then holds.

    cache: (B, S, 2 kv_heads D) bfloat16, changed in place; segment_start: (B, T) int32, t minus the
    token's position. Returns out (B, T, heads D). ValueError on other shapes or dtypes.

    >>> out = attention_cached.forward(qkv, cache, segment_start, heads=14, kv_heads=2)
    """
    a = describe(qkv, dtype=DType.BF16, shape=(None, None, None), name="qkv")
    B, T, width = a.shape
    D, rest = divmod(width, heads + 2 * kv_heads)
    if rest or D not in (8, 16, 32, 64, 128, 256) or heads % kv_heads:
        raise ValueError(
            f"qkv has rows of {width}, which {heads} + 2 * {kv_heads} heads do not share as 8, 16, "
            "32, 64, 128 or 256 each, or heads are no multiple of kv_heads"
        )
    c = describe(cache, dtype=DType.BF16, shape=(B, None, 2 * kv_heads * D), name="cache")
    start = describe(segment_start, dtype=DType.INT32, shape=(B, T), name="segment_start")
    out = empty_like(a, shape=(B, T, heads * D))
    attention_cached_launch(
        describe(out, dtype=DType.BF16).address, c.address, a.address, start.address, B=B, T=T,
        S=c.shape[1], H=heads, G=kv_heads, D=D, dtype="bf16", stream=current_stream(a),
    )  # fmt: skip
    return out


# ---- cost --------------------------------------------------------------------------------------
def attention_cached_bytes(B: int, T: int, S: int, H: int, G: int, D: int, *, itemsize: int = 2):
    """Keys and values up to position S once for each new token and group; q and out once."""
    return B * T * (2 * S * G * D + 2 * H * D) * itemsize


# ---- reference ---------------------------------------------------------------------------------
def attention_cached_ref(
    heads: np.ndarray, cache: np.ndarray, segment_start: np.ndarray, H: int, G: int
) -> tuple[np.ndarray, np.ndarray]:
    """float64 NumPy oracle: (out, the new cache) of heads (B, T, (H + 2 G) D)."""
    B, T, width = heads.shape
    D, S = width // (H + 2 * G), cache.shape[1]
    cache = cache.copy()
    positions = np.arange(T) - segment_start
    for b in range(B):
        kept = positions[b] < S
        cache[b, positions[b][kept]] = heads[b, kept, H * D :]
    q = heads.astype(np.float64)[..., : H * D].reshape(B, T, H, D)
    k, v = cache.astype(np.float64).reshape(B, S, 2, G, D).transpose(2, 0, 1, 3, 4)
    out = np.empty((B, T, H, D))
    for b, t, h in np.ndindex(B, T, H):
        seen = slice(0, min(positions[b, t] + 1, S))
        scores = k[b, seen, h * G // H] @ q[b, t, h] / math.sqrt(D)
        p = np.exp(scores - scores.max())
        out[b, t, h] = p @ v[b, seen, h * G // H] / p.sum()
    return out.reshape(B, T, H * D), cache


COMPILE_CASES = [
    CompileCase(factory, {"H": H, "G": G, "D": D, "dtype": dtype}, signature, THREADS)
    for factory, signature in (
        (make_cache_store, STORE_SIGNATURE),
        (make_attention_cached, SIGNATURE),
    )
    for H, G, D, dtype in ((14, 2, 64, "bf16"), (12, 2, 128, "bf16"), (9, 3, 64, "fp32"))
]
