"""One GPU through cuda-python: open it, name its errors, make streams and events.

Importing this needs no driver.

Handles stay what cuda-python returns (CUstream, CUevent, CUdeviceptr); `check` turns every result
into a value or a DeviceError that names the call.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.core.sizes import format_bytes

OLDEST_CC = (8, 0)
"""First compute capability that has what every kernel uses (mma.sync on bfloat16, cp.async)."""


class DeviceError(MachineError):
    """A CUDA call failed. `code`: the driver's name of it, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def driver() -> Any:
    """cuda-python's driver module. UserError if the package is missing."""
    try:
        from cuda.bindings import driver as bindings  # pyright: ignore
    except ImportError as error:
        raise UserError(
            f"cuda-python cannot be imported ({error})", mend="pip install 'llmq-nb[cu13]'"
        ) from error
    return bindings


def check(result: Any, what: str) -> Any:
    """The value of a driver call's (status, *values) result.

    DeviceError "<what>: <name>, <reason>" if it failed.
    """
    status, *values = result
    if int(status) != 0:
        d = driver()
        name = d.cuGetErrorName(status)[1] or b"unknown"
        reason = d.cuGetErrorString(status)[1] or b""
        raise DeviceError(name.decode(), f"{what}: {name.decode()}, {reason.decode()}")
    return values[0] if len(values) == 1 else tuple(values) if values else None


@cache
def _initialise() -> int:
    """cuInit once; the number of devices.

    UserError without a driver, with too old a one, without a GPU.
    """
    d = driver()
    try:
        (status,) = d.cuInit(0)
    except RuntimeError as error:  # cuda-python's answer where libcuda.so.1 is absent
        raise UserError(
            "no NVIDIA driver (libcuda.so.1 was not found)",
            mend='install one, or use device = "cpu"',
        ) from error
    if int(status) in (100, 34):  # no device, stub library
        raise UserError(
            "no NVIDIA GPU is visible", mend='check CUDA_VISIBLE_DEVICES, or use device = "cpu"'
        )
    check((status,), "cuInit")
    has, needs = check(d.cuDriverGetVersion(), "cuDriverGetVersion"), d.CUDA_VERSION
    if has // 1000 < needs // 1000:
        raise UserError(
            f"the NVIDIA driver is for CUDA {has // 1000}.{has % 1000 // 10}, "
            f"the cuda-python package for {needs // 1000}",
            mend=f"update the driver, or pip install 'llmq-nb[cu{has // 1000}]'",
        )
    return check(d.cuDeviceGetCount(), "cuDeviceGetCount")


def device_count() -> int:
    """GPUs that this process sees; 0 without a driver or a GPU."""
    try:
        return _initialise()
    except UserError:
        return 0


@dataclass(frozen=True, slots=True)
class Device:
    """An opened GPU: its primary context is retained for the life of the process."""

    ordinal: int
    name: str
    cc: tuple[int, int]
    """Compute capability."""
    total_bytes: int
    multiprocessors: int
    context: Any
    handle: Any
    integrated: bool = False
    """Whether it has no memory of its own: host memory is device memory."""

    def make_current(self) -> None:
        """Direct this thread's following CUDA calls to this device (0.4 us)."""
        check(driver().cuCtxSetCurrent(self.context), f"cuCtxSetCurrent of device {self.ordinal}")

    def free_bytes(self) -> int:
        """Memory the driver says is free now; less is usable where a display is driven."""
        self.make_current()
        return check(driver().cuMemGetInfo(), "cuMemGetInfo")[0]

    def synchronize(self) -> None:
        """Wait for everything on the device; an earlier kernel's error shows here."""
        self.make_current()
        check(driver().cuCtxSynchronize(), f"cuCtxSynchronize of device {self.ordinal}")


def pci_bus_id(device: Device) -> str:
    """Such as 0000:3B:00.0, the name that every tool of the driver's knows the GPU by."""
    name = check(driver().cuDeviceGetPCIBusId(32, device.handle), "cuDeviceGetPCIBusId")
    return name.split(b"\0")[0].decode()


@cache
def open_device(ordinal: int = 0) -> Device:
    """Open a GPU and make it current.

    UserError if there is no such GPU, no driver, or it is too old.
    """
    count = _initialise()
    if not 0 <= ordinal < count:
        raise UserError(
            f"GPU {ordinal} does not exist", mend=f"this machine shows {count}, numbered from 0"
        )
    d = driver()
    handle = check(d.cuDeviceGet(ordinal), f"cuDeviceGet({ordinal})")

    def attribute(name: str) -> int:
        which = getattr(d.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_" + name)
        return check(d.cuDeviceGetAttribute(which, handle), f"cuDeviceGetAttribute({name})")

    name = check(d.cuDeviceGetName(256, handle), "cuDeviceGetName").split(b"\0")[0].decode()
    cc = (attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR"))
    if cc < OLDEST_CC:
        raise UserError(
            f"{name} has compute capability {cc[0]}.{cc[1]}",
            mend='8.0 (A100, RTX 30 series) or later is needed; or device = "cpu"',
        )
    context = check(d.cuDevicePrimaryCtxRetain(handle), f"cuDevicePrimaryCtxRetain of {name}")
    device = Device(
        ordinal=ordinal,
        name=name,
        cc=cc,
        total_bytes=check(d.cuDeviceTotalMem(handle), "cuDeviceTotalMem"),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        context=context,
        handle=handle,
        integrated=bool(attribute("INTEGRATED")),
    )
    device.make_current()
    return device


def current_device() -> Device:
    """The device of this thread's current context; opens GPU 0 if there is none."""
    if not _initialise():
        raise UserError("no NVIDIA GPU is visible", mend='use device = "cpu"')
    status, handle = driver().cuCtxGetDevice()
    if int(status) != 0:  # no context is current on this thread
        device = open_device(0)
        device.make_current()
        return device
    return open_device(int(handle))


# ---- streams, events, memory: of the current device --------------------------------------------
def create_stream() -> Any:
    """A stream that does not wait for the default stream."""
    d = driver()
    return check(d.cuStreamCreate(int(d.CUstream_flags.CU_STREAM_NON_BLOCKING)), "cuStreamCreate")


def create_event(*, timing: bool = False) -> Any:
    """An event; without timing it is cheaper to record and to wait for."""
    d = driver()
    flags = d.CUevent_flags.CU_EVENT_DEFAULT if timing else d.CUevent_flags.CU_EVENT_DISABLE_TIMING
    return check(d.cuEventCreate(int(flags)), "cuEventCreate")


def record_event(event: Any, stream: Any) -> None:
    """Mark this point of the stream; event and stream belong to the same device."""
    check(driver().cuEventRecord(event, stream), "cuEventRecord")


def wait_event(stream: Any, event: Any) -> None:
    """What follows on the stream starts after the event (of any device)."""
    check(driver().cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")


def elapsed_seconds(start: Any, end: Any) -> float:
    """Device time between two recorded timing events; waits for the second."""
    check(driver().cuEventSynchronize(end), "cuEventSynchronize")
    return check(driver().cuEventElapsedTime(start, end), "cuEventElapsedTime") / 1e3


def synchronize_stream(stream: Any) -> None:
    """Wait until the stream is empty."""
    check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize")


def allocate(nbytes: int) -> int:
    """Address of new device memory, 256-byte aligned.

    DeviceError names the size if there is too little.
    """
    return int(check(driver().cuMemAlloc(max(nbytes, 1)), f"cuMemAlloc of {format_bytes(nbytes)}"))


def free(address: int) -> None:
    """Give device memory back."""
    check(driver().cuMemFree(address), "cuMemFree")
