"""Pieces of the gate+up product's kernel (matmul_swiglu_hopper.py): tile shape and order, products
of one step, the staged stores of its epilogue.

Registers      The accumulator of 64 rows x 256 is laid out as in attention_hopper_tiles.py.
Shared memory  A staging tile is 16 rows of 64 bfloat16, in TMA's 128-byte swizzle.
"""

import numpy as np
from numba import cuda

from llmq_nb.kernels.ptx import bf16x2, bf_hi, bf_lo, maxabs2, syncwarp
from llmq_nb.kernels.ptx_hopper import (
    bulk_commit,
    bulk_wait_read1,
    fence_async,
    make_wgmma,
    mbar_arrive_cluster,
    stsm4,
    tma_store_2d,
    tma_store_3d,
)
from llmq_nb.kernels.swiglu import swiglu_value

CLUSTER = 2
BOTH = 0b11
"""Mask of the cluster's blocks."""
ROWS, COLUMNS = 128, 128
"""Rows and act columns of a block."""
STEP_BYTES = 128
"""Of a row in one step along k: the swizzle."""
STAGES, STAGE_BITS = 4, 2
A_BYTES, B_BYTES = ROWS * STEP_BYTES, 2 * COLUMNS * STEP_BYTES
STAGE_BYTES = A_BYTES + B_BYTES
A_STAGE, B_STAGE = A_BYTES >> 4, B_BYTES >> 4  # in descriptor units
B_HALF = B_STAGE // 2
CONSUMER_WARPS = 8
STAGED_BYTES = 16 * 128
"""Of a warp's 16 rows of 64 columns on their way out; two a warp."""
SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + CONSUMER_WARPS * 2 * STAGED_BYTES + 16 * STAGES


@cuda.jit(device=True)
def tile_of(item, row_tiles, column_tiles, group):
    """(row tile, column tile): `group` row tiles, whose operands stay in the L2 cache together, row
    tiles fastest; then the next ones."""
    per = np.uint32(group * column_tiles)
    first = np.uint32(np.uint32(item) // per * np.uint32(group))
    rest = np.uint32(item - first * np.uint32(column_tiles))
    height = np.uint32(row_tiles - first)
    if height > group:
        height = np.uint32(group)
    column = np.uint32(rest // height)
    return np.uint32(first + rest - column * height), column


@cuda.jit(device=True)
def free_stage(barrier, lane):
    """A warp has read a stage: in both blocks, which fill it for each other."""
    if lane < CLUSTER:
        mbar_arrive_cluster(barrier, lane)


def make_products(kind: str):
    """step(acc, a, b, use): one step along k of 64 x 256; step_half: of 64 x 128, from zero."""
    mma = make_wgmma(256, kind=kind)
    mma_half = make_wgmma(128, kind=kind)

    @cuda.jit(device=True)
    def step(acc, a, b, use):
        mma(acc, a, b, use)
        mma(acc, np.uint32(a + 2), np.uint32(b + 2), 1)
        mma(acc, np.uint32(a + 4), np.uint32(b + 4), 1)
        mma(acc, np.uint32(a + 6), np.uint32(b + 6), 1)

    @cuda.jit(device=True)
    def step_half(part, a, b):
        mma_half(part, a, b, 0)
        mma_half(part, np.uint32(a + 2), np.uint32(b + 2), 1)
        mma_half(part, np.uint32(a + 4), np.uint32(b + 4), 1)
        mma_half(part, np.uint32(a + 6), np.uint32(b + 6), 1)

    return step, step_half


# ---- epilogue ----------------------------------------------------------------------------------
@cuda.jit(device=True)
def begin_staging(lane):
    """The staging tile filled two tiles ago has been read."""
    if lane == 0:
        bulk_wait_read1()
    syncwarp()


@cuda.jit(device=True)
def stage(buffer, lane, quarter, r):
    """Columns 16 quarter .. of the staging tile, from four registers."""
    chunk = (quarter * 2 + (lane >> 4)) ^ (lane & 7)
    stsm4(buffer + (lane & 15) * 128 + (chunk << 4), (r[0], r[1], r[2], r[3]))


@cuda.jit(device=True)
def store_half(acc, first, scale, out, column, half, row, buffer, lane, r):
    """64 columns of gate (half 0) or up (1) of this warp's 16 rows, in bfloat16."""
    begin_staging(lane)
    for quarter in range(4):
        for i in range(4):
            j = first + quarter * 8 + 2 * i
            r[i] = bf16x2(acc[j] * scale, acc[j + 1] * scale)
        stage(buffer, lane, quarter, r)
    fence_async()
    syncwarp()
    if lane == 0:
        tma_store_3d(out, column, half, row, buffer)
        bulk_commit()


def make_store_act(ABSMAX: bool):
    """store_act(...): 64 columns of act, from gate and up as they are stored; returns the running
    maxima."""

    @cuda.jit(device=True)
    def store_act(acc, first, scale, out, column, row, buffer, lane, r, running):
        begin_staging(lane)
        for quarter in range(4):
            for i in range(4):
                j = first + quarter * 8 + 2 * i
                gate = bf16x2(acc[j] * scale, acc[j + 1] * scale)
                up = bf16x2(acc[j + 32] * scale, acc[j + 33] * scale)
                r[i] = bf16x2(
                    swiglu_value(bf_lo(gate), bf_lo(up)), swiglu_value(bf_hi(gate), bf_hi(up))
                )
                if ABSMAX:
                    running = maxabs2(running, r[i])
            stage(buffer, lane, quarter, r)
        fence_async()
        syncwarp()
        if lane == 0:
            tma_store_2d(out, column, row, buffer)
            bulk_commit()
        return running

    return store_act
