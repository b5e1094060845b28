r"""Attention backward on mma.sync, for every card from sm_80: row statistics and dQ (equations:
attention.py; dK and dV: attention_dkdv.py). No atomics, so the bits repeat.

    statistics   delta = rowsum(dO * O), and lse in base 2, padded for aligned loads
    dq           a block owns QUERIES rows of one head and walks its key tiles:  dQ += dS K

S and P are recomputed here and in dkdv, so seven products of the size of Q K^T instead of five.

Shapes   q, k, v as forward; dout, out: (B, T, H, D); dq: rows of dq_stride bytes.
         stats: (B, H, 2, P) float32, P = padded_length(T): log2(e) * lse, then delta; from T on
         1e30 and 0, which make the row's P and dS zero.
Source   Dao 2023, arXiv:2307.08691, algorithm 2, split in two walks. Written from the equations.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.attention_tiles import (
    LOG2E,
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
    make_load_pair,
    make_mask,
    make_scores,
    make_stage_rows,
)
from llmq_nb.kernels.compile import CompileCase, Options
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    bf_hi,
    bf_lo,
    cp_commit,
    cp_wait0,
    ex2,
    ffma,
    ldg32f,
    ldg128_nc,
    shfl_xorf,
    smem_addr,
    stg32f,
    syncwarp,
)

STATISTICS_SIGNATURE = (types.uint64,) * 4 + (types.int32,) * 4
DQ_SIGNATURE = (types.uint64,) * 7 + (types.int32,) * 10 + (types.float32,) * 2

STATISTICS_THREADS = 256
PADDING = 128
"""Rows of `stats` are padded to this, the largest query tile of any kernel."""
ABSENT = np.float32(1e30)
"""Base-2 lse of a query that does not exist."""

TILES: dict[int, tuple[Tile, ...]] = {
    64: (Tile(128, 64), Tile(128, 32), Tile(64, 64, blocks=3), Tile(64, 64)),
    128: (Tile(128, 32), Tile(64, 64), Tile(64, 32, stages=1)),
}
"""Shapes of dq worth trying, by head_dim: the first is the default for cards with more than 100 KB
of shared memory a multiprocessor, the last for the others."""


def padded_length(T: int) -> int:
    """Row length of `stats`."""
    return cdiv(T, PADDING) * PADDING


def shared_bytes(D: int, tile: Tile) -> int:
    """Dynamic shared memory of a dq block: Q, dO, stages of K and V."""
    return (2 * tile.queries + 2 * tile.stages * tile.keys) * 2 * D


def constants(D: int, tile: Tile, *, causal: bool = True) -> dict[str, Any]:
    """Keyword arguments of the factories of dkdv and dq."""
    return {
        "D": D, "QUERIES": tile.queries, "KEYS": tile.keys, "WARPS": tile.warps,
        "STAGES": tile.stages, "CAUSAL": causal,
    }  # fmt: skip


def make_attention_statistics(D: int):
    """Kernel: stats from out, dout (16-byte loads, D / 8 lanes a row) and lse."""
    LANES = D // 8

    def attention_statistics(stats, out, dout, lse, rows, T, padded, H):
        i = cuda.blockIdx.x * STATISTICS_THREADS + cuda.threadIdx.x
        row = i // LANES  # (b, t, h), t < padded
        bt = divide(row, H)
        h = row - bt * H
        b = divide(bt, padded)
        t = bt - b * padded
        exists = row < rows and t < T
        delta = ZERO
        if exists:
            start = ((np.int64(b) * T + t) * H + h) * (2 * D) + (i % LANES) * 16
            x = cuda.local.array(4, dtype=np.uint32)
            y = cuda.local.array(4, dtype=np.uint32)
            x[0], x[1], x[2], x[3] = ldg128_nc(out + start)
            y[0], y[1], y[2], y[3] = ldg128_nc(dout + start)
            for j in range(4):
                delta = ffma(bf_lo(x[j]), bf_lo(y[j]), delta)
                delta = ffma(bf_hi(x[j]), bf_hi(y[j]), delta)
        step = LANES // 2
        while step > 0:  # every lane takes part
            delta += shfl_xorf(delta, step)
            step >>= 1
        if row < rows and i % LANES == 0:
            head = np.int64(b) * H + h
            value = ABSENT
            if exists:
                value = ldg32f(lse + (head * T + t) * 4) * LOG2E
            stg32f(stats + (head * 2 * padded + t) * 4, value)
            stg32f(stats + (head * 2 * padded + padded + t) * 4, delta)

    return attention_statistics


def make_attention_dq(D: int, QUERIES: int, KEYS: int, WARPS: int, STAGES: int, CAUSAL: bool):
    """Kernel for dQ; arguments are device addresses, extents, byte strides."""
    ROW = 2 * D
    CHUNKS = D // 8
    STEP = WARPS * 32 // CHUNKS
    M_TILES = QUERIES // (16 * WARPS)
    WARP_ROWS = 16 * M_TILES
    D8 = D // 8
    N8 = KEYS // 8
    STAGE = KEYS * ROW
    LATER = STAGES * STAGE  # from a K stage to its V stage
    load_queries = make_load_pair(QUERIES, STEP, ROW)
    load_keys = make_load_pair(KEYS, STEP, ROW)
    clear = make_clear(M_TILES, D8)
    scores = make_scores(D, M_TILES, KEYS)
    accumulate = make_accumulate(D, M_TILES, KEYS)
    mask = make_mask(M_TILES, KEYS, CAUSAL)
    stage_rows = make_stage_rows(D)
    copy_rows = make_copy_rows(D, WARP_ROWS)

    def attention_dq(
        dq, q, k, v, dout, stats, segment_start, heads, T, padded, H, group, tiles, swath,
        q_stride, kv_stride, dq_stride, scale, scale_log2,
    ):  # fmt: skip
        sq = smem_addr(cuda.shared.array(0, dtype=types.uint32))
        sk = sq + 2 * QUERIES * ROW
        tid = cuda.threadIdx.x
        lane = tid & 31
        warp_row = (tid >> 5) * WARP_ROWS
        bh, tile = block_order(cuda.blockIdx.x, heads, tiles, swath)
        b = divide(bh, H)
        h = bh - b * H
        base = np.int64(b) * T
        m0 = (tiles - 1 - tile) * QUERIES  # the longest rows first
        last = min(m0 + QUERIES, T) - 1
        n = first_key(segment_start, base + m0) // KEYS
        n_end = (last if CAUSAL else T - 1) // KEYS
        mixed = first_key(segment_start, base + last)
        open_keys = m0 + 1 if CAUSAL else T  # every row sees the keys below it

        chunk = tid % CHUNKS
        row = tid // CHUNKS
        own = row * ROW + ((chunk ^ (row & 7)) << 4)
        load_queries(
            sq + own, sq + QUERIES * ROW + own,
            q + (base + m0 + row) * q_stride + (h * ROW + chunk * 16),
            dout + ((base + m0 + row) * H + h) * ROW + chunk * 16,
            q_stride, H * ROW, T - m0 - row,
        )  # fmt: skip
        at = (base + row) * kv_stride + (divide(h, group) * ROW + chunk * 16)
        kg = k + at
        vg = v + at
        step = n * KEYS * kv_stride
        rows = T - n * KEYS - row
        load_keys(sk + own, sk + LATER + own, kg + step, vg + step, kv_stride, kv_stride, rows)
        cp_commit()
        query_a = a_address(sq, warp_row, ROW)
        key_b = b_address(sk, ROW)
        key_t = a_address(sk, 0, ROW)

        g = cuda.local.array((M_TILES, D8, 4), dtype=np.float32)
        s = cuda.local.array((M_TILES, N8, 4), dtype=np.float32)
        dp = cuda.local.array((M_TILES, N8, 4), dtype=np.float32)
        a = cuda.local.array((M_TILES, 4), dtype=np.uint32)
        lse = cuda.local.array((M_TILES, 2), dtype=np.float32)
        delta = cuda.local.array((M_TILES, 2), dtype=np.float32)
        clear(g)
        for m in range(M_TILES):
            for r in range(2):
                query = m0 + warp_row + m * 16 + r * 8 + (lane >> 2)
                lse[m, r] = ldg32f(stats + (np.int64(bh) * 2 * padded + query) * 4)
                delta[m, r] = ldg32f(stats + (np.int64(bh) * 2 * padded + padded + query) * 4)
        stage = 0
        while n <= n_end:
            after = stage ^ (STAGES - 1)
            step = (n + 1) * KEYS * kv_stride
            rows = T - (n + 1) * KEYS - row
            cp_wait0()
            cuda.syncthreads()  # this tile is here; every warp is done with the last one
            if STAGES == 2 and n < n_end:
                target = sk + after * STAGE + own
                load_keys(
                    target, target + LATER, kg + step, vg + step, kv_stride, kv_stride, rows
                )  # fmt: skip
            cp_commit()
            here = stage * STAGE
            scores(s, a, query_a, key_b + here)
            scores(dp, a, query_a + QUERIES * ROW, key_b + LATER + here)
            if (n + 1) * KEYS > open_keys or n * KEYS < mixed:
                first_query = m0 + warp_row + (lane >> 2)
                mask(s, segment_start, base, first_query, n * KEYS + ((lane & 3) << 1), T)
            for m in range(M_TILES):
                for j in range(N8):
                    for c in range(4):
                        p = ex2(ffma(s[m, j, c], scale_log2, -lse[m, c >> 1]))
                        dp[m, j, c] = p * (dp[m, j, c] - delta[m, c >> 1])
            accumulate(g, dp, a, key_t + here)
            if STAGES == 1 and n < n_end:
                cuda.syncthreads()  # every warp is done with the only stage
                load_keys(
                    sk + own, sk + LATER + own, kg + step, vg + step, kv_stride, kv_stride, rows
                )  # fmt: skip
                cp_commit()
            stage = after
            n += 1

        cp_wait0()
        syncwarp()
        for m in range(M_TILES):  # stage through this warp's own Q rows
            for r in range(2):
                tile_row = warp_row + m * 16 + r * 8 + (lane >> 2)
                stage_rows(sq, g, m, r, tile_row, scale)
        syncwarp()
        copy_rows(dq + (base + m0) * dq_stride + h * ROW, dq_stride, sq, warp_row, T - m0)

    return attention_dq


def statistics_launch(
    stats: int, out: int, dout: int, lse: int, *, B: int, T: int, H: int, D: int, stream: Any
) -> None:
    """Write stats from out, dout, lse (device addresses)."""
    launch = kernel(make_attention_statistics, STATISTICS_SIGNATURE, STATISTICS_THREADS, D=D)
    padded = padded_length(T)
    rows = B * padded * H
    grid = cdiv(rows * (D // 8), STATISTICS_THREADS)
    launch(stream, (grid,), stats, out, dout, lse, rows, T, padded, H)


COMPILE_CASES = [
    CompileCase(make_attention_statistics, {"D": D}, STATISTICS_SIGNATURE, STATISTICS_THREADS)
    for D in (64, 128)
] + [
    CompileCase(
        make_attention_dq,
        constants(D, tile),
        DQ_SIGNATURE,
        tile.warps * 32,
        shared_bytes(D, tile),
        Options(min_blocks=tile.blocks),
    )
    for D, tiles in TILES.items()
    for tile in tiles
    if tile.blocks == 0
]
