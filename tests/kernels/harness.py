"""How kernel tests run: one check function, executed in the CUDA simulator and on a GPU.

    def check_forward(device, N, C):                       # an ordinary function of the test module
        x = device.put(array)                              # NumPy / ml_dtypes array -> Buffer
        y = device.empty((N, C), bfloat16)                 # poisoned with 0xff (NaN), guarded on
        both sides rmsnorm.rmsnorm_forward_launch(y.address, ..., stream=device.stream)
        assert_close(y.numpy(), ...)                       # waits, checks the guards, copies back

    def test_forward_simulated(N, C):                      # everywhere: in a worker process that
    has
        run_sim(check_forward, N=N, C=C)                   # NUMBA_ENABLE_CUDASIM=1 from its start

    @pytest.mark.gpu
    def test_forward(gpu, N, C):                           # where there is a GPU
        check_forward(gpu, N, C)

`run_sim` runs the function in one worker for the whole session (sim_worker.py); a failure comes
back as AssertionError with the worker's traceback, a hang ends the worker after `timeout` seconds.
Keyword arguments must pickle. Keep simulated shapes small: 128 threads of a warp-reducing kernel
take 0.1 s a block.

User functions (`forward(x, ...)`) take `buffer.array()`: a NumPy array in the simulator, a
DeviceArray on a GPU. Tests that compile every kernel for every target need no per-kernel code: list
COMPILE_CASES in the kernel file, and what stack it may use in resources.toml.
"""

import atexit
import importlib
import math
import multiprocessing
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
GUARD = 256
"""Bytes before and after every buffer that no kernel may change."""
POISON = 0xFF


class Buffer:
    """Device memory with a guard on both sides."""

    def __init__(self, device: "Device", host: np.ndarray) -> None:
        self.device, self.shape, self.dtype, self.nbytes = (
            device,
            host.shape,
            host.dtype,
            host.nbytes,
        )
        padded = np.full(host.nbytes + 2 * GUARD + 16, POISON, np.uint8)
        padded[GUARD : GUARD + host.nbytes] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        self._base = device.upload(padded)
        self._padded = padded.nbytes
        self.address = self._base + GUARD

    def numpy(self) -> np.ndarray:
        """The contents now. AssertionError if a kernel wrote into a guard."""
        raw = self.device.download(self._base, self._padded)
        inside = raw[GUARD : GUARD + self.nbytes]
        outside = np.concatenate([raw[:GUARD], raw[GUARD + self.nbytes :]])
        assert (outside == POISON).all(), f"a kernel wrote outside a buffer of shape {self.shape}"
        return inside.copy().view(self.dtype).reshape(self.shape)

    def array(self) -> Any:
        """The memory as an array that `forward` functions take."""
        return self.device.as_array(self)


class Device:
    """What a check function gets: memory and a stream."""

    stream: Any = 0

    def put(self, array: Any) -> Buffer:
        """Upload an array."""
        return Buffer(self, np.asarray(array))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """A buffer of 0xff bytes: NaN as float32, bfloat16 and e4m3."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return Buffer(self, np.full(size, POISON, np.uint8).view(dtype).reshape(shape))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Buffer:
        """A buffer of zeros."""
        return Buffer(self, np.zeros(shape, dtype))

    def upload(self, data: np.ndarray) -> int:
        raise NotImplementedError

    def download(self, address: int, nbytes: int) -> np.ndarray:
        raise NotImplementedError

    def as_array(self, buffer: Buffer) -> Any:
        raise NotImplementedError


class SimulatedDevice(Device):
    """Host memory, registered with the simulator."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}

    def upload(self, data: np.ndarray) -> int:
        from llmq_nb.kernels import sim

        raw = np.empty(data.nbytes + 256, np.uint8)
        raw = raw[-raw.ctypes.data % 256 :][: data.nbytes]
        raw[:] = data
        address = sim.register(raw)
        self.memory[address] = raw
        return address

    def download(self, address: int, nbytes: int) -> np.ndarray:
        return self.memory[address].copy()

    def as_array(self, buffer: Buffer) -> np.ndarray:
        raw = self.memory[buffer.address - GUARD][GUARD : GUARD + buffer.nbytes]
        return raw.view(buffer.dtype).reshape(buffer.shape)

    def close(self) -> None:
        from llmq_nb.kernels import sim

        for address in self.memory:
            sim.unregister(address)


class GpuDevice(Device):
    """The first GPU, through cuda-python."""

    def __init__(self) -> None:
        from llmq_nb.core import device

        self.core = device
        self.device = device.open_device(0)
        self.stream = device.create_stream()
        self.allocated: list[int] = []

    def upload(self, data: np.ndarray) -> int:
        d = self.core.driver()
        address = self.core.allocate(data.nbytes)
        self.allocated.append(address)
        self.core.check(d.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes), "test upload")
        self.core.check(
            d.cuCtxSynchronize(), "test upload"
        )  # our stream does not wait for the default one
        return address

    def download(self, address: int, nbytes: int) -> np.ndarray:
        host = np.empty(nbytes, np.uint8)
        self.core.synchronize_stream(self.stream)
        self.core.synchronize_stream(0)
        self.core.check(
            self.core.driver().cuMemcpyDtoH(host.ctypes.data, address, nbytes), "test download"
        )
        return host

    def as_array(self, buffer: Buffer) -> Any:
        return _Borrowed(buffer)

    def close(self) -> None:
        for address in self.allocated:
            self.core.free(address)
        self.core.check(self.core.driver().cuStreamDestroy(self.stream), "cuStreamDestroy")


class _Borrowed:
    """A buffer as a DLPack producer, without giving up its memory."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        from llmq_nb.core.dtype import DType
        from llmq_nb.kernels import dlpack

        dtype = next(t for t in DType if t.numpy == self.buffer.dtype)
        return dlpack.write(self.buffer.address, self.buffer.shape, dtype, (2, 0), self.buffer)


# ---- simulator worker --------------------------------------------------------------------------
class _Worker:
    """The process in which simulated checks run; restarted after a hang."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Any = None

    def start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.kernels.sim_worker", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.connection = ours

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def call(self, request: tuple[str, str, dict[str, Any]], timeout: float) -> str | None:
        if self.process is None or self.process.poll() is not None:
            self.start()
        self.connection.send(request)
        if not self.connection.poll(timeout):
            self.stop()
            return f"no answer from the simulator in {timeout} s"
        try:
            return self.connection.recv()
        except EOFError:
            return "the simulator process died"


_worker = _Worker()
atexit.register(_worker.stop)


def run_sim(function: Callable[..., None], *, timeout: float = 120.0, **kwargs: Any) -> None:
    """Run function(SimulatedDevice(), **kwargs) in the simulator process. AssertionError if it
    raised."""
    request = (function.__code__.co_filename, function.__qualname__, kwargs)
    trouble = _worker.call(request, timeout)
    if trouble is not None:
        raise AssertionError(f"in the simulator:\n{trouble}")


# ---- every kernel ------------------------------------------------------------------------------
def all_compile_cases() -> list[tuple[str, Any]]:
    """(name, CompileCase) of every kernel file's COMPILE_CASES; the name tells kernel and
    constants."""
    found = []
    for module_info in sorted(pkgutil.iter_modules([str(ROOT / "kernels")]), key=lambda m: m.name):
        module = importlib.import_module(f"llmq_nb.kernels.{module_info.name}")
        for case in getattr(module, "COMPILE_CASES", []):
            constants = ",".join(f"{k}={v}" for k, v in case.constants.items())
            found.append((f"{case.factory.__name__.removeprefix('make_')}[{constants}]", case))
    return found


# ---- numbers -----------------------------------------------------------------------------------
U32 = 2.0**-24
"""Unit roundoff of float32."""
U16 = 2.0**-8
"""Unit roundoff of bfloat16 (8 bits of significand)."""


def assert_within(
    actual: Any, expected: Any, *, relative: Any = 0.0, absolute: Any = 0.0, what: str = ""
) -> None:
    """|actual - expected| <= relative * |expected| + absolute, element by element (bounds may be
    arrays)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (
        f"{what}: shape {actual.shape}, expected {expected.shape}"
    )
    error = np.abs(actual - expected)
    bound = relative * np.abs(expected) + absolute
    bad = ~(error <= bound)  # catches NaN
    if bad.any():
        at = np.unravel_index(
            np.argmax(np.where(np.isnan(error), np.inf, error - bound)), error.shape
        )
        where = tuple(int(i) for i in at)
        limit = np.broadcast_to(bound, error.shape)[at]
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.size} outside the bound; at {where} {actual[at]!r} "
            f"for {expected[at]!r}, error {error[at]:.3e}, bound {limit:.3e}"
        )
