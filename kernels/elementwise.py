r"""Elementwise passes over flat tensors: copy, convert, absmax, normal initialisation.

    copy         out = x                                        (bytes)
    convert      out = round(x)                  (bfloat16 <-> float32, to nearest even)
    absmax       slot = max(slot, max_i |x_i|)
    fill_normal  out_i = mean + std * z_i        (z standard normal: Box-Muller of Philox words)

Shapes   n elements, a multiple of 8 (one piece).
Dtypes   bfloat16 or float32 (`dtype`); absmax slot float32, 0 or an earlier maximum before.
Errors   copy, absmax: exact. convert: one rounding. fill_normal: angle and radius carry 2^-20
         absolute error (sin, cos, lg2, sqrt approximations), one rounding to the storage format.
         Element i uses Philox counters of piece start / 8 + i / 8, so any cut into shards that
         starts at a multiple of 8 gives the same values.
Cost     Every operand once.
Source   Box & Muller 1958. Philox: random.py.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    cosf,
    ffma,
    ldg32,
    ldg128_cs,
    lg2,
    sinf,
    sqrtf,
    stg32,
    stg128_cs,
    u32_to_f32,
)
from llmq_nb.kernels.random import Purpose, philox, philox_ref
from llmq_nb.kernels.vector import PIECE, vector

THREADS, UNROLL = 256, 4  # four independent 16-byte accesses a thread keep enough bytes in flight
ABSMAX_BLOCKS = 2048  # a constant; more blocks would only mean more atomics
INIT = int(Purpose.INIT)
NO_BITS = np.uint32(0)
TWO_PI, PI = np.float32(2 * np.pi), np.float32(np.pi)
MINUS_TWO_LN2 = np.float32(-2 * np.log(2.0))
TINY_UNIFORM = np.float32(2.0**-33)  # half a step, so that the logarithm is of (0, 1]
UNIFORM = np.float32(2.0**-32)

COPY_SIGNATURE = (types.uint64, types.uint64, types.int64)
FILL_SIGNATURE = (
    types.uint64, types.int64, types.int64, types.uint32, types.uint32, types.float32, types.float32
)  # fmt: skip


def make_copy():
    """Copy whole 16-byte chunks."""

    def copy(out, x, chunks):
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        for u in range(UNROLL):
            i = first + u * THREADS
            if i < chunks:
                stg128_cs(out + i * 16, ldg128_cs(x + i * 16))

    return copy


def make_convert(source: str, target: str):
    """Change the storage format."""
    a, b = vector(source), vector(target)
    IN, OUT, IN_BYTES, OUT_BYTES = a.words, b.words, a.bytes * PIECE, b.bytes * PIECE
    load_cs, store_cs, low, high, set_pair = a.load_cs, b.store_cs, a.low, a.high, b.set_pair

    def convert(out, x, pieces):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        before = cuda.local.array((1, IN), dtype=types.uint32)
        after = cuda.local.array((1, OUT), dtype=types.uint32)
        load_cs(before, 0, x + i * IN_BYTES, i < pieces)
        for j in range(4):
            set_pair(after, 0, j, low(before, 0, j), high(before, 0, j))
        store_cs(out + i * OUT_BYTES, after, 0, i < pieces)

    return convert


def make_absmax(dtype: str):
    """Largest magnitude of a tensor, one warp maximum at a time."""
    v = vector(dtype)
    WORDS, BYTES, load_cs, track = v.words, v.bytes * PIECE, v.load_cs, v.track
    absmax_update = v.absmax_update

    def absmax(slot, x, pieces):
        tile = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        running = NO_BITS
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        while first < pieces + cuda.threadIdx.x:  # the same for the whole block
            for u in range(UNROLL):
                i = first + u * THREADS
                load_cs(tile, u, x + i * BYTES, i < pieces)
            for u in range(UNROLL):
                for j in range(4):
                    running = track(running, tile, u, j)
            first += np.int64(ABSMAX_BLOCKS) * (THREADS * UNROLL)
        absmax_update(slot, running)

    return absmax


@cuda.jit(device=True)
def normal_pair(first, second):
    """Two independent standard normals from two random words (Box-Muller)."""
    radius = sqrtf(MINUS_TWO_LN2 * lg2(ffma(u32_to_f32(first), UNIFORM, TINY_UNIFORM)))
    angle = ffma(u32_to_f32(second), UNIFORM * TWO_PI, -PI)  # sin.approx is good in [-pi, pi]
    return radius * cosf(angle), radius * sinf(angle)


def make_fill_normal(dtype: str):
    """Normal values from (seed, tensor, element) alone."""
    v = vector(dtype)
    WORDS, BYTES, store, set_pair = v.words, v.bytes * PIECE, v.store, v.set_pair

    def fill_normal(out, pieces, start, seed, tensor, mean, std):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < pieces:
            tile = cuda.local.array((1, WORDS), dtype=types.uint32)
            for half in range(2):  # four values a Philox call
                w0, w1, w2, w3 = philox(seed, INIT, start + i, tensor, half)
                a, b = normal_pair(w0, w1)
                c, d = normal_pair(w2, w3)
                set_pair(tile, 0, 2 * half, ffma(a, std, mean), ffma(b, std, mean))
                set_pair(tile, 0, 2 * half + 1, ffma(c, std, mean), ffma(d, std, mean))
            store(out + i * BYTES, tile, 0, True)

    return fill_normal


# ---- launch ------------------------------------------------------------------------------------
def copy_launch(out: int, x: int, *, nbytes: int, stream: Any) -> None:
    """Copy nbytes, a multiple of 16, from one device address to another."""
    k = kernel(make_copy, COPY_SIGNATURE, threads=THREADS)
    k(stream, (cdiv(nbytes // 16, THREADS * UNROLL),), out, x, nbytes // 16)


def convert_launch(out: int, x: int, *, n: int, source: str, target: str, stream: Any) -> None:
    """Write n elements of x, stored as `source`, as `target`."""
    k = kernel(make_convert, COPY_SIGNATURE, threads=THREADS, source=source, target=target)
    k(stream, (cdiv(n // PIECE, THREADS),), out, x, n // PIECE)


def absmax_launch(slot: int, x: int, *, n: int, dtype: str = "bf16", stream: Any) -> None:
    """Raise the float32 at `slot` to the largest magnitude of n elements."""
    k = kernel(make_absmax, COPY_SIGNATURE, threads=THREADS, dtype=dtype)
    k(stream, (min(ABSMAX_BLOCKS, cdiv(n // PIECE, THREADS * UNROLL)),), slot, x, n // PIECE)


def fill_normal_launch(
    out: int, *, n: int, start: int = 0, seed: int, tensor: int, mean: float = 0.0, std: float,
    dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write n normal values.

    start: index of the first element in the whole tensor, a multiple of 8; tensor: its id.
    """
    k = kernel(make_fill_normal, FILL_SIGNATURE, threads=THREADS, dtype=dtype)
    pieces = n // PIECE
    k(stream, (cdiv(pieces, THREADS),), out, pieces, start // PIECE, seed, tensor, mean, std)


# ---- users -------------------------------------------------------------------------------------
def absmax(x: Any) -> Any:
    """Largest magnitude of a bfloat16 GPU array whose size is a multiple of 8: a float32 array of
    shape (1,).

    >>> scale = elementwise.absmax(x)
    """
    a = describe(x, dtype=DType.BF16, name="x")
    if a.size % PIECE:
        raise ValueError(f"x has {a.size} elements, must be a multiple of {PIECE}")
    slot = empty_like(a, shape=(1,), dtype=DType.FP32)
    address, stream = describe(slot, dtype=DType.FP32).address, current_stream(a)
    clear_launch(address, nbytes=4, stream=stream)
    absmax_launch(address, a.address, n=a.size, stream=stream)
    return slot


MASK_SIGNATURE = (types.uint64, types.int64, types.uint32)
FINITE_BYTES = 0xBFBFBFBF
"""Keeps each byte's sign and lowest six bits: an e4m3 or e5m2 code below 2, a bfloat16 likewise."""


def make_mask():
    """Keep some bits of 32-bit words."""

    def mask(out, words, bits):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < words:
            stg32(out + i * 4, np.uint32(ldg32(out + i * 4) & bits))

    return mask


def mask_launch(out: int, *, nbytes: int, mask: int, stream: Any) -> None:
    """Keep the bits of `mask` in nbytes of 32-bit words, a multiple of 4, in place."""
    k = kernel(make_mask, MASK_SIGNATURE, threads=THREADS)
    k(stream, (cdiv(nbytes // 4, THREADS),), out, nbytes // 4, mask)


CLEAR_SIGNATURE = (types.uint64, types.int64)


def make_clear():
    """Zero 32-bit words."""

    def clear(out, words):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < words:
            stg32(out + i * 4, NO_BITS)

    return clear


def clear_launch(out: int, *, nbytes: int, stream: Any) -> None:
    """Zero nbytes, a multiple of 4: absmax slots before a micro-step."""
    k = kernel(make_clear, CLEAR_SIGNATURE, threads=THREADS)
    k(stream, (cdiv(nbytes // 4, THREADS),), out, nbytes // 4)


# ---- cost --------------------------------------------------------------------------------------
def copy_bytes(nbytes: int) -> int:
    """Read and written."""
    return 2 * nbytes


def absmax_bytes(n: int, *, itemsize: int = 2) -> int:
    """Read once."""
    return n * itemsize


# ---- reference ---------------------------------------------------------------------------------
def fill_normal_ref(
    n: int, *, seed: int, tensor: int, std: float, mean: float = 0.0, start: int = 0
) -> np.ndarray:
    """float64 values of the same Philox words."""
    pieces = np.arange(start // PIECE, (start + n) // PIECE, dtype=np.uint64)
    words = np.stack([philox_ref(seed, INIT, pieces, tensor, half) for half in (0, 1)], axis=1)
    pairs = words.reshape(-1, 2).astype(np.float64)
    radius = np.sqrt(-2.0 * np.log((pairs[:, 0] + 0.5) / 2.0**32))
    angle = 2 * np.pi * pairs[:, 1] / 2.0**32 - np.pi
    z = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return mean + std * z.reshape(-1)


COMPILE_CASES = [
    CompileCase(make_copy, {}, COPY_SIGNATURE, THREADS),
    CompileCase(make_clear, {}, CLEAR_SIGNATURE, THREADS),
    CompileCase(make_mask, {}, MASK_SIGNATURE, THREADS),
    CompileCase(make_convert, {"source": "bf16", "target": "fp32"}, COPY_SIGNATURE, THREADS),
    CompileCase(make_convert, {"source": "fp32", "target": "bf16"}, COPY_SIGNATURE, THREADS),
    *(CompileCase(make_absmax, {"dtype": d}, COPY_SIGNATURE, THREADS) for d in ("bf16", "fp32")),
    *(
        CompileCase(make_fill_normal, {"dtype": d}, FILL_SIGNATURE, THREADS)
        for d in ("bf16", "fp32")
    ),
]
