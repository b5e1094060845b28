r"""Embedding forward and backward.

    forward   x[n] = table[tokens[n]]
    backward  dtable[t] (+)= sum over {n : tokens[n] = t}, n rising, of dx[n]

The sum of a token starts from 0 and adds its rows one after the other in float32. Where its run in
`order` covers a whole aligned segment of SEGMENT positions, it is cut at the end of that segment
and of every later one that it reaches beyond; each piece is summed from 0, then they are added in
order. So the bits depend on tokens and dx alone. Without `accumulate` rows of tokens that do not
occur are 0.

Shapes   table, dtable: (V, C); x, dx: (N, C) row-major; tokens: (N,); order: (N,), the stable
         argsort of tokens; scratch: (N / SEGMENT rounded up, C). C a multiple of 8.
Dtypes   table, x, dx bfloat16 or float32 (`dtype`); dtable bfloat16 or float32 (`grad_dtype`);
         tokens, order int32; scratch float32. A token outside 0..V-1 makes its row of x NaN and has
         no gradient.
Errors   forward: copies. backward: run length - 1 float32 additions (fewer in sequence where it was
         cut), one more with accumulate, one rounding to the storage format.
Cost     forward: reads the N rows, writes x. backward: reads dx once; writes (and reads) the rows
         of tokens that occur; without `accumulate` the whole of dtable is cleared first. A warp
         walks at most 2 SEGMENT rows, 256 columns wide, ROWS loads in flight; the pieces of cut
         runs take a second launch.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import inc, ldg32, ldg128f, redux_add_u32, shfl_idx, stg128, stg128f
from llmq_nb.kernels.vector import PIECE, vector

THREADS, UNROLL = 256, 4
WARPS = THREADS // 32
WARP_COLUMNS = 32 * PIECE
ROWS = 8
"""Rows that a lane has in flight."""
SEGMENT = 32
"""Positions of `order` that a warp owns; runs are cut at multiples of it."""
NAN_BITS, ZERO_BITS = np.uint32(0xFFFFFFFF), np.uint32(0)
NOBODY = np.uint32(0xFFFFFFFF)  # no token
ZERO = np.float32(0.0)
FORWARD_SIGNATURE = (*(types.uint64,) * 3, types.int32, types.int32)
BACKWARD_SIGNATURE = (*(types.uint64,) * 5, types.int32, types.int32)
JOIN_SIGNATURE = (*(types.uint64,) * 4, types.int32, types.int32)
CLEAR_SIGNATURE = (types.uint64, types.int64)


def make_embedding_forward(C: int, dtype: str, block: int = THREADS, unroll: int = UNROLL):
    """Gather for one row length; arguments are device addresses, see FORWARD_SIGNATURE."""
    v = vector(dtype)
    WORDS, BYTES, load, store = v.words, v.bytes, v.load, v.store
    PIECES, STEP = C // PIECE, PIECE * BYTES
    THREADS, UNROLL = block, unroll

    def embedding_forward(x, tokens, table, rows, V):
        tile = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        token = cuda.local.array(UNROLL, dtype=types.uint32)
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        total = np.int64(rows) * PIECES
        for u in range(UNROLL):  # every token before the first row, which waits for its own
            n = (first + u * THREADS) // PIECES
            token[u] = NOBODY
            if n < rows:
                token[u] = ldg32(tokens + n * 4)
        for u in range(UNROLL):
            i = first + u * THREADS
            known = token[u] < V  # unsigned: also refuses negative ones
            source = table + (np.int64(token[u]) * PIECES + i % PIECES) * STEP
            load(tile, u, source, known)
            if not known:
                for w in range(WORDS):
                    tile[u, w] = NAN_BITS
        for u in range(UNROLL):
            i = first + u * THREADS
            store(x + i * STEP, tile, u, i < total)

    return embedding_forward


def make_embedding_backward(
    C: int, accumulate: bool, dtype: str, grad_dtype: str, ahead: int = ROWS
):
    """Stage one for one row length; arguments are device addresses, see BACKWARD_SIGNATURE.

    Grid: (groups of WARPS segments of `order`, groups of 256 columns). A warp owns the pieces that
    begin in its segment; the last of them may reach to the end of the next one."""
    v, o = vector(dtype), vector(grad_dtype)
    WORDS, BYTES, load_cs, low, high = v.words, v.bytes, v.load_cs, v.low, v.high
    OUT_WORDS, OUT_BYTES, load_out, store_out = o.words, o.bytes, o.load, o.store
    low_out, high_out, set_pair = o.low, o.high, o.set_pair
    ACCUMULATE, ROWS = accumulate, ahead
    GROUP = np.uint32((1 << ahead) - 1)

    @cuda.jit(device=True)
    def position_row(order, position, rows):
        return ldg32(order + np.int64(position) * 4) if position < rows else NOBODY

    @cuda.jit(device=True)
    def row_token(tokens, row):
        return ldg32(tokens + np.int64(row) * 4) if row != NOBODY else NOBODY

    @cuda.jit(device=True)
    def write_sums(scratch, slot, column, sums):
        if column < C:
            out = scratch + (slot * C + column) * 4
            stg128f(out, (sums[0], sums[1], sums[2], sums[3]))
            stg128f(out + 16, (sums[4], sums[5], sums[6], sums[7]))

    @cuda.jit(device=True)
    def finish(dtable, token, column, old, u, sums):
        """Round the sum of a token's rows into the table (old[u]: what was there)."""
        out = cuda.local.array((1, OUT_WORDS), dtype=types.uint32)
        for j in range(4):
            a, b = sums[2 * j], sums[2 * j + 1]
            if ACCUMULATE:
                a, b = low_out(old, u, j) + a, high_out(old, u, j) + b
            set_pair(out, 0, j, a, b)
        store_out(dtable + (np.int64(token) * C + column) * OUT_BYTES, out, 0, column < C)

    def embedding_backward(dtable, scratch, dx, tokens, order, rows, V):
        lane = cuda.threadIdx.x & 31
        segment = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        base = segment * SEGMENT
        if base >= rows:
            return
        column = cuda.blockIdx.y * WARP_COLUMNS + lane * PIECE
        bit = np.uint32(1) << lane
        # positions of this segment, of the next, and (lanes 0 to 2) three more to look at
        row = position_row(order, base + lane, rows)
        row2 = position_row(order, base + SEGMENT + lane, rows)
        look = base - 1 if lane == 1 else (base - SEGMENT if lane == 0 else base + 2 * SEGMENT)
        other = NOBODY
        if lane < 3 and look >= 0:
            other = position_row(order, look, rows)
        token, token2, other = (
            row_token(tokens, row), row_token(tokens, row2), row_token(tokens, other)
        )  # fmt: skip
        first, last, following = shfl_idx(token, 0), shfl_idx(token, 31), shfl_idx(token2, 0)
        far, near, after = shfl_idx(other, 0), shfl_idx(other, 1), shfl_idx(other, 2)
        is_cut = segment > 0 and far == first  # cut at the beginning of this segment,
        is_cut2 = base + SEGMENT < rows and following == first  # of the next,
        is_cut3 = base + 2 * SEGMENT < rows and after == following  # of the one after that
        before, behind = shfl_idx(token, (lane - 1) & 31), shfl_idx(token, (lane + 1) & 31)
        if lane == 0:
            before = near
        if lane == 31:
            behind = following

        there = base + lane < rows
        begins = there and (token != before or base + lane == 0)
        ends = there and (token != behind or base + lane + 1 == rows or (lane == 31 and is_cut2))
        starts = redux_add_u32(bit if begins else ZERO_BITS)
        if is_cut:
            starts = np.uint32(starts | 1)
        if starts == 0:
            return  # the whole segment belongs to the warp before
        active = redux_add_u32(bit if there else ZERO_BITS)
        active = np.uint32(active & ~(np.uint32(starts & (~starts + 1)) - 1))
        stops = np.uint32(redux_add_u32(bit if ends else ZERO_BITS) & active)
        partial = ZERO_BITS  # the stop that goes to scratch
        if is_cut or is_cut2:
            partial = np.uint32(stops & (~stops + 1))
        goes_on = base + SEGMENT < rows and following == last and not is_cut2
        active2 = redux_add_u32(
            bit if goes_on and base + SEGMENT + lane < rows and token2 == last else ZERO_BITS
        )

        tile = cuda.local.array((ROWS, WORDS), dtype=types.uint32)
        old = cuda.local.array((ROWS, OUT_WORDS), dtype=types.uint32)
        sums = cuda.local.array(8, dtype=types.float32)
        for k in range(8):
            sums[k] = ZERO
        turn = np.uint32(0)
        while turn < 2:
            done = np.uint32(0)
            while done < SEGMENT:
                if (active >> done) & GROUP != 0:
                    for u in range(ROWS):
                        n = np.int64(shfl_idx(row, done + u))
                        inside = (active >> (done + u)) & 1 != 0 and column < C
                        load_cs(tile, u, dx + (n * C + column) * BYTES, inside)
                        if ACCUMULATE:
                            t = shfl_idx(token, done + u)
                            inside = (stops >> (done + u)) & 1 != 0 and column < C and t < V
                            target = dtable + (np.int64(t) * C + column) * OUT_BYTES
                            load_out(old, u, target, inside)
                    for u in range(ROWS):
                        t = shfl_idx(token, done + u)
                        if (starts >> (done + u)) & 1 != 0:
                            for k in range(8):
                                sums[k] = ZERO
                        for j in range(4):
                            sums[2 * j] = sums[2 * j] + low(tile, u, j)
                            sums[2 * j + 1] = sums[2 * j + 1] + high(tile, u, j)
                        if (partial >> (done + u)) & 1 != 0:
                            write_sums(scratch, np.int64(segment) + turn, column, sums)
                        elif (stops >> (done + u)) & 1 != 0 and t < V:
                            finish(dtable, t, column, old, u, sums)
                done = np.uint32(done + ROWS)
            row, token, active, starts = row2, token2, active2, ZERO_BITS
            stops = np.uint32(active2 & ~(active2 >> 1))  # its last one
            partial = ZERO_BITS
            if is_cut3:
                partial = np.uint32(stops & (np.uint32(1) << 31))
            turn = inc(turn)

    return embedding_backward


def make_embedding_join(C: int, accumulate: bool, grad_dtype: str):
    """Stage two: add up the pieces of every run that was cut. Grid as in stage one."""
    o = vector(grad_dtype)
    OUT_WORDS, OUT_BYTES, load_out, store_out = o.words, o.bytes, o.load, o.store
    low_out, high_out, set_pair = o.low, o.high, o.set_pair
    ACCUMULATE = accumulate

    @cuda.jit(device=True)
    def token_at(tokens, order, position, rows):
        token = NOBODY
        if 0 <= position and position < rows:
            token = ldg32(tokens + np.int64(ldg32(order + np.int64(position) * 4)) * 4)
        return token

    def embedding_join(dtable, scratch, tokens, order, rows, V):
        lane = cuda.threadIdx.x & 31
        segment = cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5)
        # lane l: the token that the l-th segment from the one before on begins with
        token = token_at(tokens, order, (segment - 1 + lane) * SEGMENT, rows)
        own = shfl_idx(token, 1)
        if own >= V or shfl_idx(token, 0) == own or shfl_idx(token, 2) != own:
            return  # no cut run begins here
        column = cuda.blockIdx.y * WARP_COLUMNS + lane * PIECE
        sums = cuda.local.array(8, dtype=types.float32)
        piece = cuda.local.array((ROWS, 8), dtype=types.float32)
        old = cuda.local.array((1, OUT_WORDS), dtype=types.uint32)
        target = dtable + (np.int64(own) * C + column) * OUT_BYTES
        if ACCUMULATE:
            load_out(old, 0, target, column < C)
        for k in range(8):
            sums[k] = ZERO
        slot = np.int64(segment)
        count = np.uint32(32)
        while count == 32:  # 32 segments a turn, while all of them belong to the run
            mine = token_at(tokens, order, (slot + lane) * SEGMENT, rows) == own
            count = redux_add_u32(np.uint32(1) if mine else ZERO_BITS)
            done = np.uint32(0)
            while done < count:
                for u in range(ROWS):
                    for k in range(8):
                        piece[u, k] = ZERO
                    if done + u < count and column < C:
                        at = scratch + ((slot + done + u) * C + column) * 4
                        a, b, c, d = ldg128f(at)
                        piece[u, 0], piece[u, 1], piece[u, 2], piece[u, 3] = a, b, c, d
                        a, b, c, d = ldg128f(at + 16)
                        piece[u, 4], piece[u, 5], piece[u, 6], piece[u, 7] = a, b, c, d
                for u in range(ROWS):
                    for k in range(8):
                        sums[k] = sums[k] + piece[u, k]
                done = np.uint32(done + ROWS)
            slot += 32
        for j in range(4):
            a, b = sums[2 * j], sums[2 * j + 1]
            if ACCUMULATE:
                a, b = low_out(old, 0, j) + a, high_out(old, 0, j) + b
            set_pair(old, 0, j, a, b)
        store_out(target, old, 0, column < C)

    return embedding_join


def make_embedding_clear():
    """Zero 16-byte chunks."""

    def embedding_clear(out, chunks):
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        for u in range(UNROLL):
            if first + u * THREADS < chunks:
                zeros = (ZERO_BITS, ZERO_BITS, ZERO_BITS, ZERO_BITS)
                stg128(out + (first + u * THREADS) * 16, zeros)

    return embedding_clear


def embedding_forward_launch(
    x: int, tokens: int, table: int, *, rows: int, C: int, V: int, dtype: str = "bf16", stream: Any
) -> None:
    """Write x, device addresses, in stream order."""
    k = kernel(make_embedding_forward, FORWARD_SIGNATURE, threads=THREADS, C=C, dtype=dtype)
    k(stream, (cdiv(rows * C // PIECE, THREADS * UNROLL),), x, tokens, table, rows, V)


def embedding_backward_launch(
    dtable: int, dx: int, tokens: int, order: int, *, scratch: int, rows: int, C: int, V: int,
    accumulate: bool, dtype: str = "bf16", grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write (or add to) dtable, device addresses, in stream order.

    scratch: embedding_backward_scratch(rows, C) bytes."""
    if not accumulate:
        clear = kernel(make_embedding_clear, CLEAR_SIGNATURE, threads=THREADS)
        chunks = V * C * vector(grad_dtype).bytes // 16
        clear(stream, (cdiv(chunks, THREADS * UNROLL),), dtable, chunks)
    k = kernel(
        make_embedding_backward, BACKWARD_SIGNATURE, threads=THREADS, C=C, accumulate=accumulate,
        dtype=dtype, grad_dtype=grad_dtype,
    )  # fmt: skip
    grid = (cdiv(rows, WARPS * SEGMENT), cdiv(C, WARP_COLUMNS))
    k(stream, grid, dtable, scratch, dx, tokens, order, rows, V)
    join = kernel(
        make_embedding_join, JOIN_SIGNATURE, threads=THREADS, C=C, accumulate=accumulate,
        grad_dtype=grad_dtype,
    )  # fmt: skip
    join(stream, grid, dtable, scratch, tokens, order, rows, V)


def embedding_backward_scratch(rows: int, C: int) -> int:
    """Bytes of scratch memory: one float32 row a segment."""
    return 4 * cdiv(rows, SEGMENT) * C


def _row_length(shape: tuple[int, ...], name: str) -> int:
    C = shape[-1] if shape else 0
    if C == 0 or C % PIECE:
        raise ValueError(f"{name} has shape {shape}; its last extent must be a multiple of {PIECE}")
    return C


def forward(tokens: Any, table: Any) -> Any:
    """Rows of a bfloat16 table (V, C) for int32 tokens (...): (..., C), on the current stream.

    ValueError on other shapes or dtypes. A token outside 0..V-1 gives a row of NaN.

    >>> x = embedding.forward(tokens, table)
    """
    t = describe(tokens, dtype=DType.INT32, name="tokens")
    a = describe(table, dtype=DType.BF16, shape=(None, None), name="table")
    C = _row_length(a.shape, "table")
    x = empty_like(a, shape=(*t.shape, C))
    embedding_forward_launch(
        describe(x, dtype=DType.BF16).address, t.address, a.address, rows=t.size, C=C,
        V=a.shape[0], stream=current_stream(a),
    )  # fmt: skip
    return x


def backward(dx: Any, tokens: Any, order: Any, *, vocab: int) -> Any:
    """Gradient of a bfloat16 table (vocab, C) from dx (..., C).

    tokens: (...) int32; order: their stable argsort, (N,) int32. ValueError on other shapes or
    dtypes.

    >>> dtable = embedding.backward(dx, tokens, order, vocab=50)
    """
    a = describe(dx, dtype=DType.BF16, name="dx")
    C = _row_length(a.shape, "dx")
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
def embedding_forward_bytes(N: int, C: int, *, itemsize: int = 2) -> int:
    """Read a row a token (were none repeated) and the tokens, write x."""
    return 2 * N * C * itemsize + 4 * N


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


COMPILE_CASES = (
    [
        CompileCase(make_embedding_forward, {"C": C, "dtype": d}, FORWARD_SIGNATURE, THREADS)
        for C, d in [(896, "bf16"), (4096, "bf16"), (896, "fp32")]
    ]
    + [
        CompileCase(
            make_embedding_backward,
            {"C": C, "accumulate": a, "dtype": d, "grad_dtype": g},
            BACKWARD_SIGNATURE,
            THREADS,
        )
        for C, a, d, g in [
            (896, True, "bf16", "bf16"),
            (4096, False, "bf16", "bf16"),
            (896, True, "bf16", "fp32"),
            (896, True, "fp32", "fp32"),
        ]
    ]
    + [
        CompileCase(
            make_embedding_join,
            {"C": 896, "accumulate": a, "grad_dtype": g},
            JOIN_SIGNATURE,
            THREADS,
        )
        for a, g in [(True, "bf16"), (False, "bf16"), (True, "fp32")]
    ]
    + [CompileCase(make_embedding_clear, {}, CLEAR_SIGNATURE, THREADS)]
)
