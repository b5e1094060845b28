"""A product with SwiGLU or its gradient behind it, on wgmma and TMA, for sm_90 (equations:
matmul_swiglu.py, matmul_swiglu_backward.py; pieces: matmul_swiglu_tiles.py).

    forward     gate and up = x weight^T; act
    backward    dact = dy weight, which only passes through shared memory; dgate and dup

A block computes tiles of ROWS x COLUMNS of the product: two warpgroups own 64 rows each, one warp
fetches. They round a tile into shared memory and go on with the next one, while three worker warps
(matmul_swiglu_work.py) do what follows: so nearly all of it runs under the products. Blocks go in
pairs (a cluster): 256 rows, and each fetches half of the weight's columns for both. Forward's
columns are 64 of gate, the same 64 of up, the next 64 of gate and of up.

Sums     In the order of k, float32: the tensor core's own (`promote` false; of FP8 it keeps fewer
         bits), or with `promote` every 128 products are added to float32 registers.
Tails    Loads beyond N, F or K read zeros; stores there are dropped.
Speed    H200, backward of Qwen2.5-1.5B in bf16: 1.42 ms cooled, 1.65 at the power limit; its
         products alone take 1.13, moving gate_up and dgate_up 0.56. Clusters of four fit only 30
         times on 132 multiprocessors, and double the time.
Source   NVIDIA, CUTLASS documentation, "Efficient GEMM" (persistent blocks, producer and consumer
         warps, clusters that share an operand). Written from the description.
"""

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.attention_hopper_tiles import K_MAJOR, descriptor, n_major
from llmq_nb.kernels.attention_tiles import ZERO
from llmq_nb.kernels.compile import Options
from llmq_nb.kernels.matmul_swiglu_tiles import (
    A_BYTES,
    A_STAGE,
    ACT_COLUMNS,
    B_BYTES,
    B_STAGE,
    BATCH,
    BOTH,
    CLUSTER,
    COLUMNS,
    CONSUMER_WARPS,
    GROUP_BYTES,
    PART_BYTES,
    ROW_BYTES,
    ROWS,
    SLOTS,
    STAGE_BYTES,
    STAGES,
    STEP_BYTES,
    TILE_BYTES,
    WORKER_WARPS,
    free_stage,
    make_products,
    next_stage,
    put_part,
    tile_of,
)
from llmq_nb.kernels.matmul_swiglu_work import make_backward_work, make_forward_work
from llmq_nb.kernels.ptx import inc, ldg32f, shfl_idx, smem_addr, syncwarp
from llmq_nb.kernels.ptx_hopper import (
    bulk_commit,
    bulk_wait0,
    bulk_wait_read0,
    cluster_rank,
    cluster_sync,
    fence_async,
    fence_mbar_init,
    make_set_registers,
    make_wgmma_fence,
    make_wgmma_wait,
    mbar_arrive,
    mbar_expect,
    mbar_init,
    mbar_wait,
    tma_2d,
    tma_2d_multicast,
    tma_3d_multicast,
    tma_store_3d,
    wgmma_commit,
    wgmma_fence,
    wgmma_wait1,
)

OPTIONS = Options(arch_specific=True, cluster=CLUSTER)
SIGNATURE = (*(types.uint64,) * 8, *(types.int32,) * 6)
ONE = np.float32(1.0)


def make_matmul_swiglu(kind: str, promote: bool, forward: bool, act: bool, absmax: bool):
    """Kernel for operands of one format; act: whether it is wanted (forward).

    Arguments: forward's tensor map of gate_up (else 0), the address that workers write, the one
    that they read (backward's gate_up), absmax's, tensor maps of the operands, scales, extents.
    """
    FP8 = kind == "e4m3"
    STEP = STEP_BYTES if FP8 else STEP_BYTES // 2
    PROMOTE, FORWARD, WORK = promote, forward, act or not forward
    N_MAJOR = not (FP8 or forward)
    B_MAJOR = n_major(GROUP_BYTES) if N_MAJOR else K_MAJOR
    B_HALF = B_STAGE // 2
    SHARE_BYTES, SHARE_COLUMNS = B_BYTES // CLUSTER, COLUMNS // CLUSTER
    TILE_COLUMNS = ACT_COLUMNS if forward else COLUMNS
    ARRIVALS = CONSUMER_WARPS * CLUSTER
    take = make_set_registers(208 if promote else 176, increase=True)
    release = make_set_registers(88 if promote else 152, increase=False)
    step, step_half = make_products(kind, N_MAJOR)
    work = make_forward_work(absmax) if forward else make_backward_work(absmax)
    fence_acc = make_wgmma_fence(128)
    wait_acc = make_wgmma_wait(128, 0)
    fence_part = make_wgmma_fence(64)
    wait_part = make_wgmma_wait(64, 0)

    @cuda.jit(device=True)
    def fetch_weight(place, weight_map, k, column_tile, rank, barrier):
        """This block's half of the tile's columns, for both."""
        if FORWARD:
            column = np.uint32(column_tile * ACT_COLUMNS + rank * (ACT_COLUMNS // CLUSTER))
            tma_3d_multicast(place, weight_map, k, column, 0, barrier, BOTH)
        else:
            column = np.uint32(column_tile * COLUMNS + rank * SHARE_COLUMNS)
            if N_MAJOR:
                tma_2d_multicast(place, weight_map, column, k, barrier, BOTH)
                tma_2d_multicast(place + GROUP_BYTES, weight_map, column + 64, k, barrier, BOTH)
            else:
                tma_2d_multicast(place, weight_map, k, column, barrier, BOTH)

    def matmul_swiglu(
        gate_up_map, out, source, slot, x_map, weight_map, scale_x, scale_weight,
        rows, F, row_tiles, column_tiles, steps, group,
    ):  # fmt: skip
        sa = np.uint32((smem_addr(cuda.shared.array(0, dtype=types.uint32)) + 1023) & 0xFFFFFC00)
        sb = np.uint32(sa + STAGES * A_BYTES)
        tiles = np.uint32(sa + STAGES * STAGE_BYTES)
        staging = np.uint32(tiles + CONSUMER_WARPS * TILE_BYTES)
        full = np.uint32(staging + WORKER_WARPS * SLOTS * BATCH * ROW_BYTES)
        empty = np.uint32(full + 8 * STAGES)
        written = np.uint32(empty + 8 * STAGES)  # of each warpgroup's half of the tile
        read = np.uint32(written + 16)
        tid = cuda.threadIdx.x
        warp = np.uint32(shfl_idx(tid >> 5, 0))
        lane = np.uint32(tid & 31)
        rank = cluster_rank()
        if tid == 0:
            for i in range(STAGES):
                mbar_init(full + i * 8, 1)
                mbar_init(empty + i * 8, ARRIVALS)
            for i in range(2):
                mbar_init(written + i * 8, CONSUMER_WARPS // 2)
                mbar_init(read + i * 8, WORKER_WARPS)
            fence_mbar_init()
            fence_async()
        cuda.syncthreads()
        cluster_sync()  # the barriers of both blocks exist
        item = np.uint32(cuda.blockIdx.x >> 1)
        stride = np.uint32(cuda.gridDim.x >> 1)
        items = np.uint32(row_tiles * column_tiles)
        s, phase = np.uint32(0), np.uint32(0)  # stage of the next step, parity of its barriers

        if warp == CONSUMER_WARPS:
            release()
            if lane == 0:
                while item < items:
                    row_tile, column_tile = tile_of(item, row_tiles, column_tiles, group)
                    row = np.uint32((row_tile * CLUSTER + rank) * ROWS)
                    k = np.uint32(0)
                    while k < steps:
                        filled = np.uint32(full + s * 8)
                        mbar_wait(empty + s * 8, phase ^ 1)
                        mbar_expect(filled, STAGE_BYTES)
                        tma_2d(sa + s * A_BYTES, x_map, k * STEP, row, filled)
                        share = np.uint32(sb + s * B_BYTES + rank * SHARE_BYTES)
                        fetch_weight(
                            share, weight_map, np.uint32(k * STEP), column_tile, rank, filled
                        )
                        s, phase = next_stage(s, phase)
                        k = inc(k)
                    item = np.uint32(item + stride)
        elif warp > CONSUMER_WARPS:
            release()
            if WORK:
                work(
                    out, source, slot, rows, F, item, items, stride, row_tiles, column_tiles, group,
                    rank, lane, np.uint32(warp - (CONSUMER_WARPS + 1)), tiles, staging, written,
                    read,
                )  # fmt: skip
        else:
            take()
            acc = cuda.local.array(128, dtype=np.float32)
            part = cuda.local.array(64, dtype=np.float32)
            r = cuda.local.array(4, dtype=np.uint32)
            for i in range(128):
                acc[i] = ZERO
            side, turn = np.uint32(warp >> 2), np.uint32(0)
            a0 = descriptor(K_MAJOR, sa + side * (A_BYTES // 2))
            b0 = descriptor(B_MAJOR, sb)
            tile = np.uint32(tiles + warp * TILE_BYTES)
            scale = ONE
            if FP8:
                scale = ldg32f(scale_x) * ldg32f(scale_weight)
            while item < items:
                k = np.uint32(0)
                if PROMOTE:
                    for i in range(128):
                        acc[i] = ZERO
                    while k < steps:
                        a = np.uint32(a0 + s * A_STAGE)
                        b = np.uint32(b0 + s * B_STAGE)
                        mbar_wait(full + s * 8, phase)
                        for half in range(2):
                            fence_part(part)
                            step_half(part, a, np.uint32(b + half * B_HALF))
                            wgmma_commit()
                            wait_part(part)
                            if half == 1:
                                free_stage(np.uint32(empty + s * 8), lane)
                            for i in range(64):
                                acc[half * 64 + i] = acc[half * 64 + i] + part[i]
                        s, phase = next_stage(s, phase)
                        k = inc(k)
                else:
                    mbar_wait(full + s * 8, phase)
                    fence_acc(acc)
                    step(acc, np.uint32(a0 + s * A_STAGE), np.uint32(b0 + s * B_STAGE), 0)
                    wgmma_commit()
                    k = inc(k)
                    while k < steps:
                        before = s
                        s, phase = next_stage(s, phase)
                        mbar_wait(full + s * 8, phase)
                        wgmma_fence()
                        step(acc, np.uint32(a0 + s * A_STAGE), np.uint32(b0 + s * B_STAGE), 1)
                        wgmma_commit()
                        wgmma_wait1()
                        free_stage(np.uint32(empty + before * 8), lane)
                        k = inc(k)
                    wait_acc(acc)
                    free_stage(np.uint32(empty + s * 8), lane)
                    s, phase = next_stage(s, phase)
                # the tile before has been taken, by the workers and by TMA
                if WORK:
                    mbar_wait(read + side * 8, turn ^ 1)
                if FORWARD:
                    if lane == 0:
                        bulk_wait_read0()
                    syncwarp()
                # called one by one: a loop would stay rolled and put acc into local memory
                put_part(acc, 0, scale, tile, lane, r)
                put_part(acc, 32, scale, np.uint32(tile + PART_BYTES), lane, r)
                put_part(acc, 64, scale, np.uint32(tile + 2 * PART_BYTES), lane, r)
                put_part(acc, 96, scale, np.uint32(tile + 3 * PART_BYTES), lane, r)
                if FORWARD:
                    fence_async()
                syncwarp()
                if lane == 0:
                    if WORK:
                        mbar_arrive(written + side * 8)
                    if FORWARD:
                        row_tile, column_tile = tile_of(item, row_tiles, column_tiles, group)
                        row = np.uint32((row_tile * CLUSTER + rank) * ROWS + warp * 16)
                        column = np.uint32(column_tile * TILE_COLUMNS)
                        for i in range(4):  # gate, up, gate, up
                            tma_store_3d(
                                gate_up_map, np.uint32(column + (i >> 1) * 64), i & 1, row,
                                np.uint32(tile + i * PART_BYTES),
                            )  # fmt: skip
                        bulk_commit()
                turn = np.uint32(turn ^ 1)
                item = np.uint32(item + stride)
            if FORWARD and lane == 0:
                bulk_wait0()
        cluster_sync()  # a block that has ended cannot be arrived at

    return matmul_swiglu
