r"""Embedding backward: the sum of the rows of every token.

    dtable[t] (+)= sum over {n : tokens[n] = t}, n rising, of dx[n]

The sum of a token starts from 0 and adds its rows one after the other in float32. Where its run in
`order` covers a whole aligned segment of SEGMENT positions, it is cut at the end of that segment
and of every later one that it reaches beyond. Each piece is summed from 0; WARPS sums take every
WARPS-th piece in order, then they are added in order (embedding_join.py). So the bits depend on
tokens and dx alone. Without `accumulate` rows of tokens that do not occur are 0.

Shapes   dtable: (V, C); dx: (N, C) row-major; tokens: (N,); order: (N,), the stable argsort of
         tokens; scratch: (N / SEGMENT rounded up, C). C a multiple of 8.
Dtypes   dx bfloat16 or float32 (`dtype`); dtable bfloat16 or float32 (`grad_dtype`); tokens, order
         int32; scratch float32. A token outside 0..V-1 has no gradient.
Errors   run length - 1 float32 additions (fewer in sequence where it was cut), one more with
         accumulate, one rounding to the storage format.
Cost     Reads dx once; writes (and reads) the rows of tokens that occur; without `accumulate` the
         whole of dtable is cleared first. A warp walks at most 2 SEGMENT rows, 256 columns wide, so
         no token keeps the others waiting; the pieces of cut runs take a second launch.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.embedding_join import SEGMENT, WARP_COLUMNS, embedding_join_launch
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    cp_commit,
    ldg32,
    redux_add_u32,
    redux_min_u32,
    shfl_idx,
    smem_addr,
    stg128,
    stg128f,
)
from llmq_nb.kernels.ring import ring
from llmq_nb.kernels.vector import PIECE, vector

RING_THREADS, STAGES = 128, 4
"""Of a block; rows that a warp has under way."""
THREADS = 256
CLEARED = 4
"""16-byte chunks that a thread clears."""
ZERO_BITS, ZERO = np.uint32(0), np.float32(0.0)
NOBODY = np.uint32(0xFFFFFFFF)  # no row, no token
SIGNATURE = (*(types.uint64,) * 5, types.int32, types.int32)
CLEAR_SIGNATURE = (types.uint64, types.int64)


@cuda.jit(device=True)
def position_row(order, position, rows):
    return ldg32(order + np.int64(position) * 4) if position < rows else NOBODY


@cuda.jit(device=True)
def row_token(tokens, row):
    return ldg32(tokens + np.int64(row) * 4) if row != NOBODY else NOBODY


@cuda.jit(device=True)
def pick(own, following, position):
    """What lane position % 32 holds, of this segment (position below 32) or the next."""
    return shfl_idx(own if position < 32 else following, position)


@cuda.jit(device=True)
def is_stop(position, end, stops):
    return position + 1 == end or (position < 32 and (stops >> (position & 31)) & 1 != 0)


def make_embedding_backward(C: int, accumulate: bool, dtype: str, grad_dtype: str):
    """Stage one for one row length; arguments are device addresses, see SIGNATURE.

    Grid: (groups of RING_THREADS / 32 segments of `order`, groups of 256 columns). A warp owns the
    pieces that begin in its segment; the last of them may reach to the end of the next one."""
    v, o = vector(dtype), vector(grad_dtype)
    WORDS, BYTES, low, high = v.words, v.bytes, v.low, v.high
    OUT_WORDS, OUT_BYTES, store_out = o.words, o.bytes, o.store
    low_out, high_out, set_pair = o.low, o.high, o.set_pair
    rows_, olds = ring(dtype, STAGES), ring(grad_dtype, STAGES)
    copy, take, wait = rows_.copy, rows_.take, rows_.wait
    copy_old, take_old = olds.copy, olds.take
    ACCUMULATE, WARPS = accumulate, RING_THREADS // 32
    ROW, OLD = RING_THREADS * PIECE * BYTES, RING_THREADS * PIECE * OUT_BYTES  # in the ring

    @cuda.jit(device=True)
    def fetch(own, old, dx, dtable, n, token, column, stops):
        """Start a row of dx, and where its run ends that of the table, on their way."""
        copy(own, dx + (np.int64(n) * C + column) * BYTES, column < C)
        if ACCUMULATE and stops:
            copy_old(old, dtable + (np.int64(token) * C + column) * OUT_BYTES, column < C)

    @cuda.jit(device=True)
    def add(sums, own):
        tile = cuda.local.array((1, WORDS), dtype=types.uint32)
        take(tile, 0, own)
        for j in range(4):
            sums[2 * j] = sums[2 * j] + low(tile, 0, j)
            sums[2 * j + 1] = sums[2 * j + 1] + high(tile, 0, j)

    @cuda.jit(device=True)
    def finish(dtable, token, column, old, sums):
        """Round the sum of a token's rows into the table."""
        tile = cuda.local.array((1, OUT_WORDS), dtype=types.uint32)
        if ACCUMULATE:
            take_old(tile, 0, old)
        for j in range(4):
            a, b = sums[2 * j], sums[2 * j + 1]
            if ACCUMULATE:
                a, b = low_out(tile, 0, j) + a, high_out(tile, 0, j) + b
            set_pair(tile, 0, j, a, b)
        store_out(dtable + (np.int64(token) * C + column) * OUT_BYTES, tile, 0, column < C)

    @cuda.jit(device=True)
    def keep(scratch, slot, column, sums):
        if column < C:
            out = scratch + (slot * C + column) * 4
            stg128f(out, (sums[0], sums[1], sums[2], sums[3]))
            stg128f(out + 16, (sums[4], sums[5], sums[6], sums[7]))

    def embedding_backward(dtable, scratch, dx, tokens, order, rows, V):
        lane = cuda.threadIdx.x & 31
        segment = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        base, next_base = segment * SEGMENT, segment * SEGMENT + SEGMENT
        if base >= rows:
            return
        shared = smem_addr(cuda.shared.array(0, dtype=types.uint32))
        own = shared + cuda.threadIdx.x * PIECE * BYTES
        old = shared + STAGES * ROW + cuda.threadIdx.x * PIECE * OUT_BYTES
        column = cuda.blockIdx.y * WARP_COLUMNS + lane * PIECE

        # positions of this segment, of the next, and (lanes 0 to 2) three more to look at
        row = position_row(order, base + lane, rows)
        row2 = position_row(order, next_base + lane, rows)
        look = base - 1 if lane == 1 else (base - SEGMENT if lane == 0 else next_base + SEGMENT)
        other = NOBODY
        if lane < 3 and look >= 0:
            other = position_row(order, look, rows)
        token, token2 = row_token(tokens, row), row_token(tokens, row2)
        other = row_token(tokens, other)
        first, last, following = shfl_idx(token, 0), shfl_idx(token, 31), shfl_idx(token2, 0)
        far, near, after = shfl_idx(other, 0), shfl_idx(other, 1), shfl_idx(other, 2)
        is_cut = segment > 0 and far == first  # cut at the beginning of this segment,
        is_cut2 = next_base < rows and following == first  # of the next,
        is_cut3 = next_base + SEGMENT < rows and after == following  # of the one after that
        before, behind = shfl_idx(token, (lane - 1) & 31), shfl_idx(token, (lane + 1) & 31)
        if lane == 0:
            before = near
        if lane == 31:
            behind = following

        # its positions, begin to end - 1, counted from base; bit i of stops: a piece ends at i
        there = base + lane < rows
        begins = there and (token != before or base + lane == 0)
        begin = redux_min_u32(lane if begins else 32)
        if is_cut:
            begin = ZERO_BITS
        if begin == 32:
            return  # the whole segment belongs to the warp before
        ends = there and (token != behind or base + lane + 1 == rows or (lane == 31 and is_cut2))
        stops = redux_add_u32(np.uint32(1) << lane if ends else ZERO_BITS)
        goes_on = next_base < rows and following == last and not is_cut2
        more = goes_on and next_base + lane < rows and token2 == last
        end = np.uint32(redux_add_u32(1 if there else 0) + redux_add_u32(1 if more else 0))
        # where the pieces end that go to scratch
        kept = redux_min_u32(lane if ends else 32)
        if not (is_cut or is_cut2):
            kept = NOBODY
        kept2 = np.uint32(63) if is_cut3 and end == 64 else NOBODY

        sums = cuda.local.array(8, dtype=types.float32)
        for k in range(8):
            sums[k] = ZERO
        ahead = begin
        for i in range(STAGES):
            if ahead < end:
                n, t = pick(row, row2, ahead), pick(token, token2, ahead)
                stop = is_stop(ahead, end, stops) and t < V
                fetch(own + i * ROW, old + i * OLD, dx, dtable, n, t, column, stop)
            ahead = np.uint32(ahead + 1)
            cp_commit()
        position, slot = begin, 0
        while position < end:
            wait()  # the oldest row is there
            add(sums, own + slot * ROW)
            if is_stop(position, end, stops):
                t = pick(token, token2, position)
                if position == kept or position == kept2:
                    keep(scratch, np.int64(segment + (position >> 5)), column, sums)
                elif t < V:
                    finish(dtable, t, column, old + slot * OLD, sums)
                for k in range(8):
                    sums[k] = ZERO
            if ahead < end:
                n, t = pick(row, row2, ahead), pick(token, token2, ahead)
                stop = is_stop(ahead, end, stops) and t < V
                fetch(own + slot * ROW, old + slot * OLD, dx, dtable, n, t, column, stop)
            cp_commit()
            position, ahead = np.uint32(position + 1), np.uint32(ahead + 1)
            slot = 0 if slot == STAGES - 1 else slot + 1

    return embedding_backward


def make_embedding_clear():
    """Zero 16-byte chunks."""

    def embedding_clear(out, chunks):
        first = np.int64(cuda.blockIdx.x) * (THREADS * CLEARED) + cuda.threadIdx.x
        for u in range(CLEARED):
            if first + u * THREADS < chunks:
                zeros = (ZERO_BITS, ZERO_BITS, ZERO_BITS, ZERO_BITS)
                stg128(out + (first + u * THREADS) * 16, zeros)

    return embedding_clear


def embedding_backward_launch(
    dtable: int, dx: int, tokens: int, order: int, *, scratch: int, rows: int, C: int, V: int,
    accumulate: bool, dtype: str = "bf16", grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write (or add to) dtable, device addresses, in stream order.

    scratch: embedding_backward_scratch(rows, C) bytes."""
    if not accumulate:
        clear = kernel(make_embedding_clear, CLEAR_SIGNATURE, threads=THREADS)
        chunks = V * C * vector(grad_dtype).bytes // 16
        clear(stream, (cdiv(chunks, THREADS * CLEARED),), dtable, chunks)
    k = kernel(
        make_embedding_backward, SIGNATURE, threads=RING_THREADS,
        smem=ring_bytes(accumulate, dtype, grad_dtype), C=C, accumulate=accumulate, dtype=dtype,
        grad_dtype=grad_dtype,
    )  # fmt: skip
    grid = (cdiv(rows, SEGMENT * RING_THREADS // 32), cdiv(C, WARP_COLUMNS))
    k(stream, grid, dtable, scratch, dx, tokens, order, rows, V)
    embedding_join_launch(
        dtable, scratch, tokens, order, rows=rows, C=C, V=V, accumulate=accumulate,
        grad_dtype=grad_dtype, stream=stream,
    )  # fmt: skip


def ring_bytes(accumulate: bool, dtype: str, grad_dtype: str) -> int:
    """Shared memory of stage one."""
    value = vector(dtype).bytes + (vector(grad_dtype).bytes if accumulate else 0)
    return STAGES * RING_THREADS * PIECE * value


def embedding_backward_scratch(rows: int, C: int) -> int:
    """Bytes of scratch memory: one float32 row a segment."""
    return 4 * cdiv(rows, SEGMENT) * C


# ---- users -------------------------------------------------------------------------------------
def backward(dx: Any, tokens: Any, order: Any, *, vocab: int) -> Any:
    """Gradient of a bfloat16 table (vocab, C) from dx (..., C).

    tokens: (...) int32; order: their stable argsort, (N,) int32. ValueError on other shapes or
    dtypes.

    >>> dtable = embedding.backward(dx, tokens, order, vocab=50)
    """
    a = describe(dx, dtype=DType.BF16, name="dx")
    C = a.shape[-1] if a.shape else 0
    if C == 0 or C % PIECE:
        raise ValueError(f"dx has shape {a.shape}; its last extent must be a multiple of {PIECE}")
    t = describe(tokens, dtype=DType.INT32, shape=a.shape[:-1], name="tokens")
    o = describe(order, dtype=DType.INT32, shape=(t.size,), name="order")
    dtable = empty_like(a, shape=(vocab, C))
    scratch = empty_like(a, shape=(cdiv(t.size, SEGMENT), C), dtype=DType.FP32)
    embedding_backward_launch(
        describe(dtable, dtype=DType.BF16).address, a.address, t.address, o.address,
        scratch=describe(scratch, dtype=DType.FP32).address, rows=t.size, C=C, V=vocab,
        accumulate=False, stream=current_stream(a),
    )  # fmt: skip
    return dtable


# ---- cost --------------------------------------------------------------------------------------
def embedding_backward_bytes(
    N: int, C: int, V: int, *, distinct: int, accumulate: bool, itemsize: int = 2
) -> int:
    """Read dx, tokens, order; write V rows, or read and write those of the distinct tokens."""
    return (N + (2 * distinct if accumulate else V)) * C * itemsize + 8 * N


# ---- reference ---------------------------------------------------------------------------------
def embedding_backward_ref(dx: np.ndarray, tokens: np.ndarray, V: int) -> np.ndarray:
    """float64 NumPy oracle of the sum."""
    dtable = np.zeros((V, dx.shape[-1]))
    np.add.at(dtable, tokens, dx.astype(np.float64))
    return dtable


COMPILE_CASES = [
    *(
        CompileCase(
            make_embedding_backward,
            {"C": C, "accumulate": a, "dtype": d, "grad_dtype": g},
            SIGNATURE,
            RING_THREADS,
            smem=ring_bytes(a, d, g),
        )
        for C, a, d, g in [
            (896, True, "bf16", "bf16"),
            (4096, False, "bf16", "bf16"),
            (896, True, "bf16", "fp32"),
            (896, True, "fp32", "fp32"),
        ]
    ),
    CompileCase(make_embedding_clear, {}, CLEAR_SIGNATURE, THREADS),
]
