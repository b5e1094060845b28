r"""Attention backward on mma.sync: dK and dV (equations: attention.py). No atomics.

A block owns KEYS keys of one key/value head and walks the query tiles of every query head of the
group, in order. S^T and dP^T are computed, so that P^T and dS^T are already A operands:

    S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q

Queries walked: from the block's first key to the end of its last key's document.

Shapes   q, k, v, dout, stats: attention_backward.py; dk, dv: rows of dkv_stride bytes.
Source   Dao 2023, arXiv:2307.08691, algorithm 2. Written from the equations.
"""

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.attention_backward import constants
from llmq_nb.kernels.attention_tiles import (
    Tile,
    a_address,
    b_address,
    block_order,
    divide,
    make_accumulate,
    make_clear,
    make_copy_rows,
    make_load_pair,
    make_mask_transposed,
    make_scores,
    make_stage_rows,
    queries_end,
)
from llmq_nb.kernels.compile import CompileCase, Options
from llmq_nb.kernels.ptx import (
    cp16,
    cp_commit,
    cp_wait0,
    ex2,
    ffma,
    lds64f,
    smem_addr,
    syncwarp,
)

SIGNATURE = (types.uint64,) * 8 + (types.int32,) * 10 + (types.float32,) * 2
ONE = np.float32(1.0)

TILES: dict[int, tuple[Tile, ...]] = {
    64: (Tile(64, 64), Tile(64, 64, blocks=3), Tile(32, 128), Tile(64, 64, stages=1)),
    128: (Tile(64, 64), Tile(32, 64, stages=1)),
}
"""Shapes worth trying, by head_dim, in the order of attention_backward.TILES."""


def shared_bytes(D: int, tile: Tile) -> int:
    """Dynamic shared memory a block: K, V, stages of Q, dO and two statistics a query."""
    rows = 2 * tile.keys + 2 * tile.stages * tile.queries
    return rows * 2 * D + 8 * tile.stages * tile.queries


def make_probabilities_transposed(M_TILES: int, QUERIES: int):
    """probabilities(s, dp, stats, scale_log2): S^T -> P^T = exp2(S^T - lse), dP^T -> dS^T = P^T
    (dP^T - delta); stats: shared address of this lane's first query's statistics."""
    N8 = QUERIES // 8

    @cuda.jit(device=True)
    def probabilities(s, dp, stats, scale_log2):
        for j in range(N8):
            l0, l1 = lds64f(stats + j * 32)
            d0, d1 = lds64f(stats + QUERIES * 4 + j * 32)
            for m in range(M_TILES):
                for c in range(4):
                    p = ex2(ffma(s[m, j, c], scale_log2, -(l1 if c & 1 else l0)))
                    s[m, j, c] = p
                    dp[m, j, c] = p * (dp[m, j, c] - (d1 if c & 1 else d0))

    return probabilities


def make_load_queries(QUERIES: int, STEP: int, ROW: int):
    """load_queries(sq, sd, sl, q, dout, stats, q_stride, dout_stride, padded, rows): one stage of
    Q, dO (this thread's chunks) and the statistics of its rows."""
    load_pair = make_load_pair(QUERIES, STEP, ROW)
    QUARTER = QUERIES // 4  # 16-byte pieces of one statistic
    PIECES = 2 * QUARTER

    @cuda.jit(device=True)
    def load_queries(sq, sd, sl, q, dout, stats, q_stride, dout_stride, padded, rows):
        load_pair(sq, sd, q, dout, q_stride, dout_stride, rows)
        t = cuda.threadIdx.x
        if t < PIECES:
            cp16(sl + t * 16, stats + (t // QUARTER * padded * 4 + t % QUARTER * 16))

    return load_queries


def make_attention_dkdv(D: int, QUERIES: int, KEYS: int, WARPS: int, STAGES: int, CAUSAL: bool):
    """Kernel for dK and dV; arguments are device addresses, extents, byte strides."""
    ROW = 2 * D
    CHUNKS = D // 8
    STEP = WARPS * 32 // CHUNKS
    M_TILES = KEYS // (16 * WARPS)
    WARP_ROWS = 16 * M_TILES
    D8 = D // 8
    N8 = QUERIES // 8
    STAGE = QUERIES * ROW
    LATER = STAGES * STAGE  # from a Q stage to its dO stage
    load_keys = make_load_pair(KEYS, STEP, ROW)
    load_queries = make_load_queries(QUERIES, STEP, ROW)
    clear = make_clear(M_TILES, D8)
    scores = make_scores(D, M_TILES, QUERIES)
    accumulate = make_accumulate(D, M_TILES, QUERIES)
    mask = make_mask_transposed(M_TILES, QUERIES, CAUSAL)
    probabilities = make_probabilities_transposed(M_TILES, QUERIES)
    stage_rows = make_stage_rows(D)
    copy_rows = make_copy_rows(D, WARP_ROWS)

    def attention_dkdv(
        dk, dv, q, k, v, dout, stats, segment_start, heads, T, padded, H, group, tiles, swath,
        q_stride, kv_stride, dkv_stride, scale, scale_log2,
    ):  # fmt: skip
        sk = smem_addr(cuda.shared.array(0, dtype=types.uint32))
        sv = sk + KEYS * ROW
        sq = sv + KEYS * ROW
        sl = sq + 2 * LATER
        tid = cuda.threadIdx.x
        lane = tid & 31
        warp_row = (tid >> 5) * WARP_ROWS
        bg, tile = block_order(cuda.blockIdx.x, heads, tiles, swath)  # tile 0: most queries
        b = divide(bg, divide(H, group))
        g = bg - b * divide(H, group)
        base = np.int64(b) * T
        n0 = tile * KEYS
        m_start = n0 // QUERIES * QUERIES if CAUSAL else 0
        m_end = queries_end(segment_start, base, min(n0 + KEYS, T) - 1, T)
        open_end = queries_end(segment_start, base, n0, T)  # queries before it see every key
        total = (m_end - m_start + QUERIES - 1) // QUERIES * group

        chunk = tid % CHUNKS
        row = tid // CHUNKS
        own = row * ROW + ((chunk ^ (row & 7)) << 4)
        at = (base + n0 + row) * kv_stride + (g * ROW + chunk * 16)
        load_keys(sk + own, sv + own, k + at, v + at, kv_stride, kv_stride, T - n0 - row)
        h = g * group
        m0 = m_start
        dout_stride = H * ROW
        qg = q + (base + row) * q_stride + chunk * 16
        dg = dout + (base + row) * dout_stride + chunk * 16
        sg = stats + np.int64(b) * H * padded * 8
        load_queries(
            sq + own, sq + LATER + own, sl, qg + m0 * q_stride + h * ROW,
            dg + m0 * dout_stride + h * ROW, sg + (h * 2 * padded + m0) * 4,
            q_stride, dout_stride, padded, T - m0 - row,
        )  # fmt: skip
        cp_commit()
        key_a = a_address(sk, warp_row, ROW)
        query_b = b_address(sq, ROW)
        query_t = a_address(sq, 0, ROW)

        gk = cuda.local.array((M_TILES, D8, 4), dtype=np.float32)
        gv = cuda.local.array((M_TILES, D8, 4), dtype=np.float32)
        s = cuda.local.array((M_TILES, N8, 4), dtype=np.float32)
        dp = cuda.local.array((M_TILES, N8, 4), dtype=np.float32)
        a = cuda.local.array((M_TILES, 4), dtype=np.uint32)
        clear(gk)
        clear(gv)
        stage = 0
        it = 0
        while it < total:
            it += 1
            next_h = h
            next_m = m0 + QUERIES
            if next_m >= m_end:
                next_m = m_start
                next_h = h + 1
            after = stage ^ (STAGES - 1)
            cp_wait0()
            cuda.syncthreads()  # this tile is here; every warp is done with the last one
            if STAGES == 2 and it < total:
                load_queries(
                    sq + after * STAGE + own, sq + LATER + after * STAGE + own,
                    sl + after * 8 * QUERIES, qg + next_m * q_stride + next_h * ROW,
                    dg + next_m * dout_stride + next_h * ROW,
                    sg + (next_h * 2 * padded + next_m) * 4,
                    q_stride, dout_stride, padded, T - next_m - row,
                )  # fmt: skip
            cp_commit()
            here = stage * STAGE
            scores(s, a, key_a, query_b + here)
            scores(dp, a, key_a + KEYS * ROW, query_b + LATER + here)
            if (CAUSAL and m0 < n0 + KEYS) or min(m0 + QUERIES, T) > open_end:
                key = n0 + warp_row + (lane >> 2)
                mask(s, segment_start, base, key, m0 + ((lane & 3) << 1), T)
            probabilities(s, dp, sl + stage * 8 * QUERIES + ((lane & 3) << 3), scale_log2)
            accumulate(gv, s, a, query_t + LATER + here)
            accumulate(gk, dp, a, query_t + here)
            if STAGES == 1 and it < total:
                cuda.syncthreads()  # every warp is done with the only stage
                load_queries(
                    sq + own, sq + LATER + own, sl, qg + next_m * q_stride + next_h * ROW,
                    dg + next_m * dout_stride + next_h * ROW,
                    sg + (next_h * 2 * padded + next_m) * 4,
                    q_stride, dout_stride, padded, T - next_m - row,
                )  # fmt: skip
                cp_commit()
            stage = after
            h = next_h
            m0 = next_m

        cp_wait0()
        syncwarp()
        for m in range(M_TILES):  # stage through this warp's own K and V rows
            for r in range(2):
                tile_row = warp_row + m * 16 + r * 8 + (lane >> 2)
                stage_rows(sk, gk, m, r, tile_row, scale)
                stage_rows(sv, gv, m, r, tile_row, ONE)
        syncwarp()
        target = (base + n0) * dkv_stride + g * ROW
        copy_rows(dk + target, dkv_stride, sk, warp_row, T - n0)
        copy_rows(dv + target, dkv_stride, sv, warp_row, T - n0)

    return attention_dkdv


COMPILE_CASES = [
    CompileCase(
        make_attention_dkdv,
        constants(D, tile),
        SIGNATURE,
        tile.warps * 32,
        shared_bytes(D, tile),
        Options(min_blocks=tile.blocks),
    )
    for D, tiles in TILES.items()
    for tile in tiles
    if tile.blocks == 0
]
