"""FP8 codes in registers: float32 -> e4m3 / e5m2, by the card's instruction or bit for bit in
software.

    code = nearest value to x, ties to even; |x| above the largest finite value saturates,
           NaN -> 0x7F, a NaN in both formats

Software (cards before compute capability 8.9): normal numbers round by an integer addition to the
float32 pattern, subnormal ones by a float32 addition of 2^(step + 23), whose last place is the
step. `inv_scale` and `scale` are divided with div.rn, and products use mul.rn, so that every engine
and card has the same bits although kernels compile with fast math.

Source    OCP 8-bit Floating Point Specification 1.0, tables 1 and 2. PTX ISA: cvt.rn.satfinite.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import cuda

from llmq_nb.core.dtype import ABSMAX_FLOOR, FP8_MAX, DType
from llmq_nb.kernels.ptx import (
    SIMULATED,
    add_rn,
    bf16x2,
    div_rn,
    e4m3x4,
    e5m2x4,
    f2u,
    ldg32,
    ldg32f,
    mul_rn,
    u2f,
)

UNITS_CC = (8, 9)
"""First compute capability with FP8 conversions and products."""

MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
BIAS = {"e4m3": 7, "e5m2": 15}
LARGEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}  # 448, 57344
NAN_CODE = np.uint32(0x7F)
FLOOR_BITS = np.float32(ABSMAX_FLOOR).view(np.uint32)
MAGNITUDE, SIGN_SHIFT, SIGN = np.uint32(0x7FFFFFFF), np.uint32(24), np.uint32(0x80)
INFINITY, ONE_BIT = np.uint32(0x7F800000), np.uint32(1)
CODE_MAGNITUDE, SIGN_UP = np.uint32(0x7F), np.uint32(24)
BYTE, BYTE_MASK = np.uint32(8), np.uint32(0xFF)
TWO_BYTES, THREE_BYTES = np.uint32(16), np.uint32(24)


def largest(format: str) -> np.float32:
    """Largest finite value."""
    return np.float32(FP8_MAX[DType(format)])


def has_units() -> bool:
    """Whether the current device converts FP8 by itself."""
    if SIMULATED:
        return True
    from llmq_nb.core.device import current_device

    return current_device().cc >= UNITS_CC


def make_inv_scale(format: str) -> Any:
    """Device function inv_scale(slot): FP8_MAX / max(absmax, 1e-30), absmax the float32 at an
    address; NaN if that is NaN."""
    FP8_LARGEST = largest(format)

    @cuda.jit(device=True)
    def inv_scale(slot):
        # of the bits, in which a NaN is the largest: max.f32 would give the floor
        return div_rn(FP8_LARGEST, u2f(max(ldg32(slot), FLOOR_BITS)))

    return inv_scale


def make_scale(format: str) -> Any:
    """Device function scale(slot): absmax / FP8_MAX, what a product multiplies by."""
    FP8_LARGEST = largest(format)

    @cuda.jit(device=True)
    def scale(slot):
        return div_rn(ldg32f(slot), FP8_LARGEST)

    return scale


def _make_encode(format: str) -> Any:
    """Device function: one float32 to one code (uint32 below 256), in software."""
    DROPPED = np.uint32(23 - MANTISSA_BITS[format])  # mantissa bits that rounding drops
    HALF = np.uint32((1 << (22 - MANTISSA_BITS[format])) - 1)
    REBIAS = np.uint32((127 - BIAS[format]) << MANTISSA_BITS[format])
    LEAST_NORMAL = np.float32(2.0 ** (1 - BIAS[format])).view(np.uint32)
    STEP_UP = np.float32(2.0 ** (1 - BIAS[format] - MANTISSA_BITS[format] + 23))
    STEP_UP_BITS = STEP_UP.view(np.uint32)
    LARGEST = np.uint32(LARGEST_CODE[format])

    @cuda.jit(device=True)
    def encode(x):
        pattern = f2u(x)
        sign = (pattern >> SIGN_SHIFT) & SIGN
        magnitude = pattern & MAGNITUDE
        if magnitude < LEAST_NORMAL:
            code = np.uint32(f2u(add_rn(u2f(magnitude), STEP_UP)) - STEP_UP_BITS)
        else:
            odd = (magnitude >> DROPPED) & ONE_BIT
            code = np.uint32((np.uint32(magnitude + HALF + odd) >> DROPPED) - REBIAS)
        code = np.uint32(min(code, LARGEST) | sign)
        return NAN_CODE if magnitude > INFINITY else code  # one NaN, as the card's conversion

    return encode


def make_encode4(format: str, hardware: bool) -> Any:
    """Device function encode4(a, b, c, d): four float32 to four codes, a in the lowest byte."""
    if hardware:
        return {"e4m3": e4m3x4, "e5m2": e5m2x4}[format]
    encode = _make_encode(format)

    @cuda.jit(device=True)
    def encode4(a, b, c, d):
        low = encode(a) | (encode(b) << BYTE)
        return np.uint32(low | (encode(c) << TWO_BYTES) | (encode(d) << THREE_BYTES))

    return encode4


def make_decode4(format: str) -> Any:
    """Device function decode4(word): four codes to two packed bfloat16 pairs, exact, on every card.

    The code's exponent and mantissa are put in place in a float32 pattern, which a product with a
    power of two then re-biases; that also makes the subnormals normal.
    """
    SHIFT = np.uint32(23 - MANTISSA_BITS[format])
    REBIAS = np.float32(2.0 ** (127 - BIAS[format]))
    LARGEST = np.uint32(LARGEST_CODE[format])
    NAN = np.uint32(0x7FC00000)

    @cuda.jit(device=True)
    def decode(code):
        magnitude = code & CODE_MAGNITUDE
        value = f2u(mul_rn(u2f(magnitude << SHIFT), REBIAS))
        value = NAN if magnitude > LARGEST else value  # infinities of e5m2 never come from encode
        return u2f(np.uint32(value | ((code & SIGN) << SIGN_UP)))

    @cuda.jit(device=True)
    def decode4(word):
        a, b = decode(word & BYTE_MASK), decode((word >> BYTE) & BYTE_MASK)
        c, d = decode((word >> TWO_BYTES) & BYTE_MASK), decode(word >> THREE_BYTES)
        return bf16x2(a, b), bf16x2(c, d)

    return decode4


# ---- reference ---------------------------------------------------------------------------------
def scales_ref(absmax: npt.ArrayLike, format: str) -> tuple[np.ndarray, np.ndarray]:
    """(inv_scale, scale) in float32, as NumPy divides."""
    top = np.float32(FP8_MAX[DType(format)])
    value = np.asarray(absmax, np.float32)
    return top / np.maximum(value, np.float32(ABSMAX_FLOOR)), value / top


def quantize_ref(x: np.ndarray, absmax: float, format: str) -> np.ndarray:
    """uint8 codes of x by ml_dtypes' cast of the scaled and clipped values."""
    inv_scale, _ = scales_ref(np.float32(absmax), format)
    top = FP8_MAX[DType(format)]
    scaled = np.clip(x.astype(np.float32) * inv_scale, -top, top)
    return scaled.astype(DType(format).numpy).view(np.uint8)
