r"""What each rank makes of small vectors that it has from every rank: norms and absmax.

    norms[t]  = sqrt(sum_r gathered[r, t]^2)       gathered: norms of the ranks' shards of tensor t
    total     = norm, clip factor, 1 if finite     of norms, as global_norm.py makes it
    absmax[i] = max_r gathered[r, i]

Shapes   gathered: (RANKS, TENSORS), rows one behind the other; for absmax RANKS rows `stride` bytes
         apart, with values `spacing` bytes apart, as in `absmax` (words of FP8 slots).
Dtypes   float32; norms and absmax are not negative, or NaN.
Errors   norms: RANKS multiply-adds in the order of the ranks and one root, (RANKS / 2 + 1) 2^-24
         relative; then global_norm.py's error. absmax: exact. Every rank gets the same bits.
         NaN and infinity stay: maxima are of the bits, where NaN is above all numbers.
Cost     A launch or two of some microseconds.
Source   Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.global_norm import TOTAL_SIGNATURE, TOTAL_THREADS, make_total_norm
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ffma, ldg32, ldg32f, sqrt_rn, stg32, stg32f

THREADS = 128
ZERO, NO_BITS = np.float32(0.0), np.uint32(0)
NORMS_SIGNATURE = (types.uint64, types.uint64, types.int32, types.int32)
ABSMAX_SIGNATURE = (types.uint64, types.uint64, *(types.int32,) * 3, types.int64)


def make_combine_norms():
    """norms[t]: one thread a tensor."""

    def combine_norms(norms, gathered, tensors, ranks):
        t = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if t < tensors:
            total = ZERO
            for r in range(ranks):
                value = ldg32f(gathered + (r * np.int64(tensors) + t) * 4)
                total = ffma(value, value, total)
            stg32f(norms + t * 4, sqrt_rn(total))

    return combine_norms


def make_combine_absmax():
    """absmax[i]: one thread a value."""

    def combine_absmax(absmax, gathered, n, ranks, spacing, stride):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < n:
            largest = NO_BITS
            for r in range(ranks):
                largest = max(largest, ldg32(gathered + r * stride + i * spacing))
            stg32(absmax + i * spacing, largest)

    return combine_absmax


# ---- launch ------------------------------------------------------------------------------------
def combine_norms_launch(
    norms: int, total: int, gathered: int, *, tensors: int, ranks: int, max_norm: float, stream: Any
) -> None:
    """Write norms (tensors) and total (3 words). max_norm: math.inf never clips."""
    a = kernel(make_combine_norms, NORMS_SIGNATURE, threads=THREADS)
    a(stream, (cdiv(tensors, THREADS),), norms, gathered, tensors, ranks)
    b = kernel(make_total_norm, TOTAL_SIGNATURE, threads=TOTAL_THREADS)
    b(stream, (1,), total, norms, tensors, max_norm)


def combine_absmax_launch(
    absmax: int, gathered: int, *, n: int, ranks: int, spacing: int, stride: int, stream: Any
) -> None:
    """Write the largest of all ranks to each of n values. spacing, stride: bytes from value to
    value and from row to row; the addresses are those of the first value."""
    k = kernel(make_combine_absmax, ABSMAX_SIGNATURE, threads=THREADS)
    k(stream, (cdiv(n, THREADS),), absmax, gathered, n, ranks, spacing, stride)


# ---- reference ---------------------------------------------------------------------------------
def combine_norms_ref(gathered: np.ndarray, max_norm: float) -> tuple[np.ndarray, float, float]:
    """float64 NumPy oracle: (norms, norm, clip)."""
    squares = (gathered.astype(np.float64) ** 2).sum(axis=0)
    norm = float(np.sqrt(squares.sum()))
    return np.sqrt(squares), norm, min(1.0, max_norm / norm) if norm else 1.0


def combine_absmax_ref(gathered: np.ndarray) -> np.ndarray:
    """NumPy's maximum, which keeps NaN: exact."""
    return np.maximum.reduce(gathered, axis=0)


COMPILE_CASES = [
    CompileCase(make_combine_norms, {}, NORMS_SIGNATURE, THREADS),
    CompileCase(make_combine_absmax, {}, ABSMAX_SIGNATURE, THREADS),
]
