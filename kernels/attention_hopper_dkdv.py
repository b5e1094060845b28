r"""Attention backward on wgmma and TMA, for sm_90: dK and dV (equations: attention.py; causal
only).

As attention_dkdv, and as deterministic: a block owns 64 keys a warpgroup and walks the 64-query
tiles of every head of its group. One producer warp fetches by TMA; a warpgroup skips the tiles
that lie above its own diagonal.

Shapes   as attention_dkdv; rows beyond T read as zero (4-D tensor maps).
Source   Shah et al. 2024, arXiv:2407.08608; Dao 2023, arXiv:2307.08691, algorithm 2.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.attention_backward import padded_length
from llmq_nb.kernels.attention_hopper_tiles import (
    CC,
    HALF_ROW,
    K_MAJOR,
    OPTIONS,
    REGISTERS,
    WARPGROUP_HALF,
    Wgmma,
    block_threads,
    descriptor,
    input_maps,
    make_copy_half_rows,
    make_load_halves,
    make_pack,
    make_product,
    make_product_registers,
    make_stage_half_rows,
    n_major,
)
from llmq_nb.kernels.attention_tiles import (
    LOG2E,
    MASKED,
    ZERO,
    Problem,
    block_order,
    divide,
    first_key,
    queries_end,
)
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import bar_sync, ex2, ffma, lds64f, sel_gt, shfl_idx, smem_addr, syncwarp
from llmq_nb.kernels.ptx_hopper import (
    bulk_g2s,
    fence_async,
    make_pin,
    make_set_registers,
    make_settle,
    make_wgmma_fence,
    make_wgmma_wait,
    mbar_arrive,
    mbar_expect,
    mbar_init,
    mbar_wait,
    wgmma_commit,
)

SIGNATURE = (types.uint64,) * 8 + (types.int32,) * 8 + (types.float32,) * 2
SHAPES = {64: [Wgmma(2, 64)], 128: [Wgmma(2, 64)]}
"""By head_dim; the first is the default. Measured and slower at D = 64: three warpgroups, which
leave too few registers to overlap."""
STAGE_BITS = 2
STAGES = 1 << STAGE_BITS
QUERY_TILE = 64
ONE = np.float32(1.0)


def make_mask_queries():
    """mask(s, segment_start, base, key, query, T): mask S^T; key, query: this lane's first row and
    column, base: flat position of the sequence's first token."""

    @cuda.jit(device=True)
    def mask(s, segment_start, base, key, query, T):
        for j in range(QUERY_TILE // 8):
            for c in range(2):
                column = query + j * 8 + c
                below = first_key(segment_start, base + min(column, T - 1)) - key
                for r in range(2):
                    x = sel_gt(key - column, -(r * 8), MASKED, s[4 * j + 2 * r + c])
                    s[4 * j + 2 * r + c] = sel_gt(below, r * 8, MASKED, x)

    return mask


@cuda.jit(device=True)
def probabilities_transposed(s, stats, scale_log2):
    """S^T -> P^T; stats: shared address of the base-2 lse of this lane's first query."""
    for j in range(QUERY_TILE // 8):
        l0, l1 = lds64f(stats + j * 32)
        for r in range(2):
            s[4 * j + 2 * r] = ex2(ffma(s[4 * j + 2 * r], scale_log2, -l0))
            s[4 * j + 2 * r + 1] = ex2(ffma(s[4 * j + 2 * r + 1], scale_log2, -l1))


@cuda.jit(device=True)
def score_gradients_transposed(dp, s, stats):
    """dP^T -> dS^T = P^T (dP^T - delta)."""
    for j in range(QUERY_TILE // 8):
        d0, d1 = lds64f(stats + j * 32)
        for r in range(2):
            i = 4 * j + 2 * r
            dp[i] = s[i] * (dp[i] - d0)
            dp[i + 1] = s[i + 1] * (dp[i + 1] - d1)


@cuda.jit(device=True)
def release_next(full, empty, turn):
    """Give a stage back unread; returns the next turn."""
    stage = turn & (STAGES - 1)
    mbar_wait(full + stage * 8, (turn >> STAGE_BITS) & 1)
    mbar_arrive(empty + stage * 8)
    return np.uint32(turn + 1)


def make_attention_dkdv_hopper(D: int, CONSUMERS: int):
    """Kernel for dK and dV; arguments: addresses, tensor maps, extents."""
    BLOCK_ROWS = 64 * CONSUMERS
    HALVES = D // 64
    KV_HALF = BLOCK_ROWS * HALF_ROW
    Q_HALF = QUERY_TILE * HALF_ROW
    KV_BYTES = HALVES * KV_HALF
    Q_BYTES = HALVES * Q_HALF
    STAGE_BYTES = 2 * Q_BYTES  # Q, then dO
    STAT_BYTES = 2 * QUERY_TILE * 4  # lse, then delta
    DOUT = Q_BYTES >> 4  # from Q to dO in descriptor units
    STAGE = STAGE_BYTES >> 4
    LAST_STAGE = STAGES - 1
    OVERLAP = D == 64  # a tile's products with those of the tile before: D = 128 lacks registers
    ARRIVALS = 128 * CONSUMERS
    ACC = D // 2
    N_MAJOR = n_major(Q_HALF)
    release = make_set_registers(REGISTERS[CONSUMERS][0], increase=False)
    take = make_set_registers(REGISTERS[CONSUMERS][1], increase=True)
    load_kv = make_load_halves(D, KV_HALF)
    load_q = make_load_halves(D, Q_HALF)
    scores = make_product(D, QUERY_TILE, KV_HALF, Q_HALF)
    accumulate = make_product_registers(D, QUERY_TILE)
    pack = make_pack(16)
    mask = make_mask_queries()
    stage_rows = make_stage_half_rows(D, KV_HALF)
    copy_rows = make_copy_half_rows(D, KV_HALF)
    fence_scores = make_wgmma_fence(32)
    fence_acc = make_wgmma_fence(ACC)
    wait_s = make_wgmma_wait(32, 1)
    wait_dp = make_wgmma_wait(32, 0)
    wait_s_of_three = make_wgmma_wait(32, 2)
    wait_dp_of_three = make_wgmma_wait(32, 1)
    settle = make_settle(32)
    wait_acc = make_wgmma_wait(ACC, 0)
    pin_p = make_pin(16, "r")

    def attention_dkdv_hopper(
        dk, dv, q_map, k_map, v_map, dout_map, stats, segment_start, heads, T, padded, H, group,
        tiles, swath, dkv_stride, scale, scale_log2,
    ):  # fmt: skip
        sk = np.uint32((smem_addr(cuda.shared.array(0, dtype=types.uint32)) + 1023) & 0xFFFFFC00)
        sv = np.uint32(sk + KV_BYTES)
        sq = np.uint32(sv + KV_BYTES)
        sl = np.uint32(sq + STAGES * STAGE_BYTES)
        kv_full = np.uint32(sl + STAGES * STAT_BYTES)  # barriers, 8 bytes each
        full = np.uint32(kv_full + 8)
        empty = np.uint32(full + STAGES * 8)
        dump = np.uint32(empty + STAGES * 8)
        tid = cuda.threadIdx.x
        warp = shfl_idx(tid >> 5, 0)
        lane = tid & 31
        bg, tile = block_order(cuda.blockIdx.x, heads, tiles, swath)  # tile 0: most queries
        kv_heads = divide(H, group)
        b = divide(bg, kv_heads)
        g = bg - b * kv_heads
        base = np.int64(b) * T
        n0 = tile * BLOCK_ROWS
        m_end = queries_end(segment_start, base, min(n0 + BLOCK_ROWS, T) - 1, T)
        open_end = queries_end(segment_start, base, n0, T)  # queries before it see every key
        per_head = (m_end - n0 + QUERY_TILE - 1) // QUERY_TILE
        total = per_head * group
        if tid == 0:
            for i in range(1 + STAGES):
                mbar_init(kv_full + i * 8, 1)
            for i in range(STAGES):
                mbar_init(empty + i * 8, ARRIVALS)
            fence_async()
        cuda.syncthreads()  # the barriers exist

        if warp >= 4 * CONSUMERS:
            release()
            if tid == ARRIVALS:
                mbar_expect(kv_full, 2 * KV_BYTES)
                load_kv(sk, k_map, g, n0, b, kv_full)
                load_kv(sv, v_map, g, n0, b, kv_full)
                h = g * group
                m0 = n0
                for it in range(total):
                    stage = it & LAST_STAGE
                    ready = full + stage * 8
                    mbar_wait(empty + stage * 8, ((it >> STAGE_BITS) & 1) ^ 1)
                    mbar_expect(ready, STAGE_BYTES + STAT_BYTES)
                    target = sq + stage * STAGE_BYTES
                    load_q(target, q_map, h, m0, b, ready)
                    load_q(target + Q_BYTES, dout_map, h, m0, b, ready)
                    row = stats + ((np.int64(b) * H + h) * 2 * padded + m0) * 4
                    bulk_g2s(sl + stage * STAT_BYTES, row, QUERY_TILE * 4, ready)
                    row += padded * 4
                    target = sl + stage * STAT_BYTES + QUERY_TILE * 4
                    bulk_g2s(target, row, QUERY_TILE * 4, ready)
                    m0 += QUERY_TILE
                    if m0 >= m_end:
                        m0 = n0
                        h += 1
        else:
            take()
            wg = np.int64(warp >> 2)
            gk = cuda.local.array(ACC, dtype=np.float32)
            gv = cuda.local.array(ACC, dtype=np.float32)
            s = cuda.local.array(32, dtype=np.float32)
            dp = cuda.local.array(32, dtype=np.float32)
            p = cuda.local.array(16, dtype=np.uint32)
            ds = cuda.local.array(16, dtype=np.uint32)
            for i in range(ACC):
                gk[i] = ZERO
                gv[i] = ZERO
            for i in range(32):
                s[i] = ZERO
                dp[i] = ZERO
            key = descriptor(K_MAJOR, sk + wg * WARPGROUP_HALF)
            value = descriptor(K_MAJOR, sv + wg * WARPGROUP_HALF)
            query = descriptor(K_MAJOR, sq)
            query_t = descriptor(N_MAJOR, sq)
            tile_row = np.int32(wg * 64 + (warp & 3) * 16 + (lane >> 2))
            own_key = n0 + wg * 64
            own_row = n0 + tile_row
            column = (lane & 3) << 1
            # of a head's query tiles the first ones lie above this warpgroup's diagonal
            skip = min(wg, per_head)
            count = (per_head - skip) * group
            turn = np.uint32(0)
            mbar_wait(kv_full, 0)
            if count == 0:
                skip = total
            for _ in range(skip):
                turn = release_next(full, empty, turn)
            if count > 0:
                m0 = own_key
                stage = turn & LAST_STAGE
                at = np.uint32(stage * STAGE)
                mbar_wait(full + stage * 8, (turn >> STAGE_BITS) & 1)
                fence_scores(s)
                fence_scores(dp)
                scores(s, key, np.uint32(query + at))
                wgmma_commit()
                scores(dp, value, np.uint32(query + at + DOUT))
                wgmma_commit()
                own_stats = sl + stage * STAT_BYTES + (column << 2)
                wait_s(s)
                mask(s, segment_start, base, own_row, m0 + column, T)
                probabilities_transposed(s, own_stats, scale_log2)
                settle(s, dump)
                wait_dp(dp)
                score_gradients_transposed(dp, s, own_stats + QUERY_TILE * 4)
                pack(s, p)
                pack(dp, ds)
                for _ in range(count - 1):
                    before = stage
                    at_before = at
                    turn = np.uint32(turn + 1)
                    m0 += QUERY_TILE
                    if m0 >= m_end:
                        m0 = own_key
                        for _ in range(skip):
                            turn = release_next(full, empty, turn)
                    stage = turn & LAST_STAGE
                    at = np.uint32(stage * STAGE)
                    mbar_wait(full + stage * 8, (turn >> STAGE_BITS) & 1)
                    pin_p(p)
                    pin_p(ds)
                    if OVERLAP:
                        fence_scores(s)
                        fence_scores(dp)
                        fence_acc(gk)
                        fence_acc(gv)
                        scores(s, key, np.uint32(query + at))
                        wgmma_commit()
                        scores(dp, value, np.uint32(query + at + DOUT))
                        wgmma_commit()
                        accumulate(gv, p, np.uint32(query_t + at_before + DOUT))
                        accumulate(gk, ds, np.uint32(query_t + at_before))
                        wgmma_commit()
                        wait_s_of_three(s)
                    else:
                        fence_acc(gk)
                        fence_acc(gv)
                        accumulate(gv, p, np.uint32(query_t + at_before + DOUT))
                        accumulate(gk, ds, np.uint32(query_t + at_before))
                        wgmma_commit()
                        wait_acc(gv)
                        wait_acc(gk)
                        mbar_arrive(empty + before * 8)
                        fence_scores(s)
                        fence_scores(dp)
                        scores(s, key, np.uint32(query + at))
                        wgmma_commit()
                        scores(dp, value, np.uint32(query + at + DOUT))
                        wgmma_commit()
                        wait_s(s)
                    own_stats = sl + stage * STAT_BYTES + (column << 2)
                    if m0 < own_key + 64 or min(m0 + QUERY_TILE, T) > open_end:
                        mask(s, segment_start, base, own_row, m0 + column, T)
                    probabilities_transposed(s, own_stats, scale_log2)
                    settle(s, dump)
                    if OVERLAP:
                        wait_dp_of_three(dp)
                    else:
                        wait_dp(dp)
                    score_gradients_transposed(dp, s, own_stats + QUERY_TILE * 4)
                    if OVERLAP:
                        wait_acc(gv)
                        wait_acc(gk)
                        pin_p(p)  # read until here
                        pin_p(ds)
                        mbar_arrive(empty + before * 8)
                    pack(s, p)
                    pack(dp, ds)
                pin_p(p)
                pin_p(ds)
                fence_acc(gk)
                fence_acc(gv)
                accumulate(gv, p, np.uint32(query_t + at + DOUT))
                accumulate(gk, ds, np.uint32(query_t + at))
                wgmma_commit()
                wait_acc(gv)
                wait_acc(gk)
            bar_sync(wg + 1, 128)  # every warp of the group has read its K and V
            for r in range(2):
                stage_rows(sk, gk, r, tile_row + r * 8, scale)
                stage_rows(sv, gv, r, tile_row + r * 8, ONE)
            syncwarp()
            target = (base + n0) * dkv_stride + g * (2 * D)
            copy_rows(dk + target, dkv_stride, sk, wg * 64 + (warp & 3) * 16, 0, T - n0)
            copy_rows(dv + target, dkv_stride, sv, wg * 64 + (warp & 3) * 16, 0, T - n0)

    return attention_dkdv_hopper


def _constants(D: int, tile: Wgmma) -> dict[str, int]:
    return {"D": D, "CONSUMERS": tile.warpgroups}


def shared_bytes(D: int, tile: Wgmma) -> int:
    """Dynamic shared memory a block: alignment, K, V, stages of Q, dO and statistics, barriers."""
    tiles = 4 * D * (64 * tile.warpgroups + STAGES * QUERY_TILE)
    return 1024 + tiles + STAGES * (8 * QUERY_TILE + 16) + 24


def dkdv_launch(
    dk: int, dv: int, stride: int, stats: int, dout: int, qkv: tuple[int, int, int], p: Problem,
    tile: Wgmma, stream: Any,
) -> None:  # fmt: skip
    """Write dk and dv from the inputs and `stats` (addresses); causal, bfloat16."""
    launch = kernel(
        make_attention_dkdv_hopper, SIGNATURE, block_threads(tile), shared_bytes(p.D, tile),
        OPTIONS, **_constants(p.D, tile),
    )  # fmt: skip
    rows = 64 * tile.warpgroups
    tiles = cdiv(p.T, rows)
    launch(
        stream, (p.B * p.G * tiles,), dk, dv, *input_maps(qkv, dout, QUERY_TILE, rows, p), stats,
        p.segment_start, p.B * p.G, p.T, padded_length(p.T), p.H, p.group, tiles,
        p.swath(2 * p.group, tiles), stride, p.scale, p.scale * float(LOG2E),
    )  # fmt: skip


COMPILE_CASES = [
    CompileCase(
        make_attention_dkdv_hopper, _constants(D, tile), SIGNATURE, block_threads(tile),
        shared_bytes(D, tile), OPTIONS, only_cc=CC,
    )
    for D, tiles in SHAPES.items()
    for tile in tiles
]  # fmt: skip
