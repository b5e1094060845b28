r"""Attention backward on wgmma and TMA, for sm_90: dQ, and both launches (equations: attention.py;
causal only).

As attention_backward's dq: a block takes item after item (64 queries a warpgroup of one head) and
walks its key tiles. One producer warp fetches by TMA; a warpgroup skips the tiles that lie above
its own diagonal.

Shapes   as attention_backward; rows beyond T read as zero (4-D tensor maps).
Source   Shah et al. 2024, arXiv:2407.08608; Dao 2023, arXiv:2307.08691, algorithm 2.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels import attention_hopper_dkdv as dkdv
from llmq_nb.kernels.attention_backward import padded_length
from llmq_nb.kernels.attention_hopper_tiles import (
    CC,
    HALF_ROW,
    K_MAJOR,
    OPTIONS,
    REGISTERS,
    WARPGROUP_HALF,
    descriptor,
    head_map,
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
from llmq_nb.kernels.ptx import ex2, ffma, ldg32f, smem_addr, syncwarp
from llmq_nb.kernels.ptx_hopper import (
    fence_async,
    make_pin,
    make_set_registers,
    make_wgmma_fence,
    make_wgmma_wait,
    mbar_arrive,
    mbar_expect,
    mbar_init,
    mbar_wait,
    wgmma_commit,
)

SIGNATURE = (types.uint64,) * 7 + (types.int32,) * 8 + (types.float32,) * 2
SHAPES = {64: (3, 64), 128: (2, 64)}
"""(Warpgroups of 64 queries, keys of a tile), by head_dim."""
STAGES = 2


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
    wait_acc = make_wgmma_wait(ACC, 0)
    pin_p = make_pin(PAIRS, "r")

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
        tid = cuda.threadIdx.x
        warp = tid >> 5
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
                        stage = turn & 1
                        ready = full + stage * 8
                        row = (n_last - i) * KEYS
                        mbar_wait(empty + stage * 8, ((turn >> 1) & 1) ^ 1)
                        mbar_expect(ready, STAGE_BYTES)
                        load_kv(sk + stage * STAGE_BYTES, k_map, g, row, b, ready)
                        load_kv(sk + stage * STAGE_BYTES + KV_BYTES, v_map, g, row, b, ready)
                        turn = np.uint32(turn + 1)
                    item += 1
                    work = next_work(item)
        else:
            take()
            wg = warp >> 2
            acc = cuda.local.array(ACC, dtype=np.float32)
            s = cuda.local.array(SCORES, dtype=np.float32)
            dp = cuda.local.array(SCORES, dtype=np.float32)
            ds = cuda.local.array(PAIRS, dtype=np.uint32)
            lse = cuda.local.array(2, dtype=np.float32)
            delta = cuda.local.array(2, dtype=np.float32)
            starts = cuda.local.array(2, dtype=np.int32)
            tile_row = wg * 64 + (warp & 3) * 16 + (lane >> 2)
            query_d = descriptor(K_MAJOR, sq + wg * WARPGROUP_HALF)
            dout_d = descriptor(K_MAJOR, sd + wg * WARPGROUP_HALF)
            key = descriptor(K_MAJOR, sk)
            key_t = descriptor(N_MAJOR, sk)
            for i in range(SCORES):
                s[i] = ZERO
                dp[i] = ZERO
            while work < heads * tiles:
                b, h, m0, n_last, count = item_of(work, segment_start, heads, T, H, tiles, swath)
                base = np.int64(b) * T
                own_row = m0 + wg * 64
                row_stats = stats + (np.int64(b) * H + h) * padded * 8
                for i in range(ACC):
                    acc[i] = ZERO
                for r in range(2):
                    row = min(m0 + tile_row + r * 8, padded - 1)  # the last tile may reach further
                    lse[r] = ldg32f(row_stats + row * 4)
                    delta[r] = ldg32f(row_stats + (padded + row) * 4)
                    starts[r] = first_key(segment_start, base + min(row, T - 1))
                mixed = first_key(segment_start, base + min(own_row + 63, T - 1))
                mbar_wait(q_full, item & 1)
                for n in range(n_last, n_last - count, -1):
                    stage = turn & 1
                    first = n * KEYS
                    mbar_wait(full + stage * 8, (turn >> 1) & 1)
                    if first < own_row + 64:  # else all above the diagonal
                        at = np.uint64(stage) * np.uint64(STAGE)
                        fence_scores(dp)
                        fence_scores(s)
                        scores(s, query_d, key + at)
                        wgmma_commit()
                        scores(dp, dout_d, key + at + np.uint64(VALUE))
                        wgmma_commit()
                        wait_s(s)
                        if first + KEYS > own_row or first < mixed:
                            mask(s, first + ((lane & 3) << 1), m0 + tile_row, starts)
                        for i in range(SCORES):
                            s[i] = ex2(ffma(s[i], scale_log2, -lse[(i >> 1) & 1]))
                        wait_dp(dp)
                        for i in range(SCORES):
                            dp[i] = s[i] * (dp[i] - delta[(i >> 1) & 1])
                        pack(dp, ds)
                        pin_p(ds)
                        fence_acc(acc)
                        accumulate(acc, ds, key_t + at)
                        wgmma_commit()
                        wait_acc(acc)
                    mbar_arrive(empty + stage * 8)
                    turn = np.uint32(turn + 1)
                mbar_arrive(q_empty)
                for r in range(2):
                    stage_rows(so, acc, r, tile_row + r * 8, scale)
                syncwarp()
                target = dq + (base + m0) * dq_stride + h * (2 * D)
                copy_rows(target, dq_stride, so, wg * 64 + (warp & 3) * 16, T - m0)
                syncwarp()  # the staged rows have been read
                item += 1
                work = next_work(item)

    return attention_dq_hopper


def shared_bytes(D: int, consumers: int, keys: int) -> int:
    """Dynamic shared memory a block: alignment, Q, dO, dQ, stages of K and V, barriers."""
    return 1024 + 2 * D * (192 * consumers + 2 * STAGES * keys) + 64


def backward_launch(
    gradients: tuple[int, int, int], strides: tuple[int, int], stats: int, dout: int,
    qkv: tuple[int, int, int], p: Problem, stream: Any,
) -> None:  # fmt: skip
    """Write dq, dk, dv from the inputs and `stats` (addresses); causal, bfloat16."""
    q, k, v = qkv
    padded, dout_stride = padded_length(p.T), p.H * p.D * 2
    scales = p.scale, p.scale * float(LOG2E)

    def maps(query_rows: int, key_rows: int) -> tuple[int, int, int, int]:
        return (
            head_map(q, p.H, p.q_stride, query_rows, p),
            head_map(k, p.G, p.kv_stride, key_rows, p),
            head_map(v, p.G, p.kv_stride, key_rows, p),
            head_map(dout, p.H, dout_stride, query_rows, p),
        )

    consumers = dkdv.CONSUMERS[p.D]
    launch = kernel(
        dkdv.make_attention_dkdv_hopper, dkdv.SIGNATURE, 128 * (consumers + 1),
        dkdv.shared_bytes(p.D, consumers), OPTIONS, D=p.D, CONSUMERS=consumers,
    )  # fmt: skip
    tiles = cdiv(p.T, 64 * consumers)
    launch(
        stream, (p.B * p.G * tiles,), gradients[1], gradients[2],
        *maps(dkdv.QUERY_TILE, 64 * consumers), stats, p.segment_start, p.B * p.G, p.T, padded, p.H,
        p.group, tiles, p.swath(2 * p.group), strides[1], *scales,
    )  # fmt: skip
    consumers, keys = SHAPES[p.D]
    launch = kernel(
        make_attention_dq_hopper, SIGNATURE, 128 * (consumers + 1),
        shared_bytes(p.D, consumers, keys), OPTIONS, D=p.D, CONSUMERS=consumers, KEYS=keys,
    )  # fmt: skip
    tiles = cdiv(p.T, 64 * consumers)
    launch(
        stream, (persistent_grid(p.B * p.H * tiles),), gradients[0], *maps(64 * consumers, keys),
        stats,
        p.segment_start, p.B * p.H, p.T, padded, p.H, p.group, tiles, p.swath(2) * p.group,
        strides[0], *scales,
    )  # fmt: skip


COMPILE_CASES = [
    CompileCase(
        make_attention_dq_hopper,
        {"D": D, "CONSUMERS": consumers, "KEYS": keys},
        SIGNATURE,
        128 * (consumers + 1),
        shared_bytes(D, consumers, keys),
        OPTIONS,
        only_cc=CC,
    )
    for D, (consumers, keys) in SHAPES.items()
]
