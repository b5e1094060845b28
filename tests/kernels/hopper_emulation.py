"""mbarriers, TMA and wgmma in Python, for attention's sm_90 kernels in the CUDA simulator.

`install` puts stand-ins for the names of ptx_hopper.py into the kernel modules. Copies and products
happen at once when issued, in the layouts of the PTX ISA (128-byte swizzle, descriptors,
accumulator fragments), so that indexing, phases, arrival counts, byte counts and masks are tested;
what is in flight at the same time is not. A wait that nobody can end fails after TIMEOUT seconds.

Blocks run one after the other, so a grid of clusters runs twice: what a block stores to another in
the first run lies there in the second one, after the second `cluster_sync`.

Kernels keep shared addresses in 32 bits: here the low half of a host address, whose upper half is
that of the block's only shared array.
"""

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from llmq_nb.kernels import sim, sim_ops
from llmq_nb.kernels.launch import kernel as compiled_kernel

TIMEOUT = 60.0
LOW = 0xFFFFFFFF
_condition = threading.Condition()
_barriers: dict[int, "MBarrier"] = {}
_maps: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
_groups: dict[Any, "Group"] = {}


# ---- shared addresses --------------------------------------------------------------------------
def _window() -> np.ndarray:
    """The running block's shared memory."""
    return next(iter(sim.current_thread().launch.windows.values()))


def _smem_addr(array: Any) -> int:
    return sim_ops.smem_addr(array) & LOW


def _checked(original: Callable[[Any, int], int]) -> Callable[[Any, int], int]:
    def checked(address: Any, size: int) -> int:
        address = int(address)
        if address <= LOW:
            start = _window().ctypes.data
            address += (start & ~LOW) + (LOW + 1 if address < start & LOW else 0)
        return original(address, size)

    return checked


# ---- mbarriers ---------------------------------------------------------------------------------
class MBarrier:
    """Arrivals and bytes still to come in this phase; `phase` is the running phase's parity."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def add(self, arrivals: int, nbytes: int) -> None:
        with _condition:
            self.pending -= arrivals
            self.bytes += nbytes
            assert self.pending >= 0, "more arrivals than the barrier expects"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase ^ 1, self.count
                _condition.notify_all()


def mbar_init(address: Any, count: Any) -> None:
    _barriers[int(address)] = MBarrier(int(count))


def mbar_expect(address: Any, nbytes: Any) -> None:
    _barriers[int(address)].add(1, int(nbytes))


def mbar_arrive(address: Any) -> None:
    _barriers[int(address)].add(1, 0)


def mbar_wait(address: Any, parity: Any) -> None:
    barrier = _barriers[int(address)]
    with _condition:
        if not _condition.wait_for(lambda: barrier.phase != int(parity) & 1, TIMEOUT):
            raise RuntimeError(f"nobody completes phase {parity} of the mbarrier at {address:#x}")


# ---- copies ------------------------------------------------------------------------------------
def tensor_map(
    address: int, extents: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> int:
    """A handle in place of the map's address."""
    assert address % 16 == 0 and all(s % 16 == 0 for s in strides) and max(box) <= 256
    _maps.append((address, extents, strides, box))
    return len(_maps) - 1


_counters: dict[int, np.ndarray] = {}


def work_counter(address: int) -> int:
    """A word for each tensor, which the kernels before have left 0."""
    if address not in _counters:
        _counters[address] = np.zeros(1, np.uint32)
        sim.register(_counters[address])
    assert _counters[address][0] == 0
    return _counters[address].ctypes.data


def tma_4d(shared: Any, handle: Any, x: Any, y: Any, z: Any, w: Any, barrier: Any) -> None:
    """A box of (64, 1, rows, 1): rows of 128 bytes, chunk c of row r at c ^ (r & 7)."""
    address, extents, strides, box = _maps[int(handle)]
    x, y, z, w, shared = int(x), int(y), int(z), int(w), int(shared)
    assert shared % 1024 == 0
    for r in range(box[2]):
        inside = 0 <= z + r < extents[2] and w < extents[3] and y < extents[1] and x < extents[0]
        start = address + w * strides[2] + (z + r) * strides[1] + y * strides[0] + x * 2
        for c in range(8):
            data = sim.read(start + c * 16, 16) if inside else bytes(16)
            sim.write(shared + r * 128 + ((c ^ (r & 7)) << 4), data)
    _barriers[int(barrier)].add(0, -box[2] * 128)


def bulk_g2s(shared: Any, source: Any, nbytes: Any, barrier: Any) -> None:
    for i in range(0, int(nbytes), 16):
        sim.write(int(shared) + i, sim.read(int(source) + i, 16))
    _barriers[int(barrier)].add(0, -int(nbytes))


# ---- clusters ----------------------------------------------------------------------------------
_stored: dict[int, dict[int, bytes]] = {}  # of the run before: block -> offset -> data
_syncs: dict[int, int] = {}  # of this run: block -> how often its threads have met


def cluster_address(address: Any, rank: Any) -> int:
    return int(address) & LOW | int(rank) << 32


def sts128f_cluster(address: Any, word: Any) -> None:
    block = sim.current_thread().blockIdx.x & ~1 | int(address) >> 32
    offset = int(address) - _window().ctypes.data & LOW
    assert offset % 16 == 0
    with _condition:
        _stored.setdefault(block, {})[offset] = np.array(word, np.float32).tobytes()


def cluster_sync() -> None:
    thread = sim.current_thread()
    thread.syncthreads()
    if thread.thread_id == 0:
        block = thread.blockIdx.x
        _syncs[block] = _syncs.get(block, 0) + 1
        if _syncs[block] == 2:
            for offset, data in _stored.get(block, {}).items():
                _window()[offset : offset + 16] = np.frombuffer(data, np.uint8)
    thread.syncthreads()


def _kernel(*arguments: Any, **constants: Any) -> Any:
    """As launch.kernel; a grid of clusters runs twice."""
    launch = compiled_kernel(*arguments, **constants)

    def twice(*values: Any) -> None:
        _stored.clear()
        for _ in range(2):
            _syncs.clear()
            launch(*values)

    return twice if constants.get("CLUSTER", 1) > 1 else launch


# ---- warpgroups --------------------------------------------------------------------------------
class Group:
    """Threads that meet, with a table to exchange values."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads)
        self.table: list[Any] = [None] * threads
        self.product: Any = None


def _group(key: Any, threads: int = 128) -> Group:
    with _condition:
        return _groups.setdefault(key, Group(threads))


def _elements(descriptor: Any, offsets: np.ndarray) -> np.ndarray:
    """bfloat16 values at byte offsets from a descriptor's start, through the swizzle."""
    window = _window()
    start = ((int(descriptor) & 0x3FFF) << 4) - (window.ctypes.data & 0x3FFFF)
    at = start % (1 << 18) + offsets
    at ^= ((at >> 7) & 7) << 4
    return window.view(np.uint16)[at // 2].view(ml_dtypes.bfloat16).astype(np.float64)


def _k_major(descriptor: Any, rows: int) -> np.ndarray:
    r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    return _elements(descriptor, r // 8 * 1024 + r % 8 * 128 + k * 2)


def _n_major(descriptor: Any, columns: int) -> np.ndarray:
    half = (int(descriptor) >> 16 & 0x3FFF) << 4
    k, n = np.arange(16)[:, None], np.arange(columns)[None, :]
    return _elements(descriptor, n // 64 * half + k // 8 * 1024 + k % 8 * 128 + n % 64 * 2)


def _fragments(table: list[Any]) -> np.ndarray:
    """A (64, 16) from the four registers of each thread."""
    a = np.zeros((64, 16))
    for i, words in enumerate(table):
        pairs = np.array(words, np.uint32).view(ml_dtypes.bfloat16).astype(np.float64)
        row, column = i // 32 * 16 + i % 32 // 4, 2 * (i % 4)
        a[row, column : column + 2], a[row + 8, column : column + 2] = pairs[:2], pairs[2:4]
        a[row, column + 8 : column + 10] = pairs[4:6]
        a[row + 8, column + 8 : column + 10] = pairs[6:]
    return a


def make_wgmma(n: int, *, registers: bool = False, trans_b: int = 0) -> Callable[..., None]:
    def wgmma(tile: Any, *operands: Any) -> None:
        thread = sim.current_thread().thread_id
        group, i = _group(("warpgroup", thread >> 7)), thread & 127
        if registers:
            group.table[i] = [int(operands[0][int(operands[1]) + k]) for k in range(4)]
        b, accumulate = operands[-2:]
        if group.barrier.wait(TIMEOUT) == 0:
            left = _fragments(group.table) if registers else _k_major(operands[0], 64)
            right = _n_major(b, n) if trans_b else _k_major(b, n).T
            group.product = (left @ right).astype(np.float32)
        group.barrier.wait(TIMEOUT)
        row = i // 32 * 16 + i % 32 // 4
        for e in range(n // 2):
            value = group.product[row + 8 * (e >> 1 & 1), e // 4 * 8 + 2 * (i % 4) + (e & 1)]
            tile[e] = np.float32(tile[e]) + value if accumulate else value
        group.barrier.wait(TIMEOUT)

    return wgmma


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _make_nothing(*_: Any, **__: Any) -> Callable[..., None]:
    return _nothing


STAND_INS: dict[str, Any] = {
    "smem_addr": _smem_addr, "cluster_address": cluster_address, "cluster_sync": cluster_sync,
    "sts128f_cluster": sts128f_cluster, "kernel": _kernel,
    "settle": _nothing, "make_settle": _make_nothing, "mbar_init": mbar_init,
    "mbar_expect": mbar_expect, "mbar_arrive": mbar_arrive, "mbar_wait": mbar_wait,
    "tensor_map": tensor_map, "work_counter": work_counter, "tma_4d": tma_4d, "bulk_g2s": bulk_g2s,
    "make_wgmma": make_wgmma,
    "fence_async": _nothing, "wgmma_commit": _nothing, "make_pin": _make_nothing,
    "make_set_registers": _make_nothing, "make_wgmma_fence": _make_nothing,
    "make_wgmma_wait": _make_nothing,
}  # fmt: skip
_installed: set[str] = set()


def install(modules: list[ModuleType], blocks: int) -> None:
    """Emulate in these modules; persistent kernels get this many blocks. For good: the process runs
    nothing but the simulator."""
    names = {**STAND_INS, "persistent_grid": lambda items: min(items, blocks)}
    for module in modules:
        for name, function in names.items():
            if hasattr(module, name):
                setattr(module, name, function)
    if not _installed:
        sim.checked = _checked(sim.checked)
        _installed.add("checked")
