r"""bfloat16 to FP8 codes, row-major, transposed or both in one pass; FP8 codes back to bfloat16.

    inv_scale = FP8_MAX / max(absmax, 1e-30)
    scale     = absmax / FP8_MAX                              (FP8_MAX: 448 or 57344)
    q[r, c]   = fp8(x[r, c] * inv_scale)                      x ~= scale * q
    q_t[c, r] = q[r, c] for r < R, 0 in the padding

Shapes   x, q: (R, C) row-major; q_t: (C, Rp), Rp = R rounded up to 16 (`padded_rows`), what the
         weight gradient's product takes as its K. R of at least 1, C a multiple of 16. absmax,
         scale: (1,).
Dtypes   x: bfloat16; q: e4m3 or e5m2 (`format`); absmax, scale: float32. absmax is of this x, read
         on the device, so that the launch can be part of a graph.
Errors   div.rn, mul.rn, one rounding to nearest even, saturating: every code exact, and the same by
         the card's conversion (`hardware`, from compute capability 8.9) as by software (fp8.py).
Limits   absmax 0: codes and scale 0. Below 1e-30 the floor keeps inv_scale finite: values turn into
         few or no steps, scale may be subnormal, both are finite. One huge outlier: the values
         below 2^-10 / 448 of it (e5m2: 2^-17 / 57344) become 0. NaN: absmax is of the other values
         (elementwise.py), and the NaN becomes a NaN code, so a product has NaN in the same places
         as one in bfloat16. Infinity: absmax and scale are infinite, inv_scale 0, the infinity's
         code NaN, and the product NaN. A NaN absmax makes every code and the scale NaN.
Cost     x is read once. A 128 x 128 tile is transposed through shared memory: bytes 4 x 4 in
         registers by byte permutes, then 16-byte chunks with an XOR swizzle that spreads them over
         the banks.
Source   Scaling per tensor, just in time: DESIGN.md section 5. Formats: OCP FP8 1.0.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase, Options
from llmq_nb.kernels.fp8 import (
    UNITS_CC,
    has_units,
    make_decode4,
    make_encode4,
    make_inv_scale,
    make_scale,
)
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import (
    bf_hi,
    bf_lo,
    ldg128_cs,
    ldg128_nc,
    lds128,
    mul_rn,
    prmt,
    smem_addr,
    stg32f,
    stg128,
    sts32,
)

THREADS = 256
CHUNK = 16
"""Codes of a 16-byte access; C and the rows of q_t are multiples of it."""
TILE = 128
TILE_WORDS = TILE * TILE // 4
TWO_BLOCKS = Options(min_blocks=2)  # software conversion would take 218 registers on sm_89
ZERO_BITS, ALL_BITS = np.uint32(0), np.uint32(0xFFFFFFFF)
# byte permutes of a 4 x 4 transposition: interleave the low or high two bytes, then pair the halves
LOW_BYTES, HIGH_BYTES = np.uint32(0x5140), np.uint32(0x7362)
LOW_PAIR, HIGH_PAIR = np.uint32(0x5410), np.uint32(0x7632)

SIGNATURE = (*(types.uint64,) * 4, types.int64)
TRANSPOSE_SIGNATURE = (*(types.uint64,) * 5, types.int32, types.int32)
DECODE_SIGNATURE = (types.uint64, types.uint64, types.int64)


def make_quantize(format: str, hardware: bool):
    """Codes in the order of x, 16 a thread."""
    encode4 = make_encode4(format, hardware)
    inv_scale_of, scale_of = make_inv_scale(format), make_scale(format)

    def quantize(q, scale, x, slot, chunks):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < chunks:
            v = cuda.local.array(8, dtype=types.uint32)
            code = cuda.local.array(4, dtype=types.uint32)
            v[0], v[1], v[2], v[3] = ldg128_cs(x + i * 32)
            v[4], v[5], v[6], v[7] = ldg128_cs(x + i * 32 + 16)
            s = inv_scale_of(slot)
            for j in range(4):
                code[j] = encode4(
                    mul_rn(bf_lo(v[2 * j]), s), mul_rn(bf_hi(v[2 * j]), s),
                    mul_rn(bf_lo(v[2 * j + 1]), s), mul_rn(bf_hi(v[2 * j + 1]), s),
                )  # fmt: skip
            stg128(q + i * 16, (code[0], code[1], code[2], code[3]))
            if i == 0:
                stg32f(scale, scale_of(slot))

    return quantize


def make_write_tile(row_major: bool, transposed: bool):
    """Device function write_tile(q, q_t, code, R, C): a block's codes to q and, transposed, to q_t.

    A block owns a 128 x 128 tile, thread (group, chunk) 4 rows x 16 columns of it: code is its
    (4, 4) local array of words, zeros in rows from R on, anything in columns from C on. Every
    thread must reach the call. What is not asked for is not written: its address may be 0.
    """
    ROW_MAJOR, TRANSPOSED = row_major, transposed

    @cuda.jit(device=True)
    def write_tile(q, q_t, code, R, C):
        chunk = cuda.threadIdx.x & 7  # of 16 columns
        group = cuda.threadIdx.x >> 3  # of 4 rows
        row0 = cuda.blockIdx.y * TILE
        column0 = cuda.blockIdx.x * TILE
        if ROW_MAJOR:
            row, column = row0 + group * 4, column0 + chunk * CHUNK
            target = q + np.int64(row) * C + column
            for i in range(4):
                if row + i < R and column < C:
                    line = (code[i, 0], code[i, 1], code[i, 2], code[i, 3])
                    stg128(target + np.int64(i) * C, line)
        if TRANSPOSED:
            tile = smem_addr(cuda.shared.array(TILE_WORDS, dtype=types.uint32))
            # column c of the tile is a row of 128 bytes in shared memory; word `group` of it holds
            # 4 rows
            word = (group ^ (chunk * 4)) * 4
            for j in range(4):
                a = prmt(code[0, j], code[1, j], LOW_BYTES)
                b = prmt(code[2, j], code[3, j], LOW_BYTES)
                c = prmt(code[0, j], code[1, j], HIGH_BYTES)
                d = prmt(code[2, j], code[3, j], HIGH_BYTES)
                base = tile + (chunk * CHUNK + j * 4) * TILE + word
                sts32(base, prmt(a, b, LOW_PAIR))
                sts32(base + TILE, prmt(a, b, HIGH_PAIR))
                sts32(base + 2 * TILE, prmt(c, d, LOW_PAIR))
                sts32(base + 3 * TILE, prmt(c, d, HIGH_PAIR))
            cuda.syncthreads()  # the whole tile is there
            Rp = (R + CHUNK - 1) & -CHUNK
            for i in range(4):
                c = i * 32 + group
                piece = lds128(tile + c * TILE + ((chunk ^ ((c >> 4) & 7)) << 4))
                if column0 + c < C and row0 + chunk * CHUNK < Rp:
                    stg128(q_t + np.int64(column0 + c) * Rp + row0 + chunk * CHUNK, piece)

    return write_tile


def make_quantize_transpose(format: str, hardware: bool, row_major: bool):
    """q_t, and q where row_major. Thread (group, chunk) owns 4 rows x 16 columns of a 128 x 128
    tile."""
    encode4 = make_encode4(format, hardware)
    inv_scale_of, scale_of = make_inv_scale(format), make_scale(format)
    write_tile = make_write_tile(row_major, True)

    def quantize_transpose(q, q_t, scale, x, slot, R, C):
        row = cuda.blockIdx.y * TILE + (cuda.threadIdx.x >> 3) * 4
        column = cuda.blockIdx.x * TILE + (cuda.threadIdx.x & 7) * CHUNK
        v = cuda.local.array((4, 8), dtype=types.uint32)
        code = cuda.local.array((4, 4), dtype=types.uint32)
        # beyond an edge the last row or columns are read again, so that no load waits on a branch
        source = x + np.int64(min(column, C - CHUNK)) * 2
        for i in range(4):
            line = source + np.int64(min(row + i, R - 1)) * C * 2
            v[i, 0], v[i, 1], v[i, 2], v[i, 3] = ldg128_nc(line)
            v[i, 4], v[i, 5], v[i, 6], v[i, 7] = ldg128_nc(line + 16)
        s = inv_scale_of(slot)
        for i in range(4):
            kept = ALL_BITS if row + i < R else ZERO_BITS
            for j in range(4):
                a, b = v[i, 2 * j], v[i, 2 * j + 1]
                word = encode4(
                    mul_rn(bf_lo(a), s),
                    mul_rn(bf_hi(a), s),
                    mul_rn(bf_lo(b), s),
                    mul_rn(bf_hi(b), s),
                )
                code[i, j] = word & kept
        write_tile(q, q_t, code, R, C)
        if cuda.threadIdx.x == 0 and cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0:
            stg32f(scale, scale_of(slot))

    return quantize_transpose


def make_decode(format: str):
    """Codes to the bfloat16 of the same value (not scaled), 16 a thread: exact."""
    decode4 = make_decode4(format)

    def decode(out, q, chunks):
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        if i < chunks:
            code = cuda.local.array(4, dtype=types.uint32)
            v = cuda.local.array(8, dtype=types.uint32)
            code[0], code[1], code[2], code[3] = ldg128_cs(q + i * 16)
            for j in range(4):
                v[2 * j], v[2 * j + 1] = decode4(code[j])
            stg128(out + i * 32, (v[0], v[1], v[2], v[3]))
            stg128(out + i * 32 + 16, (v[4], v[5], v[6], v[7]))

    return decode


def padded_rows(R: int) -> int:
    """Row length of transposed codes: R rounded up to 16."""
    return cdiv(R, CHUNK) * CHUNK


# ---- launch ------------------------------------------------------------------------------------
def quantize_launch(
    q: int, scale: int, x: int, absmax: int, *, n: int, format: str, hardware: bool | None = None,
    stream: Any,
) -> None:  # fmt: skip
    """Write the n = R * C codes and the scale. hardware None: what the card has."""
    hardware = has_units() if hardware is None else hardware
    k = kernel(make_quantize, SIGNATURE, threads=THREADS, format=format, hardware=hardware)
    k(stream, (max(1, cdiv(n // CHUNK, THREADS)),), q, scale, x, absmax, n // CHUNK)


def quantize_transpose_launch(
    q: int, q_t: int, scale: int, x: int, absmax: int, *, R: int, C: int, format: str,
    hardware: bool | None = None, stream: Any,
) -> None:  # fmt: skip
    """Write q_t (C, padded_rows(R)), q (R, C) unless its address is 0, and the scale."""
    hardware = has_units() if hardware is None else hardware
    k = kernel(
        make_quantize_transpose, TRANSPOSE_SIGNATURE, threads=THREADS, options=TWO_BLOCKS,
        format=format, hardware=hardware, row_major=bool(q),
    )  # fmt: skip
    k(stream, (cdiv(C, TILE), cdiv(R, TILE)), q, q_t, scale, x, absmax, R, C)


def decode_launch(out: int, q: int, *, n: int, format: str, stream: Any) -> None:
    """Write the bfloat16 value of n codes (a multiple of 16)."""
    k = kernel(make_decode, DECODE_SIGNATURE, threads=THREADS, format=format)
    k(stream, (cdiv(n // CHUNK, THREADS),), out, q, n // CHUNK)


def quantize(
    x: Any, absmax: Any, *, format: str = "e4m3", transpose: bool = False
) -> tuple[Any, Any]:
    """Quantise a bfloat16 GPU array (R, C), C a multiple of 16, by its absmax (float32, (1,)).

    Returns (q, scale) with x ~= scale * q; with `transpose`, q is (C, R rounded up to 16), zeros in
    the columns from R on. ValueError on other shapes.

    >>> q, scale = quantize.quantize(x, elementwise.absmax(x), format="e4m3")
    """
    a = describe(x, dtype=DType.BF16, shape=(None, None), name="x")
    R, C = a.shape
    if R == 0 or C == 0 or C % CHUNK:
        raise ValueError(f"x has shape {a.shape}; must be (R, C) with C a multiple of {CHUNK}")
    if format not in ("e4m3", "e5m2"):
        raise ValueError(f"format is {format!r}, must be 'e4m3' or 'e5m2'")
    slot = describe(absmax, dtype=DType.FP32, shape=(1,), name="absmax").address
    q = empty_like(a, shape=(C, padded_rows(R)) if transpose else (R, C), dtype=DType(format))
    scale = empty_like(a, shape=(1,), dtype=DType.FP32)
    q_ = describe(q, dtype=DType(format)).address
    scale_, stream = describe(scale, dtype=DType.FP32).address, current_stream(a)
    if transpose:
        quantize_transpose_launch(
            0, q_, scale_, a.address, slot, R=R, C=C, format=format, stream=stream
        )
    else:
        quantize_launch(q_, scale_, a.address, slot, n=a.size, format=format, stream=stream)
    return q, scale


# ---- cost --------------------------------------------------------------------------------------
def quantize_bytes(n: int, *, outputs: int = 1) -> int:
    """Read bfloat16 once, write one or two sets of codes."""
    return n * (2 + outputs)


COMPILE_CASES = [
    *(
        CompileCase(
            make_quantize, {"format": f, "hardware": h}, SIGNATURE, THREADS,
            min_cc=UNITS_CC if h else (8, 0),
        )
        for f in ("e4m3", "e5m2") for h in (True, False)
    ),
    *(
        CompileCase(
            make_quantize_transpose, {"format": f, "hardware": h, "row_major": r},
            TRANSPOSE_SIGNATURE, THREADS, options=TWO_BLOCKS, min_cc=UNITS_CC if h else (8, 0),
        )
        for f, h, r in (("e4m3", True, True), ("e5m2", True, False), ("e4m3", False, True))
    ),
    *(CompileCase(make_decode, {"format": f}, DECODE_SIGNATURE, THREADS) for f in ("e4m3", "e5m2")),
]  # fmt: skip
