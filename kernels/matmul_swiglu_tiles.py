"""Pieces of the kernels that have SwiGLU behind a product (matmul_swiglu_hopper.py): tile shape and
order, products of one step, the rounded tile in shared memory.

Registers      The accumulator of 64 rows x 256 is laid out as in attention_hopper_tiles.py.
Shared memory  A warp's rounded accumulator is four parts of 16 rows x 64 columns, in TMA's 128-byte
               swizzle.
"""

import numpy as np
from numba import cuda

from llmq_nb.kernels.ptx import bf16x2
from llmq_nb.kernels.ptx_hopper import make_wgmma, mbar_arrive_cluster, stsm4

CLUSTER = 2
BOTH = 0b11
"""Mask of the cluster's blocks."""
ROWS, COLUMNS = 128, 256
"""Of the product, a block's tile; forward's columns are ACT_COLUMNS of gate and of up."""
ACT_COLUMNS = COLUMNS // 2
STEP_BYTES = 128
"""Of a row in one step along k: the swizzle."""
STAGES = 3
A_BYTES, B_BYTES = ROWS * STEP_BYTES, COLUMNS * STEP_BYTES
STAGE_BYTES = A_BYTES + B_BYTES
A_STAGE, B_STAGE = A_BYTES >> 4, B_BYTES >> 4  # in descriptor units
GROUP_BYTES = 64 * STEP_BYTES
"""64 columns of a weight whose columns run along memory, in one step: they lie together."""
CONSUMER_WARPS, WORKER_WARPS = 8, 3
PART_BYTES = 16 * 128
TILE_BYTES = 4 * PART_BYTES
"""Of one consumer warp's rounded accumulator."""
SLOTS, BATCH = 3, 2
"""Batches of a worker warp on their way and in work (backward), rows of a batch."""
BATCHES = ROWS // BATCH
ROW_BYTES = 2 * 2 * COLUMNS
"""Of gate and up beside a tile's row (backward)."""
THREADS = 32 * (CONSUMER_WARPS + 1 + WORKER_WARPS)
BARRIER_BYTES = 2 * 8 * STAGES + 2 * 2 * 8
SHARED_BYTES = (
    1024 - 128  # to the next multiple of 1024; dynamic shared memory starts at one of 128
    + STAGES * STAGE_BYTES + CONSUMER_WARPS * TILE_BYTES
    + WORKER_WARPS * SLOTS * BATCH * ROW_BYTES + BARRIER_BYTES
)  # fmt: skip


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


@cuda.jit(device=True)
def next_stage(stage, phase):
    """(stage, parity of its barriers) of the step behind one."""
    stage = np.uint32(stage + 1)
    if stage == STAGES:
        return np.uint32(0), np.uint32(phase ^ 1)
    return stage, phase


def make_products(kind: str, n_major: bool):
    """step(acc, a, b, use): one step along k of 64 x 256; step_half: of 64 x 128, from zero.

    n_major: the weight's columns run along memory (bfloat16 only), else along k.
    """
    mma = make_wgmma(COLUMNS, kind=kind, trans_b=int(n_major))
    mma_half = make_wgmma(COLUMNS // 2, kind=kind, trans_b=int(n_major))
    ACROSS = 16 * STEP_BYTES >> 4 if n_major else 2  # 16 rows down, or 32 bytes along

    @cuda.jit(device=True)
    def step(acc, a, b, use):
        mma(acc, a, b, use)
        mma(acc, np.uint32(a + 2), np.uint32(b + ACROSS), 1)
        mma(acc, np.uint32(a + 4), np.uint32(b + 2 * ACROSS), 1)
        mma(acc, np.uint32(a + 6), np.uint32(b + 3 * ACROSS), 1)

    @cuda.jit(device=True)
    def step_half(part, a, b):
        mma_half(part, a, b, 0)
        mma_half(part, np.uint32(a + 2), np.uint32(b + ACROSS), 1)
        mma_half(part, np.uint32(a + 4), np.uint32(b + 2 * ACROSS), 1)
        mma_half(part, np.uint32(a + 6), np.uint32(b + 3 * ACROSS), 1)

    return step, step_half


@cuda.jit(device=True)
def put_part(acc, first, scale, buffer, lane, r):
    """64 columns of a warp's accumulator, in bfloat16, into one part of its tile."""
    for quarter in range(4):
        for i in range(4):
            j = first + quarter * 8 + 2 * i
            r[i] = bf16x2(acc[j] * scale, acc[j + 1] * scale)
        chunk = (quarter * 2 + (lane >> 4)) ^ (lane & 7)
        stsm4(buffer + (lane & 15) * 128 + (chunk << 4), (r[0], r[1], r[2], r[3]))


@cuda.jit(device=True)
def first_element(item, items, row_tiles, column_tiles, group, rank, rows, columns):
    """(row, column) where a block's tile of an item begins, `columns` apart; behind the last item
    the row `rows`, of which nothing is fetched."""
    row_tile, column_tile = tile_of(item, row_tiles, column_tiles, group)
    row = np.int32((row_tile * CLUSTER + rank) * ROWS)
    return np.int32(row if item < items else rows), np.int32(column_tile * columns)
