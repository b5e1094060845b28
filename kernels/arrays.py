"""Other libraries' GPU arrays as addresses, and new arrays in the caller's library.

`describe` takes torch tensors, anything with `__cuda_array_interface__` (cupy, numba) and anything
with DLPack (jax, ...), without importing any of them. Outputs are torch tensors for torch inputs,
cupy arrays for cupy inputs where cupy has the dtype, else `DeviceArray`, which every DLPack
consumer takes. In the simulator NumPy arrays (with ml_dtypes) stand for GPU arrays.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmq_nb.core.dtype import DType
from llmq_nb.kernels import dlpack
from llmq_nb.kernels.ptx import SIMULATED

_NAMES = {  # as torch, NumPy, cupy and ml_dtypes call them
    "float32": DType.FP32, "bfloat16": DType.BF16, "int32": DType.INT32,
    "float8_e4m3fn": DType.E4M3, "float8_e5m2": DType.E5M2,
}  # fmt: skip
_LIBRARY_NAMES = {dtype: name for name, dtype in _NAMES.items()}
_TYPESTR = {DType.FP32: "<f4", DType.INT32: "<i4"}


@dataclass(frozen=True, slots=True)
class Array:
    """A C-contiguous array in GPU memory, as kernels see it. `source` keeps the memory alive."""

    address: int
    shape: tuple[int, ...]
    dtype: DType
    device: int
    source: Any

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class DeviceArray:
    """GPU memory of our own, for callers whose library has no such array: freed with the last
    reference.

    Hand it on with `from_dlpack`; `numpy()` copies it to the host.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DType, device: int) -> None:
        from llmq_nb.core.device import allocate

        self.shape, self.dtype, self.device = shape, dtype, device
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.address = allocate(self.nbytes)

    def __del__(self) -> None:
        if getattr(self, "address", 0) and not sys.is_finalizing():
            from llmq_nb.core.device import free

            free(self.address)
            self.address = 0

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype.value}, device={self.device})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CUDA, self.device)

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """Our kernels ran on the caller's stream, so a consumer's stream must follow that one."""
        return dlpack.write(self.address, self.shape, self.dtype, self.__dlpack_device__(), self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype not in _TYPESTR:  # the interface has no name for bfloat16 and FP8
            raise AttributeError(
                f"__cuda_array_interface__ cannot name {self.dtype.value}; use DLPack"
            )
        data = (self.address, False)
        return {"shape": self.shape, "typestr": _TYPESTR[self.dtype], "data": data, "version": 3}

    def numpy(self) -> np.ndarray:
        """A copy on the host (ml_dtypes for bfloat16 and FP8); waits for the device."""
        from llmq_nb.core.device import check, driver, open_device

        open_device(self.device).synchronize()
        host = np.empty(self.shape, self.dtype.numpy)
        check(
            driver().cuMemcpyDtoH(host.ctypes.data, self.address, self.nbytes), "copy to the host"
        )
        return host


def _library(x: Any) -> str:
    return type(x).__module__.split(".")[0]


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> bool:
    """Whether strides (any unit) are C order up to that unit; extents of one do not matter."""
    if strides is None or 0 in shape:
        return True
    expected = None
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1:
            if expected is not None and stride != expected:
                return False
            expected = stride * extent
    return True


def _unpack(x: Any, name: str) -> tuple[int, tuple[int, ...], bool, Any, int | None, Any]:
    """(address, shape, contiguous, dtype name or DType, device or None, what keeps it alive)."""
    if _library(x) == "torch":
        if not x.is_cuda:
            raise ValueError(f"{name} is on {x.device}, not on a GPU")
        return (
            x.data_ptr(),
            tuple(x.shape),
            x.is_contiguous(),
            str(x.dtype).split(".")[-1],
            x.device.index,
            x,
        )
    if isinstance(x, DeviceArray):
        return x.address, x.shape, True, x.dtype, x.device, x
    if SIMULATED and isinstance(x, np.ndarray):
        from llmq_nb.kernels.sim import register

        contiguous = x.flags.c_contiguous
        return register(x) if contiguous else 0, x.shape, contiguous, x.dtype.name, 0, x
    interface = getattr(x, "__cuda_array_interface__", None)
    if interface is not None:
        dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
        strides = interface.get("strides")
        tight = strides is None or (
            _is_contiguous(shape, strides)
            and (0 in shape or _last_stride(shape, strides) in (None, dtype.itemsize))
        )
        kind = getattr(getattr(x, "dtype", dtype), "name", dtype.name)
        return interface["data"][0], shape, tight, kind, None, x
    if hasattr(x, "__dlpack__"):
        found = dlpack.read(x.__dlpack__())
        if found.device[0] not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
            raise ValueError(f"{name} is not in GPU memory (DLPack device {found.device})")
        tight = found.strides is None or (
            _is_contiguous(found.shape, found.strides)
            and _last_stride(found.shape, found.strides) in (None, 1)
        )
        kind = found.dtype or found.type_name
        return found.address, found.shape, tight, kind, found.device[1], (x, found.capsule)
    raise TypeError(f"{name} is a {type(x).__name__}: neither DLPack nor __cuda_array_interface__")


def _last_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Stride of the innermost extent above one, None if there is none."""
    return next(
        (s for n, s in zip(reversed(shape), reversed(strides), strict=True) if n != 1), None
    )


def describe(
    x: Any, *, dtype: DType, shape: tuple[int | None, ...] | None = None, name: str = "array"
) -> Array:
    """An array as address, shape, dtype, device.

    dtype must match; shape too, where given (None in it: any extent). Raises TypeError for what is
    no GPU array, ValueError for another dtype, shape or layout, with `name` in the message.
    """
    address, extents, contiguous, kind, device, source = _unpack(x, name)
    found = kind if isinstance(kind, DType) else _NAMES.get(kind)
    if found is None or found is not dtype:
        raise ValueError(
            f"{name} is {found.value if found else kind}, must be {DType(dtype).value}"
        )
    if shape is not None:
        fits = len(shape) == len(extents) and all(
            w in (None, h) for w, h in zip(shape, extents, strict=True)
        )
        if not fits:
            wanted = ", ".join("any" if w is None else str(w) for w in shape)
            raise ValueError(f"{name} has shape {extents}, must be ({wanted})")
    if not contiguous:
        raise ValueError(f"{name} is not C-contiguous; make a contiguous copy first")
    if address % 16 and math.prod(extents):
        raise ValueError(f"{name} starts at {address:#x}, which is no multiple of 16 bytes")
    if device is None:
        device = _device_of(address, name)
    if not SIMULATED:
        from llmq_nb.core.device import open_device

        open_device(device).make_current()
    return Array(address, extents, found, device, source)


def _device_of(address: int, name: str) -> int:
    """Ordinal of the GPU whose memory this is."""
    from llmq_nb.core.device import current_device, driver

    current_device()
    d = driver()
    which = d.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status, ordinal = d.cuPointerGetAttribute(which, address)
    if int(status) != 0:
        raise ValueError(f"{name} is not in GPU memory")
    return int(ordinal)


def empty_like(
    x: Array, *, shape: tuple[int, ...] | None = None, dtype: DType | None = None
) -> Any:
    """A new uninitialised array in the library of x, on its device; shape and dtype default to
    those of x."""
    shape, dtype = x.shape if shape is None else shape, x.dtype if dtype is None else dtype
    source, library = x.source, _library(x.source)
    if library == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, _LIBRARY_NAMES[dtype]), device=source.device)
    if SIMULATED and isinstance(source, np.ndarray):
        return np.empty(shape, dtype.numpy)
    if library == "cupy" and dtype in _TYPESTR:
        return sys.modules["cupy"].empty(shape, dtype.numpy)
    return DeviceArray(shape, dtype, x.device)


def upload_like(x: Array, values: np.ndarray) -> Any:
    """A new array beside x that holds these host values; returns when they are there."""
    dtype = next(t for t in DType if t.numpy == values.dtype)
    out = empty_like(x, shape=values.shape, dtype=dtype)
    if SIMULATED:
        out[...] = values
        return out
    from llmq_nb.core.device import check, driver

    values = np.ascontiguousarray(values)
    address = describe(out, dtype=dtype).address
    check(driver().cuMemcpyHtoD(address, values.ctypes.data, values.nbytes), "copy to the device")
    return out


def current_stream(x: Array) -> int:
    """The stream that x's library works on now, as an integer; 0, the default stream, where it has
    none."""
    library = _library(x.source)
    if library == "torch":
        return sys.modules["torch"].cuda.current_stream(x.device).cuda_stream
    if library == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    interface = getattr(x.source, "__cuda_array_interface__", None)
    stream = interface.get("stream") if interface else None
    return stream if stream else 0
