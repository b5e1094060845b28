r"""Attention backward on mma.sync: dK and dV by two parts of a block (equations: attention.py).

As attention_dkdv, but the warps of a block are two parts with stages of their own, which take turns
at the query tiles of its keys and add up at the end, always in the same order. So the longest block
takes half the time, where attention_dkdv has two blocks a multiprocessor, one of which idles.

Query tiles from the last down, at each position one head of the group after the other: blocks of
the same heads that started together read the same tiles together.

Shapes   as attention_dkdv.
Source   Dao 2023, arXiv:2307.08691, algorithm 2. Written from the equations.
"""

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.attention_backward import constants
from llmq_nb.kernels.attention_dkdv import ONE, SIGNATURE, make_probabilities_transposed
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
    bar_sync,
    cp16,
    cp_commit,
    cp_wait0,
    f2u,
    lds128,
    smem_addr,
    sts128,
    syncwarp,
    u2f,
)

PARTS = 2
TILES: dict[int, tuple[Tile, ...]] = {
    64: (),
    128: (Tile(64, 64, stages=1, parts=2), Tile(32, 64, parts=2)),
}
"""Shapes by head_dim; the first is the default where query heads share keys."""


def shared_bytes(D: int, tile: Tile) -> int:
    """Dynamic shared memory a block: K, V, stages of Q, dO and two statistics a query."""
    stages = tile.stages * PARTS
    rows = 2 * tile.keys + 2 * stages * tile.queries
    return rows * 2 * D + 8 * stages * tile.queries


def make_load_queries(QUERIES: int, STEP: int, ROW: int, THREADS: int):
    """load_queries(sq, sd, sl, q, dout, stats, q_stride, dout_stride, padded, rows): one stage of
    Q, dO (this thread's chunks) and the statistics of its rows; THREADS: of a part."""
    load_pair = make_load_pair(QUERIES, STEP, ROW)
    QUARTER = QUERIES // 4  # 16-byte pieces of one statistic
    PIECES = 2 * QUARTER

    @cuda.jit(device=True)
    def load_queries(sq, sd, sl, q, dout, stats, q_stride, dout_stride, padded, rows):
        load_pair(sq, sd, q, dout, q_stride, dout_stride, rows)
        t = cuda.threadIdx.x % THREADS
        if t < PIECES:
            cp16(sl + t * 16, stats + (t // QUARTER * padded * 4 + t % QUARTER * 16))

    return load_queries


def make_add_parts(M_TILES: int, D8: int, THREADS: int):
    """(store, add): a part's accumulator tile to shared memory, and onto the tile of another part:
    16 bytes a thread, then the next. thread: within the part."""
    STEP = THREADS * 16

    @cuda.jit(device=True)
    def store(shared, acc, thread):
        for m in range(M_TILES):
            for j in range(D8):
                x, y, z, w = acc[m, j, 0], acc[m, j, 1], acc[m, j, 2], acc[m, j, 3]
                word = f2u(x), f2u(y), f2u(z), f2u(w)
                sts128(shared + thread * 16 + (m * D8 + j) * STEP, word)

    @cuda.jit(device=True)
    def add(acc, shared, thread):
        for m in range(M_TILES):
            for j in range(D8):
                x, y, z, w = lds128(shared + thread * 16 + (m * D8 + j) * STEP)
                acc[m, j, 0] += u2f(x)
                acc[m, j, 1] += u2f(y)
                acc[m, j, 2] += u2f(z)
                acc[m, j, 3] += u2f(w)

    return store, add


def make_attention_dkdv_parts(
    D: int, QUERIES: int, KEYS: int, WARPS: int, STAGES: int, CAUSAL: bool
):
    """Kernel for dK and dV; arguments are device addresses, extents, byte strides."""
    ROW = 2 * D
    CHUNKS = D // 8
    THREADS = WARPS * 32  # of a part
    STEP = THREADS // CHUNKS
    M_TILES = KEYS // (16 * WARPS)
    WARP_ROWS = 16 * M_TILES
    D8 = D // 8
    N8 = QUERIES // 8
    STAGE = QUERIES * ROW
    LATER = STAGES * STAGE  # from a Q stage to its dO stage
    PART = 2 * LATER + STAGES * 8 * QUERIES  # a part's stages
    ACCUMULATOR = KEYS * D * 4
    load_keys = make_load_pair(KEYS, STEP * PARTS, ROW)
    load_queries = make_load_queries(QUERIES, STEP, ROW, THREADS)
    clear = make_clear(M_TILES, D8)
    scores = make_scores(D, M_TILES, QUERIES)
    accumulate = make_accumulate(D, M_TILES, QUERIES)
    mask = make_mask_transposed(M_TILES, QUERIES, CAUSAL)
    probabilities = make_probabilities_transposed(M_TILES, QUERIES)
    store, add = make_add_parts(M_TILES, D8, THREADS)
    stage_rows = make_stage_rows(D)
    copy_rows = make_copy_rows(D, WARP_ROWS)

    @cuda.jit(device=True)
    def part_sync(part):
        bar_sync(part + 1, THREADS)

    @cuda.jit(device=True)
    def next_tile(h, m0, group):
        """The part's next one: (head of the group, first query)."""
        h = np.int32(h + PARTS)
        while h >= group:
            h = np.int32(h - group)
            m0 = np.int32(m0 - QUERIES)
        return h, m0

    def attention_dkdv_parts(
        dk, dv, q, k, v, dout, stats, segment_start, heads, T, padded, H, group, tiles, swath,
        q_stride, kv_stride, dkv_stride, scale, scale_log2,
    ):  # fmt: skip
        sk = smem_addr(cuda.shared.array(0, dtype=types.uint32))
        sv = sk + KEYS * ROW
        lane = cuda.threadIdx.x & 31
        part = cuda.threadIdx.x // THREADS
        tid = cuda.threadIdx.x - part * THREADS
        sq = sv + KEYS * ROW + part * PART
        sl = sq + 2 * LATER
        warp_row = (tid >> 5) * WARP_ROWS
        bg, tile = block_order(cuda.blockIdx.x, heads, tiles, swath)  # tile 0: most queries
        b = divide(bg, divide(H, group))
        g = bg - b * divide(H, group)
        base = np.int64(b) * T
        n0 = tile * KEYS
        m_start = np.int32(n0 // QUERIES * QUERIES) if CAUSAL else np.int32(0)
        m_end = queries_end(segment_start, base, min(n0 + KEYS, T) - 1, T)
        # queries before it see every key
        open_end = np.int32(queries_end(segment_start, base, n0, T))
        per_head = (m_end - m_start + QUERIES - 1) // QUERIES

        chunk = tid % CHUNKS
        row = cuda.threadIdx.x // CHUNKS
        at = (base + n0 + row) * kv_stride + (g * ROW + chunk * 16)
        own = row * ROW + ((chunk ^ (row & 7)) << 4)
        load_keys(sk + own, sv + own, k + at, v + at, kv_stride, kv_stride, T - n0 - row)
        # from the last queries down, at each position one head after the other: blocks of the same
        # heads that start together read the same tiles together
        m0 = np.int32(m_start + (per_head - 1) * QUERIES)
        h, m0 = next_tile(np.int32(part - PARTS), m0, group)
        row = tid // CHUNKS
        own = row * ROW + ((chunk ^ (row & 7)) << 4)
        dout_stride = H * ROW
        rows = np.int32(T - row)
        qg = q + (base + row) * q_stride + (g * group * ROW + chunk * 16)
        dg = dout + (base + row) * dout_stride + (g * group * ROW + chunk * 16)
        sg = stats + (np.int64(b) * H + g * group) * padded * 8
        if m0 >= m_start:
            load_queries(
                sq + own, sq + LATER + own, sl, qg + m0 * q_stride + h * ROW,
                dg + m0 * dout_stride + h * ROW, sg + (h * 2 * padded + m0) * 4,
                q_stride, dout_stride, padded, rows - m0,
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
        cp_wait0()
        cuda.syncthreads()  # both parts' rows of K and V are here
        stage = 0
        while m0 >= m_start:
            next_h, next_m = next_tile(h, m0, group)
            after = stage ^ (STAGES - 1)
            cp_wait0()
            part_sync(part)  # this tile is here; every warp is done with the last one
            if STAGES == 2 and next_m >= m_start:
                load_queries(
                    sq + after * STAGE + own, sq + LATER + after * STAGE + own,
                    sl + after * 8 * QUERIES, qg + next_m * q_stride + next_h * ROW,
                    dg + next_m * dout_stride + next_h * ROW,
                    sg + (next_h * 2 * padded + next_m) * 4,
                    q_stride, dout_stride, padded, rows - next_m,
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
            if STAGES == 1 and next_m >= m_start:
                part_sync(part)  # every warp is done with the only stage
                load_queries(
                    sq + own, sq + LATER + own, sl, qg + next_m * q_stride + next_h * ROW,
                    dg + next_m * dout_stride + next_h * ROW,
                    sg + (next_h * 2 * padded + next_m) * 4,
                    q_stride, dout_stride, padded, rows - next_m,
                )  # fmt: skip
                cp_commit()
            stage = after
            h = next_h
            m0 = next_m

        cp_wait0()
        cuda.syncthreads()  # every warp is done with shared memory
        if part == 0:  # gets the other's dK, part 1 this one's dV
            store(sk, gv, tid)
        else:
            store(sk + ACCUMULATOR, gk, tid)
        cuda.syncthreads()
        if part == 0:
            add(gk, sk + ACCUMULATOR, tid)
        else:
            add(gv, sk, tid)
        cuda.syncthreads()  # read, before K's and V's rows are written again
        for m in range(M_TILES):  # stage through this warp's own K or V rows
            for r in range(2):
                tile_row = warp_row + m * 16 + r * 8 + (lane >> 2)
                if part == 0:
                    stage_rows(sk, gk, m, r, tile_row, scale)
                else:
                    stage_rows(sv, gv, m, r, tile_row, ONE)
        syncwarp()
        target = (base + n0) * dkv_stride + g * ROW
        if part == 0:
            copy_rows(dk + target, dkv_stride, sk, warp_row, T - n0)
        else:
            copy_rows(dv + target, dkv_stride, sv, warp_row, T - n0)

    return attention_dkdv_parts


COMPILE_CASES = [
    CompileCase(
        make_attention_dkdv_parts,
        constants(D, tile),
        SIGNATURE,
        tile.warps * PARTS * 32,
        shared_bytes(D, tile),
        Options(min_blocks=tile.blocks),
    )
    for D, tiles in TILES.items()
    for tile in tiles
]
