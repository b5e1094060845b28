"""CUDA simulator for our kernels: checked memory, warps, and a launch that runs Python threads.

Used when NUMBA_ENABLE_CUDASIM=1. Addresses are host addresses of registered NumPy arrays; every
access of sim_ops.py goes through `read` and `write`, which refuse what is misaligned, out of bounds
or freed. One Python thread per CUDA thread, one block at a time. Shared memory is filled with 0xff
(NaN) before every block, so that reading what nobody wrote shows.

Stricter than the hardware: a warp operation that not all 32 lanes reach is an error, not a hang.
Not shown here: type errors and float64 promotion (Python numbers are weak) and races between warps.
"""

import bisect
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

DEADLOCK_SECONDS = 60.0
"""No barrier of a simulated block takes this long unless some thread can never reach it."""
SHARED_ALIGNMENT = 1024

# ---- memory ------------------------------------------------------------------------------------
_starts: list[int] = []
_buffers: list[tuple[int, np.ndarray]] = []  # (end address, array), sorted like _starts
_lock = threading.RLock()


def register(array: np.ndarray) -> int:
    """Make a C-contiguous array addressable by kernels; returns its address. Registering twice is
    free."""
    if not array.flags.c_contiguous:
        raise ValueError("only C-contiguous arrays can be registered")
    address = array.ctypes.data
    with _lock:
        i = bisect.bisect_left(_starts, address)
        if i < len(_starts) and _starts[i] == address:
            _buffers[i] = (address + array.nbytes, array)
        else:
            _starts.insert(i, address)
            _buffers.insert(i, (address + array.nbytes, array))
    return address


def unregister(address: int) -> None:
    """Kernels may not touch the array at this address any more."""
    with _lock:
        i = _starts.index(address)
        del _starts[i], _buffers[i]


def checked(address: Any, size: int) -> int:
    """The address as an int, if size bytes there are aligned and inside one registered array."""
    address = int(address)
    if address % size:
        raise MemoryError(f"misaligned {size}-byte access at {address:#x}")
    i = bisect.bisect_right(_starts, address) - 1
    if i < 0 or address + size > _buffers[i][0]:
        raise MemoryError(f"out-of-bounds {size}-byte access at {address:#x}")
    return address


def read(address: Any, size: int) -> bytes:
    """size bytes at an address aligned to size."""
    return ctypes.string_at(checked(address, size), size)


def write(address: Any, data: bytes) -> None:
    """Store bytes at an address aligned to their count."""
    ctypes.memmove(checked(address, len(data)), data, len(data))


# ---- threads, warps, blocks --------------------------------------------------------------------
class Rendezvous:
    """A barrier of some threads. strict: every member must come; else threads that ended count as
    there."""

    def __init__(self, members: int, *, strict: bool) -> None:
        self.condition = threading.Condition()
        self.strict, self.members = strict, members
        self.failure: str | None = None
        self.reset()

    def reset(self) -> None:
        """Start a new block: nobody has left or arrived."""
        self.live, self.arrived, self.generation = self.members, 0, 0

    def fail(self, reason: str) -> None:
        """Wake every waiter with an error."""
        with self.condition:
            self.failure = self.failure or reason
            self.condition.notify_all()

    def _release_if_complete(self) -> None:
        if self.strict and self.live < self.members and self.arrived:
            self.failure = "a warp operation that some lanes of the warp never reach"
        if self.failure or self.arrived == self.live:
            self.arrived, self.generation = 0, self.generation + 1
            self.condition.notify_all()

    def wait(self) -> None:
        """Return when all members are here."""
        with self.condition:
            generation = self.generation
            self.arrived += 1
            self._release_if_complete()
            done = self.condition.wait_for(
                lambda: self.failure or self.generation != generation, timeout=DEADLOCK_SECONDS
            )
            if not done:
                self.failure = f"deadlock: {self.arrived} of {self.live} threads wait at a barrier"
                self.condition.notify_all()
            if self.failure:
                raise RuntimeError(self.failure)

    def leave(self) -> None:
        """The calling thread has ended."""
        with self.condition:
            self.live -= 1
            if self.arrived:
                self._release_if_complete()


class Warp:
    """32 lanes: a strict barrier and two exchange tables, used in turn."""

    def __init__(self) -> None:
        self.rendezvous = Rendezvous(32, strict=True)
        self.tables: list[list[Any]] = [[None] * 32, [None] * 32]


class _Thread(threading.Thread):
    """One CUDA thread; Numba's simulator module reads threadIdx, blockIdx and syncthreads from
    it."""

    def __init__(self, launch: "_Launch", index: int) -> None:
        super().__init__(daemon=True)
        from numba.cuda.simulator.kernelapi import Dim3  # pyright: ignore[reportMissingImports]

        self.launch, self.thread_id, self.phase = launch, index, 0
        self.threadIdx, self.blockIdx = Dim3(index, 0, 0), Dim3(0, 0, 0)
        self.dimension = Dim3

    @property
    def warp(self) -> Warp:
        return self.launch.warps[self.thread_id >> 5]

    def syncthreads(self) -> None:
        self.launch.block.wait()

    def run(self) -> None:
        launch = self.launch
        try:
            for point in np.ndindex(*launch.grid[::-1]):  # x varies fastest, as on the device
                self.blockIdx = self.dimension(*(int(i) for i in point[::-1]))
                launch.next_block.wait()
                launch.function(*launch.args)
                self.warp.rendezvous.leave()
                launch.block.leave()
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            launch.abort(error, f"thread {self.thread_id} of block {tuple(self.blockIdx)}")


class _Launch:
    """One running grid."""

    def __init__(
        self,
        function: Callable[..., None],
        grid: tuple[int, ...],
        threads: int,
        args: Sequence[Any],
    ):
        self.function, self.grid, self.args = function, grid, args
        self.warps = [Warp() for _ in range((threads + 31) // 32)]
        self.block = Rendezvous(threads, strict=False)
        self.next_block = threading.Barrier(threads, action=self._start_block)
        self.windows: dict[tuple[int, int], np.ndarray] = {}
        self.named: dict[int, Rendezvous] = {}
        self.error: tuple[BaseException, str] | None = None

    def _start_block(self) -> None:
        self.block.reset()
        for warp in self.warps:
            warp.rendezvous.reset()
        for window in self.windows.values():
            window[:] = 0xFF

    def abort(self, error: BaseException, where: str) -> None:
        with _lock:
            self.error = self.error or (error, where)
        warps = (w.rendezvous for w in self.warps)
        for rendezvous in [self.block, *warps, *self.named.values()]:
            rendezvous.fail(f"another thread failed: {self.error[0]}")
        self.next_block.abort()

    def named_barrier(self, number: int, threads: int) -> Rendezvous:
        """Where that many threads of the block meet."""
        with _lock:
            return self.named.setdefault(number, Rendezvous(threads, strict=False))

    def window(self, array: np.ndarray) -> np.ndarray:
        """The aligned, poisoned stand-in of a shared array (the XOR swizzles rely on the
        alignment)."""
        key = (array.ctypes.data, array.nbytes)
        with _lock:
            if key not in self.windows:
                raw = np.full(array.nbytes + SHARED_ALIGNMENT, 0xFF, np.uint8)
                offset = -raw.ctypes.data % SHARED_ALIGNMENT
                self.windows[key] = raw[offset : offset + array.nbytes]
                register(self.windows[key])
            return self.windows[key]


def current_thread() -> _Thread:
    """The simulated CUDA thread that calls."""
    thread = threading.current_thread()
    if not isinstance(thread, _Thread):
        raise RuntimeError("a device instruction was called outside a simulated kernel")
    return thread


def exchange(value: Any) -> list[Any]:
    """Every lane's value, once all 32 lanes are here."""
    thread = current_thread()
    warp = thread.warp
    table = warp.tables[thread.phase & 1]
    thread.phase += 1
    table[thread.thread_id & 31] = value
    warp.rendezvous.wait()
    return list(table)


def simulate(
    function: Callable[..., None],
    grid: tuple[int, ...],
    threads: int,
    smem: int,
    args: Sequence[Any],
) -> None:
    """Run a kernel on every block of the grid; raises what its first failing thread raised."""
    # pyright: ignore[reportMissingImports]
    from numba.cuda.simulator import kernel as numba_simulator
    from numba.cuda.simulator.kernelapi import (  # pyright: ignore[reportMissingImports]
        FakeCUDAModule,
        swapped_cuda_module,
    )

    grid = (*grid, 1, 1)[:3]
    module = FakeCUDAModule(grid, (threads, 1, 1), smem)
    launch = _Launch(function, grid, threads, args)
    with numba_simulator._push_kernel_context(module), swapped_cuda_module(function, module):
        lanes = [_Thread(launch, i) for i in range(threads)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    for window in launch.windows.values():
        unregister(window.ctypes.data)
    if launch.error:
        error, where = launch.error
        error.add_note(f"in {function.__name__}, {where}")
        raise error
