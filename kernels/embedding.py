r"""Embedding forward and backward.

    forward   x[n] = table[tokens[n]]
    backward  dtable[t] (+)= sum over {n : tokens[n] = t}, n rising, of dx[n]

The sum of a token starts from 0 and adds its rows one after the other in float32, so it is that of
a plain loop to the bit, on any card. Without `accumulate` rows of tokens that do not occur are 0.

Shapes   table, dtable: (V, C); x, dx: (N, C) row-major; tokens: (N,); order: (N,), the stable
         argsort of tokens. C a multiple of 8.
Dtypes   table, x, dx bfloat16 or float32 (`dtype`); dtable bfloat16 or float32 (`grad_dtype`);
         tokens, order int32. A token outside 0..V-1 makes its row of x NaN and has no gradient.
Errors   forward: copies. backward: run length - 1 float32 additions, one more with accumulate, one
         rounding to the storage format.
Cost     forward: reads the N rows, writes x. backward: reads dx once; writes (and reads) the rows
         of tokens that occur; without `accumulate` the whole of dtable is cleared first.
         One warp walks along the run of one token, 256 columns wide, ROWS loads in flight. Runs
         are not split: a token that makes up 5 % of 32768 rows takes about 200 round trips to
         memory, some 0.1 ms (estimated), which overlaps with the other tokens.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import inc, ldg32, redux_add_u32, shfl_idx, stg128
from llmq_nb.kernels.vector import PIECE, vector

THREADS, UNROLL = 256, 4
WARPS = THREADS // 32
WARP_COLUMNS = 32 * PIECE
ROWS = 8
"""Rows of a run that a lane has in flight."""
POSITIONS = 8
"""Positions of the order in which a warp looks for runs to begin."""
NAN_BITS, ZERO_BITS = np.uint32(0xFFFFFFFF), np.uint32(0)
NOBODY = np.uint32(0xFFFFFFFF)  # no token
ZERO = np.float32(0.0)
FORWARD_SIGNATURE = (*(types.uint64,) * 3, types.int32, types.int32)
BACKWARD_SIGNATURE = (*(types.uint64,) * 4, types.int32, types.int32)
CLEAR_SIGNATURE = (types.uint64, types.int64)


def make_embedding_forward(C: int, dtype: str):
    """Gather for one row length; arguments are device addresses, see FORWARD_SIGNATURE."""
    v = vector(dtype)
    WORDS, BYTES, load, store = v.words, v.bytes, v.load, v.store
    PIECES, STEP = C // PIECE, PIECE * BYTES

    def embedding_forward(x, tokens, table, rows, V):
        tile = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        total = np.int64(rows) * PIECES
        for u in range(UNROLL):
            i = first + u * THREADS
            if i < total:
                n = i // PIECES
                token = ldg32(tokens + n * 4)
                known = token < V  # unsigned: also refuses negative ones
                source = table + (np.int64(token) * PIECES + (i - n * PIECES)) * STEP
                load(tile, u, source, known)
                if not known:
                    for w in range(WORDS):
                        tile[u, w] = NAN_BITS
        for u in range(UNROLL):
            i = first + u * THREADS
            store(x + i * STEP, tile, u, i < total)

    return embedding_forward


def make_embedding_backward(C: int, accumulate: bool, dtype: str, grad_dtype: str):
    """Row sums for one row length; arguments are device addresses, see BACKWARD_SIGNATURE.

    Grid: (groups of WARPS * POSITIONS of `order`, groups of 256 columns)."""
    v, o = vector(dtype), vector(grad_dtype)
    WORDS, BYTES, load_cs, low, high = v.words, v.bytes, v.load_cs, v.low, v.high
    OUT_WORDS, OUT_BYTES, load_out, store_out = o.words, o.bytes, o.load, o.store
    low_out, high_out, set_pair = o.low, o.high, o.set_pair
    ACCUMULATE = accumulate

    @cuda.jit(device=True)
    def token_at(tokens, order, position):
        return ldg32(tokens + np.int64(ldg32(order + position * 4)) * 4)

    @cuda.jit(device=True)
    def add_run(sums, dx, tokens, order, token, position, column, rows):
        """sums[0:8] += the rows of `token`, from `position` of the order on."""
        lane = cuda.threadIdx.x & 31
        tile = cuda.local.array((ROWS, WORDS), dtype=types.uint32)
        count = 32
        while count == 32:  # 32 positions a turn, while all of them belong to the run
            row, mine = ZERO_BITS, ZERO_BITS
            if position + lane < rows:
                row = ldg32(order + (position + lane) * 4)
                if ldg32(tokens + np.int64(row) * 4) == token:
                    mine = np.uint32(1)
            count = np.int32(redux_add_u32(mine))
            done = np.uint32(0)
            while done < count:
                for u in range(ROWS):
                    n = np.int64(shfl_idx(row, done + u))
                    inside = done + u < count and column < C
                    load_cs(tile, u, dx + (n * C + column) * BYTES, inside)
                for u in range(ROWS):
                    if done + u < count:
                        for j in range(4):
                            sums[2 * j] = sums[2 * j] + low(tile, u, j)
                            sums[2 * j + 1] = sums[2 * j + 1] + high(tile, u, j)
                done = np.uint32(done + ROWS)
            position += 32

    def embedding_backward(dtable, dx, tokens, order, rows, V):
        lane = cuda.threadIdx.x & 31
        base = (np.int64(cuda.blockIdx.x) * WARPS + (cuda.threadIdx.x >> 5)) * POSITIONS
        column = cuda.blockIdx.y * WARP_COLUMNS + lane * PIECE
        out = cuda.local.array((1, OUT_WORDS), dtype=types.uint32)
        sums = cuda.local.array(8, dtype=types.float32)
        own, before = NOBODY, NOBODY  # lane g: the tokens at base + g and before it
        if lane < POSITIONS and base + lane < rows:
            own = token_at(tokens, order, base + lane)
            if base + lane > 0:
                before = token_at(tokens, order, base + lane - 1)
        g = np.uint32(0)
        while g < POSITIONS:
            token = shfl_idx(own, g)
            if token != shfl_idx(before, g) and token < V:  # the same for the whole warp
                for k in range(8):
                    sums[k] = ZERO
                add_run(sums, dx, tokens, order, token, base + g, column, rows)
                target = dtable + (np.int64(token) * C + column) * OUT_BYTES
                if ACCUMULATE:
                    load_out(out, 0, target, column < C)
                    for j in range(4):
                        sums[2 * j] = low_out(out, 0, j) + sums[2 * j]
                        sums[2 * j + 1] = high_out(out, 0, j) + sums[2 * j + 1]
                for j in range(4):
                    set_pair(out, 0, j, sums[2 * j], sums[2 * j + 1])
                store_out(target, out, 0, column < C)
            g = inc(g)

    return embedding_backward


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
    dtable: int, dx: int, tokens: int, order: int, *, rows: int, C: int, V: int, accumulate: bool,
    dtype: str = "bf16", grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write (or add to) dtable, device addresses, in stream order."""
    if not accumulate:
        clear = kernel(make_embedding_clear, CLEAR_SIGNATURE, threads=THREADS)
        chunks = V * C * vector(grad_dtype).bytes // 16
        clear(stream, (cdiv(chunks, THREADS * UNROLL),), dtable, chunks)
    k = kernel(
        make_embedding_backward, BACKWARD_SIGNATURE, threads=THREADS, C=C, accumulate=accumulate,
        dtype=dtype, grad_dtype=grad_dtype,
    )  # fmt: skip
    grid = (cdiv(rows, WARPS * POSITIONS), cdiv(C, WARP_COLUMNS))
    k(stream, grid, dtable, dx, tokens, order, rows, V)


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

    >>> dtable = embedding.backward(dx, tokens, order, vocab=32000)
    """
    a = describe(dx, dtype=DType.BF16, name="dx")
    C = _row_length(a.shape, "dx")
    t = describe(tokens, dtype=DType.INT32, shape=a.shape[:-1], name="tokens")
    o = describe(order, dtype=DType.INT32, shape=(t.size,), name="order")
    dtable = empty_like(a, shape=(vocab, C))
    embedding_backward_launch(
        describe(dtable, dtype=DType.BF16).address, a.address, t.address, o.address, rows=t.size,
        C=C, V=vocab, accumulate=False, stream=current_stream(a),
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
    + [CompileCase(make_embedding_clear, {}, CLEAR_SIGNATURE, THREADS)]
)
