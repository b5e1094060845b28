"""Pieces that the wgmma attention kernels share: descriptors, products, masks, tile loads by TMA,
staged stores, work items.

Shared memory  A tile of R rows is halves of 64 columns, R * 128 bytes each, in TMA's and wgmma's
               128-byte swizzle: chunk c of row r lies at c ^ (r & 7). Tiles start at multiples of
               1024 bytes.
Registers      A wgmma accumulator of 64 x N is N / 2 elements a lane: of columns 8 j + 2 (lane % 4)
               and the next one, elements 4 j, 4 j + 1 for row lane / 4 of the warp's 16 rows,
               4 j + 2, 4 j + 3 for the row eight below.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numba import cuda

from llmq_nb.core.device import current_device
from llmq_nb.kernels.attention_tiles import (
    MASKED,
    SWATH_BYTES,
    Problem,
    block_order,
    divide,
    first_key,
)
from llmq_nb.kernels.compile import Options
from llmq_nb.kernels.launch import cdiv
from llmq_nb.kernels.ptx import atom_inc_g, bf16x2, lds128, sel_gt, stg128, sts32
from llmq_nb.kernels.ptx_hopper import make_wgmma, tma_4d
from llmq_nb.kernels.tensor_map import tensor_map


@dataclass(frozen=True, slots=True)
class Wgmma:
    """Shape of one block's work in an sm_90 kernel."""

    warpgroups: int
    """Of 64 rows each (keys in dkdv, queries elsewhere); one more fetches."""
    columns: int
    """Rows of a streamed tile."""
    cluster: int = 0
    """dkdv: 1 or 2 blocks take an item by attention_hopper_items, two dividing its streamed tiles
    between them; 0: attention_hopper_dkdv."""


OPTIONS = Options(arch_specific=True)
CC = (9, 0)
REGISTERS = {2: (24, 240), 3: (32, 160), 4: (24, 112)}
"""Of a producer and a consumer thread, by the number of consumer warpgroups."""
PERSISTENT = True
"""Whether a block takes item after item of the kernels whose items are independent."""
MOST_SWATH_BYTES = 3 * SWATH_BYTES // 2
ITEM_ROWS = 128
"""What beginning and ending an item costs, in keys."""
HALF_ROW = 128
"""Bytes of a row of 64 columns: a D = 128 tile is two halves, one after the other."""
WARPGROUP_HALF = 64 * HALF_ROW
K_MAJOR = np.uint32(1 << 16)
"""Low half of the descriptor of a K-major operand (DESCRIPTOR_HIGH: the other half)."""


@cuda.jit(device=True)
def descriptor(base, address):
    """Low half of the descriptor of a tile at a shared address; adding bytes / 16 moves it."""
    return np.uint32(base + ((address & 0x3FFFF) >> 4))


def n_major(half_bytes: int) -> np.uint32:
    """Descriptor of an operand whose rows run along k, its 64-column halves this far apart."""
    return np.uint32((half_bytes >> 4) << 16)


def make_product(D: int, COLUMNS: int, A_HALF: int, B_HALF: int):
    """product(s, a, b): s[64, COLUMNS] = A[64, D] B[COLUMNS, D]^T from descriptors, not awaited."""
    mma = make_wgmma(COLUMNS)
    STEPS = D // 16
    A_STEP = A_HALF >> 4
    B_STEP = B_HALF >> 4

    @cuda.jit(device=True)
    def product(s, a, b):
        for kk in range(STEPS):
            across = (kk & 3) * 2
            mma(
                s, np.uint32(a + ((kk >> 2) * A_STEP + across)),
                np.uint32(b + ((kk >> 2) * B_STEP + across)), 1 if kk > 0 else 0,
            )  # fmt: skip

    return product


def make_product_registers(D: int, ROWS: int):
    """product(acc, p, b): acc[64, D] += P[64, ROWS] B[ROWS, D], P in registers, not awaited."""
    mma = make_wgmma(D, registers=True, trans_b=1)
    STEPS = ROWS // 16

    @cuda.jit(device=True)
    def product(acc, p, b):
        for kk in range(STEPS):
            mma(acc, p, kk * 4, np.uint32(b + kk * (16 * HALF_ROW >> 4)), 1)

    return product


def make_pack(COUNT: int):
    """pack(s, p): 2 * COUNT float32 to COUNT pairs of bfloat16."""

    @cuda.jit(device=True)
    def pack(s, p):
        for j in range(COUNT):
            p[j] = bf16x2(s[2 * j], s[2 * j + 1])

    return pack


def make_mask_hopper(COLUMNS: int):
    """mask(s, key, row, starts): mask scores; key, row: this lane's first column and row; starts:
    document starts of the lane's two rows."""
    N8 = COLUMNS // 8

    @cuda.jit(device=True)
    def mask(s, key, row, starts):
        for r in range(2):
            above = key - row
            below = starts[r] - key
            for j in range(N8):
                for c in range(2):
                    i = 4 * j + 2 * r + c
                    x = sel_gt(above, r * 8 - (j * 8 + c), MASKED, s[i])
                    s[i] = sel_gt(below, j * 8 + c, MASKED, x)

    return mask


def make_stage_half_rows(D: int, HALF: int):
    """stage(shared, acc, r, row, factor): one of this lane's two rows of a wgmma accumulator as
    bfloat16, in the swizzled halves that TMA uses."""
    D8 = D // 8

    @cuda.jit(device=True)
    def stage(shared, acc, r, row, factor):
        lane = cuda.threadIdx.x & 31
        for j in range(D8):
            chunk = ((j & 7) ^ (row & 7)) << 4
            word = shared + (j >> 3) * HALF + row * HALF_ROW + chunk + ((lane & 3) << 2)
            sts32(word, bf16x2(acc[4 * j + 2 * r] * factor, acc[4 * j + 2 * r + 1] * factor))

    return stage


def make_copy_half_rows(D: int, HALF: int):
    """copy(target, stride, shared, row, low, high): as copy_rows, for 16 rows a warp in halves, of
    the tile's rows from `low` up to `high`."""
    CHUNKS = D // 8
    COUNT = CHUNKS // 2

    @cuda.jit(device=True)
    def copy(target, stride, shared, row, low, high):
        lane = cuda.threadIdx.x & 31
        for i in range(COUNT):
            r = row + (i * 32 + lane) // CHUNKS
            c = (i * 32 + lane) % CHUNKS
            if r >= low and r < high:
                word = shared + (c >> 3) * HALF + r * HALF_ROW + (((c & 7) ^ (r & 7)) << 4)
                stg128(target + r * stride + c * 16, lds128(word))

    return copy


def make_load_halves(D: int, HALF: int):
    """load(shared, map, head, row, sequence, barrier): one tile by TMA, half by half."""
    HALVES = D // 64

    @cuda.jit(device=True)
    def load(shared, tensor, head, row, sequence, barrier):
        for i in range(HALVES):
            tma_4d(shared + i * HALF, tensor, i * 64, head, row, sequence, barrier)

    return load


@cuda.jit(device=True)
def next_work(item):
    """The block's item number `item`: to and fro over the blocks, so that the first ones do not get
    all the longest."""
    blocks = cuda.gridDim.x
    step = cuda.blockIdx.x if (item & 1) == 0 else blocks - 1 - cuda.blockIdx.x
    return np.int64(item) * blocks + step


@cuda.jit(device=True)
def take_work(counter, total):
    """The next item that no block has, `total` or more if there is none, for one thread of a block.
    A block begins with that of its own number and calls this until there is none: `total` calls in
    all, so the counter ends at 0 again. What comes of an item does not depend on who takes it."""
    return np.int64(atom_inc_g(counter, np.uint32(total - 1))) + cuda.gridDim.x


def make_item(QUERIES: int, KEYS: int):
    """item_of(work, segment_start, heads, T, H, tiles, swath): (sequence, head, first query, last
    key tile, number of key tiles) of a work item: QUERIES rows of one head. Tiles end at T, and
    what does not fill a tile is the first one, which sees the fewest keys: its first query is
    negative."""

    @cuda.jit(device=True)
    def item_of(work, segment_start, heads, T, H, tiles, swath):
        bh, tile = block_order(work, heads, tiles, swath)
        b = divide(bh, H)
        m0 = T - (tile + 1) * QUERIES  # the longest rows first
        n_last = divide(m0 + QUERIES - 1, KEYS)
        first = divide(first_key(segment_start, np.int64(b) * T + max(m0, 0)), KEYS)
        return b, bh - b * H, m0, n_last, n_last + 1 - first

    return item_of


def persistent_grid(items: int) -> int:
    """Blocks for so many independent work items: one a multiprocessor, which then fetches an item's
    first tiles under the end of the one before. (Bits do not depend on it.)"""
    return min(items, current_device().multiprocessors) if PERSISTENT else items


def even_swath(p: Problem, rows: int, blocks: int) -> int:
    """Heads at a time for which next_work gives `blocks` blocks the most even work: items of `rows`
    queries, whose keys and values stream."""
    streamed = 2 * p.T * p.D * p.dtype.itemsize
    most = p.group * max(1, MOST_SWATH_BYTES // streamed)
    return _even_swath(p.B * p.H, p.T, rows, blocks, max(1, most // 4), most)


@functools.lru_cache(maxsize=256)
def _even_swath(heads: int, T: int, rows: int, blocks: int, least: int, most: int) -> int:
    least, most = min(least, heads), min(most, heads)
    lengths = np.arange(T, 0, -rows) + ITEM_ROWS  # of one head, the longest first
    rounds = cdiv(heads * len(lengths), blocks)
    spans = []
    for swath in range(least, most + 1):
        whole, rest = divmod(heads, swath)
        work = np.zeros(rounds * blocks)
        order = [np.tile(np.repeat(lengths, swath), whole), np.repeat(lengths, rest)]
        work[: heads * len(lengths)] = np.concatenate(order)
        work = work.reshape(rounds, blocks)
        work[1::2] = work[1::2, ::-1]
        spans.append(work.sum(0).max())
    near = np.array(spans) <= 1.005 * min(spans)
    return least + int(near.argmax())  # the smallest of them, for the L2 cache


def block_threads(tile: Wgmma) -> int:
    """Threads of a block: the consumers and the producer's warpgroup."""
    return 128 * (tile.warpgroups + 1)


def head_map(address: int, heads: int, row_stride: int, rows: int, p: Problem) -> int:
    """Tensor map of one of q, k, v, out: (D, heads, T, B), copies of `rows` rows of 64 columns."""
    strides = (2 * p.D, row_stride, p.T * row_stride)
    return tensor_map(address, (p.D, heads, p.T, p.B), strides, (64, 1, rows, 1))


def input_maps(
    qkv: tuple[int, int, int], dout: int, query_rows: int, key_rows: int, p: Problem
) -> tuple[int, int, int, int]:
    """Tensor maps of q, k, v and dout, as the backward kernels take them."""
    q, k, v = qkv
    return (
        head_map(q, p.H, p.q_stride, query_rows, p),
        head_map(k, p.G, p.kv_stride, key_rows, p),
        head_map(v, p.G, p.kv_stride, key_rows, p),
        head_map(dout, p.H, p.H * p.D * 2, query_rows, p),
    )
