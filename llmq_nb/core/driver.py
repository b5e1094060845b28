"""What NVIDIA driver and GPUs there are, asked of the driver itself: no package, no context."""

import ctypes
import dataclasses
import importlib.util
from importlib.metadata import version

LIBRARY = "libcuda.so.1"
CUDA_13_DRIVER = 13000
"""A driver that reports this CUDA version or more runs the cu13 packages (driver 580 and later)."""
PACKAGES = ("cuda.bindings", "nvmath")
"""What training on a GPU imports, beyond the base install."""


@dataclasses.dataclass(frozen=True, slots=True)
class Driver:
    """cuda_version: the newest CUDA that the driver runs, e.g. 13000. devices: their names."""

    cuda_version: int
    devices: tuple[str, ...]

    @property
    def cuda(self) -> str:
        """For example "13.0"."""
        return f"{self.cuda_version // 1000}.{self.cuda_version % 1000 // 10}"

    @property
    def major(self) -> int:
        return self.cuda_version // 1000

    @property
    def extra(self) -> str:
        """The extra of this package that goes with the driver."""
        return "cu13" if self.cuda_version >= CUDA_13_DRIVER else "cu12"


def find_driver(library: str = LIBRARY) -> Driver | None:
    """The driver and its GPUs, or None where there is no driver or it sees no device."""
    try:
        return _ask(ctypes.CDLL(library))
    except (OSError, AttributeError):  # no library, or one that is no driver
        return None


def _ask(cuda: ctypes.CDLL) -> Driver | None:
    if cuda.cuInit(0) != 0:
        return None
    newest, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(newest)) != 0:
        return None
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return None
    names = []
    for index in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        ok = cuda.cuDeviceGet(ctypes.byref(device), index) == 0
        ok = ok and cuda.cuDeviceGetName(name, len(name), device) == 0
        names.append(name.value.decode(errors="replace") if ok else "unknown GPU")
    return Driver(newest.value, tuple(names))


def missing_packages(driver: Driver) -> list[str]:
    """Packages for the GPU that are not installed, or are of a newer CUDA than the driver's."""

    def found(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # its parent is missing
            return False

    missing = [name for name in PACKAGES if not found(name)]
    bindings = "cuda-bindings"
    if PACKAGES[0] not in missing and int(version(bindings).partition(".")[0]) > driver.major:
        missing.append(f"{bindings} {driver.major}")
    return missing
