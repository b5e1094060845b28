r"""Attention backward on wgmma and TMA, for sm_90: dQ (equations: attention.py; causal only).

As attention_backward's dq: a block takes item after item (64 queries a warpgroup of one head) and
walks its key tiles. One producer warp fetches by TMA; a warpgroup skips the tiles that lie above
its own diagonal. S and dP of a tile are issued with dQ of the tile before, which then runs under
their arithmetic.

Shapes   as attention_backward; rows beyond T read as zero (4-D tensor maps).
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
    make_item,
    make_load_halves,
    make_mask_hopper,
    make_pack,
    make_product,
    make_product_registers,
    make_stage_half_rows,
    n_major,
    next_work,
    persistent_grid,
)
from llmq_nb.kernels.attention_tiles import LOG2E, ZERO, Problem, divide, first_key
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ex2, ffma, ldg32f, shfl_idx, smem_addr, syncwarp
from llmq_nb.kernels.ptx_hopper import (
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

SIGNATURE = (types.uint64,) * 7 + (types.int32,) * 8 + (types.float32,) * 2
SHAPES = {64: [Wgmma(3, 64)], 128: [Wgmma(2, 64)]}
"""By head_dim; the first is the default. Measured and slower at D = 64: two warpgroups, of 64 or
128 keys."""
STAGE_BITS = 2
STAGES = 1 << STAGE_BITS


def make_attention_dq_hopper(D: int, CONSUMERS: int, KEYS: int):
    """Kernel for dQ; arguments: addresses, tensor maps, extents."""
    BLOCK_ROWS = 64 * CONSUMERS
    HALVES = D // 64
    Q_HALF = BLOCK_ROWS * HALF_ROW
    KV_HALF = KEYS * HALF_ROW
    Q_BYTES = HALVES * Q_HALF
    KV_BYTES = HALVES * KV_HALF
    STAGE_BYTES = 2 * KV_BYTES  # K, then V
    VALUE = KV_BYTES >> 4
    STAGE = STAGE_BYTES >> 4
    ARRIVALS = 128 * CONSUMERS
    ACC = D // 2
    SCORES = KEYS // 2
    PAIRS = KEYS // 4
    LAST_STAGE = STAGES - 1
    N_MAJOR = n_major(KV_HALF)
    item_of = make_item(BLOCK_ROWS, KEYS)
    release = make_set_registers(REGISTERS[CONSUMERS][0], increase=False)
    take = make_set_registers(REGISTERS[CONSUMERS][1], increase=True)
    load_q = make_load_halves(D, Q_HALF)
    load_kv = make_load_halves(D, KV_HALF)
    scores = make_product(D, KEYS, Q_HALF, KV_HALF)
    accumulate = make_product_registers(D, KEYS)
    pack = make_pack(PAIRS)
    mask = make_mask_hopper(KEYS)
    stage_rows = make_stage_half_rows(D, Q_HALF)
    copy_rows = make_copy_half_rows(D, Q_HALF)
    fence_scores = make_wgmma_fence(SCORES)
    fence_acc = make_wgmma_fence(ACC)
    wait_s = make_wgmma_wait(SCORES, 1)
    wait_dp = make_wgmma_wait(SCORES, 0)
    wait_s_of_three = make_wgmma_wait(SCORES, 2)
    wait_dp_of_three = make_wgmma_wait(SCORES, 1)
    wait_acc = make_wgmma_wait(ACC, 0)
    settle = make_settle(SCORES)
    pin_p = make_pin(PAIRS, "r")

    @cuda.jit(device=True)
    def probabilities(s, lse, scale_log2):
        for i in range(SCORES):
            s[i] = ex2(ffma(s[i], scale_log2, -lse[(i >> 1) & 1]))

    @cuda.jit(device=True)
    def score_gradients(dp, s, delta):
        for i in range(SCORES):
            dp[i] = s[i] * (dp[i] - delta[(i >> 1) & 1])

    def attention_dq_hopper(
        dq, q_map, k_map, v_map, dout_map, stats, segment_start, heads, T, padded, H, group, tiles,
        swath, dq_stride, scale, scale_log2,
    ):  # fmt: skip
        sq = np.uint32((smem_addr(cuda.shared.array(0, dtype=types.uint32)) + 1023) & 0xFFFFFC00)
        sd = np.uint32(sq + Q_BYTES)
        so = np.uint32(sd + Q_BYTES)
        sk = np.uint32(so + Q_BYTES)
        q_full = np.uint32(sk + STAGES * STAGE_BYTES)  # barriers, 8 bytes each
        q_empty = np.uint32(q_full + 8)
        full = np.uint32(q_full + 16)
        empty = np.uint32(full + STAGES * 8)
        dump = np.uint32(empty + STAGES * 8)
        tid = cuda.threadIdx.x
        warp = shfl_idx(tid >> 5, 0)
        lane = tid & 31
        if tid == 0:
            mbar_init(q_full, 1)
            mbar_init(q_empty, ARRIVALS)
            for i in range(STAGES):
                mbar_init(full + i * 8, 1)
                mbar_init(empty + i * 8, ARRIVALS)
            fence_async()
        cuda.syncthreads()  # the barriers exist
        turn = np.uint32(0)  # tiles before this item: stage and phase
        item = 0
        work = next_work(0)

        if warp >= 4 * CONSUMERS:
            release()
            if tid == ARRIVALS:
                while work < heads * tiles:
                    b, h, m0, n_last, count = item_of(
                        work, segment_start, heads, T, H, tiles, swath
                    )
                    g = divide(h, group)
                    mbar_wait(q_empty, (item & 1) ^ 1)
                    mbar_expect(q_full, 2 * Q_BYTES)
                    load_q(sq, q_map, h, m0, b, q_full)
                    load_q(sd, dout_map, h, m0, b, q_full)
                    for i in range(count):
                        stage = turn & LAST_STAGE
                        ready = full + stage * 8
                        row = (n_last - i) * KEYS
                        mbar_wait(empty + stage * 8, ((turn >> STAGE_BITS) & 1) ^ 1)
                        mbar_expect(ready, STAGE_BYTES)
                        load_kv(sk + stage * STAGE_BYTES, k_map, g, row, b, ready)
                        load_kv(sk + stage * STAGE_BYTES + KV_BYTES, v_map, g, row, b, ready)
                        turn = np.uint32(turn + 1)
                    item += 1
                    work = next_work(item)
        else:
            take()
            wg = np.int64(warp >> 2)
            acc = cuda.local.array(ACC, dtype=np.float32)
            s = cuda.local.array(SCORES, dtype=np.float32)
            dp = cuda.local.array(SCORES, dtype=np.float32)
            ds = cuda.local.array(PAIRS, dtype=np.uint32)
            lse = cuda.local.array(2, dtype=np.float32)
            delta = cuda.local.array(2, dtype=np.float32)
            starts = cuda.local.array(2, dtype=np.int32)
            tile_row = np.int32(wg * 64 + (warp & 3) * 16 + (lane >> 2))
            query_d = descriptor(K_MAJOR, sq + wg * WARPGROUP_HALF)
            dout_d = descriptor(K_MAJOR, sd + wg * WARPGROUP_HALF)
            key = descriptor(K_MAJOR, sk)
            key_t = descriptor(N_MAJOR, sk)
            column = (lane & 3) << 1
            while work < heads * tiles:
                b, h, m0, n_last, count = item_of(work, segment_start, heads, T, H, tiles, swath)
                base = np.int64(b) * T
                own = m0 + wg * 64
                row_stats = stats + (np.int64(b) * H + h) * padded * 8
                for i in range(ACC):
                    acc[i] = ZERO
                for i in range(SCORES):
                    s[i] = ZERO
                    dp[i] = ZERO
                for r in range(2):
                    row = max(m0 + tile_row + r * 8, 0)
                    lse[r] = ldg32f(row_stats + row * 4)
                    delta[r] = ldg32f(row_stats + (padded + row) * 4)
                    starts[r] = first_key(segment_start, base + row)
                mixed = first_key(segment_start, base + max(own + 63, 0))
                # tiles above this warpgroup's last row are only released
                skip = count
                if own + 63 >= 0:
                    skip = n_last - divide(own + 63, KEYS)
                for _ in range(skip):
                    stage = turn & LAST_STAGE
                    mbar_wait(full + stage * 8, (turn >> STAGE_BITS) & 1)
                    mbar_arrive(empty + stage * 8)
                    turn = np.uint32(turn + 1)
                mbar_wait(q_full, item & 1)
                if skip < count:
                    stage = turn & LAST_STAGE
                    at = np.uint32(stage * STAGE)
                    mbar_wait(full + stage * 8, (turn >> STAGE_BITS) & 1)
                    fence_scores(s)
                    fence_scores(dp)
                    scores(s, query_d, np.uint32(key + at))
                    wgmma_commit()
                    scores(dp, dout_d, np.uint32(key + at + VALUE))
                    wgmma_commit()
                    wait_s(s)
                    mask(s, (n_last - skip) * KEYS + column, m0 + tile_row, starts)
                    probabilities(s, lse, scale_log2)
                    settle(s, dump)
                    wait_dp(dp)
                    score_gradients(dp, s, delta)
                    pack(dp, ds)
                    for n in range(n_last - skip - 1, n_last - count, -1):
                        before = stage
                        at_before = at
                        turn = np.uint32(turn + 1)
                        stage = turn & LAST_STAGE
                        at = np.uint32(stage * STAGE)
                        mbar_wait(full + stage * 8, (turn >> STAGE_BITS) & 1)
                        pin_p(ds)
                        fence_scores(s)
                        fence_scores(dp)
                        fence_acc(acc)
                        scores(s, query_d, np.uint32(key + at))
                        wgmma_commit()
                        scores(dp, dout_d, np.uint32(key + at + VALUE))
                        wgmma_commit()
                        accumulate(acc, ds, np.uint32(key_t + at_before))
                        wgmma_commit()
                        wait_s_of_three(s)
                        if n * KEYS < mixed or n * KEYS + KEYS > own + 1:
                            mask(s, n * KEYS + column, m0 + tile_row, starts)
                        probabilities(s, lse, scale_log2)
                        settle(s, dump)
                        wait_dp_of_three(dp)
                        score_gradients(dp, s, delta)
                        wait_acc(acc)
                        pin_p(ds)  # read until here
                        mbar_arrive(empty + before * 8)
                        pack(dp, ds)
                    pin_p(ds)
                    fence_acc(acc)
                    accumulate(acc, ds, np.uint32(key_t + at))
                    wgmma_commit()
                    wait_acc(acc)
                    mbar_arrive(empty + stage * 8)
                    turn = np.uint32(turn + 1)
                mbar_arrive(q_empty)
                for r in range(2):
                    stage_rows(so, acc, r, tile_row + r * 8, scale)
                syncwarp()
                target = dq + (base + m0) * dq_stride + h * (2 * D)
                copy_rows(target, dq_stride, so, wg * 64 + (warp & 3) * 16, -m0, BLOCK_ROWS)
                syncwarp()  # the staged rows have been read
                item += 1
                work = next_work(item)

    return attention_dq_hopper


def _constants(D: int, tile: Wgmma) -> dict[str, int]:
    return {"D": D, "CONSUMERS": tile.warpgroups, "KEYS": tile.columns}


def shared_bytes(D: int, tile: Wgmma) -> int:
    """Dynamic shared memory a block: alignment, Q, dO, dQ, stages of K and V, barriers."""
    tiles = 2 * D * (192 * tile.warpgroups + 2 * STAGES * tile.columns)
    return 1024 + tiles + 16 * STAGES + 32


def dq_launch(
    dq: int, stride: int, stats: int, dout: int, qkv: tuple[int, int, int], p: Problem,
    tile: Wgmma, stream: Any,
) -> None:  # fmt: skip
    """Write dq from the inputs and `stats` (addresses); causal, bfloat16."""
    launch = kernel(
        make_attention_dq_hopper, SIGNATURE, block_threads(tile), shared_bytes(p.D, tile),
        OPTIONS, **_constants(p.D, tile),
    )  # fmt: skip
    rows = 64 * tile.warpgroups
    tiles = cdiv(p.T, rows)
    launch(
        stream, (persistent_grid(p.B * p.H * tiles),), dq,
        *input_maps(qkv, dout, rows, tile.columns, p), stats, p.segment_start, p.B * p.H, p.T,
        padded_length(p.T), p.H, p.group, tiles, p.swath(2, tiles, p.group), stride, p.scale,
        p.scale * float(LOG2E),
    )  # fmt: skip


COMPILE_CASES = [
    CompileCase(
        make_attention_dq_hopper, _constants(D, tile), SIGNATURE, block_threads(tile),
        shared_bytes(D, tile), OPTIONS, only_cc=CC,
    )
    for D, tiles in SHAPES.items()
    for tile in tiles
]  # fmt: skip
