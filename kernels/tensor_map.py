"""Tensor maps for TMA copies (sm_90 and later), kept in device memory, and counters of work.

A kernel takes the address of a 64-byte aligned copy of the driver's 128 bytes. Maps are remembered
by what they describe, so a launch with known buffers makes no copy (and may be captured).
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from llmq_nb.core.device import allocate, check, current_device, driver, synchronize_stream
from llmq_nb.core.dtype import DType

MAP_BYTES = 128
MAPS_PER_DEVICE = 4096
"""Slots of a device (512 KiB). When all are taken the device is drained and they start anew."""

_slots: dict[int, int] = {}
_maps: dict[int, dict[Any, int]] = {}


def tensor_map(
    address: int,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: DType = DType.BF16,
) -> int:
    """Device address of the map of a tensor of bfloat16 or FP8 codes, innermost extent first.

    strides: bytes, of all but the innermost extent, multiples of 16. box: extents of one copy, the
    innermost 128 bytes (the swizzle). Elements outside the tensor read as zero.
    """
    key = (address, extents, strides, box, dtype)
    return _kept(key, lambda: _encode(address, extents, strides, box, dtype))


def work_counter(address: int) -> int:
    """Device address of a word that is 0, for the kernels that write a tensor at `address`, of
    which no two run at once. They leave it 0."""
    return _kept(address, lambda: np.zeros(MAP_BYTES, np.uint8))


def _kept(key: Any, make: Callable[[], np.ndarray]) -> int:
    """Device address of MAP_BYTES that are made once."""
    device = current_device()
    known = _maps.setdefault(device.ordinal, {})
    if key not in known:
        if device.ordinal not in _slots:
            _slots[device.ordinal] = allocate(MAP_BYTES * MAPS_PER_DEVICE)
        if len(known) == MAPS_PER_DEVICE:  # addresses of freed buffers; kernels may still read them
            device.synchronize()
            known.clear()
        target = _slots[device.ordinal] + MAP_BYTES * len(known)
        host = make()
        check(driver().cuMemcpyHtoD(target, host.ctypes.data, MAP_BYTES), "copy of a tensor map")
        synchronize_stream(0)  # the call returns before the bytes are there; other streams go on
        known[key] = target
    return known[key]


def _encode(
    address: int,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    dtype: DType,
) -> np.ndarray:
    d = driver()
    kinds = d.CUtensorMapDataType
    result = d.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        if dtype is DType.BF16
        else kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(extents),
        address,
        [d.cuuint64_t(n) for n in extents],
        [d.cuuint64_t(n) for n in strides],
        [d.cuuint32_t(n) for n in box],
        [d.cuuint32_t(1)] * len(extents),
        d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    encoded = check(result, f"tensor map of {extents} at {address:#x}")
    raw = ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
    return np.frombuffer(raw, np.uint8).copy()
