r"""SwiGLU forward and backward, and forward straight to FP8 codes where absmax is known.

    s[n, f]     = 1 / (1 + exp(-gate[n, f]))
    y[n, f]     = gate[n, f] * s[n, f] * up[n, f]
    dgate[n, f] = dy[n, f] * up[n, f] * s[n, f] * (1 + gate[n, f] * (1 - s[n, f]))
    dup[n, f]   = dy[n, f] * gate[n, f] * s[n, f]
    absmax      = max |y|, or max over |dgate|, |dup|      (optional; of the rounded values)
    q, q_t      = the codes of y, as quantize.py makes them; y itself is not written

Shapes   gate_up, dgate_up: (N, 2 F) row-major, a row is [gate; up]; y, dy, q: (N, F); q_t: (F, N
         rounded up to 16), zeros in the padding. F a multiple of 8 (codes: 16).
Dtypes   bfloat16 or float32 (`dtype`); absmax: float32, 0 or an earlier maximum before; codes from
         bfloat16 only.
Errors   float32 inside. exp by ex2.approx: its argument rounds once and log2 e is off by 0.22 *
         2^-24, so exp(-g) is good to (1.25 |g| + 4) * 2^-24, s to (1.25 |g| + 6) * 2^-24; y adds
         two products and one rounding. y is made of mul.rn, so that a recomputed y has the same
         bits in whichever kernel. Gradients below 2^-126 are flushed to 0.
         dgate: the same of |dy up s| (1 + |g|), since 1 + g (1 - s) may cancel; dup as y.
         No sums between threads: bitwise reproducible. dgate_up may be gate_up.
Cost     Every operand once. Recomputing in backward: 5 bytes a value to q_t, where y and its
         quantisation would move 9.
Source   Shazeer 2020, arXiv:2002.05202, eq. 5; Hendrycks & Gimpel for SiLU. Written from the
         equations.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe, empty_like
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.fp8 import UNITS_CC, has_units, make_encode4, make_inv_scale, make_scale
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import bf16x2, bf_hi, bf_lo, ex2, ldg128_nc, mul_rn, rcp, stg32f
from llmq_nb.kernels.quantize import CHUNK, TILE, TWO_BLOCKS, make_write_tile
from llmq_nb.kernels.vector import PIECE, vector

THREADS, UNROLL = 256, 2  # two pieces a thread: four to six independent 16-byte loads
ONE, MINUS_LOG2E = np.float32(1.0), np.float32(-np.log2(np.e))
NO_BITS = np.uint32(0)
FORWARD_SIGNATURE = (*(types.uint64,) * 3, types.int64)
BACKWARD_SIGNATURE = (*(types.uint64,) * 4, types.int64)
QUANTIZE_SIGNATURE = (*(types.uint64,) * 5, types.int32)


@cuda.jit(device=True)
def sigmoid(x):
    """1 / (1 + exp(-x)); exp overflows to infinity below -88, which gives 0."""
    return rcp(ONE + ex2(x * MINUS_LOG2E))


@cuda.jit(device=True)
def swiglu_value(gate, up):
    """gate * sigmoid(gate) * up; products that no compiler reorders, for the same bits anywhere."""
    return mul_rn(mul_rn(gate, sigmoid(gate)), up)


@cuda.jit(device=True)
def silu_gradient(x, s):
    """Derivative of x * sigmoid(x), given s = sigmoid(x)."""
    return s * (ONE + x * (ONE - s))


def make_swiglu_forward(F: int, absmax: bool, dtype: str):
    """Kernel for one feed-forward size; arguments are device addresses (0 where unused)."""
    v = vector(dtype)
    WORDS, BYTES, load_cs, store, low, high = v.words, v.bytes, v.load_cs, v.store, v.low, v.high
    set_pair, track, absmax_update = v.set_pair, v.track, v.absmax_update
    ROW_PIECES = F // PIECE
    ABSMAX = absmax

    def swiglu_forward(y, slot, gate_up, pieces):
        g = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        u = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        running = NO_BITS
        for k in range(UNROLL):
            i = first + k * THREADS
            start = (i + i // ROW_PIECES * ROW_PIECES) * (PIECE * BYTES)  # rows are twice as long
            load_cs(g, k, gate_up + start, i < pieces)
            load_cs(u, k, gate_up + start + F * BYTES, i < pieces)
        for k in range(UNROLL):
            i = first + k * THREADS
            for j in range(4):
                a = swiglu_value(low(g, k, j), low(u, k, j))
                b = swiglu_value(high(g, k, j), high(u, k, j))
                set_pair(g, k, j, a, b)
                if ABSMAX:
                    running = track(running, g, k, j)
            store(y + i * (PIECE * BYTES), g, k, i < pieces)
        if ABSMAX:
            absmax_update(slot, running)

    return swiglu_forward


def make_swiglu_backward(F: int, absmax: bool, dtype: str):
    """Kernel for one feed-forward size; arguments are device addresses (0 where unused)."""
    v = vector(dtype)
    WORDS, BYTES, load_cs, store, low, high = v.words, v.bytes, v.load_cs, v.store, v.low, v.high
    set_pair, track, absmax_update = v.set_pair, v.track, v.absmax_update
    ROW_PIECES = F // PIECE
    ABSMAX = absmax

    def swiglu_backward(dgate_up, slot, dy, gate_up, pieces):
        g = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        u = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        d = cuda.local.array((UNROLL, WORDS), dtype=types.uint32)
        first = np.int64(cuda.blockIdx.x) * (THREADS * UNROLL) + cuda.threadIdx.x
        running = NO_BITS
        for k in range(UNROLL):
            i = first + k * THREADS
            start = (i + i // ROW_PIECES * ROW_PIECES) * (PIECE * BYTES)  # rows are twice as long
            load_cs(g, k, gate_up + start, i < pieces)
            load_cs(u, k, gate_up + start + F * BYTES, i < pieces)
            load_cs(d, k, dy + i * (PIECE * BYTES), i < pieces)
        for k in range(UNROLL):
            i = first + k * THREADS
            start = (i + i // ROW_PIECES * ROW_PIECES) * (PIECE * BYTES)
            for j in range(4):
                a, b = low(g, k, j), high(g, k, j)
                da, db = low(d, k, j), high(d, k, j)
                sa, sb = sigmoid(a), sigmoid(b)
                set_pair(
                    g, k, j,
                    da * low(u, k, j) * silu_gradient(a, sa),
                    db * high(u, k, j) * silu_gradient(b, sb),
                )  # fmt: skip
                set_pair(u, k, j, da * a * sa, db * b * sb)
                if ABSMAX:
                    running = track(track(running, g, k, j), u, k, j)
            store(dgate_up + start, g, k, i < pieces)
            store(dgate_up + start + F * BYTES, u, k, i < pieces)
        if ABSMAX:
            absmax_update(slot, running)

    return swiglu_backward


def make_swiglu_quantize(F: int, format: str, hardware: bool, row_major: bool, transposed: bool):
    """q and q_t, the ones asked for. Thread (group, chunk) owns 4 rows x 16 columns of a tile of
    128 x 128, as in quantize.py."""
    encode4 = make_encode4(format, hardware)
    inv_scale_of, scale_of = make_inv_scale(format), make_scale(format)
    write_tile = make_write_tile(row_major, transposed)

    @cuda.jit(device=True)
    def y_pair(gate, up):  # rounded as forward stores it
        return bf16x2(swiglu_value(bf_lo(gate), bf_lo(up)), swiglu_value(bf_hi(gate), bf_hi(up)))

    @cuda.jit(device=True)
    def encode_row(code, g, u, i, s, inside):
        for j in range(4):
            a, b = y_pair(g[i, 2 * j], u[i, 2 * j]), y_pair(g[i, 2 * j + 1], u[i, 2 * j + 1])
            word = encode4(
                mul_rn(bf_lo(a), s),
                mul_rn(bf_hi(a), s),
                mul_rn(bf_lo(b), s),
                mul_rn(bf_hi(b), s),
            )
            code[i, j] = word if inside else NO_BITS

    def swiglu_quantize(q, q_t, scale, gate_up, slot, N):
        row = cuda.blockIdx.y * TILE + (cuda.threadIdx.x >> 3) * 4
        column = cuda.blockIdx.x * TILE + (cuda.threadIdx.x & 7) * CHUNK
        g = cuda.local.array((4, 8), dtype=types.uint32)
        u = cuda.local.array((4, 8), dtype=types.uint32)
        code = cuda.local.array((4, 4), dtype=types.uint32)
        # beyond an edge the last row or columns are read again, so that no load waits on a branch
        source = gate_up + np.int64(min(column, F - CHUNK)) * 2
        for i in range(4):
            line = source + np.int64(min(row + i, N - 1)) * (4 * F)
            g[i, 0], g[i, 1], g[i, 2], g[i, 3] = ldg128_nc(line)
            g[i, 4], g[i, 5], g[i, 6], g[i, 7] = ldg128_nc(line + 16)
            u[i, 0], u[i, 1], u[i, 2], u[i, 3] = ldg128_nc(line + 2 * F)
            u[i, 4], u[i, 5], u[i, 6], u[i, 7] = ldg128_nc(line + 2 * F + 16)
        s = inv_scale_of(slot)
        # one call a row: a loop over them would stay rolled and put the tile into local memory
        encode_row(code, g, u, 0, s, row < N)
        encode_row(code, g, u, 1, s, row + 1 < N)
        encode_row(code, g, u, 2, s, row + 2 < N)
        encode_row(code, g, u, 3, s, row + 3 < N)
        write_tile(q, q_t, code, N, F)
        if cuda.threadIdx.x == 0 and cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0:
            stg32f(scale, scale_of(slot))

    return swiglu_quantize


# ---- launch ------------------------------------------------------------------------------------
def swiglu_forward_launch(
    y: int, gate_up: int, *, rows: int, F: int, absmax: int = 0, dtype: str = "bf16", stream: Any
) -> None:
    """Write y (rows, F) from gate_up (rows, 2 F), device addresses; raise absmax unless 0."""
    constants = {"F": F, "absmax": bool(absmax), "dtype": dtype}
    k = kernel(make_swiglu_forward, FORWARD_SIGNATURE, threads=THREADS, **constants)
    pieces = rows * F // PIECE
    k(stream, (cdiv(pieces, THREADS * UNROLL),), y, absmax, gate_up, pieces)


def swiglu_backward_launch(
    dgate_up: int, dy: int, gate_up: int, *, rows: int, F: int, absmax: int = 0,
    dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Write dgate_up (rows, 2 F) from dy (rows, F) and gate_up; raise absmax unless 0."""
    constants = {"F": F, "absmax": bool(absmax), "dtype": dtype}
    k = kernel(make_swiglu_backward, BACKWARD_SIGNATURE, threads=THREADS, **constants)
    pieces = rows * F // PIECE
    k(stream, (cdiv(pieces, THREADS * UNROLL),), dgate_up, absmax, dy, gate_up, pieces)


def swiglu_quantize_launch(
    q: int, q_t: int, scale: int, gate_up: int, absmax: int, *, rows: int, F: int, format: str,
    hardware: bool | None = None, stream: Any,
) -> None:  # fmt: skip
    """Write the codes of y as q (rows, F) and q_t (F, padded_rows(rows)), unless its address is 0,
    and the scale, from bfloat16 gate_up and the absmax that forward found. Bit for bit what
    quantize_transpose_launch makes of forward's y."""
    hardware = has_units() if hardware is None else hardware
    k = kernel(
        make_swiglu_quantize, QUANTIZE_SIGNATURE, threads=THREADS, options=TWO_BLOCKS, F=F,
        format=format, hardware=hardware, row_major=bool(q), transposed=bool(q_t),
    )  # fmt: skip
    k(stream, (cdiv(F, TILE), cdiv(rows, TILE)), q, q_t, scale, gate_up, absmax, rows)


# ---- users -------------------------------------------------------------------------------------
def forward(gate_up: Any) -> Any:
    """SwiGLU of a bfloat16 GPU array (..., 2 F), F a multiple of 8: silu(first half) * second half,
    (..., F).

    >>> y = swiglu.forward(gate_up)
    """
    a = describe(gate_up, dtype=DType.BF16, name="gate_up")
    width = a.shape[-1] if a.shape else 0
    if width == 0 or width % (2 * PIECE):
        raise ValueError(f"gate_up has shape {a.shape}; its last extent must be a multiple of 16")
    F = width // 2
    y = empty_like(a, shape=(*a.shape[:-1], F))
    out = describe(y, dtype=DType.BF16).address
    swiglu_forward_launch(out, a.address, rows=a.size // width, F=F, stream=current_stream(a))
    return y


def backward(dy: Any, gate_up: Any) -> Any:
    """Gradient of swiglu.forward with respect to gate_up, for bfloat16 GPU arrays (..., F) and
    (..., 2 F).

    >>> dgate_up = swiglu.backward(dy, gate_up)
    """
    a = describe(gate_up, dtype=DType.BF16, name="gate_up")
    width = a.shape[-1] if a.shape else 0
    if width == 0 or width % (2 * PIECE):
        raise ValueError(f"gate_up has shape {a.shape}; its last extent must be a multiple of 16")
    F = width // 2
    b = describe(dy, dtype=DType.BF16, shape=(*a.shape[:-1], F), name="dy")
    dgate_up = empty_like(a)
    out = describe(dgate_up, dtype=DType.BF16).address
    rows, stream = a.size // width, current_stream(a)
    swiglu_backward_launch(out, b.address, a.address, rows=rows, F=F, stream=stream)
    return dgate_up


# ---- cost --------------------------------------------------------------------------------------
def swiglu_forward_bytes(N: int, F: int, *, itemsize: int = 2) -> int:
    """Read gate and up, write y."""
    return 3 * N * F * itemsize


def swiglu_backward_bytes(N: int, F: int, *, itemsize: int = 2) -> int:
    """Read gate, up and dy, write dgate and dup."""
    return 5 * N * F * itemsize


def swiglu_quantize_bytes(N: int, F: int, *, outputs: int = 1) -> int:
    """Read bfloat16 gate and up, write one or two sets of codes."""
    return N * F * (4 + outputs)


# ---- reference ---------------------------------------------------------------------------------
def swiglu_forward_ref(gate_up: np.ndarray) -> np.ndarray:
    """float64 NumPy oracle."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def swiglu_backward_ref(dy: np.ndarray, gate_up: np.ndarray) -> np.ndarray:
    """float64 NumPy oracle: [dgate; dup]."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    dy64, s = dy.astype(np.float64), 1 / (1 + np.exp(-gate))
    return np.concatenate([dy64 * up * s * (1 + gate * (1 - s)), dy64 * gate * s], axis=-1)


COMPILE_CASES = [
    *(
        CompileCase(factory, {"F": F, "absmax": absmax, "dtype": dtype}, signature, THREADS)
        for factory, signature in (
            (make_swiglu_forward, FORWARD_SIGNATURE),
            (make_swiglu_backward, BACKWARD_SIGNATURE),
        )
        for F, absmax, dtype in ((4864, True, "bf16"), (8960, False, "bf16"), (4864, False, "fp32"))
    ),
    *(
        CompileCase(
            make_swiglu_quantize,
            {"F": 4864, "format": "e4m3", "hardware": h, "row_major": q, "transposed": q_t},
            QUANTIZE_SIGNATURE, THREADS, options=TWO_BLOCKS, min_cc=UNITS_CC if h else (8, 0),
        )
        for h, q, q_t in (
            (True, False, True), (True, True, True), (True, True, False), (False, False, True)
        )
    ),
]  # fmt: skip
