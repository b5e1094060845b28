"""The gate+up product with SwiGLU in its epilogue on wgmma and TMA, for sm_90 (equations:
matmul_swiglu.py, pieces: matmul_swiglu_tiles.py).

A block computes ROWS x 128 columns of gate and of up: two warpgroups own 64 rows each, one warp
fetches. Blocks go in pairs (a cluster): 256 rows, and each fetches 64 gate and the same 64 up rows
of the weight for both. So a thread's accumulator is gate 0..63, up 0..63, gate 64..127, up 64..127,
and its gate and up of one column lie 32 elements apart. Blocks are persistent: the fetching warp
runs ahead, under the epilogue of the tile before.

Sums     In the order of k, float32: the tensor core's own (`promote` false; of FP8 it keeps fewer
         bits), or with `promote` every 128 products are added to float32 registers.
Tails    Loads beyond N, F or K read zeros, stores there are dropped; both are TMA's doing.
Source   NVIDIA, CUTLASS documentation, "Efficient GEMM" (persistent blocks, producer and consumer
         warps, clusters that share an operand). Written from the description.
"""

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.attention_hopper_tiles import K_MAJOR, descriptor
from llmq_nb.kernels.attention_tiles import ZERO
from llmq_nb.kernels.compile import Options
from llmq_nb.kernels.matmul_swiglu_tiles import (
    A_BYTES,
    A_STAGE,
    B_BYTES,
    B_HALF,
    B_STAGE,
    BOTH,
    CLUSTER,
    COLUMNS,
    CONSUMER_WARPS,
    ROWS,
    STAGE_BITS,
    STAGE_BYTES,
    STAGED_BYTES,
    STAGES,
    STEP_BYTES,
    free_stage,
    make_products,
    make_store_act,
    store_half,
    tile_of,
)
from llmq_nb.kernels.ptx import inc, ldg32f, shfl_idx, smem_addr
from llmq_nb.kernels.ptx_hopper import (
    bulk_wait0,
    cluster_rank,
    cluster_sync,
    fence_async,
    fence_mbar_init,
    make_set_registers,
    make_wgmma_fence,
    make_wgmma_wait,
    mbar_expect,
    mbar_init,
    mbar_wait,
    tma_2d,
    tma_3d_multicast,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait1,
)
from llmq_nb.kernels.reduce import absmax_update

THREADS = 384
OPTIONS = Options(arch_specific=True, cluster=CLUSTER)
SIGNATURE = (*(types.uint64,) * 7, *(types.int32,) * 4)
NO_BITS = np.uint32(0)
ONE = np.float32(1.0)


def make_matmul_swiglu(kind: str, promote: bool, act: bool, absmax: bool):
    """Kernel for operands of one format; arguments: tensor maps, addresses, extents in tiles."""
    FP8 = kind == "e4m3"
    STEP = STEP_BYTES if FP8 else STEP_BYTES // 2
    PROMOTE, ACT, ABSMAX = promote, act, absmax
    ARRIVALS = CONSUMER_WARPS * CLUSTER
    B_SHARE = B_BYTES // CLUSTER
    release = make_set_registers(40, increase=False)
    take = make_set_registers(232, increase=True)
    step, step_half = make_products(kind)
    store_act = make_store_act(absmax)
    fence_acc = make_wgmma_fence(128)
    wait_acc = make_wgmma_wait(128, 0)
    fence_part = make_wgmma_fence(64)
    wait_part = make_wgmma_wait(64, 0)

    def matmul_swiglu(
        gate_up_map, act_map, slot, x_map, weight_map, scale_x, scale_weight,
        row_tiles, column_tiles, steps, group,
    ):  # fmt: skip
        sa = np.uint32((smem_addr(cuda.shared.array(0, dtype=types.uint32)) + 1023) & 0xFFFFFC00)
        sb = np.uint32(sa + STAGES * A_BYTES)
        staging = np.uint32(sa + STAGES * STAGE_BYTES)
        full = np.uint32(staging + CONSUMER_WARPS * 2 * STAGED_BYTES)
        empty = np.uint32(full + 8 * STAGES)
        tid = cuda.threadIdx.x
        warp = np.uint32(shfl_idx(tid >> 5, 0))
        lane = np.uint32(tid & 31)
        rank = cluster_rank()
        if tid == 0:
            for i in range(STAGES):
                mbar_init(full + i * 8, 1)
                mbar_init(empty + i * 8, ARRIVALS)
            fence_mbar_init()
            fence_async()
        cuda.syncthreads()
        cluster_sync()  # the barriers of both blocks exist
        item = np.uint32(cuda.blockIdx.x >> 1)
        stride = np.uint32(cuda.gridDim.x >> 1)
        items = np.uint32(row_tiles * column_tiles)
        turn = np.uint32(0)  # steps before this one: stage and phase of its barriers

        if warp >= CONSUMER_WARPS:
            release()
            if tid == CONSUMER_WARPS * 32:
                while item < items:
                    row_tile, column_tile = tile_of(item, row_tiles, column_tiles, group)
                    row = np.uint32((row_tile * CLUSTER + rank) * ROWS)
                    column = np.uint32(column_tile * COLUMNS + rank * (COLUMNS // CLUSTER))
                    k = np.uint32(0)
                    while k < steps:
                        s = np.uint32(turn & (STAGES - 1))
                        filled = np.uint32(full + s * 8)
                        mbar_wait(empty + s * 8, ((turn >> STAGE_BITS) & 1) ^ 1)
                        mbar_expect(filled, STAGE_BYTES)
                        tma_2d(sa + s * A_BYTES, x_map, k * STEP, row, filled)
                        share = np.uint32(sb + s * B_BYTES + rank * B_SHARE)
                        tma_3d_multicast(share, weight_map, k * STEP, column, 0, filled, BOTH)
                        turn = np.uint32(turn + 1)
                        k = inc(k)
                    item = np.uint32(item + stride)
        else:
            take()
            acc = cuda.local.array(128, dtype=np.float32)
            part = cuda.local.array(64, dtype=np.float32)
            r = cuda.local.array(4, dtype=np.uint32)
            for i in range(128):
                acc[i] = ZERO
            a0 = descriptor(K_MAJOR, sa + (warp >> 2) * (A_BYTES // 2))
            b0 = descriptor(K_MAJOR, sb)
            even = np.uint32(staging + warp * (2 * STAGED_BYTES))
            odd = np.uint32(even + STAGED_BYTES)
            scale = ONE
            if FP8:
                scale = ldg32f(scale_x) * ldg32f(scale_weight)
            running = NO_BITS
            while item < items:
                row_tile, column_tile = tile_of(item, row_tiles, column_tiles, group)
                row = np.uint32((row_tile * CLUSTER + rank) * ROWS + warp * 16)
                column = np.uint32(column_tile * COLUMNS)
                k = np.uint32(0)
                if PROMOTE:
                    for i in range(128):
                        acc[i] = ZERO
                    while k < steps:
                        s = np.uint32(turn & (STAGES - 1))
                        a = np.uint32(a0 + s * A_STAGE)
                        b = np.uint32(b0 + s * B_STAGE)
                        mbar_wait(full + s * 8, (turn >> STAGE_BITS) & 1)
                        for half in range(2):
                            fence_part(part)
                            step_half(part, a, np.uint32(b + half * B_HALF))
                            wgmma_commit()
                            wait_part(part)
                            if half == 1:
                                free_stage(np.uint32(empty + s * 8), lane)
                            for i in range(64):
                                acc[half * 64 + i] = acc[half * 64 + i] + part[i]
                        turn = np.uint32(turn + 1)
                        k = inc(k)
                else:
                    s = np.uint32(turn & (STAGES - 1))
                    mbar_wait(full + s * 8, (turn >> STAGE_BITS) & 1)
                    fence_acc(acc)
                    step(acc, np.uint32(a0 + s * A_STAGE), np.uint32(b0 + s * B_STAGE), 0)
                    wgmma_commit()
                    k = inc(k)
                    while k < steps:
                        before = s
                        turn = np.uint32(turn + 1)
                        s = np.uint32(turn & (STAGES - 1))
                        mbar_wait(full + s * 8, (turn >> STAGE_BITS) & 1)
                        wgmma_fence()
                        step(acc, np.uint32(a0 + s * A_STAGE), np.uint32(b0 + s * B_STAGE), 1)
                        wgmma_commit()
                        wgmma_wait1()
                        free_stage(np.uint32(empty + before * 8), lane)
                        k = inc(k)
                    turn = np.uint32(turn + 1)
                    wait_acc(acc)
                    free_stage(np.uint32(empty + s * 8), lane)
                # called one by one: a loop would stay rolled and put acc into local memory
                store_half(acc, 0, scale, gate_up_map, column, 0, row, even, lane, r)
                store_half(acc, 32, scale, gate_up_map, column, 1, row, odd, lane, r)
                if ACT:
                    running = store_act(acc, 0, scale, act_map, column, row, even, lane, r, running)
                    store_half(acc, 64, scale, gate_up_map, column + 64, 0, row, odd, lane, r)
                    store_half(acc, 96, scale, gate_up_map, column + 64, 1, row, even, lane, r)
                    running = store_act(
                        acc, 64, scale, act_map, column + 64, row, odd, lane, r, running
                    )
                else:
                    store_half(acc, 64, scale, gate_up_map, column + 64, 0, row, even, lane, r)
                    store_half(acc, 96, scale, gate_up_map, column + 64, 1, row, odd, lane, r)
                item = np.uint32(item + stride)
            if ABSMAX:
                absmax_update(slot, running)
            if lane == 0:
                bulk_wait0()
        cluster_sync()  # a block that has ended cannot be arrived at

    return matmul_swiglu
