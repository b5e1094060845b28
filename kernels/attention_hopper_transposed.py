"""Pieces of the sm_90 kernels for dK and dV: the arithmetic of S^T and dP^T tiles, and for
attention_hopper_items the order of work, results, the sum over a cluster.

Order of tiles  From the last queries down, at each position one head of the group after the other:
                blocks of the same heads that started together read the same tiles together, and
                the tiles above a warpgroup's diagonal come last. A cluster of two blocks takes
                turns: tile i is block i % 2's.
"""

import numpy as np
from numba import cuda

from llmq_nb.kernels.attention_hopper_tiles import HALF_ROW
from llmq_nb.kernels.attention_tiles import (
    MASKED,
    block_order,
    divide,
    first_key,
    queries_end,
)
from llmq_nb.kernels.ptx import (
    bf16x2,
    ex2,
    ffma,
    lds64f,
    lds128,
    sel_gt,
    shfl_idx,
    stg128,
    sts32,
    syncwarp,
    u2f,
)
from llmq_nb.kernels.ptx_hopper import cluster_address, mbar_arrive, mbar_wait, sts128f_cluster

STAGE_BITS = 2
STAGES = 1 << STAGE_BITS
QUERY_TILE = 64


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


# ---- order of work -----------------------------------------------------------------------------
# The producer decides which item is next and hands it to the consumers through shared memory: it is
# ahead of them, so neither the counter nor the search for the item's queries holds them up.
def make_key_item(KEYS: int):
    """item_of(work, ...): (sequence and key/value head, first key, first query that does not see
    every key, query tiles of a head: at least one) of a piece of work. Whole warps must call it."""

    @cuda.jit(device=True)
    def item_of(work, segment_start, heads, T, kv_heads, tiles, swath):
        bg, tile = block_order(work, heads, tiles, swath)  # tile 0: most queries
        base = divide(bg, kv_heads) * T
        n0 = tile * KEYS
        m_end = queries_end(segment_start, base, min(n0 + KEYS, T) - 1, T)
        open_end = queries_end(segment_start, base, n0, T)
        per_head = (m_end - n0 + QUERY_TILE - 1) // QUERY_TILE
        return np.int32(bg), np.int32(n0), np.int32(open_end), np.int32(per_head)

    return item_of


@cuda.jit(device=True)
def read_item(shared):
    """What item_of gave, from the four words at a shared address. Whole warps."""
    a, b, c, d = lds128(shared)
    return (
        np.int32(shfl_idx(a, 0)),
        np.int32(shfl_idx(b, 0)),
        np.int32(shfl_idx(c, 0)),
        np.int32(shfl_idx(d, 0)),
    )


@cuda.jit(device=True)
def share(tiles, rank, blocks):
    """How many of so many tiles are those of block `rank` of 1 or 2."""
    return (tiles - rank + blocks - 1) >> (blocks - 1)


@cuda.jit(device=True)
def wrap_heads(head, query, group):
    """(head of the group, first query) of a tile, where `head` may lie beyond the group."""
    while head >= group:
        head = np.int32(head - group)
        query = np.int32(query - QUERY_TILE)
    return np.int32(head), np.int32(query)


@cuda.jit(device=True)
def release_next(full, empty, turn):
    """Give a stage back unread; returns the next turn."""
    stage = turn & (STAGES - 1)
    mbar_wait(full + stage * 8, (turn >> STAGE_BITS) & 1)
    mbar_arrive(empty + stage * 8)
    return np.uint32(turn + 1)


# ---- results -----------------------------------------------------------------------------------
def make_write_rows(D: int):
    """write(target, stride, shared, acc, row, rows, factor): a warp's 16 rows of an accumulator as
    bfloat16, 64 columns at a time through its own rows at `shared`; row: this lane's first of the
    block's, target: address of the block's row 0; rows from `rows` on do not exist."""
    HALVES = D // 64

    @cuda.jit(device=True)
    def write(target, stride, shared, acc, row, rows, factor):
        lane = cuda.threadIdx.x & 31
        for half in range(HALVES):
            for r in range(2):
                for j in range(8):
                    word = shared + (row + r * 8) * HALF_ROW + ((j ^ (row & 7)) << 4)
                    i = 4 * (half * 8 + j) + 2 * r
                    sts32(word + ((lane & 3) << 2), bf16x2(acc[i] * factor, acc[i + 1] * factor))
            syncwarp()
            for i in range(4):
                r = row - (lane >> 2) + i * 4 + (lane >> 3)
                c = lane & 7
                if r < rows:
                    word = shared + r * HALF_ROW + ((c ^ (r & 7)) << 4)
                    stg128(target + r * stride + half * HALF_ROW + c * 16, lds128(word))
            syncwarp()  # read, before the next half

    return write


# ---- sum over a cluster of two -----------------------------------------------------------------
def make_exchange(ACC: int):
    """(send, receive): a warpgroup's ACC accumulators a thread to block `rank` of the cluster, and
    added to the own ones there. shared: address, the same in both blocks, of ACC * 512 bytes for
    each warpgroup."""

    @cuda.jit(device=True)
    def place(shared):
        thread = cuda.threadIdx.x
        return shared + (thread >> 7) * (ACC * 512) + (thread & 127) * 16

    @cuda.jit(device=True)
    def send(acc, shared, rank):
        there = cluster_address(place(shared), rank)
        for i in range(ACC // 4):
            word = acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]
            sts128f_cluster(there + i * 2048, word)

    @cuda.jit(device=True)
    def receive(acc, shared):
        here = place(shared)
        for i in range(ACC // 4):
            a, b, c, d = lds128(here + i * 2048)
            acc[4 * i] += u2f(a)
            acc[4 * i + 1] += u2f(b)
            acc[4 * i + 2] += u2f(c)
            acc[4 * i + 3] += u2f(d)

    return send, receive
