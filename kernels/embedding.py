r"""Token embedding, forward and deterministic backward.

    x[n, c]      = table[tokens[n], c]
    dtable[v, c] += sum over n with tokens[n] = v of dx[n, c]

Backward walks the tokens in sorted order, so that equal tokens are neighbours (runs). Stage one
sums RUN consecutive sorted positions a block; a run inside them goes straight to dtable, one that
crosses into the next block leaves a partial sum. Stage two adds up the partial sums of every
crossing run, in order. Rows of tokens that do not occur are not touched: clear dtable before the
first micro-step.

Shapes   tokens, order: (N,); table, dtable: (V, C); x, dx: (N, C); C a multiple of 8.
         order: stable argsort of tokens. scratch: (2, ceil(N / RUN), C).
Dtypes   tokens, order: int32, 0 <= tokens < V; table, x, dx: bfloat16 or float32 (`dtype`); dtable:
         bfloat16 or float32 (`grad_dtype`); scratch float32.
Errors   forward: exact. backward: a token that occurs k times takes at most min(k, RUN) + k / RUN +
         1 float32 additions, then one rounding. Each row has one writer: bitwise reproducible.
Cost     forward: reads and writes N rows. backward: reads dx, reads and writes the rows that occur.
Source   Derivative of a row lookup.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ldg32, ldg128f_cs, stg128f
from llmq_nb.kernels.vector import PIECE, vector

THREADS, UNROLL = 256, 2
RUN = 32
"""Sorted positions a block sums; a constant, so that the order of every sum is fixed."""
BACKWARD_THREADS, AHEAD = 128, 4  # a piece of columns a thread; rows loaded together
COLUMNS = BACKWARD_THREADS * PIECE
ZERO = np.float32(0.0)
FORWARD_SIGNATURE = (*(types.uint64,) * 3, types.int64)
BACKWARD_SIGNATURE = (*(types.uint64,) * 5, types.int32)
MERGE_SIGNATURE = (*(types.uint64,) * 4, types.int32)


def make_embedding_forward(C: int, dtype: str):
    """Copy one table row a token."""
    v = vector(dtype)
    WORDS, BYTES, load_nc, store = v.words, v.bytes * PIECE, v.load_nc, v.store
    ROW_PIECES = C // PIECE

    def embedding_forward(x, tokens, table, pieces):
        tile = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        for u in range(UNROLL):
            i = first + u * THREADS
            row = i // ROW_PIECES
            token = np.int64(ldg32(tokens + row * 4)) if i < pieces else np.int64(0)
            source = table + (token * ROW_PIECES + (i - row * ROW_PIECES)) * BYTES
            load_nc(tile, u, source, i < pieces)
        for u in range(UNROLL):
            i = first + u * THREADS
            store(x + i * BYTES, tile, u, i < pieces)

    return embedding_forward


@cuda.jit(device=True)
def sorted_token(tokens, order, position):
    """The token at a sorted position."""
    return np.int32(ldg32(tokens + np.int64(np.int32(ldg32(order + np.int64(position) * 4))) * 4))


def _make_add_row(grad_dtype: str) -> Any:
    """Device function add_row(address, total): 8 values at the address += total, one rounding."""
    v = vector(grad_dtype)
    WORDS, load, store, low, high, set_pair = v.words, v.load, v.store, v.low, v.high, v.set_pair

    @cuda.jit(device=True)
    def add_row(address, total):
        tile = cuda.local.array((1, WORDS), dtype=types.uint32)
        load(tile, 0, address, True)
        for j in range(4):
            set_pair(
                tile, 0, j, low(tile, 0, j) + total[2 * j], high(tile, 0, j) + total[2 * j + 1]
            )
        store(address, tile, 0, True)

    return add_row


@cuda.jit(device=True)
def store_partial(address, total):
    """8 float32."""
    stg128f(address, (total[0], total[1], total[2], total[3]))
    stg128f(address + 16, (total[4], total[5], total[6], total[7]))


def make_embedding_backward(C: int, dtype: str, grad_dtype: str):
    """Stage one: sums of runs inside RUN sorted positions; partial sums of those that cross."""
    v, g = vector(dtype), vector(grad_dtype)
    WORDS, BYTES, GRAD_BYTES, load, low, high = v.words, v.bytes, g.bytes, v.load, v.low, v.high
    add_row = _make_add_row(grad_dtype)

    def embedding_backward(dtable, scratch, dx, tokens, order, N):
        column = cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x * PIECE
        if column < C:
            first = cuda.blockIdx.y * RUN
            heads = scratch + (np.int64(cuda.blockIdx.y) * C + column) * 4
            tails = heads + np.int64(cuda.gridDim.y) * C * 4
            tile = cuda.local.array((AHEAD, WORDS), dtype=types.uint32)
            total = cuda.local.array(8, dtype=types.float32)
            for k in range(8):
                total[k] = ZERO
            token = sorted_token(tokens, order, first)
            # whether the current run began in an earlier block
            inherited = first > 0 and sorted_token(tokens, order, max(first - 1, 0)) == token
            end = min(first + RUN, N)
            position = first
            while position < end:
                for u in range(AHEAD):
                    at = position + u
                    row = np.int64(np.int32(ldg32(order + np.int64(at) * 4))) if at < end else 0
                    load(tile, u, dx + (row * C + column) * BYTES, at < end)
                for u in range(AHEAD):
                    at = position + u
                    if at < end:
                        for j in range(4):
                            total[2 * j] = total[2 * j] + low(tile, u, j)
                            total[2 * j + 1] = total[2 * j + 1] + high(tile, u, j)
                        after = sorted_token(tokens, order, at + 1) if at + 1 < N else -1
                        if after != token or at + 1 == end:  # the run, or our part of it, ends
                            if inherited:
                                store_partial(heads, total)
                            elif after == token:
                                store_partial(tails, total)
                            else:
                                add_row(dtable + (np.int64(token) * C + column) * GRAD_BYTES, total)
                            for k in range(8):
                                total[k] = ZERO
                            inherited = False
                            token = after
                position += AHEAD

    return embedding_backward


def make_embedding_merge(C: int, grad_dtype: str):
    """Stage two: the block in which a crossing run begins adds all its partial sums, in order."""
    GRAD_BYTES = vector(grad_dtype).bytes
    add_row = _make_add_row(grad_dtype)

    def embedding_merge(dtable, scratch, tokens, order, N):
        column = cuda.blockIdx.x * COLUMNS + cuda.threadIdx.x * PIECE
        first = cuda.blockIdx.y * RUN
        end = first + RUN  # of the last block: no next one
        if column < C and end < N:
            token = sorted_token(tokens, order, end - 1)
            begins = first == 0 or sorted_token(tokens, order, max(first - 1, 0)) != token
            if begins and sorted_token(tokens, order, end) == token:
                step = np.int64(C) * 4
                total = cuda.local.array(8, dtype=types.float32)
                part = scratch + (np.int64(cuda.gridDim.y + cuda.blockIdx.y) * C + column) * 4
                total[0], total[1], total[2], total[3] = ldg128f_cs(part)
                total[4], total[5], total[6], total[7] = ldg128f_cs(part + 16)
                part = scratch + (np.int64(cuda.blockIdx.y) * C + column) * 4
                goes_on = True
                while goes_on:
                    part += step
                    a, b, c, d = ldg128f_cs(part)
                    e, f, g, h = ldg128f_cs(part + 16)
                    total[0], total[1], total[2], total[3] = (
                        total[0] + a, total[1] + b, total[2] + c, total[3] + d
                    )  # fmt: skip
                    total[4], total[5], total[6], total[7] = (
                        total[4] + e, total[5] + f, total[6] + g, total[7] + h
                    )  # fmt: skip
                    end += RUN
                    goes_on = end < N and sorted_token(tokens, order, min(end, N - 1)) == token
                add_row(dtable + (np.int64(token) * C + column) * GRAD_BYTES, total)

    return embedding_merge


# ---- launch ------------------------------------------------------------------------------------
def embedding_forward_launch(
    x: int, tokens: int, table: int, *, N: int, C: int, dtype: str = "bf16", stream: Any
) -> None:
    """Write x (N, C) from the rows of table that tokens (N) name."""
    k = kernel(make_embedding_forward, FORWARD_SIGNATURE, threads=THREADS, C=C, dtype=dtype)
    pieces = N * C // PIECE
    k(stream, (cdiv(pieces, THREADS * UNROLL),), x, tokens, table, pieces)


def embedding_backward_launch(
    dtable: int, dx: int, tokens: int, order: int, *, scratch: int, N: int, C: int,
    dtype: str = "bf16", grad_dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Add to dtable (V, C) the rows of dx (N, C). scratch: embedding_backward_scratch(N, C)
    bytes."""
    constants = {"C": C, "grad_dtype": grad_dtype}
    grid = (cdiv(C, COLUMNS), cdiv(N, RUN))
    k = kernel(
        make_embedding_backward, BACKWARD_SIGNATURE, BACKWARD_THREADS, dtype=dtype, **constants
    )
    k(stream, grid, dtable, scratch, dx, tokens, order, N)
    m = kernel(make_embedding_merge, MERGE_SIGNATURE, BACKWARD_THREADS, **constants)
    m(stream, grid, dtable, scratch, tokens, order, N)


def embedding_backward_scratch(N: int, C: int) -> int:
    """Bytes of scratch memory."""
    return 2 * cdiv(N, RUN) * C * 4


# ---- users -------------------------------------------------------------------------------------
def forward(tokens: Any, table: Any) -> Any:
    """Rows of a bfloat16 GPU array (V, C), C a multiple of 8, by int32 tokens (...): (..., C).

    Tokens must lie in 0 .. V - 1; that is not checked on the device.

    >>> x = embedding.forward(tokens, table)
    """
    t = describe(tokens, dtype=DType.INT32, name="tokens")
    w = describe(table, dtype=DType.BF16, shape=(None, None), name="table")
    C = w.shape[1]
    if C % PIECE:
        raise ValueError(f"table has shape {w.shape}; its rows must be a multiple of {PIECE}")
    x = empty_like(w, shape=(*t.shape, C))
    out = describe(x, dtype=DType.BF16).address
    embedding_forward_launch(out, t.address, w.address, N=t.size, C=C, stream=current_stream(w))
    return x


def backward(dtable: Any, dx: Any, tokens: Any, order: Any) -> Any:
    """Add the rows of dx (..., C) to dtable (V, C) at tokens (...), in place; bfloat16, int32 GPU
    arrays.

    order: stable argsort of the flattened tokens, int32. Returns dtable. ValueError on other
    shapes.

    >>> embedding.backward(dtable, dx, tokens, order)
    """
    g = describe(dtable, dtype=DType.BF16, shape=(None, None), name="dtable")
    t = describe(tokens, dtype=DType.INT32, name="tokens")
    C = g.shape[1]
    if C % PIECE:
        raise ValueError(f"dtable has shape {g.shape}; its rows must be a multiple of {PIECE}")
    d = describe(dx, dtype=DType.BF16, shape=(*t.shape, C), name="dx")
    o = describe(order, dtype=DType.INT32, shape=(t.size,), name="order")
    words = embedding_backward_scratch(t.size, C) // 4
    scratch = describe(empty_like(g, shape=(words,), dtype=DType.FP32), dtype=DType.FP32)
    embedding_backward_launch(
        g.address, d.address, t.address, o.address, scratch=scratch.address, N=t.size, C=C,
        stream=current_stream(g),
    )  # fmt: skip
    return dtable


# ---- cost --------------------------------------------------------------------------------------
def embedding_forward_bytes(N: int, C: int, *, itemsize: int = 2) -> int:
    """Read and write N rows, read the tokens."""
    return 2 * N * C * itemsize + 4 * N


def embedding_backward_bytes(N: int, C: int, distinct: int, *, itemsize: int = 2) -> int:
    """Read dx, tokens and order; read and write the rows of `distinct` tokens."""
    return (N + 2 * distinct) * C * itemsize + 8 * N


# ---- reference ---------------------------------------------------------------------------------
def embedding_backward_ref(dtable: np.ndarray, dx: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float64 NumPy oracle: dtable plus the scattered rows."""
    total = dtable.astype(np.float64)
    np.add.at(total, tokens.reshape(-1), dx.astype(np.float64).reshape(-1, dtable.shape[1]))
    return total


COMPILE_CASES = [
    CompileCase(make_embedding_forward, {"C": 896, "dtype": "bf16"}, FORWARD_SIGNATURE, THREADS),
    CompileCase(make_embedding_forward, {"C": 2048, "dtype": "fp32"}, FORWARD_SIGNATURE, THREADS),
    *(
        CompileCase(
            make_embedding_backward, {"C": 896, "dtype": d, "grad_dtype": g}, BACKWARD_SIGNATURE,
            BACKWARD_THREADS,
        )
        for d, g in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"))
    ),
    *(
        CompileCase(
            make_embedding_merge, {"C": 896, "grad_dtype": g}, MERGE_SIGNATURE, BACKWARD_THREADS
        )
        for g in ("bf16", "fp32")
    ),
]  # fmt: skip
