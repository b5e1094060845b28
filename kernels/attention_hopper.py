r"""Attention forward on wgmma and TMA, for sm_90 (equations: attention.py; causal only).

One producer warp fetches tiles by TMA; CONSUMERS warpgroups own 64 query rows each. S = Q K^T of a
tile is issued with the last tile's P V, which then runs under the softmax of S. K and V have two
stages each; every consumer thread frees a stage on its empty barrier (one arrival a warp would be a
race with the other lanes' reads). A block takes item after item (QUERIES rows of a head).

Two rules keep ptxas from serialising the wgmma: every operand register is final before the first
wgmma of a stage (pins), and P is packed from S only after P V has ended. A third (`settle`) keeps
it from waiting for P V before the softmax.

Shapes   as attention_forward; 4-D tensor maps (D, heads, T, B), so that rows beyond T read as zero.
Source   Shah et al. 2024, arXiv:2407.08608 (producer and consumers, overlapped softmax). Written
         from the description.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

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
from llmq_nb.kernels.attention_tiles import (
    FIRST_MAXIMUM,
    LN2,
    LOG2E,
    ZERO,
    Problem,
    divide,
    first_key,
)
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    ex2,
    ffma,
    fmax,
    lg2,
    rcp,
    shfl_idx,
    smem_addr,
    stg32f,
    syncwarp,
)
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
    settle,
    wgmma_commit,
)
from llmq_nb.kernels.reduce import quad_max, quad_sum

SIGNATURE = (types.uint64,) * 6 + (types.int32,) * 6 + (types.float32,)
SHAPES = {64: [Wgmma(3, 96), Wgmma(3, 128), Wgmma(4, 64)], 128: [Wgmma(2, 128)]}
"""By head_dim; the first is the default. Measured and slower at D = 64: two warpgroups, (3, 64),
and warpgroups that take turns at issuing products."""


def make_softmax_hopper(COLUMNS: int):
    """softmax(s, largest, total, shrink, scale_log2): scores -> exp2(score - largest); shrink: what
    the accumulator must still be multiplied by."""
    N8 = COLUMNS // 8

    @cuda.jit(device=True)
    def softmax(s, largest, total, shrink, scale_log2):
        for r in range(2):
            top = largest[r]
            for j in range(N8):
                top = fmax(fmax(top, s[4 * j + 2 * r]), s[4 * j + 2 * r + 1])
            top = quad_max(top)
            shrink[r] = ex2((largest[r] - top) * scale_log2)
            largest[r] = top
            offset = -(top * scale_log2)
            t = total[r] * shrink[r]
            for j in range(N8):
                p0 = ex2(ffma(s[4 * j + 2 * r], scale_log2, offset))
                p1 = ex2(ffma(s[4 * j + 2 * r + 1], scale_log2, offset))
                t += p0 + p1
                s[4 * j + 2 * r] = p0
                s[4 * j + 2 * r + 1] = p1
            total[r] = t

    return softmax


def make_attention_forward_hopper(D: int, CONSUMERS: int, KEYS: int):
    """Kernel for CONSUMERS warpgroups; arguments: addresses, tensor maps, extents."""
    QUERIES = 64 * CONSUMERS
    HALVES = D // 64
    Q_HALF = QUERIES * HALF_ROW
    KV_HALF = KEYS * HALF_ROW
    Q_BYTES = HALVES * Q_HALF
    KV_BYTES = HALVES * KV_HALF
    STAGE = KV_BYTES >> 4  # in descriptor units
    ARRIVALS = 128 * CONSUMERS
    ACC = D // 2
    D8 = D // 8
    SCORES = KEYS // 2
    PAIRS = KEYS // 4
    N_MAJOR = n_major(KV_HALF)
    item_of = make_item(QUERIES, KEYS)
    release = make_set_registers(REGISTERS[CONSUMERS][0], increase=False)
    take = make_set_registers(REGISTERS[CONSUMERS][1], increase=True)
    load_q = make_load_halves(D, Q_HALF)
    load_kv = make_load_halves(D, KV_HALF)
    scores = make_product(D, KEYS, Q_HALF, KV_HALF)
    accumulate = make_product_registers(D, KEYS)
    pack = make_pack(PAIRS)
    mask = make_mask_hopper(KEYS)
    softmax = make_softmax_hopper(KEYS)
    stage_rows = make_stage_half_rows(D, Q_HALF)
    copy_rows = make_copy_half_rows(D, Q_HALF)
    fence_scores = make_wgmma_fence(SCORES)
    fence_acc = make_wgmma_fence(ACC)
    wait_scores = make_wgmma_wait(SCORES, 1)
    wait_first = make_wgmma_wait(SCORES, 0)
    wait_acc = make_wgmma_wait(ACC, 0)
    pin_p = make_pin(PAIRS, "r")
    pin_acc = make_pin(ACC)

    def attention_forward_hopper(
        out, lse, q_map, k_map, v_map, segment_start, heads, T, H, group, tiles, swath, scale_log2
    ):
        sq = np.uint32((smem_addr(cuda.shared.array(0, dtype=types.uint32)) + 1023) & 0xFFFFFC00)
        sk = np.uint32(sq + Q_BYTES)
        sv = np.uint32(sk + 2 * KV_BYTES)
        so = np.uint32(sv + 2 * KV_BYTES)
        q_full = np.uint32(so + Q_BYTES)  # barriers, 8 bytes each; two stages where two
        k_full = np.uint32(q_full + 8)
        v_full = np.uint32(q_full + 24)
        q_empty = np.uint32(q_full + 40)
        k_empty = np.uint32(q_full + 48)
        v_empty = np.uint32(q_full + 64)
        dump = np.uint32(q_full + 80)
        tid = cuda.threadIdx.x
        warp = shfl_idx(tid >> 5, 0)
        lane = tid & 31
        if tid == 0:
            for i in range(5):
                mbar_init(q_full + i * 8, 1)
            for i in range(5):
                mbar_init(q_empty + i * 8, ARRIVALS)
            fence_async()
        cuda.syncthreads()  # the barriers exist
        turn = np.uint32(0)  # tiles before this item: stage and phase of every barrier
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
                    mbar_expect(q_full, Q_BYTES)
                    load_q(sq, q_map, h, m0, b, q_full)
                    for i in range(count):
                        stage = turn & 1
                        free = ((turn >> 1) & 1) ^ 1
                        row = (n_last - i) * KEYS
                        mbar_wait(k_empty + stage * 8, free)
                        mbar_expect(k_full + stage * 8, KV_BYTES)
                        load_kv(sk + stage * KV_BYTES, k_map, g, row, b, k_full + stage * 8)
                        mbar_wait(v_empty + stage * 8, free)
                        mbar_expect(v_full + stage * 8, KV_BYTES)
                        load_kv(sv + stage * KV_BYTES, v_map, g, row, b, v_full + stage * 8)
                        turn = np.uint32(turn + 1)
                    item += 1
                    work = next_work(item)
        else:
            take()
            wg = np.int64(warp >> 2)
            acc = cuda.local.array(ACC, dtype=np.float32)
            s = cuda.local.array(SCORES, dtype=np.float32)
            p = cuda.local.array(PAIRS, dtype=np.uint32)
            largest = cuda.local.array(2, dtype=np.float32)
            total = cuda.local.array(2, dtype=np.float32)
            shrink = cuda.local.array(2, dtype=np.float32)
            starts = cuda.local.array(2, dtype=np.int32)
            tile_row = np.int32(wg * 64 + (warp & 3) * 16 + (lane >> 2))
            query = descriptor(K_MAJOR, sq + wg * WARPGROUP_HALF)
            key = descriptor(K_MAJOR, sk)
            value = descriptor(N_MAJOR, sv)
            column = (lane & 3) << 1
            while work < heads * tiles:
                b, h, m0, n_last, count = item_of(work, segment_start, heads, T, H, tiles, swath)
                base = np.int64(b) * T
                own = m0 + wg * 64
                for i in range(ACC):
                    acc[i] = ZERO
                for i in range(SCORES):
                    s[i] = ZERO
                for r in range(2):
                    largest[r] = FIRST_MAXIMUM
                    total[r] = ZERO
                    starts[r] = first_key(segment_start, base + max(m0 + tile_row + r * 8, 0))
                mixed = first_key(segment_start, base + max(own + 63, 0))
                # tiles above this warpgroup's last row are only released
                skip = count
                if own + 63 >= 0:
                    skip = n_last - divide(own + 63, KEYS)
                for _ in range(skip):
                    stage = turn & 1
                    mbar_wait(k_full + stage * 8, (turn >> 1) & 1)
                    mbar_wait(v_full + stage * 8, (turn >> 1) & 1)
                    mbar_arrive(k_empty + stage * 8)
                    mbar_arrive(v_empty + stage * 8)
                    turn = np.uint32(turn + 1)
                mbar_wait(q_full, item & 1)
                if skip < count:
                    stage = turn & 1
                    mbar_wait(k_full + stage * 8, (turn >> 1) & 1)
                    fence_scores(s)
                    scores(s, query, np.uint32(key + stage * STAGE))
                    wgmma_commit()
                    wait_first(s)
                    mbar_arrive(k_empty + stage * 8)
                    mask(s, (n_last - skip) * KEYS + column, m0 + tile_row, starts)
                    softmax(s, largest, total, shrink, scale_log2)
                    pack(s, p)
                    for n in range(n_last - skip - 1, n_last - count, -1):
                        before = turn & 1
                        parity = (turn >> 1) & 1
                        turn = np.uint32(turn + 1)
                        stage = turn & 1
                        mbar_wait(k_full + stage * 8, (turn >> 1) & 1)
                        mbar_wait(v_full + before * 8, parity)
                        pin_acc(acc)
                        pin_p(p)
                        fence_scores(s)
                        scores(s, query, np.uint32(key + stage * STAGE))
                        wgmma_commit()
                        accumulate(acc, p, np.uint32(value + before * STAGE))
                        wgmma_commit()
                        wait_scores(s)
                        mbar_arrive(k_empty + stage * 8)
                        if n * KEYS < mixed or n * KEYS + KEYS > own + 1:
                            mask(s, n * KEYS + column, m0 + tile_row, starts)
                        softmax(s, largest, total, shrink, scale_log2)
                        settle(total[0] + total[1], dump)
                        wait_acc(acc)
                        pin_p(p)  # P is read until here: keeps the next P in other registers
                        mbar_arrive(v_empty + before * 8)
                        for j in range(D8):
                            for c in range(4):
                                acc[4 * j + c] = acc[4 * j + c] * shrink[c >> 1]
                        pack(s, p)
                    before = turn & 1
                    mbar_wait(v_full + before * 8, (turn >> 1) & 1)
                    pin_p(p)
                    fence_acc(acc)
                    accumulate(acc, p, np.uint32(value + before * STAGE))
                    wgmma_commit()
                    wait_acc(acc)
                    mbar_arrive(v_empty + before * 8)
                    turn = np.uint32(turn + 1)
                mbar_arrive(q_empty)

                for r in range(2):
                    row = m0 + tile_row + r * 8
                    t = quad_sum(total[r])
                    if (lane & 3) == 0 and row >= 0:
                        result = (largest[r] * scale_log2 + lg2(t)) * LN2
                        stg32f(lse + ((np.int64(b) * H + h) * T + row) * 4, result)
                    stage_rows(so, acc, r, tile_row + r * 8, rcp(t))
                syncwarp()
                target = out + ((base + m0) * H + h) * (2 * D)
                copy_rows(target, H * (2 * D), so, wg * 64 + (warp & 3) * 16, -m0, QUERIES)
                syncwarp()  # the staged rows have been read
                item += 1
                work = next_work(item)

    return attention_forward_hopper


def _constants(D: int, tile: Wgmma) -> dict[str, int]:
    return {"D": D, "CONSUMERS": tile.warpgroups, "KEYS": tile.columns}


def shared_bytes(D: int, tile: Wgmma) -> int:
    """Dynamic shared memory a block: alignment, Q and out, two stages of K and V, ten barriers."""
    return 1024 + 2 * D * (128 * tile.warpgroups + 4 * tile.columns) + 96


def forward_launch(
    out: int, lse: int, q: int, k: int, v: int, p: Problem, tile: Wgmma, stream: Any
) -> None:
    """Write out and lse (addresses); the problem must be causal and bfloat16."""
    launch = kernel(
        make_attention_forward_hopper, SIGNATURE, block_threads(tile), shared_bytes(p.D, tile),
        OPTIONS, **_constants(p.D, tile),
    )  # fmt: skip
    rows = 64 * tile.warpgroups
    heads, count = p.B * p.H, cdiv(p.T, rows)
    launch(
        stream, (persistent_grid(heads * count),), out, lse,
        head_map(q, p.H, p.q_stride, rows, p), head_map(k, p.G, p.kv_stride, tile.columns, p),
        head_map(v, p.G, p.kv_stride, tile.columns, p), p.segment_start, heads, p.T, p.H, p.group,
        count, p.swath(2, count, p.group), p.scale * float(LOG2E),
    )  # fmt: skip


COMPILE_CASES = [
    CompileCase(
        make_attention_forward_hopper, _constants(D, tile), SIGNATURE, block_threads(tile),
        shared_bytes(D, tile), OPTIONS, only_cc=CC,
    )
    for D, tiles in SHAPES.items()
    for tile in tiles
]  # fmt: skip
