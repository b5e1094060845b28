"""DLPack in both directions through ctypes: read another library's array, hand out one of ours.

Source    DLPack 1.1 header (the unversioned DLManagedTensor, which every producer and consumer
          speaks).
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from llmq_nb.core.dtype import DType

CUDA, CUDA_MANAGED = 2, 13
"""DLPack's device types of GPU memory."""

_CODES = {  # (type code, bits)
    DType.FP32: (2, 32),
    DType.BF16: (4, 16),
    DType.INT32: (0, 32),
    DType.E4M3: (10, 8),
    DType.E5M2: (12, 8),
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", _DELETER)]

_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_CAPSULE_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _CAPSULE_DESTRUCTOR]
# for a capsule that is being destroyed, which must not become a py_object again
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)


@dataclass(frozen=True, slots=True)
class Imported:
    """What a capsule says. The memory lives as long as `capsule`."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In elements; None is C order."""
    dtype: DType | None
    """None for a type we do not use."""
    type_name: str
    device: tuple[int, int]
    capsule: Any


def read(capsule: Any) -> Imported:
    """Describe the array of a DLPack capsule without consuming it."""
    pointer = _api.PyCapsule_GetPointer(capsule, b"dltensor")
    tensor = ctypes.cast(pointer, ctypes.POINTER(_ManagedTensor)).contents.tensor
    code = (tensor.type_code, tensor.type_bits)
    return Imported(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=tuple(tensor.shape[: tensor.ndim]),
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        dtype=_DTYPES.get(code) if tensor.type_lanes == 1 else None,
        type_name=f"DLPack type {code[0]} of {code[1]} bits",
        device=(tensor.device_type, tensor.device_id),
        capsule=capsule,
    )


_exported: dict[
    int, tuple[Any, ...]
] = {}  # address of each managed tensor that a consumer still holds


@_DELETER
def _release(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


@_CAPSULE_DESTRUCTOR
def _destroy(capsule: int) -> None:
    if _is_valid(capsule, b"dltensor"):  # nobody consumed it
        _exported.pop(_pointer_of(capsule, b"dltensor"), None)


def write(
    address: int, shape: tuple[int, ...], dtype: DType, device: tuple[int, int], owner: Any
) -> Any:
    """A capsule of a C-ordered array; owner stays alive until the consumer lets go."""
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    managed = _ManagedTensor()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device_id = address, *device
    tensor.ndim, tensor.shape = len(shape), ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
    (tensor.type_code, tensor.type_bits), tensor.type_lanes = _CODES[dtype], 1
    managed.deleter = _release
    key = ctypes.addressof(managed)
    _exported[key] = (managed, sizes, owner)
    return _api.PyCapsule_New(key, b"dltensor", _destroy)
