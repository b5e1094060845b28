"""Storage formats, their sizes and their largest values. Arithmetic is float32 everywhere."""

import enum
from typing import Any

import ml_dtypes
import numpy as np


class DType(enum.StrEnum):
    """A storage format, named as the config files name it."""

    FP32 = "fp32"
    BF16 = "bf16"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    INT32 = "int32"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.numpy.itemsize

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy dtype (from ml_dtypes for the formats that NumPy does not have)."""
        return _NUMPY[self]

    @property
    def is_fp8(self) -> bool:
        """Whether it is one of the 8-bit formats, which need a scale."""
        return self in FP8_MAX


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.FP32: np.dtype(np.float32),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.E5M2: np.dtype(ml_dtypes.float8_e5m2),
    DType.INT32: np.dtype(np.int32),
}

FP8_MAX: dict[DType, float] = {DType.E4M3: 448.0, DType.E5M2: 57344.0}
"""Largest finite value of each FP8 format; the absmax of a tensor is scaled to it."""

ABSMAX_FLOOR = 1e-30
"""Least absmax that a scale is computed from, so that an all-zero tensor has finite scales."""

M_GROUP = 128
"""Values of an e4m3 first moment that share a float32 scale."""
