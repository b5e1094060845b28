"""Python stand-ins for the instructions of ptx.py, by name, for the CUDA simulator.

Each does what the PTX ISA says on one lane; warp-wide ones meet through `sim.exchange`.
Approximations (ex2, rsqrt, ...) are computed in float64 and rounded, so they are better than the
hardware's.
"""

import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from llmq_nb.kernels import sim

np.seterr(
    over="ignore", invalid="ignore", divide="ignore"
)  # device arithmetic wraps and makes inf and NaN


def stand_in(name: str) -> Callable[..., Any]:
    """The function that simulates an instruction; one that raises NotImplementedError if there is
    none."""

    def missing(*_: Any) -> Any:
        raise NotImplementedError(f"{name} has no simulator stand-in")

    return globals().get(name, missing)


def _u32(value: Any) -> int:
    """Low 32 bits, as an untyped cast to a 32-bit operand takes them."""
    return int(value) & 0xFFFFFFFF


def _f32(value: Any) -> np.float32:
    return np.float32(value)


# ---- memory: lds/sts share the code, since shared addresses are host addresses here ------------
def _loader(size: int, format: str, kind: type) -> Callable[[Any], Any]:
    def load(address: Any) -> Any:
        values = struct.unpack(format, sim.read(address, size))
        return kind(values[0]) if len(values) == 1 else tuple(kind(v) for v in values)

    return load


def _storer(format: str, cast: Callable[[Any], Any]) -> Callable[..., None]:
    def store(address: Any, *values: Any) -> None:
        flat = values[0] if len(values) == 1 and isinstance(values[0], tuple) else values
        sim.write(address, struct.pack(format, *(cast(v) for v in flat)))

    return store


ldg128 = lds128 = _loader(16, "<4I", np.uint32)
ldg128f = _loader(16, "<4f", np.float32)
ldg64 = lds64 = _loader(8, "<2I", np.uint32)
ldg64f = lds64f = _loader(8, "<2f", np.float32)
ldg32 = lds32 = _loader(4, "<I", np.uint32)
ldg32f = lds32f = _loader(4, "<f", np.float32)
ldg16 = lds16 = _loader(2, "<H", np.uint32)
ldg8 = _loader(1, "<B", np.uint32)
stg128 = sts128 = _storer("<4I", _u32)
stg128f = _storer("<4f", float)
stg64 = sts64 = _storer("<2I", _u32)
sts64f = _storer("<2f", float)
stg32 = sts32 = _storer("<I", _u32)
stg32f = sts32f = _storer("<f", float)
stg16 = sts16 = _storer("<H", lambda v: int(v) & 0xFFFF)
stg8 = _storer("<B", lambda v: int(v) & 0xFF)


def red_max_g(address: Any, value: Any) -> None:
    with sim._lock:
        stg32(address, max(_u32(value), int(ldg32(address))))


def red_add_g(address: Any, value: Any) -> None:
    with sim._lock:
        stg32(address, _u32(int(ldg32(address)) + _u32(value)))


def atom_inc_g(address: Any, last: Any) -> np.uint32:
    with sim._lock:
        old = ldg32(address)
        stg32(address, 0 if int(old) >= int(last) else int(old) + 1)
    return old


def cp16(shared: Any, source: Any) -> None:
    sim.write(shared, sim.read(source, 16))


def cp16z(shared: Any, source: Any, size: Any) -> None:
    size = int(size)
    if size not in (0, 16):
        raise ValueError(f"cp16z: {size} source bytes")
    sim.write(shared, sim.read(source, 16) if size else bytes(16))


def cp4(shared: Any, source: Any) -> None:
    sim.write(shared, sim.read(source, 4))


def cp_commit() -> None:
    pass


def cp_wait() -> None:
    pass


def smem_addr(array: Any) -> int:
    return (
        sim.current_thread().launch.window(np.asarray(getattr(array, "_item", array))).ctypes.data
    )


def array_addr(array: Any) -> int:
    return sim.register(np.asarray(getattr(array, "_item", array)))


# ---- conversions -------------------------------------------------------------------------------
def f2u(value: Any) -> np.uint32:
    return _f32(value).view(np.uint32)


def u2f(bits: Any) -> np.float32:
    return np.uint32(_u32(bits)).view(np.float32)


def u32_to_f32(value: Any) -> np.float32:
    return np.float32(_u32(value))


def bf_lo(pair: Any) -> np.float32:
    return u2f(_u32(pair) << 16)


def bf_hi(pair: Any) -> np.float32:
    return u2f(_u32(pair) & 0xFFFF0000)


def _bf16_bits(value: Any) -> int:
    return int(np.array(_f32(value)).astype(ml_dtypes.bfloat16).view(np.uint16))


def bf16x2(low: Any, high: Any) -> np.uint32:
    return np.uint32(_bf16_bits(low) | _bf16_bits(high) << 16)


def _fp8_bits(value: Any, kind: Any, largest: float) -> int:
    return int(np.array(np.clip(_f32(value), -largest, largest)).astype(kind).view(np.uint8))


def _fp8x4(kind: Any, largest: float) -> Callable[..., np.uint32]:
    def pack(*values: Any) -> np.uint32:
        return np.uint32(sum(_fp8_bits(v, kind, largest) << 8 * i for i, v in enumerate(values)))

    return pack


def _fp8x2_f32(kind: Any) -> Callable[[Any], tuple[np.float32, np.float32]]:
    def unpack(codes: Any) -> tuple[np.float32, np.float32]:
        low, high = np.array([int(codes) & 0xFF, int(codes) >> 8 & 0xFF], np.uint8).view(kind)
        return np.float32(low), np.float32(high)

    return unpack


e4m3x4 = _fp8x4(ml_dtypes.float8_e4m3fn, 448.0)
e5m2x4 = _fp8x4(ml_dtypes.float8_e5m2, 57344.0)
e4m3x2_f32 = _fp8x2_f32(ml_dtypes.float8_e4m3fn)
e5m2x2_f32 = _fp8x2_f32(ml_dtypes.float8_e5m2)


# ---- bits and packed bfloat16 ------------------------------------------------------------------
def low32(value: Any) -> np.uint32:
    return np.uint32(_u32(value))


def high32(value: Any) -> np.uint32:
    return np.uint32(int(value) >> 32 & 0xFFFFFFFF)


def prmt(a: Any, b: Any, selector: Any) -> np.uint32:
    source = struct.pack("<2I", _u32(a), _u32(b))
    return np.uint32(sum(source[(_u32(selector) >> 4 * i) & 7] << 8 * i for i in range(4)))


def mulhi(a: Any, b: Any) -> np.uint32:
    return np.uint32(_u32(a) * _u32(b) >> 32)


def mullo(a: Any, b: Any) -> np.uint32:
    return np.uint32(_u32(_u32(a) * _u32(b)))


def xor3(a: Any, b: Any, c: Any) -> np.uint32:
    return np.uint32(_u32(a) ^ _u32(b) ^ _u32(c))


def inc(value: Any) -> np.uint32:
    return np.uint32(_u32(_u32(value) + 1))


def fma2(a: Any, b: Any, c: Any) -> np.uint32:
    return bf16x2(ffma(bf_lo(a), bf_lo(b), bf_lo(c)), ffma(bf_hi(a), bf_hi(b), bf_hi(c)))


def maxabs2(running: Any, pair: Any) -> np.uint32:
    magnitude = _u32(pair) & 0x7FFF7FFF
    low, high = fmax(bf_lo(running), bf_lo(magnitude)), fmax(bf_hi(running), bf_hi(magnitude))
    return bf16x2(low, high)


# ---- float32 arithmetic ------------------------------------------------------------------------
def ffma(a: Any, b: Any, c: Any) -> np.float32:
    return np.float32(np.float64(_f32(a)) * np.float64(_f32(b)) + np.float64(_f32(c)))


def fnma(a: Any, b: Any, c: Any) -> np.float32:
    return ffma(-_f32(a), b, c)


def mul_rn(a: Any, b: Any) -> np.float32:
    return _f32(a) * _f32(b)


def add_rn(a: Any, b: Any) -> np.float32:
    return _f32(a) + _f32(b)


def div_rn(a: Any, b: Any) -> np.float32:
    return _f32(a) / _f32(b)


def sqrt_rn(a: Any) -> np.float32:
    return np.sqrt(_f32(a))


def fmax(a: Any, b: Any) -> np.float32:
    return np.fmax(_f32(a), _f32(b))


def fmin(a: Any, b: Any) -> np.float32:
    return np.fmin(_f32(a), _f32(b))


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], np.float32]:
    return lambda value: np.float32(function(np.float64(_f32(value))))


ex2, lg2, tanhf = _unary(np.exp2), _unary(np.log2), _unary(np.tanh)
rcp, rsqrt, sqrtf = _unary(lambda v: 1.0 / v), _unary(lambda v: 1.0 / np.sqrt(v)), _unary(np.sqrt)
sinf, cosf = _unary(np.sin), _unary(np.cos)


def _s32(value: Any) -> int:
    return (_u32(value) ^ 0x80000000) - 0x80000000


def sel_gt(a: Any, b: Any, x: Any, y: Any) -> np.float32:
    return _f32(x if _s32(a) > _s32(b) else y)


def sel_ge(a: Any, b: Any, x: Any, y: Any) -> np.float32:
    return _f32(x if _s32(a) >= _s32(b) else y)


def sel_eq(a: Any, b: Any, x: Any, y: Any) -> np.float32:
    return _f32(x if _s32(a) == _s32(b) else y)


# ---- warps and blocks --------------------------------------------------------------------------
def _lane() -> int:
    return sim.current_thread().thread_id & 31


def shfl_xor(value: Any, mask: Any) -> Any:
    return sim.exchange(value)[_lane() ^ int(mask)]


def shfl_idx(value: Any, lane: Any) -> Any:
    return sim.exchange(value)[int(lane) & 31]


def redux_max_u32(value: Any) -> np.uint32:
    return np.uint32(max(sim.exchange(_u32(value))))


def redux_min_u32(value: Any) -> np.uint32:
    return np.uint32(min(sim.exchange(_u32(value))))


def redux_add_u32(value: Any) -> np.uint32:
    return np.uint32(_u32(sum(sim.exchange(_u32(value)))))


def syncwarp() -> None:
    sim.exchange(None)


def bar_sync(number: Any, threads: Any) -> None:
    sim.current_thread().launch.named_barrier(int(number), int(threads)).wait()


# ---- tensor cores ------------------------------------------------------------------------------
def _ldmatrix(address: Any, count: int, transposed: bool) -> tuple[np.uint32, ...]:
    """Lane i of group j gives the address of row i % 8 of matrix j; lane l gets row l / 4, pair l %
    4."""
    lane, rows = _lane(), sim.exchange(int(address))
    out = []
    for j in range(count):
        if transposed:
            pair = [int(ldg16(rows[8 * j + 2 * (lane & 3) + e] + 2 * (lane >> 2))) for e in (0, 1)]
            out.append(np.uint32(pair[0] | pair[1] << 16))
        else:
            out.append(ldg32(rows[8 * j + (lane >> 2)] + 4 * (lane & 3)))
    return tuple(out)


def ldsm4(address: Any) -> tuple[np.uint32, ...]:
    return _ldmatrix(address, 4, False)


def ldsm4t(address: Any) -> tuple[np.uint32, ...]:
    return _ldmatrix(address, 4, True)


def ldsm2(address: Any) -> tuple[np.uint32, ...]:
    return _ldmatrix(address, 2, False)


def ldsm2t(address: Any) -> tuple[np.uint32, ...]:
    return _ldmatrix(address, 2, True)


def _mma(
    operands: tuple[Any, ...], unpack: Callable[[Any], tuple[Any, ...]]
) -> tuple[np.float32, ...]:
    """c[16, 8] += a[16, k] b[8, k]^T; unpack splits a register into its 2 (bf16) or 4 (FP8)
    elements."""
    lane = _lane()
    group, column = lane >> 2, lane & 3
    lanes = sim.exchange(operands)
    a: list[list[float]] = [[], []]  # this lane's two rows, in some order of k
    b: list[list[float]] = [[], []]  # this lane's two columns, in the same order
    for quad in range(4):
        registers = lanes[4 * group + quad]
        a[0] += [*unpack(registers[4]), *unpack(registers[6])]
        a[1] += [*unpack(registers[5]), *unpack(registers[7])]
        for n in range(2):
            registers = lanes[4 * (2 * column + n) + quad]
            b[n] += [*unpack(registers[8]), *unpack(registers[9])]
    product = np.array(a, np.float64) @ np.array(b, np.float64).T
    return tuple(np.float32(np.float64(operands[i]) + product[i >> 1, i & 1]) for i in range(4))


def mma_bf16(*operands: Any) -> tuple[np.float32, ...]:
    return _mma(operands, lambda r: (bf_lo(r), bf_hi(r)))


def mma_e4m3(*operands: Any) -> tuple[np.float32, ...]:
    return _mma(operands, lambda r: (*e4m3x2_f32(_u32(r) & 0xFFFF), *e4m3x2_f32(_u32(r) >> 16)))
