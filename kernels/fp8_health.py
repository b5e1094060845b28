r"""How well a tensor fits its FP8 format: the values that its scale loses at either end.

    code[i]      = fp8(x[i] * inv_scale)                     as quantize.py makes it
    underflowed += number of i with code[i] = 0 and x[i] != 0
    saturated   += number of i with |code[i]| = FP8_MAX      (the absmax itself is one of them)

Shapes   x: n values, n a multiple of 8; absmax: (1,), of x; counts: (2,) = [underflowed,
         saturated], words 2 and 3 of a tensor's slot (plan/fp8.py).
Dtypes   x: bfloat16; absmax: float32; counts: uint32, added to: n < 2^32 in all.
Errors   Exact and the same for every code path: a code is 0 up to half the least subnormal (ties go
         to even) and the largest from the middle of the last two values on (in e5m2 above it: there
         the even one is the smaller), and both are compared with the product that is encoded. A
         NaN is neither. Integer atomics: the sum does not depend on their order.
Cost     Reads x once, writes nothing but two integers a block. A log's step only, one in many.
Source   OCP 8-bit Floating Point Specification 1.0, tables 1 and 2.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import FP8_MAX, DType
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.fp8 import BIAS, INFINITY, MAGNITUDE, MANTISSA_BITS, make_inv_scale
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    bf_hi,
    bf_lo,
    f2u,
    ldg128_cs,
    lds32,
    mul_rn,
    red_add_g,
    redux_add_u32,
    smem_addr,
    sts32,
)

THREADS, UNROLL = 256, 4
WARPS = THREADS // 32
PIECE = 8
"""Values of a 16-byte access; n is a multiple of it."""
BLOCK_VALUES = THREADS * UNROLL * PIECE
"""Below 2^16: a block's two counts fit into one word."""
NONE, ONE, ONE_HIGH = np.uint32(0), np.uint32(1), np.uint32(1 << 16)
HALF_WORD, LOW_HALF = np.uint32(16), np.uint32(0xFFFF)
SIGNATURE = (*(types.uint64,) * 3, types.int64)


def _thresholds(format: str) -> tuple[np.uint32, np.uint32]:
    """float32 bits of scaled magnitudes: the last that becomes 0, the first that becomes the
    largest code."""
    last_zero = np.float32(2.0 ** (-BIAS[format] - MANTISSA_BITS[format]))
    largest = FP8_MAX[DType(format)]
    step = 2.0 ** (np.floor(np.log2(largest)) - MANTISSA_BITS[format])
    middle = np.float32(largest - step / 2)
    even = largest / step % 2 == 0  # the middle itself goes to the even one of its neighbours
    first = middle if even else np.nextafter(middle, np.float32(np.inf))
    return last_zero.view(np.uint32), first.view(np.uint32)


def make_fp8_health(format: str):
    """Both counts of one tensor, 32 values a thread."""
    inv_scale_of = make_inv_scale(format)
    LAST_ZERO, FIRST_LARGEST = _thresholds(format)

    @cuda.jit(device=True)
    def lost(value, s):
        """Counts of one value: underflowed in the low half of a word, saturated in the high one."""
        scaled = f2u(mul_rn(value, s)) & MAGNITUDE
        zero = ONE if scaled <= LAST_ZERO and (f2u(value) & MAGNITUDE) != NONE else NONE
        return ONE_HIGH if scaled >= FIRST_LARGEST and scaled <= INFINITY else zero

    def fp8_health(counts, x, slot, pieces):
        partial = smem_addr(cuda.shared.array(WARPS, dtype=types.uint32))
        v = cuda.local.array((UNROLL, 4), dtype=types.uint32)
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        for k in range(UNROLL):
            i = first + k * THREADS
            if i < pieces:
                v[k, 0], v[k, 1], v[k, 2], v[k, 3] = ldg128_cs(x + i * (2 * PIECE))
            else:
                for j in range(4):
                    v[k, j] = NONE
        s = inv_scale_of(slot)
        mine = NONE
        for k in range(UNROLL):
            for j in range(4):
                mine = mine + lost(bf_lo(v[k, j]), s) + lost(bf_hi(v[k, j]), s)
        total = redux_add_u32(mine)
        if (cuda.threadIdx.x & 31) == 0:
            sts32(partial + (cuda.threadIdx.x >> 5) * 4, total)
        cuda.syncthreads()  # every warp's counts are there
        if cuda.threadIdx.x == 0:
            for w in range(1, WARPS):
                total = total + lds32(partial + w * 4)
            if total & LOW_HALF != NONE:
                red_add_g(counts, total & LOW_HALF)
            if total >> HALF_WORD != NONE:
                red_add_g(counts + 4, total >> HALF_WORD)

    return fp8_health


# ---- launch ------------------------------------------------------------------------------------
def fp8_health_launch(
    counts: int, x: int, absmax: int, *, n: int, format: str, stream: Any
) -> None:
    """Add [underflowed, saturated] of the n bfloat16 values at x, quantised by absmax, to the two
    uint32 at counts (device addresses). They hold 0 or other parts of the tensor before."""
    k = kernel(make_fp8_health, SIGNATURE, threads=THREADS, format=format)
    k(stream, (cdiv(n, BLOCK_VALUES),), counts, x, absmax, n // PIECE)


# ---- cost --------------------------------------------------------------------------------------
def fp8_health_bytes(n: int) -> int:
    """Read bfloat16 once."""
    return 2 * n


# ---- reference ---------------------------------------------------------------------------------
def fp8_health_ref(x: np.ndarray, codes: np.ndarray, format: str) -> tuple[int, int]:
    """(underflowed, saturated) from the values and their codes, an array of the FP8 dtype."""
    values, coded = x.astype(np.float64), codes.astype(np.float64)
    underflowed = (coded == 0) & (values != 0)
    saturated = np.abs(coded) == FP8_MAX[DType(format)]
    return int(underflowed.sum()), int(saturated.sum())


COMPILE_CASES = [CompileCase(make_fp8_health, {"format": f}, SIGNATURE, THREADS) for f in BIAS]
