r"""Embedding forward: rows of a table. Backward: embedding_backward.py.

    x[n] = table[tokens[n]]

Shapes   table: (V, C); x: (N, C) row-major; tokens: (N,). C a multiple of 8.
Dtypes   table, x bfloat16 or float32 (`dtype`); tokens int32. A token outside 0..V-1 makes its row
         of x NaN.
Errors   Copies.
Cost     Reads the rows of the tokens, writes x.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.embedding_backward import backward  # noqa: F401
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ldg32
from llmq_nb.kernels.vector import PIECE, vector

THREADS, UNROLL = 256, 2
NAN_BITS = NOBODY = np.uint32(0xFFFFFFFF)
"""Of a row of x without a token; the token of a row that does not exist."""
SIGNATURE = (*(types.uint64,) * 3, types.int32, types.int32)


def make_embedding_forward(C: int, dtype: str):
    """Gather for one row length; arguments are device addresses, see SIGNATURE."""
    v = vector(dtype)
    WORDS, BYTES, load, store = v.words, v.bytes, v.load, v.store
    PIECES, STEP = C // PIECE, PIECE * BYTES

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


def embedding_forward_launch(
    x: int, tokens: int, table: int, *, rows: int, C: int, V: int, dtype: str = "bf16", stream: Any
) -> None:
    """Write x, device addresses, in stream order."""
    k = kernel(make_embedding_forward, SIGNATURE, threads=THREADS, C=C, dtype=dtype)
    k(stream, (cdiv(rows * C // PIECE, THREADS * UNROLL),), x, tokens, table, rows, V)


# ---- users -------------------------------------------------------------------------------------
def forward(tokens: Any, table: Any) -> Any:
    """Rows of a bfloat16 table (V, C) for int32 tokens (...): (..., C), on the current stream.

    ValueError on other shapes or dtypes. A token outside 0..V-1 gives a row of NaN.

    >>> x = embedding.forward(tokens, table)
    """
    t = describe(tokens, dtype=DType.INT32, name="tokens")
    a = describe(table, dtype=DType.BF16, shape=(None, None), name="table")
    C = a.shape[1]
    if C == 0 or C % PIECE:
        raise ValueError(f"table has shape {a.shape}; its rows must be multiples of {PIECE}")
    x = empty_like(a, shape=(*t.shape, C))
    embedding_forward_launch(
        describe(x, dtype=DType.BF16).address, t.address, a.address, rows=t.size, C=C,
        V=a.shape[0], stream=current_stream(a),
    )  # fmt: skip
    return x


# ---- cost --------------------------------------------------------------------------------------
def embedding_forward_bytes(N: int, C: int, *, itemsize: int = 2) -> int:
    """Read a row a token (were none repeated) and the tokens, write x."""
    return 2 * N * C * itemsize + 4 * N


COMPILE_CASES = [
    CompileCase(make_embedding_forward, {"C": C, "dtype": d}, SIGNATURE, THREADS)
    for C, d in [(896, "bf16"), (4096, "bf16"), (896, "fp32")]
]
