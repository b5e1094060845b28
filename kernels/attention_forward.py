r"""Attention forward on mma.sync, for every card from sm_80 (equations: attention.py).

A block owns QUERIES rows of one head and walks the key tiles from the diagonal down to the first
tile of its documents, with the running maximum and sum of each row (online softmax, base 2). The
next K tile and this V tile travel under the other product.

Shapes   q: rows of q_stride bytes, head h at h * D; k, v: rows of kv_stride bytes, head h / group;
         out: (B, T, H, D); lse: (B, H, T). Any T: rows beyond it are read as zeros, never written.
Dtypes   q, k, v, out: bfloat16; lse: float32 (natural logarithm).
Source   Dao 2023, arXiv:2307.08691, algorithm 1. Written from the equations.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.attention_tiles import (
    FIRST_MAXIMUM,
    LN2,
    ZERO,
    Tile,
    a_address,
    b_address,
    block_order,
    divide,
    first_key,
    make_accumulate,
    make_clear,
    make_copy_rows,
    make_loaders,
    make_mask,
    make_scores,
    make_stage_rows,
)
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.ptx import (
    cp_commit,
    cp_wait0,
    ex2,
    ffma,
    fmax,
    lg2,
    rcp,
    smem_addr,
    stg32f,
    syncwarp,
)
from llmq_nb.kernels.reduce import quad_max, quad_sum

SIGNATURE = (types.uint64,) * 6 + (types.int32,) * 8 + (types.float32,)

TILES: dict[int, tuple[Tile, ...]] = {
    64: (Tile(128, 64), Tile(64, 64)),
    128: (Tile(128, 64), Tile(64, 64), Tile(128, 32)),
}
"""Shapes worth trying, by head_dim; the first is the default."""


def shared_bytes(D: int, tile: Tile) -> int:
    """Dynamic shared memory a block: Q, one K, one V tile."""
    return (tile.queries + 2 * tile.keys) * 2 * D


def constants(D: int, tile: Tile, *, causal: bool = True) -> dict[str, Any]:
    """Keyword arguments of the kernel factory."""
    return {
        "D": D, "QUERIES": tile.queries, "KEYS": tile.keys, "WARPS": tile.warps, "CAUSAL": causal
    }  # fmt: skip


def make_online_softmax(D: int, M_TILES: int, KEYS: int):
    """online_softmax(s, acc, largest, total, scale_log2): scores -> exp2(score - largest), with
    the rows' maxima and sums so far and the accumulator brought to the new maximum."""
    D8 = D // 8
    N8 = KEYS // 8

    @cuda.jit(device=True)
    def online_softmax(s, acc, largest, total, scale_log2):
        for m in range(M_TILES):
            for r in range(2):
                top = largest[m, r]
                for j in range(N8):
                    top = fmax(fmax(top, s[m, j, 2 * r]), s[m, j, 2 * r + 1])
                top = quad_max(top)
                shrink = ex2((largest[m, r] - top) * scale_log2)
                largest[m, r] = top
                offset = -(top * scale_log2)
                t = total[m, r] * shrink
                for j in range(D8):
                    acc[m, j, 2 * r] = acc[m, j, 2 * r] * shrink
                    acc[m, j, 2 * r + 1] = acc[m, j, 2 * r + 1] * shrink
                for j in range(N8):
                    p0 = ex2(ffma(s[m, j, 2 * r], scale_log2, offset))
                    p1 = ex2(ffma(s[m, j, 2 * r + 1], scale_log2, offset))
                    s[m, j, 2 * r] = p0
                    s[m, j, 2 * r + 1] = p1
                    t += p0 + p1
                total[m, r] = t

    return online_softmax


def make_attention_forward(D: int, QUERIES: int, KEYS: int, WARPS: int, CAUSAL: bool):
    """Kernel for one tile shape; arguments are device addresses, extents, byte strides."""
    ROW = 2 * D
    CHUNKS = D // 8
    STEP = WARPS * 32 // CHUNKS
    M_TILES = QUERIES // (16 * WARPS)
    WARP_ROWS = 16 * M_TILES
    D8 = D // 8
    N8 = KEYS // 8
    load_queries = make_loaders(QUERIES, STEP, ROW)[1]
    load_tile, load_edge = make_loaders(KEYS, STEP, ROW)
    clear = make_clear(M_TILES, D8)
    scores = make_scores(D, M_TILES, KEYS)
    accumulate = make_accumulate(D, M_TILES, KEYS)
    mask = make_mask(M_TILES, KEYS, CAUSAL)
    online_softmax = make_online_softmax(D, M_TILES, KEYS)
    stage_rows = make_stage_rows(D)
    copy_rows = make_copy_rows(D, WARP_ROWS)

    def attention_forward(
        out, lse, q, k, v, segment_start, heads, T, H, group, tiles, swath, q_stride, kv_stride,
        scale_log2,
    ):  # fmt: skip
        sq = smem_addr(cuda.shared.array(0, dtype=types.uint32))
        sk = sq + QUERIES * ROW
        sv = sk + KEYS * ROW
        tid = cuda.threadIdx.x
        lane = tid & 31
        warp_row = (tid >> 5) * WARP_ROWS
        bh, tile = block_order(cuda.blockIdx.x, heads, tiles, swath)
        b = divide(bh, H)
        h = bh - b * H
        base = np.int64(b) * T
        m0 = (tiles - 1 - tile) * QUERIES  # the longest rows first
        # keys of the tile: from the first row's document start to the last row (or T)
        last = min(m0 + QUERIES, T) - 1
        n = (last if CAUSAL else T - 1) // KEYS
        n_end = first_key(segment_start, base + m0) // KEYS
        mixed = first_key(segment_start, base + last)
        open_keys = m0 + 1 if CAUSAL else T  # every row sees the keys below it

        chunk = tid % CHUNKS
        row = tid // CHUNKS
        own = row * ROW + ((chunk ^ (row & 7)) << 4)
        qg = q + (base + m0 + row) * q_stride + (h * ROW + chunk * 16)
        kg = k + (base + row) * kv_stride + (divide(h, group) * ROW + chunk * 16)
        vg = v + (base + row) * kv_stride + (divide(h, group) * ROW + chunk * 16)
        load_queries(sq + own, qg, q_stride, T - m0 - row)
        load_edge(sk + own, kg + n * KEYS * kv_stride, kv_stride, T - n * KEYS - row)
        cp_commit()
        query_a = a_address(sq, warp_row, ROW)
        key_b = b_address(sk, ROW)
        value_b = a_address(sv, 0, ROW)

        acc = cuda.local.array((M_TILES, D8, 4), dtype=np.float32)
        s = cuda.local.array((M_TILES, N8, 4), dtype=np.float32)
        a = cuda.local.array((M_TILES, 4), dtype=np.uint32)
        largest = cuda.local.array((M_TILES, 2), dtype=np.float32)
        total = cuda.local.array((M_TILES, 2), dtype=np.float32)
        clear(acc)
        for m in range(M_TILES):
            for r in range(2):
                largest[m, r] = FIRST_MAXIMUM
                total[m, r] = ZERO
        while n >= n_end:
            cp_wait0()
            cuda.syncthreads()  # K (and Q) are here; every warp is done with the last V
            if (n + 1) * KEYS <= T:
                load_tile(sv + own, vg + n * KEYS * kv_stride, kv_stride)
            else:
                load_edge(sv + own, vg + n * KEYS * kv_stride, kv_stride, T - n * KEYS - row)
            cp_commit()
            scores(s, a, query_a, key_b)
            cp_wait0()
            cuda.syncthreads()  # V is here; every warp is done with K
            if n > n_end:
                load_tile(sk + own, kg + (n - 1) * KEYS * kv_stride, kv_stride)
            cp_commit()
            if (n + 1) * KEYS > open_keys or n * KEYS < mixed:
                first_query = m0 + warp_row + (lane >> 2)
                mask(s, segment_start, base, first_query, n * KEYS + ((lane & 3) << 1), T)
            online_softmax(s, acc, largest, total, scale_log2)
            accumulate(acc, s, a, value_b)
            n -= 1

        for m in range(M_TILES):  # normalise, stage through this warp's own Q rows
            for r in range(2):
                t = quad_sum(total[m, r])
                tile_row = warp_row + m * 16 + r * 8 + (lane >> 2)
                if (lane & 3) == 0 and m0 + tile_row < T:
                    value = (largest[m, r] * scale_log2 + lg2(t)) * LN2
                    stg32f(lse + (np.int64(bh) * T + m0 + tile_row) * 4, value)
                stage_rows(sq, acc, m, r, tile_row, rcp(t))
        syncwarp()
        target = out + ((base + m0) * H + h) * ROW
        copy_rows(target, H * ROW, sq, warp_row, T - m0)

    return attention_forward


COMPILE_CASES = [
    CompileCase(
        make_attention_forward,
        constants(D, tile),
        SIGNATURE,
        tile.warps * 32,
        smem=shared_bytes(D, tile),
    )
    for D, tiles in TILES.items()
    for tile in tiles
] + [
    CompileCase(
        make_attention_forward,
        constants(128, TILES[128][0], causal=False),
        SIGNATURE,
        TILES[128][0].warps * 32,
        smem=shared_bytes(128, TILES[128][0]),
    )
]
