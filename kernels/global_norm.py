r"""Global gradient norm, clip factor and non-finite flag, in a fixed order.

    squares[k]  = sum of g^2 over chunk k                 chunks: parts of at most CHUNK elements
    norms[t]    = sqrt(sum of squares[k], k in tensor t)
    norm        = sqrt(sum_t norms[t]^2)
    clip        = min(1, max_norm / norm),   finite = 1 if norm is finite else 0 (then clip = 0)

Shapes   chunks: (K, 2) of (address, elements), elements a multiple of 8; first_chunk: (TENSORS +
         1,): tensor t owns chunks first_chunk[t] to first_chunk[t + 1] - 1. norms: (TENSORS,);
         total: (3,). scratch: K float32. `chunk_table` makes the tables on the host.
Dtypes   gradients bfloat16 or float32 (`dtype`, the same for all); chunks int64; first_chunk int32;
         norms, total float32: norm, clip, finite (words NORM, CLIP, FINITE).
Errors   All terms are non-negative: relative error of norm below (CHUNK / THREADS + k /
         TENSOR_THREADS + TENSORS / TOTAL_THREADS + 40) / 2 * 2^-24, k the chunks of the largest
         tensor. Squares overflow float32 above 1.8e19: that counts as not finite. The order depends
         on the tables alone: bitwise reproducible. The first non-finite tensor is the first t whose
         norms[t] is not finite.
Cost     Reads the gradients once. Three launches for any number of tensors.
Source   Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like, upload_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import kernel
from llmq_nb.kernels.ptx import (
    div_rn,
    f2u,
    ffma,
    fmin,
    ldg32,
    ldg32f,
    ldg64,
    sqrt_rn,
    stg32f,
)
from llmq_nb.kernels.reduce import make_block_sum
from llmq_nb.kernels.vector import PIECE, vector

CHUNK = 1 << 16
"""Elements of a chunk: 128 KiB of bfloat16, enough for a block to stream, small enough to share
out."""
THREADS, UNROLL = 256, 4
TENSOR_THREADS, TOTAL_THREADS = 128, 256
NORM, CLIP, FINITE, WORDS = 0, 1, 2, 3
"""Word numbers in `total`, and their count."""
ZERO, ONE = np.float32(0.0), np.float32(1.0)
EXPONENT, YES, NO = np.uint32(0x7F800000), np.float32(1.0), np.float32(0.0)

CHUNK_SIGNATURE = (types.uint64, types.uint64)
TENSOR_SIGNATURE = (types.uint64,) * 3
TOTAL_SIGNATURE = (types.uint64, types.uint64, types.int32, types.float32)


def make_chunk_squares(dtype: str):
    """squares[k]: one block a chunk."""
    v = vector(dtype)
    VECTOR_WORDS, BYTES, load_cs, low, high = v.words, v.bytes * PIECE, v.load_cs, v.low, v.high
    block_sum = make_block_sum(THREADS)
    LAST = (UNROLL - 1) * THREADS

    def chunk_squares(squares, chunks):
        k = cuda.blockIdx.x
        address_low, address_high = ldg64(chunks + np.int64(k) * 16)
        pieces = np.int32(ldg32(chunks + np.int64(k) * 16 + 8)) >> 3
        address = (np.int64(address_high) << 32) | np.int64(address_low)
        tile = cuda.local.array((UNROLL, VECTOR_WORDS), dtype=types.uint32)
        total = cuda.local.array(1, dtype=types.float32)
        total[0] = ZERO
        i = cuda.threadIdx.x
        while i < pieces:
            start = address + np.int64(i) * BYTES
            if i + LAST < pieces:  # without predicates the loads stay together
                for u in range(UNROLL):
                    load_cs(tile, u, start + u * THREADS * BYTES, True)
            else:
                for u in range(UNROLL):
                    load_cs(tile, u, start + u * THREADS * BYTES, i + u * THREADS < pieces)
            for u in range(UNROLL):
                for j in range(4):
                    total[0] = ffma(low(tile, u, j), low(tile, u, j), total[0])
                    total[0] = ffma(high(tile, u, j), high(tile, u, j), total[0])
            i += UNROLL * THREADS
        block_sum(total)
        if cuda.threadIdx.x == 0:
            stg32f(squares + np.int64(k) * 4, total[0])

    return chunk_squares


def make_tensor_norms():
    """norms[t]: one block a tensor."""
    block_sum = make_block_sum(TENSOR_THREADS)

    def tensor_norms(norms, squares, first_chunk):
        t = cuda.blockIdx.x
        first = np.int32(ldg32(first_chunk + np.int64(t) * 4))
        end = np.int32(ldg32(first_chunk + np.int64(t) * 4 + 4))
        total = cuda.local.array(1, dtype=types.float32)
        total[0] = ZERO
        k = first + cuda.threadIdx.x
        while k < end:
            total[0] = total[0] + ldg32f(squares + np.int64(k) * 4)
            k += TENSOR_THREADS
        block_sum(total)
        if cuda.threadIdx.x == 0:
            stg32f(norms + np.int64(t) * 4, sqrt_rn(total[0]))

    return tensor_norms


def make_total_norm():
    """The three words: one block."""
    block_sum = make_block_sum(TOTAL_THREADS)

    def total_norm(out, norms, tensors, max_norm):
        total = cuda.local.array(1, dtype=types.float32)
        total[0] = ZERO
        t = cuda.threadIdx.x
        while t < tensors:
            value = ldg32f(norms + np.int64(t) * 4)
            total[0] = ffma(value, value, total[0])
            t += TOTAL_THREADS
        block_sum(total)
        if cuda.threadIdx.x == 0:
            norm = sqrt_rn(total[0])
            # by bits: fast math may assume that comparisons never see NaN
            finite = (f2u(norm) & EXPONENT) != EXPONENT
            clip = fmin(ONE, div_rn(max_norm, norm))
            stg32f(out + NORM * 4, norm)
            stg32f(out + CLIP * 4, clip if finite else ZERO)
            stg32f(out + FINITE * 4, YES if finite else NO)

    return total_norm


# ---- launch ------------------------------------------------------------------------------------
def chunk_table(
    tensors: Sequence[tuple[int, int]], *, itemsize: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """(chunks int64 (K, 2), first_chunk int32 (TENSORS + 1,)) of (address, elements) pairs.

    itemsize: bytes an element, the same for all. ValueError if a size is no multiple of 8.
    """
    chunks, first = [], [0]
    for address, n in tensors:
        if n % PIECE:
            raise ValueError(f"a tensor has {n} elements, must be a multiple of {PIECE}")
        for start in range(0, n, CHUNK):
            chunks.append((address + start * itemsize, min(CHUNK, n - start)))
        first.append(len(chunks))
    return np.array(chunks, np.int64).reshape(-1, 2), np.array(first, np.int32)


def global_norm_launch(
    norms: int, total: int, chunks: int, first_chunk: int, *, scratch: int, n_chunks: int,
    tensors: int, max_norm: float, dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write norms (tensors) and total (3 words). scratch: 4 n_chunks bytes.

    max_norm: math.inf never clips."""
    a = kernel(make_chunk_squares, CHUNK_SIGNATURE, threads=THREADS, dtype=dtype)
    a(stream, (n_chunks,), scratch, chunks)
    b = kernel(make_tensor_norms, TENSOR_SIGNATURE, threads=TENSOR_THREADS)
    b(stream, (tensors,), norms, scratch, first_chunk)
    c = kernel(make_total_norm, TOTAL_SIGNATURE, threads=TOTAL_THREADS)
    c(stream, (1,), total, norms, tensors, max_norm)


# ---- users -------------------------------------------------------------------------------------
def norm(grads: Sequence[Any], *, max_norm: float = float("inf")) -> Any:
    """Global L2 norm of bfloat16 GPU arrays: float32 (3,) of norm, clip factor, 1 if finite
    else 0.

    Sizes must be multiples of 8. ValueError on other sizes or dtypes.

    >>> total = global_norm.norm([g1, g2], max_norm=1.0)
    """
    if not grads:
        raise ValueError("no gradients were given")
    arrays = [describe(g, dtype=DType.BF16, name=f"grads[{i}]") for i, g in enumerate(grads)]
    chunks, first = chunk_table([(a.address, a.size) for a in arrays])
    a = arrays[0]
    table = upload_like(a, chunks.view(np.int32))
    starts, total = upload_like(a, first), empty_like(a, shape=(WORDS,), dtype=DType.FP32)
    norms = empty_like(a, shape=(len(arrays),), dtype=DType.FP32)
    scratch = empty_like(a, shape=(max(len(chunks), 1),), dtype=DType.FP32)
    norms_, total_, scratch_ = (
        describe(x, dtype=DType.FP32).address for x in (norms, total, scratch)
    )
    table_, starts_ = (describe(x, dtype=DType.INT32).address for x in (table, starts))
    global_norm_launch(
        norms_, total_, table_, starts_, scratch=scratch_, n_chunks=len(chunks),
        tensors=len(arrays), max_norm=max_norm, stream=current_stream(a),
    )  # fmt: skip
    return total


# ---- cost --------------------------------------------------------------------------------------
def global_norm_bytes(n: int, *, itemsize: int = 2) -> int:
    """Read every gradient once; the partial sums are 1 / 32768 of it."""
    return n * itemsize


# ---- reference ---------------------------------------------------------------------------------
def global_norm_ref(
    grads: Sequence[np.ndarray], max_norm: float
) -> tuple[np.ndarray, float, float]:
    """float64 NumPy oracle: (norms, norm, clip)."""
    norms = np.array([np.sqrt((g.astype(np.float64) ** 2).sum()) for g in grads])
    norm = float(np.sqrt((norms**2).sum()))
    return norms, norm, min(1.0, max_norm / norm) if norm else 1.0


COMPILE_CASES = [
    *(
        CompileCase(make_chunk_squares, {"dtype": d}, CHUNK_SIGNATURE, THREADS)
        for d in ("bf16", "fp32")
    ),
    CompileCase(make_tensor_norms, {}, TENSOR_SIGNATURE, TENSOR_THREADS),
    CompileCase(make_total_norm, {}, TOTAL_SIGNATURE, TOTAL_THREADS),
]
