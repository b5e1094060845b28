"""Rounding to FP8 and BF16 as a search in the list of a format's values.

The values of every code are computed from its bit fields. Two neighbouring codes are neighbouring
values, and their midpoint is exact in float64, so nearest-even is: which interval, which half, and
on the midpoint the even code. Formats: "e4m3" (no infinity, one NaN per sign), "e5m2", "bf16".
Shares nothing with llmq_nb.
Sources: Micikevicius et al. 2022, "FP8 formats for deep learning", table 1; OCP OFP8 1.0.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tests.oracles.layers import Array, f64

Codes = NDArray[np.uint16]


class Format(NamedTuple):
    """Field widths after the sign bit; the codes 0 .. magnitudes - 1 are the finite values >= 0."""

    exponent_bits: int
    mantissa_bits: int
    magnitudes: int
    infinity: int | None
    nan: int


FORMATS = {
    "e4m3": Format(4, 3, 0x7F, None, 0x7F),
    "e5m2": Format(5, 2, 0x7C, 0x7C, 0x7F),
    "bf16": Format(8, 7, 0x7F80, 0x7F80, 0x7FC0),
}


def _sign_bit(format: str) -> int:
    return 1 << (FORMATS[format].exponent_bits + FORMATS[format].mantissa_bits)


def magnitude(code: int, format: str) -> float:
    """Value of a code >= 0 by its fields, as if no code were infinite or NaN."""
    bits, bias = FORMATS[format].mantissa_bits, 2 ** (FORMATS[format].exponent_bits - 1) - 1
    exponent, mantissa = code >> bits, code & ((1 << bits) - 1)
    if exponent == 0:
        return mantissa * 2.0 ** (1 - bias - bits)
    return (mantissa + (1 << bits)) * 2.0 ** (exponent - bias - bits)


@cache
def magnitudes(format: str) -> Array:
    """The finite values >= 0, ascending: entry i is the value of code i."""
    return np.array([magnitude(code, format) for code in range(FORMATS[format].magnitudes)])


def largest(format: str) -> float:
    """The largest finite value: 448 for e4m3, 57344 for e5m2."""
    return float(magnitudes(format)[-1])


def decode(codes: ArrayLike, format: str) -> Array:
    """float64 values of codes (any unsigned integers); infinities and NaNs included."""
    codes = np.asarray(codes).astype(np.int64)
    sign, code = codes & _sign_bit(format), codes & (_sign_bit(format) - 1)
    finite = magnitudes(format)
    value = np.where(code < len(finite), finite[np.minimum(code, len(finite) - 1)], np.nan)
    if FORMATS[format].infinity is not None:
        value = np.where(code == FORMATS[format].infinity, np.inf, value)
    return np.where(sign != 0, -value, value)


def _with_sign(code: NDArray[np.int64], x: Array, format: str) -> Codes:
    code = np.where(np.isnan(x), FORMATS[format].nan, code)
    negative = np.signbit(x) & ~np.isnan(x)
    return np.where(negative, code | _sign_bit(format), code).astype(np.uint16)


def encode(x: ArrayLike, format: str, *, saturate: bool = True) -> Codes:
    """Codes of x rounded to nearest, ties to the even code.

    Above the largest finite value: that value if saturate (infinities too), else infinity from the
    midpoint to the value that would come next (formats with infinity only). -0.0 keeps its sign;
    every NaN becomes the positive one.
    """
    x = f64(x)
    following = magnitude(FORMATS[format].magnitudes, format)
    values = np.append(magnitudes(format), following)
    midpoints = (values[:-1] + values[1:]) / 2.0
    size = np.nan_to_num(np.abs(x), nan=0.0, posinf=np.inf)
    code = np.searchsorted(midpoints, size, side="left")  # midpoints below size
    tie = size == midpoints[np.minimum(code, len(midpoints) - 1)]
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    if saturate or FORMATS[format].infinity is None:
        code = np.minimum(code, FORMATS[format].magnitudes - 1)
    return _with_sign(code, x, format)


def round_nearest(x: ArrayLike, format: str, *, saturate: bool = True) -> Array:
    """float64 value of encode: x rounded once."""
    return decode(encode(x, format, saturate=saturate), format)


def bf16(x: ArrayLike) -> Array:
    """x rounded to bfloat16 the IEEE way (overflow to infinity), in float64."""
    return round_nearest(x, "bf16", saturate=False)


def encode_stochastic(
    x: ArrayLike, random_bits: ArrayLike, format: str, *, bits: int = 16
) -> Codes:
    """Codes of x rounded away from zero where fraction 2^bits + random_bits >= 2^bits.

    fraction in [0, 1) is the place of |x| between its neighbours, random_bits an integer of that
    many bits: for bf16 and float32 x this is adding them to the lower half and truncating. The mean
    over random_bits is x, up to 2^-bits of the interval. Finite x only; saturates.
    """
    x, random_bits = f64(x), f64(random_bits)
    values = magnitudes(format)
    size = np.minimum(np.abs(x), values[-1])
    low = np.minimum(np.searchsorted(values, size, side="right") - 1, len(values) - 2)
    fraction = (size - values[low]) / (values[low + 1] - values[low])
    up = fraction * 2.0**bits + random_bits >= 2.0**bits
    return _with_sign(low + up, x, format)


def round_stochastic(x: ArrayLike, random_bits: ArrayLike, format: str, *, bits: int = 16) -> Array:
    """float64 value of encode_stochastic."""
    return decode(encode_stochastic(x, random_bits, format, bits=bits), format)


def quantize(x: ArrayLike, format: str) -> tuple[Codes, np.float32]:
    """(codes, scale) of a tensor with just-in-time scaling: x ~= scale * decode(codes).

    absmax is of x as given (round to bf16 first where the contract says so). scale = absmax / max,
    inv_scale = max / max(absmax, 1e-30), both divisions and the product x inv_scale in float32,
    which NumPy rounds to nearest; then one rounding to the format, saturating.
    """
    x32 = f64(x).astype(np.float32)
    absmax = np.max(np.abs(x32), initial=np.float32(0.0))
    top = np.float32(largest(format))
    inv_scale = top / np.maximum(absmax, np.float32(1e-30))
    return encode(x32 * inv_scale, format), np.float32(absmax / top)
