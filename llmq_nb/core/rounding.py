"""Rounding from float32 to the storage formats, on the host. Both engines agree with it to the bit.

nearest      round to nearest, ties to even (ml_dtypes)
stochastic   x rounds up with the probability of its position between its two neighbours:
             add 16 random bits below the BF16 mantissa, then truncate. Non-finite stay as they are.
quantize     per-tensor scaling to FP8 (just in time): absmax lands on the format's largest value
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.dtype import ABSMAX_FLOOR, FP8_MAX, DType


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """The values as float32: exact for every format; no copy if they are float32 already."""
    return array if array.dtype == np.float32 else array.astype(np.float32)


def stochastic_bf16(x: NDArray[np.float32], bits: NDArray[np.uint16]) -> NDArray[Any]:
    """float32 to BF16 with 16 random bits an element. Infinities and NaN round to nearest."""
    pattern = np.ascontiguousarray(x).view(np.uint32)
    high = ((pattern + bits) >> np.uint32(16)).astype(np.uint16)
    finite = (pattern & np.uint32(0x7F800000)) != np.uint32(0x7F800000)
    rounded = high.view(DType.BF16.numpy)
    return np.where(finite, rounded, x.astype(DType.BF16.numpy))


def stochastic_e4m3(x: NDArray[np.float32], bits: NDArray[np.uint16]) -> NDArray[Any]:
    """float32 to e4m3 with 16 random bits an element; beyond 448 saturates.

    As for BF16: |x| rounds up where its position between its neighbours, cut to 16 bits, plus
    `bits` reaches 2^16.
    """
    magnitude = np.minimum(np.abs(x), np.float32(FP8_MAX[DType.E4M3]))
    exponent = np.frexp(magnitude)[1].astype(np.int32) - 1
    ulp = np.ldexp(
        np.float32(1.0), np.maximum(exponent, -6) - 3
    )  # subnormals below 2^-6 share one ulp
    steps = magnitude / ulp  # exact: a division by a power of two
    low = np.floor(steps)
    up = np.floor((steps - low) * np.float32(65536.0)) + bits >= np.float32(65536.0)
    rounded = np.copysign((low + up) * ulp, x)
    return rounded.astype(DType.E4M3.numpy)


def absmax(x: NDArray[Any]) -> np.float32:
    """Largest absolute value as float32, exact; of the elements that are not NaN, 0 of nothing.

    The GPU's max instructions leave NaN out too: in the codes it is a NaN at its own place, and a
    product has it where one in BF16 would.
    """
    values = to_float32(x)
    above = np.fmax.reduce(values, axis=None, initial=0)
    below = np.fmin.reduce(values, axis=None, initial=0)
    return np.float32(max(abs(above), abs(below)))  # abs of both: a zero may have a sign


def scales(absmax: Any, dtype: DType) -> tuple[Any, Any]:
    """(scale, inv_scale) as float32, of a number or elementwise.

    scale = absmax / FP8_MAX dequantises; inv_scale goes before the cast.
    """
    largest = np.float32(FP8_MAX[dtype])
    value = np.float32(absmax)
    return value / largest, largest / np.maximum(value, np.float32(ABSMAX_FLOOR))


def quantize(
    x: NDArray[Any], dtype: DType, absmax: np.float32 | float
) -> tuple[NDArray[Any], np.float32]:
    """(codes, scale) with x ~= scale * codes; the cast saturates and keeps subnormals."""
    scale, inv_scale = scales(absmax, dtype)
    largest = np.float32(FP8_MAX[dtype])
    scaled = np.clip(to_float32(x) * inv_scale, -largest, largest)
    return scaled.astype(dtype.numpy), scale
