"""Pieces that the mma.sync attention kernels share: order of blocks, tile loads, products of
register tiles, masks, staged stores.

Shared memory  A tile is rows of 2 * D bytes; the 16-byte chunk c of row r lies at c ^ (r & 7), so
               that ldmatrix and 16-byte stores are free of bank conflicts.
Registers      A tile is a local array [m][n][4] of 16 x 8 mma accumulators. Lane l holds rows l / 4
               (elements 0, 1) and l / 4 + 8 (elements 2, 3), columns 2 * (l % 4) and the next one.
Documents      segment_start is int32 [B, T], not decreasing along T; address 0 means one document.
               Only tiles that a document border crosses are masked by it, tiles outside skipped.
"""

import math
from dataclasses import dataclass

import numpy as np
from numba import cuda

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.ptx import (
    bf16x2,
    cp16,
    cp16z,
    ldg32,
    lds128,
    ldsm4,
    ldsm4t,
    mma_bf16,
    redux_add_u32,
    sel_gt,
    stg128,
    sts32,
)

ZERO = np.float32(0.0)
MASKED = np.float32(-1e30)
"""Score of a masked pair; far below FIRST_MAXIMUM, so that a fully masked row adds 0."""
FIRST_MAXIMUM = np.float32(-1e20)
LOG2E = np.float32(1.4426950408889634)
LN2 = np.float32(0.6931471805599453)
SWATH_BYTES = 16 << 20
"""Heads whose streamed tensors are together this large are worked on at the same time, so that the
L2 cache (32 to 96 MB on most cards, of which half may hold copies) holds them."""
LEAST_BLOCKS = 264
"""Blocks of a swath at least: two for each multiprocessor of a large card. The tiles of a swath
begin with the longest, so a multiprocessor that had a long one gets a short one next; with fewer
blocks the long tiles of the last swath would begin when others have nothing left to do."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one block's work: query rows, keys, warps, copies of the streamed tile (stages)."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2
    blocks: int = 0
    """Blocks a multiprocessor should hold at least, which limits registers; 0: as it comes."""
    parts: int = 1
    """Times `warps`, each with stages of its own (dkdv; 2: attention_dkdv_parts)."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Extents: what the choice of kernels depends on."""

    B: int
    T: int
    H: int
    G: int
    D: int

    @property
    def group(self) -> int:
        return self.H // self.G

    def name(self, kernel: str) -> str:
        """Under which a run's choice of one kernel is kept (attention_choice)."""
        return f"attention {kernel} {self.B}x{self.T}, {self.H}/{self.G} heads of {self.D}"


@dataclass(frozen=True, slots=True)
class Problem(AttentionShape):
    """Extents, byte strides and options that every launch needs."""

    q_stride: int
    kv_stride: int
    segment_start: int
    causal: bool = True
    dtype: DType = DType.BF16

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.D)

    def swath(
        self, streamed_rows: int, tiles: int, heads: int = 1, least: int = LEAST_BLOCKS
    ) -> int:
        """Heads at a time, of `tiles` blocks each, if `heads` of them stream together this many
        rows of D a token. least: blocks."""
        streamed = self.T * streamed_rows * self.D * self.dtype.itemsize
        cached = heads * (SWATH_BYTES // streamed)
        return max(1, cached, -(-least // tiles))


# ---- which work a block does -------------------------------------------------------------------
@cuda.jit(device=True)
def divide(a, b):
    """a // b of small non-negative integers. Numba's int64 division is a subroutine, beside which
    ptxas serialises wgmma and ignores setmaxnreg."""
    return np.int64(np.uint32(a) // np.uint32(b))


@cuda.jit(device=True)
def block_order(index, heads, tiles, swath):
    """(head, tile) of a block. `swath` heads, whose tensors stay in the L2 cache together, go tile
    by tile (0 first: the longest) with the head varying fastest; then the next swath."""
    first = divide(index, swath * tiles) * swath
    rest = index - first * tiles
    width = min(swath, heads - first)
    tile = divide(rest, width)
    return first + (rest - tile * width), tile


@cuda.jit(device=True)
def first_key(segment_start, position):
    """Start of the document of flat token `position`; 0 without documents."""
    start = 0
    if segment_start != 0:
        start = np.int64(ldg32(segment_start + position * 4))
    return start


@cuda.jit(device=True)
def queries_end(segment_start, row, key, T):
    """First query of a sequence whose document starts after `key` (T if none): 32 probes a round,
    so three rounds for T up to 32768. row: flat position of the sequence's first token. Every lane
    of the warp must reach the call."""
    end = T
    if segment_start != 0:
        low = key  # query `key` itself sees key
        span = T - low
        while span > 1:  # the end lies in (low, low + span]
            stride = (span + 31) // 32
            probe = low + stride * ((cuda.threadIdx.x & 31) + 1)
            sees = 0
            if probe < low + span:
                sees = 1 if ldg32(segment_start + (row + probe) * 4) <= key else 0
            steps = np.int64(redux_add_u32(sees))  # starts do not decrease: these are the first
            low = low + steps * stride
            span = min(stride, span - steps * stride)
        end = low + span
    return end


# ---- global <-> shared -------------------------------------------------------------------------
def make_loaders(ROWS: int, STEP: int, ROW: int):
    """(load_tile, load_edge): this thread's 16-byte chunks of a tile of ROWS rows, STEP rows apart
    (a multiple of 8, so that the swizzle is the same for each), by cp.async."""
    COUNT = ROWS // STEP
    STEP_BYTES = STEP * ROW

    @cuda.jit(device=True)
    def load_tile(shared, source, stride):
        for i in range(COUNT):
            cp16(shared + i * STEP_BYTES, source + i * STEP * stride)

    @cuda.jit(device=True)
    def load_edge(shared, source, stride, rows):
        """Rows from `rows` on (counted from this thread's first) are zero and not read."""
        for i in range(COUNT):
            inside = 16 if i * STEP < rows else 0
            cp16z(shared + i * STEP_BYTES, source + i * STEP * stride, inside)

    return load_tile, load_edge


def make_load_pair(ROWS: int, STEP: int, ROW: int):
    """load_pair(first, second, x, y, x_stride, y_stride, rows): this thread's chunks of one tile
    each of two tensors; rows: as load_edge."""
    load_tile, load_edge = make_loaders(ROWS, STEP, ROW)
    LAST = ROWS - STEP  # from the thread's first row to its last

    @cuda.jit(device=True)
    def load_pair(first, second, x, y, x_stride, y_stride, rows):
        if rows > LAST:
            load_tile(first, x, x_stride)
            load_tile(second, y, y_stride)
        else:
            load_edge(first, x, x_stride, rows)
            load_edge(second, y, y_stride, rows)

    return load_pair


def make_stage_rows(D: int):
    """stage_rows(shared, tile, m, r, row, factor): rows of an accumulator tile as bfloat16."""
    D8 = D // 8
    ROW = 2 * D

    @cuda.jit(device=True)
    def stage_rows(shared, tile, m, r, row, factor):
        lane = cuda.threadIdx.x & 31
        for j in range(D8):
            word = shared + row * ROW + ((j ^ (row & 7)) << 4) + ((lane & 3) << 2)
            sts32(word, bf16x2(tile[m, j, 2 * r] * factor, tile[m, j, 2 * r + 1] * factor))

    return stage_rows


def make_copy_rows(D: int, ROWS: int):
    """copy_rows(target, stride, shared, row, rows): a warp's ROWS staged rows, from `row` of the
    block's tile on, to global memory in 16-byte stores; target is the address of tile row 0, rows
    from `rows` on do not exist."""
    ROW = 2 * D
    CHUNKS = D // 8
    COUNT = ROWS * CHUNKS // 32

    @cuda.jit(device=True)
    def copy_rows(target, stride, shared, row, rows):
        lane = cuda.threadIdx.x & 31
        for i in range(COUNT):
            r = row + (i * 32 + lane) // CHUNKS
            c = (i * 32 + lane) % CHUNKS
            if r < rows:
                word = lds128(shared + r * ROW + ((c ^ (r & 7)) << 4))
                stg128(target + r * stride + c * 16, word)

    return copy_rows


# ---- products of register tiles ----------------------------------------------------------------
@cuda.jit(device=True)
def a_address(shared, row, ROW):
    """ldmatrix address of an A operand (16 x 16, or transposed B) whose first row is `row`."""
    lane = cuda.threadIdx.x & 31
    return shared + (row + (lane & 15)) * ROW + (((lane >> 4) ^ (lane & 7)) << 4)


@cuda.jit(device=True)
def b_address(shared, ROW):
    """ldmatrix address of a B operand: 16 rows (columns of the product) by 16."""
    lane = cuda.threadIdx.x & 31
    row = (lane & 7) + ((lane >> 4) << 3)
    return shared + row * ROW + ((((lane >> 3) & 1) ^ (lane & 7)) << 4)


@cuda.jit(device=True)
def mma_tile(c, m, n, a, b0, b1):
    """c[m][n] += A B for one m16n8k16 product."""
    c[m, n, 0], c[m, n, 1], c[m, n, 2], c[m, n, 3] = mma_bf16(
        c[m, n, 0], c[m, n, 1], c[m, n, 2], c[m, n, 3],
        a[m, 0], a[m, 1], a[m, 2], a[m, 3], b0, b1,
    )  # fmt: skip


def make_scores(D: int, M_TILES: int, COLUMNS: int):
    """scores(s, a, left, right): s[16 * M_TILES, COLUMNS] = A B^T, both row-major tiles in shared
    memory with rows of D. a: scratch [M_TILES][4]."""
    ROW16 = 16 * 2 * D
    STEPS = D // 16
    N16 = COLUMNS // 16
    N8 = COLUMNS // 8

    @cuda.jit(device=True)
    def scores(s, a, left, right):
        for m in range(M_TILES):
            for j in range(N8):
                for c in range(4):
                    s[m, j, c] = ZERO
        for kk in range(STEPS):  # a step along D is one XOR, a step along rows one add
            for m in range(M_TILES):
                a[m, 0], a[m, 1], a[m, 2], a[m, 3] = ldsm4((left ^ (kk * 32)) + m * ROW16)
            for j in range(N16):
                b0, b1, b2, b3 = ldsm4((right ^ (kk * 32)) + j * ROW16)
                for m in range(M_TILES):
                    mma_tile(s, m, 2 * j, a, b0, b1)
                    mma_tile(s, m, 2 * j + 1, a, b2, b3)

    return scores


def make_accumulate(D: int, M_TILES: int, ROWS: int):
    """accumulate(acc, s, a, right): acc[16 * M_TILES, D] += bfloat16(s)[16 * M_TILES, ROWS] B, B a
    row-major tile in shared memory. An accumulator tile is already laid out as an A operand."""
    ROW16 = 16 * 2 * D
    N16 = ROWS // 16
    D16 = D // 16

    @cuda.jit(device=True)
    def accumulate(acc, s, a, right):
        for kk in range(N16):
            for m in range(M_TILES):
                for e in range(2):
                    a[m, 2 * e] = bf16x2(s[m, 2 * kk + e, 0], s[m, 2 * kk + e, 1])
                    a[m, 2 * e + 1] = bf16x2(s[m, 2 * kk + e, 2], s[m, 2 * kk + e, 3])
            for j in range(D16):
                b0, b1, b2, b3 = ldsm4t((right ^ (j * 32)) + kk * ROW16)
                for m in range(M_TILES):
                    mma_tile(acc, m, 2 * j, a, b0, b1)
                    mma_tile(acc, m, 2 * j + 1, a, b2, b3)

    return accumulate


def make_clear(M_TILES: int, N8: int):
    """clear(tile): zeros."""

    @cuda.jit(device=True)
    def clear(tile):
        for m in range(M_TILES):
            for j in range(N8):
                for c in range(4):
                    tile[m, j, c] = ZERO

    return clear


# ---- masks -------------------------------------------------------------------------------------
def make_mask(M_TILES: int, KEYS: int, CAUSAL: bool):
    """mask(s, segment_start, base, query, key, T): mask a tile of scores, rows = queries from
    `query` on (this lane's first), columns = keys from `key` on (this lane's first). base: flat
    position of the sequence's first token."""
    N8 = KEYS // 8

    @cuda.jit(device=True)
    def mask(s, segment_start, base, query, key, T):
        for m in range(M_TILES):
            for r in range(2):
                row = query + m * 16 + r * 8
                below = first_key(segment_start, base + min(row, T - 1)) - key
                above = key - row if CAUSAL else key - (T - 1)
                for j in range(N8):
                    for c in range(2):
                        x = sel_gt(above, -(j * 8 + c), MASKED, s[m, j, 2 * r + c])
                        s[m, j, 2 * r + c] = sel_gt(below, j * 8 + c, MASKED, x)

    return mask


def make_mask_transposed(M_TILES: int, QUERIES: int, CAUSAL: bool):
    """mask(s, segment_start, base, key, query, T): the same for a tile whose rows are keys and
    whose columns are queries. Queries from T on need none: their exp2(score - lse) is 0."""
    N8 = QUERIES // 8

    @cuda.jit(device=True)
    def mask(s, segment_start, base, key, query, T):
        for j in range(N8):
            for c in range(2):
                column = query + j * 8 + c
                start = first_key(segment_start, base + min(column, T - 1)) - key
                ahead = key - column if CAUSAL else 0
                for m in range(M_TILES):
                    for r in range(2):
                        x = sel_gt(ahead, -(m * 16 + r * 8), MASKED, s[m, j, 2 * r + c])
                        s[m, j, 2 * r + c] = sel_gt(start, m * 16 + r * 8, MASKED, x)

    return mask
