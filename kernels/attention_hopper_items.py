r"""Attention backward on wgmma and TMA, for sm_90: dK and dV, in another way than
attention_hopper_dkdv (equations: attention.py; causal only).

A block takes item after item (64 keys a warpgroup of one key/value head): the next item's first
tiles, K and V travel while this one's results are written. Which one is next is counted, so that
blocks end together whatever the lengths of documents are. Or a cluster of two takes one item, each
block half of its query tiles; at the end one gets the other's dK, the other its dV, and adds it to
its own: where items are too few to occupy the card. Order of tiles: attention_hopper_transposed.

Shapes   as attention_dkdv; rows beyond T read as zero (4-D tensor maps).
Source   Shah et al. 2024, arXiv:2407.08608; Dao 2023, arXiv:2307.08691, algorithm 2.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.attention_backward import padded_length
from llmq_nb.kernels.attention_hopper_steps import make_steps
from llmq_nb.kernels.attention_hopper_tiles import (
    CC,
    HALF_ROW,
    K_MAJOR,
    REGISTERS,
    WARPGROUP_HALF,
    Wgmma,
    block_threads,
    descriptor,
    input_maps,
    make_load_halves,
    n_major,
    persistent_grid,
    take_work,
)
from llmq_nb.kernels.attention_hopper_transposed import (
    QUERY_TILE,
    STAGE_BITS,
    STAGES,
    make_exchange,
    make_key_item,
    make_write_rows,
    read_item,
    release_next,
    share,
    wrap_heads,
)
from llmq_nb.kernels.attention_tiles import LEAST_BLOCKS, LOG2E, ZERO, Problem, divide
from llmq_nb.kernels.compile import CompileCase, Options
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import shfl_idx, smem_addr, sts128, syncwarp
from llmq_nb.kernels.ptx_hopper import (
    bulk_g2s,
    cluster_sync,
    fence_async,
    make_set_registers,
    mbar_arrive,
    mbar_expect,
    mbar_init,
    mbar_wait,
)
from llmq_nb.kernels.tensor_map import work_counter

SIGNATURE = (types.uint64,) * 9 + (types.int32,) * 8 + (types.float32,) * 2
SHAPES = [Wgmma(2, 64, cluster=1), Wgmma(2, 64, cluster=2)]
"""For either head_dim: item after item, and a pair of blocks an item."""
KEYS = 64 * SHAPES[0].warpgroups
"""Of an item."""
ONE = np.float32(1.0)
BARRIERS = (2 + 2 * STAGES) * 8  # bytes


def make_attention_dkdv_items(D: int, CONSUMERS: int, CLUSTER: int):
    """Kernel for dK and dV; arguments: addresses, tensor maps, extents."""
    BLOCK_ROWS = 64 * CONSUMERS
    HALVES = D // 64
    KV_HALF = BLOCK_ROWS * HALF_ROW
    Q_HALF = QUERY_TILE * HALF_ROW
    KV_BYTES = HALVES * KV_HALF
    Q_BYTES = HALVES * Q_HALF
    STAGE_BYTES = 2 * Q_BYTES  # Q, then dO
    STAT_BYTES = 2 * QUERY_TILE * 4  # lse, then delta
    STAGE = STAGE_BYTES >> 4  # in descriptor units
    LAST_STAGE = STAGES - 1
    ARRIVALS = 128 * CONSUMERS
    ACC = D // 2
    N_MAJOR = n_major(Q_HALF)
    release = make_set_registers(REGISTERS[CONSUMERS][0], increase=False)
    take = make_set_registers(REGISTERS[CONSUMERS][1], increase=True)
    load_kv = make_load_halves(D, KV_HALF)
    load_q = make_load_halves(D, Q_HALF)
    begin, advance, finish = make_steps(D, KV_HALF, Q_HALF)
    send, receive = make_exchange(ACC)
    write = make_write_rows(D)
    item_of = make_key_item(BLOCK_ROWS)

    def attention_dkdv_items(
        dk, dv, q_map, k_map, v_map, dout_map, stats, segment_start, counter, heads, T, padded, H,
        group, tiles, swath, dkv_stride, scale, scale_log2,
    ):  # fmt: skip
        sk = np.uint32((smem_addr(cuda.shared.array(0, dtype=types.uint32)) + 1023) & 0xFFFFFC00)
        sv = np.uint32(sk + KV_BYTES)
        sq = np.uint32(sv + KV_BYTES)
        sl = np.uint32(sq + STAGES * STAGE_BYTES)
        so = np.uint32(sl + STAGES * STAT_BYTES)
        kv_full = np.uint32(so + BLOCK_ROWS * HALF_ROW)  # barriers, 8 bytes each
        full = np.uint32(kv_full + 8)
        kv_empty = np.uint32(full + STAGES * 8)
        empty = np.uint32(kv_empty + 8)
        words = np.uint32(kv_full + BARRIERS)  # of the item in work
        dump = np.uint32(words + 16)
        tid = cuda.threadIdx.x
        warp = shfl_idx(tid >> 5, 0)
        lane = tid & 31
        rank = cuda.blockIdx.x & (CLUSTER - 1)
        kv_heads = divide(H, group)
        if tid == 0:
            for i in range(1 + STAGES):
                mbar_init(kv_full + i * 8, 1)
            for i in range(1 + STAGES):
                mbar_init(kv_empty + i * 8, ARRIVALS)
            fence_async()
        cuda.syncthreads()  # the barriers exist
        turn = np.uint32(0)  # tiles before this item: stage and phase
        item = 0

        if warp >= 4 * CONSUMERS:
            release()
            total = heads * tiles
            work = np.int64(cuda.blockIdx.x >> (CLUSTER - 1))
            while warp == 4 * CONSUMERS and work < total:
                bg, n0, open_end, per_head = item_of(
                    work, segment_start, heads, T, kv_heads, tiles, swath
                )
                b = divide(bg, kv_heads)
                g = np.int64(bg - b * kv_heads)
                mine = share(per_head * group, rank, CLUSTER)
                h, m0 = wrap_heads(np.int32(rank), np.int32(n0 + per_head * QUERY_TILE - 64), group)
                if lane == 0:
                    for it in range(max(mine, 1)):
                        if it < mine:
                            stage = turn & LAST_STAGE
                            ready = full + stage * 8
                            mbar_wait(empty + stage * 8, ((turn >> STAGE_BITS) & 1) ^ 1)
                            mbar_expect(ready, STAGE_BYTES + STAT_BYTES)
                            head = g * group + h
                            target = sq + stage * STAGE_BYTES
                            load_q(target, q_map, head, m0, b, ready)
                            load_q(target + Q_BYTES, dout_map, head, m0, b, ready)
                            row = stats + ((np.int64(b) * H + head) * 2 * padded + m0) * 4
                            bulk_g2s(sl + stage * STAT_BYTES, row, QUERY_TILE * 4, ready)
                            row += padded * 4
                            target = sl + stage * STAT_BYTES + QUERY_TILE * 4
                            bulk_g2s(target, row, QUERY_TILE * 4, ready)
                            h, m0 = wrap_heads(np.int32(h + CLUSTER), m0, group)
                            turn = np.uint32(turn + 1)
                        if it == 0:  # behind the tile: their buffer is free later than a stage
                            mbar_wait(kv_empty, (item & 1) ^ 1)
                            sts128(words, (bg, n0, open_end, per_head))
                            mbar_expect(kv_full, 2 * KV_BYTES)
                            load_kv(sk, k_map, g, n0, b, kv_full)
                            load_kv(sv, v_map, g, n0, b, kv_full)
                item += 1
                work = np.int64(total)
                if CLUSTER == 1:
                    if lane == 0:
                        work = take_work(counter, total)
                    work = np.int64(shfl_idx(np.int32(work), 0))
                syncwarp()
            if tid == ARRIVALS:  # no query tiles: there is nothing left
                mbar_wait(kv_empty, (item & 1) ^ 1)
                sts128(words, (0, 0, 0, 0))
                mbar_arrive(kv_full)
            if CLUSTER == 2:
                cluster_sync()  # as the consumers
                cluster_sync()
        else:
            take()
            wg = np.int32(warp >> 2)
            gk = cuda.local.array(ACC, dtype=np.float32)
            gv = cuda.local.array(ACC, dtype=np.float32)
            s = cuda.local.array(32, dtype=np.float32)
            dp = cuda.local.array(32, dtype=np.float32)
            p = cuda.local.array(16, dtype=np.uint32)
            ds = cuda.local.array(16, dtype=np.uint32)
            for i in range(32):
                s[i] = ZERO
                dp[i] = ZERO
            key = descriptor(K_MAJOR, sk + wg * WARPGROUP_HALF)
            value = descriptor(K_MAJOR, sv + wg * WARPGROUP_HALF)
            query = descriptor(K_MAJOR, sq)
            query_t = descriptor(N_MAJOR, sq)
            tile_row = np.int32(wg * 64 + (warp & 3) * 16 + (lane >> 2))
            column = np.int32((lane & 3) << 1)
            mbar_wait(kv_full, 0)
            bg, n0, open_end, per_head = read_item(words)
            while per_head > 0:
                b = divide(bg, kv_heads)
                g = bg - b * kv_heads
                base = b * T
                own_key = np.int32(n0 + wg * 64)
                own_row = np.int32(n0 + tile_row)
                mine = share(per_head * group, rank, CLUSTER)
                # the last tiles lie above this warpgroup's diagonal and are only released
                count = share((per_head - min(wg, per_head)) * group, rank, CLUSTER)
                h, m0 = wrap_heads(np.int32(rank), np.int32(n0 + per_head * QUERY_TILE - 64), group)
                for i in range(ACC):
                    gk[i] = ZERO
                    gv[i] = ZERO
                if count > 0:
                    stage = turn & LAST_STAGE
                    at = np.uint32(stage * STAGE)
                    mbar_wait(full + stage * 8, (turn >> STAGE_BITS) & 1)
                    own_stats = np.uint32(sl + stage * STAT_BYTES + (column << 2))
                    begin(
                        s, dp, p, ds, key, value, np.uint32(query + at), own_stats, segment_start,
                        base, own_row, np.int32(m0 + column), T, scale_log2, dump,
                    )  # fmt: skip
                    for _ in range(count - 1):
                        before = stage
                        at_before = at
                        turn = np.uint32(turn + 1)
                        h, m0 = wrap_heads(np.int32(h + CLUSTER), m0, group)
                        stage = turn & LAST_STAGE
                        at = np.uint32(stage * STAGE)
                        mbar_wait(full + stage * 8, (turn >> STAGE_BITS) & 1)
                        own_stats = np.uint32(sl + stage * STAT_BYTES + (column << 2))
                        masked = m0 < own_key + 64 or min(m0 + QUERY_TILE, T) > open_end
                        advance(
                            gk, gv, s, dp, p, ds, key, value, np.uint32(query + at),
                            np.uint32(query_t + at_before), own_stats, masked, segment_start, base,
                            own_row, np.int32(m0 + column), T, scale_log2, dump, empty + before * 8,
                        )  # fmt: skip
                    mbar_arrive(kv_empty)  # K and V have been read
                    finish(gk, gv, p, ds, np.uint32(query_t + at))
                    mbar_arrive(empty + stage * 8)
                    turn = np.uint32(turn + 1)
                else:
                    mbar_arrive(kv_empty)
                for _ in range(mine - count):
                    turn = release_next(full, empty, turn)
                if CLUSTER == 2:  # a cluster takes one item, so its stages are free
                    cluster_sync()  # every warp of both blocks has read its last stage
                    if rank == 0:
                        send(gv, sq, 1)
                    else:
                        send(gk, sq, 0)
                    cluster_sync()  # it has arrived
                    if rank == 0:
                        receive(gk, sq)
                    else:
                        receive(gv, sq)
                target = (base + n0) * dkv_stride + g * (2 * D)
                if CLUSTER == 1 or rank == 0:
                    write(dk + target, dkv_stride, so, gk, tile_row, T - n0, scale)
                if CLUSTER == 1 or rank == 1:
                    write(dv + target, dkv_stride, so, gv, tile_row, T - n0, ONE)
                item += 1
                mbar_wait(kv_full, item & 1)
                bg, n0, open_end, per_head = read_item(words)

    return attention_dkdv_items


def _constants(D: int, tile: Wgmma) -> dict[str, int]:
    return {"D": D, "CONSUMERS": tile.warpgroups, "CLUSTER": tile.cluster}


def _options(tile: Wgmma) -> Options:
    return Options(arch_specific=True, cluster=tile.cluster)


def shared_bytes(D: int, tile: Wgmma) -> int:
    """Dynamic shared memory a block: alignment, K, V, stages of Q, dO and statistics, a half
    of the results, barriers, the item."""
    tiles = 4 * D * (64 * tile.warpgroups + STAGES * QUERY_TILE)
    staged = 64 * tile.warpgroups * HALF_ROW
    return 1024 + tiles + staged + STAGES * 8 * QUERY_TILE + BARRIERS + 16 + 16


def dkdv_launch(
    dk: int, dv: int, stride: int, stats: int, dout: int, qkv: tuple[int, int, int], p: Problem,
    tile: Wgmma, stream: Any,
) -> None:  # fmt: skip
    """Write dk and dv from the inputs and `stats` (addresses); causal, bfloat16."""
    launch = kernel(
        make_attention_dkdv_items, SIGNATURE, block_threads(tile), shared_bytes(p.D, tile),
        options=_options(tile), **_constants(p.D, tile),
    )  # fmt: skip
    rows = 64 * tile.warpgroups
    tiles = cdiv(p.T, rows)
    items = p.B * p.G * tiles
    grid = 2 * items if tile.cluster == 2 else persistent_grid(items)
    swath = p.swath(2 * p.group, tiles, least=2 * LEAST_BLOCKS)
    launch(
        stream, (grid,), dk, dv,
        *input_maps(qkv, dout, QUERY_TILE, rows, p), stats, p.segment_start,
        work_counter(dk), p.B * p.G, p.T,
        padded_length(p.T), p.H, p.group, tiles, swath, stride, p.scale, p.scale * float(LOG2E),
    )  # fmt: skip


COMPILE_CASES = [
    CompileCase(
        make_attention_dkdv_items, _constants(D, tile), SIGNATURE, block_threads(tile),
        shared_bytes(D, tile), _options(tile), only_cc=CC,
    )
    for D in (64, 128)
    for tile in SHAPES
]  # fmt: skip
