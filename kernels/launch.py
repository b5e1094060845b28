"""Load compiled kernels and launch them with a prepacked parameter block.

    k = kernel(make_rmsnorm_forward, SIGNATURE, threads=128, C=2048)
    k(stream, (grid,), y, rstd, x, weight, rows, eps)

`kernel` compiles (or takes from the disk cache), loads for the current device and remembers, so the
second call is a dictionary lookup. A launch packs its values into one buffer at their natural
alignment and makes one driver call: 4 us of host time where Numba's dispatcher takes 23 to 71.
In the simulator the same call runs the kernel in Python on the host (sim.py).
"""

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from llmq_nb.core.device import Device, check, current_device, driver
from llmq_nb.kernels.compile import DEFAULT, Compiled, Options, compile_kernel, target_of
from llmq_nb.kernels.ptx import SIMULATED

STATIC_SHARED_LIMIT = 48 * 1024
"""Dynamic shared memory above this must be asked for, kernel by kernel."""

_FORMATS = {"uint64": "Q", "int64": "q", "uint32": "I", "int32": "i", "float32": "f"}


_preparing = False


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Inside, launches only compile and load their kernels: a graph capture needs them loaded."""
    global _preparing
    before, _preparing = _preparing, True
    try:
        yield
    finally:
        _preparing = before


def loaded() -> list[str]:
    """Names of the kernels that this process has compiled or taken from the cache, and loaded."""
    return [k.compiled.name for k in _kernels.values() if isinstance(k, Kernel)]


def is_preparing() -> bool:
    """Whether launches are left out now."""
    return _preparing


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


class Kernel:
    """A kernel loaded for one compute capability; call it with (stream, grid, *args) to launch
    it."""

    def __init__(
        self,
        compiled: Compiled,
        signature: tuple[Any, ...],
        threads: int,
        smem: int,
        cluster: int = 1,
    ) -> None:
        """cluster: blocks along x that every launch makes a cluster; 1: what the cubin says."""
        d = driver()
        self.compiled, self.threads, self.smem = compiled, threads, smem
        library = d.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0)
        self._library = check(library, f"loading kernel {compiled.name}")
        entry = compiled.entry.encode()
        self._kernel = check(d.cuLibraryGetKernel(self._library, entry), f"kernel {compiled.name}")
        self._function = d.CUfunction(
            int(self._kernel)
        )  # the driver takes either, and any device's stream
        self._prepared: set[int] = set()
        self._layout = struct.Struct("@" + "".join(_FORMATS[str(t)] for t in signature))
        self._block = ctypes.create_string_buffer(max(self._layout.size, 8))
        base = ctypes.addressof(self._block)
        offsets = _offsets(signature)
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(base + o for o in offsets))
        self._parameters = ctypes.addressof(self._pointers)
        self._launch = d.cuLaunchKernel
        if cluster > 1:
            self._launch = _clustered(cluster)

    def prepare(self, device: Device) -> "Kernel":
        """Load into the device's context and allow the shared memory; once for each device."""
        if device.ordinal not in self._prepared:
            d = driver()
            name = self.compiled.name
            check(
                d.cuKernelGetFunction(self._kernel), f"loading kernel {name}"
            )  # now, not inside a capture
            if self.smem > STATIC_SHARED_LIMIT:
                which = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                result = d.cuKernelSetAttribute(which, self.smem, self._kernel, device.handle)
                check(result, f"kernel {name}: {self.smem} bytes of shared memory on {device.name}")
            self._prepared.add(device.ordinal)
        return self

    def __call__(self, stream: Any, grid: tuple[int, ...], *args: int | float) -> None:
        """Launch in stream order. A grid with a zero launches nothing."""
        x, y, z = (*grid, 1, 1)[:3]
        if x == 0 or y == 0 or z == 0 or _preparing:
            return
        self._layout.pack_into(self._block, 0, *args)
        result = self._launch(
            self._function, x, y, z, self.threads, 1, 1, self.smem, stream, self._parameters, 0
        )  # fmt: skip
        if result[0] != 0:
            check(result, f"launching kernel {self.compiled.name} with grid {grid}")


def _clustered(blocks: int) -> Callable[..., Any]:
    """cuLaunchKernel for clusters of so many blocks along x."""
    d = driver()
    cluster, config = d.CUlaunchAttribute(), d.CUlaunchConfig()
    cluster.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = cluster.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    config.attrs, config.numAttrs = [cluster], 1

    def launch(function: Any, x: int, y: int, z: int, *rest: Any) -> Any:
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ, smem, stream, values, extra = rest
        config.sharedMemBytes, config.hStream = smem, stream
        return d.cuLaunchKernelEx(config, function, values, extra)

    return launch


class SimulatedKernel:
    """The same call in the simulator: args are host addresses of registered arrays."""

    def __init__(
        self, function: Callable[..., None], signature: tuple[Any, ...], threads: int, smem: int
    ):
        self.function, self.threads, self.smem = function, threads, smem
        # Integers stay Python's: Numba widens int32 arithmetic to 64 bits, NumPy's int32 would
        # wrap.
        self.casts = [np.float32 if str(t) == "float32" else int for t in signature]

    def __call__(self, stream: Any, grid: tuple[int, ...], *args: int | float) -> None:
        from llmq_nb.kernels.sim import simulate

        values = [cast(a) for cast, a in zip(self.casts, args, strict=True)]
        simulate(self.function, grid, self.threads, self.smem, values)


def _offsets(signature: tuple[Any, ...]) -> list[int]:
    """Byte offset of each parameter at its natural alignment, as struct's "@" lays them out."""
    offsets, end = [], 0
    for kind in signature:
        size = struct.calcsize(_FORMATS[str(kind)])
        start = -(-end // size) * size
        offsets.append(start)
        end = start + size
    return offsets


_kernels: dict[Any, Any] = {}
_functions: dict[Any, Callable[..., None]] = {}


def kernel(
    factory: Callable[..., Callable[..., None]],
    signature: tuple[Any, ...],
    threads: int,
    smem: int = 0,
    options: Options = DEFAULT,
    **constants: Any,
) -> Any:
    """The kernel factory(**constants), compiled and loaded for the current device.

    signature: Numba types of the parameters (uint64, int64, uint32, int32, float32). threads: of a
    block, along x. smem: dynamic shared memory, bytes. constants: hashable.
    """
    identity = (factory, signature, threads, smem, options, *sorted(constants.items()))
    if SIMULATED:
        if identity not in _kernels:
            _kernels[identity] = SimulatedKernel(factory(**constants), signature, threads, smem)
        return _kernels[identity]
    device = current_device()
    key = (device.cc, identity)
    found = _kernels.get(key)
    if found is None:
        if identity not in _functions:
            _functions[identity] = factory(**constants)
        cc = device.cc if options.arch_specific else target_of(device.cc)
        compiled = compile_kernel(_functions[identity], signature, threads, cc, options)
        cluster = options.cluster if options.arch_specific else 1
        found = _kernels[key] = Kernel(compiled, signature, threads, smem, cluster)
    return found.prepare(device)
