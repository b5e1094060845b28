r"""A first moment in e4m3 with one float32 scale for every 128 values, in software: any card.

    scale = absmax / 448;   code = round(value * 448 / max(absmax, 1e-30))          (stochastically)

Sixteen neighbouring lanes hold the 128 values of a group, eight each, so every lane of the warp
must reach `store`. Values that do not exist must be 0. Codes of e4m3: sign, 4 bits of exponent
(bias 7), 3 of mantissa; multiples of 2^-9 below 2^-6; largest 448.

Rounding  as for bfloat16: up where the position between the neighbours, cut to 16 bits, and the
          random bits together reach one.
"""

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import ABSMAX_FLOOR
from llmq_nb.kernels.ptx import (
    div_rn,
    f2u,
    fmax,
    fmin,
    ldg8,
    ldg32f,
    ldg64,
    mul_rn,
    shfl_xorf,
    stg8,
    stg32f,
    stg64,
    u2f,
)
from llmq_nb.kernels.vector import PIECE

GROUP = 128
"""Values that share a scale."""
LANES = GROUP // PIECE
LARGEST, ZERO, FLOOR = np.float32(448.0), np.float32(0.0), np.float32(ABSMAX_FLOOR)
SMALLEST_NORMAL = np.float32(2.0**-6)
EXPONENT_UP = np.float32(2.0**120)  # float32's bias 127 less e4m3's 7
SUBNORMAL_STEPS = np.float32(2.0**25)  # units of 2^-9 / 65536
EXPONENT_DOWN = np.uint32(120 << 3)
MAGNITUDE, SIGN, BYTE = np.uint32(0x7FFFFFFF), np.uint32(0x80), np.uint32(0xFF)
LOW_HALF = np.uint32(0xFFFF)


@cuda.jit(device=True)
def decode(code):
    """e4m3 code (uint32 below 256, no NaN) -> float32, exact."""
    magnitude = mul_rn(u2f((code & np.uint32(0x7F)) << 20), EXPONENT_UP)
    return u2f(f2u(magnitude) | ((code & SIGN) << 24))


@cuda.jit(device=True)
def encode(value, bits):
    """float32 -> e4m3 code, saturating, rounded stochastically with bits (uint32 below 2^16)."""
    magnitude = fmin(u2f(f2u(value) & MAGNITUDE), LARGEST)
    pattern = f2u(magnitude)
    # of the mantissa's 23 bits three stay; the random bits meet the next 16, a carry rounds up
    normal = np.uint32(np.uint32(np.uint32(pattern + (bits << 4)) >> 20) - EXPONENT_DOWN)
    steps = np.uint32(mul_rn(fmin(magnitude, SMALLEST_NORMAL), SUBNORMAL_STEPS))
    small = np.uint32(np.uint32(steps + bits) >> 16)
    code = small if magnitude < SMALLEST_NORMAL else normal
    return np.uint32(code | ((f2u(value) >> 24) & SIGN))


@cuda.jit(device=True)
def load(values, codes, scales, i, count):
    """values[0:8] = piece i, scaled; zeros where fewer than 8 exist."""
    words = cuda.local.array(2, dtype=types.uint32)
    words[0], words[1] = np.uint32(0), np.uint32(0)
    address = codes + np.int64(i) * PIECE
    scale = ZERO
    if count > 0:
        scale = ldg32f(scales + np.int64(i // LANES) * 4)
    if count >= PIECE:
        words[0], words[1] = ldg64(address)
    else:
        for k in range(PIECE):
            if k < count:
                code = np.uint32(ldg8(address + k) << (8 * (k & 3)))
                words[k >> 2] = np.uint32(words[k >> 2] | code)
    for k in range(PIECE):
        values[k] = mul_rn(decode(np.uint32((words[k >> 2] >> (8 * (k & 3))) & BYTE)), scale)


@cuda.jit(device=True)
def store(values, codes, scales, i, count, random_words):
    """Write piece i and, once a group, its scale."""
    top = ZERO
    for k in range(PIECE):
        top = fmax(top, u2f(f2u(values[k]) & MAGNITUDE))
    for level in range(4):
        top = fmax(top, shfl_xorf(top, (LANES // 2) >> level))
    scale = div_rn(top, LARGEST)
    inverse = div_rn(LARGEST, fmax(top, FLOOR))
    words = cuda.local.array(2, dtype=types.uint32)
    words[0], words[1] = np.uint32(0), np.uint32(0)
    for k in range(PIECE):
        bits = np.uint32((random_words[k >> 1] >> (16 * (k & 1))) & LOW_HALF)
        code = np.uint32(encode(mul_rn(values[k], inverse), bits) << (8 * (k & 3)))
        words[k >> 2] = np.uint32(words[k >> 2] | code)
    address = codes + np.int64(i) * PIECE
    if count >= PIECE:
        stg64(address, words[0], words[1])
    else:
        for k in range(PIECE):
            if k < count:
                stg8(address + k, words[k >> 2] >> (8 * (k & 3)))
    if count > 0 and (i & (LANES - 1)) == 0:
        stg32f(scales + np.int64(i // LANES) * 4, scale)


def scale_count(n: int) -> int:
    """Scales of n values."""
    return -(-n // GROUP)
