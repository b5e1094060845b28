"""What the worker warps of matmul_swiglu_hopper.py do with the tiles that its products leave in
shared memory: SwiGLU, or SwiGLU backward of the gradient in it.

    work(out, source, slot, rows, F, ...)      forward: out = act; backward: out = dgate_up,
                                               source = gate_up

A tile is taken in batches of BATCH rows, which the warps take by turns. `written` and `read`: the
barriers of the tile's two halves, one a consumer warpgroup.
"""

import numpy as np
from numba import cuda

from llmq_nb.kernels.matmul_swiglu_tiles import (
    ACT_COLUMNS,
    BATCH,
    BATCHES,
    COLUMNS,
    PART_BYTES,
    ROW_BYTES,
    SLOTS,
    TILE_BYTES,
    WORKER_WARPS,
    first_element,
)
from llmq_nb.kernels.ptx import (
    bf16x2,
    bf_hi,
    bf_lo,
    cp16z,
    cp_commit,
    cp_wait2,
    inc,
    lds128,
    maxabs2,
    stg128_cs,
    syncwarp,
)
from llmq_nb.kernels.ptx_hopper import mbar_arrive, mbar_wait
from llmq_nb.kernels.reduce import absmax_update
from llmq_nb.kernels.swiglu import sigmoid, silu_gradient, swiglu_value

HALF = BATCHES // 2
"""Batches of a half of the tile."""
PER_WARP = 16 // BATCH
"""Batches of one consumer warp's rows."""
NO_BITS = np.uint32(0)


@cuda.jit(device=True)
def next_batch(n, read, lane):
    """The warp's batch behind n; tells the consumers when a half of the tile has been read."""
    after = np.uint32(n + WORKER_WARPS)
    side = np.uint32(n // HALF)
    if after // HALF != side:
        syncwarp()
        if lane == 0:
            mbar_arrive(read + side * 8)
    return after


# ---- forward -----------------------------------------------------------------------------------
def make_forward_work(ABSMAX: bool):
    """A tile's parts are gate, up, gate, up of 64 columns; 16 lanes have a row of act."""

    @cuda.jit(device=True)
    def work(
        out, source, slot, rows, F, item, items, stride, row_tiles, column_tiles, group, rank, lane,
        worker, tiles, staging, written, read,
    ):  # fmt: skip
        g = cuda.local.array(4, dtype=np.uint32)
        u = cuda.local.array(4, dtype=np.uint32)
        running, turn = NO_BITS, np.uint32(0)
        piece, below = np.uint32(lane & 15), np.uint32(lane >> 4)
        parts = np.uint32(tiles + (piece >> 3) * (2 * PART_BYTES))
        while item < items:
            row, column = first_element(
                item, items, row_tiles, column_tiles, group, rank, rows, ACT_COLUMNS
            )
            column = np.int32(column + piece * 8)
            n = worker
            while n < BATCHES:
                mbar_wait(written + n // HALF * 8, turn)
                at = np.uint32(n % PER_WARP * BATCH + below)
                chunk = np.uint32((piece & 7) ^ (at & 7))
                place = np.uint32(parts + n // PER_WARP * TILE_BYTES + at * 128 + (chunk << 4))
                g[0], g[1], g[2], g[3] = lds128(place)
                u[0], u[1], u[2], u[3] = lds128(place + PART_BYTES)
                here = np.int32(row + n * BATCH + below)
                n = next_batch(n, read, lane)
                for j in range(4):
                    g[j] = bf16x2(
                        swiglu_value(bf_lo(g[j]), bf_lo(u[j])),
                        swiglu_value(bf_hi(g[j]), bf_hi(u[j])),
                    )
                    if ABSMAX:
                        running = maxabs2(running, g[j])
                if here < rows and column < F:
                    line = out + (np.int64(here) * np.int64(F) + np.int64(column)) * 2
                    stg128_cs(line, (g[0], g[1], g[2], g[3]))
            turn = np.uint32(turn ^ 1)
            item = np.uint32(item + stride)
        if ABSMAX:
            absmax_update(slot, running)

    return work


# ---- backward ----------------------------------------------------------------------------------
@cuda.jit(device=True)
def fetch(buffer, gate_up, row, column, rows, F):
    """Begin to copy a batch of rows of gate and up, this lane's eight columns; zeros outside."""
    half = np.int64(F) * 2
    for i in range(BATCH):
        inside = row + i < rows and column < F
        size = np.uint32(16 if inside else 0)
        # a copy of no bytes reads nothing, but its address must be one
        at = np.int64(np.int64(row + i) * (2 * half) + np.int64(column) * 2 if inside else 0)
        cp16z(buffer + i * ROW_BYTES, gate_up + at, size)
        cp16z(buffer + (i * ROW_BYTES + ROW_BYTES // 2), gate_up + at + half, size)
    cp_commit()


def make_finish(ABSMAX: bool):
    """finish(...): SwiGLU backward of a batch of rows; returns the running maxima."""

    @cuda.jit(device=True)
    def gradients(g, u, d, i, running):
        for j in range(4):
            a, b = bf_lo(g[i, j]), bf_hi(g[i, j])
            da, db = bf_lo(d[i, j]), bf_hi(d[i, j])
            sa, sb = sigmoid(a), sigmoid(b)
            ua, ub = bf_lo(u[i, j]), bf_hi(u[i, j])
            g[i, j] = bf16x2(da * ua * silu_gradient(a, sa), db * ub * silu_gradient(b, sb))
            u[i, j] = bf16x2(da * a * sa, db * b * sb)
            if ABSMAX:
                running = maxabs2(maxabs2(running, g[i, j]), u[i, j])
        return running

    @cuda.jit(device=True)
    def finish(g, u, d, buffer, tile, r, dgate_up, row, column, rows, F, running):
        half = np.int64(F) * 2
        for i in range(BATCH):  # all loads before any store: these instructions keep their order
            at = np.uint32(r + i)
            chunk = np.uint32((cuda.threadIdx.x & 7) ^ (at & 7))
            g[i, 0], g[i, 1], g[i, 2], g[i, 3] = lds128(buffer + i * ROW_BYTES)
            u[i, 0], u[i, 1], u[i, 2], u[i, 3] = lds128(buffer + (i * ROW_BYTES + ROW_BYTES // 2))
            d[i, 0], d[i, 1], d[i, 2], d[i, 3] = lds128(np.uint32(tile + at * 128 + (chunk << 4)))
        for i in range(BATCH):
            running = gradients(g, u, d, i, running)
        out = dgate_up + np.int64(row) * (2 * half) + np.int64(column) * 2
        for i in range(BATCH):
            if row + i < rows and column < F:
                stg128_cs(out + i * (2 * half), (g[i, 0], g[i, 1], g[i, 2], g[i, 3]))
                stg128_cs(out + (i * (2 * half) + half), (u[i, 0], u[i, 1], u[i, 2], u[i, 3]))
        return running

    return finish


def make_backward_work(ABSMAX: bool):
    """A warp has a row of the tile at a time, a lane eight columns of it. Gate and up come through
    shared memory, by copies that a lane waits for one batch at a time: loads into registers would
    share a scoreboard, and the wait for one batch would be one for all."""
    finish = make_finish(ABSMAX)

    @cuda.jit(device=True)
    def work(
        out, source, slot, rows, F, item, items, stride, row_tiles, column_tiles, group, rank, lane,
        worker, tiles, staging, written, read,
    ):  # fmt: skip
        g = cuda.local.array((BATCH, 4), dtype=np.uint32)
        u = cuda.local.array((BATCH, 4), dtype=np.uint32)
        d = cuda.local.array((BATCH, 4), dtype=np.uint32)
        running, turn = NO_BITS, np.uint32(0)
        ring = np.uint32(staging + worker * (SLOTS * BATCH * ROW_BYTES) + lane * 16)
        part = np.uint32(tiles + (lane >> 3) * PART_BYTES)
        # the batch in work: its number in the tile, buffer, the tile's first row, the lane's column
        n, buffer = worker, np.uint32(0)
        row, column = first_element(
            item, items, row_tiles, column_tiles, group, rank, rows, COLUMNS
        )
        column = np.int32(column + lane * 8)
        # the next one to fetch
        ahead, m, next_buffer, next_row, next_column = item, worker, np.uint32(0), row, column
        missing = np.uint32(SLOTS)  # batches to fetch before the next one is finished
        while item < items:
            while missing > 0:
                fetch(
                    np.uint32(ring + next_buffer * (BATCH * ROW_BYTES)), source,
                    np.int32(next_row + m * BATCH), next_column, rows, F,
                )  # fmt: skip
                next_buffer = np.uint32(next_buffer + 1 if next_buffer < SLOTS - 1 else 0)
                m = np.uint32(m + WORKER_WARPS)
                if m >= BATCHES:
                    m, ahead = worker, np.uint32(ahead + stride)
                    next_row, next_column = first_element(
                        ahead, items, row_tiles, column_tiles, group, rank, rows, COLUMNS
                    )
                    next_column = np.int32(next_column + lane * 8)
                missing = np.uint32(missing - 1)
            missing = inc(missing)
            cp_wait2()
            mbar_wait(written + n // HALF * 8, turn)
            running = finish(
                g, u, d, np.uint32(ring + buffer * (BATCH * ROW_BYTES)),
                np.uint32(part + n // PER_WARP * TILE_BYTES), np.uint32(n % PER_WARP * BATCH), out,
                np.int32(row + n * BATCH), column, rows, F, running,
            )  # fmt: skip
            buffer = np.uint32(buffer + 1 if buffer < SLOTS - 1 else 0)
            n = next_batch(n, read, lane)
            if n >= BATCHES:
                n, turn, item = worker, np.uint32(turn ^ 1), np.uint32(item + stride)
                row, column = first_element(
                    item, items, row_tiles, column_tiles, group, rank, rows, COLUMNS
                )
                column = np.int32(column + lane * 8)
        if ABSMAX:
            absmax_update(slot, running)

    return work
