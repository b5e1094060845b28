r"""SwiGLU forward and backward.

    s[n, f]     = 1 / (1 + exp(-gate[n, f]))
    y[n, f]     = gate[n, f] * s[n, f] * up[n, f]
    dgate[n, f] = dy[n, f] * up[n, f] * s[n, f] * (1 + gate[n, f] * (1 - s[n, f]))
    dup[n, f]   = dy[n, f] * gate[n, f] * s[n, f]
    absmax      = max |y|, or max over |dgate|, |dup|               (optional; of the rounded
    values)

Shapes   gate_up, dgate_up: (N, 2 F) row-major, a row is [gate; up]; y, dy: (N, F). F a multiple of
         8.
Dtypes   bfloat16 or float32 (`dtype`); absmax: float32, 0 or an earlier maximum before.
Errors   float32 inside. exp by ex2.approx: its argument rounds once and log2 e is off by 0.22 *
         2^-24, so exp(-g) is good to (1.25 |g| + 4) * 2^-24, s to (1.25 |g| + 6) * 2^-24; y adds
         two products and one rounding. Below 2^-126 results are flushed to 0.
         dgate: the same of |dy up s| (1 + |g|), since 1 + g (1 - s) may cancel; dup as y.
         No sums between threads: bitwise reproducible. dgate_up may be gate_up.
Cost     Every operand once.
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
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ex2, rcp
from llmq_nb.kernels.vector import PIECE, vector

THREADS, UNROLL = 256, 2  # two pieces a thread: four to six independent 16-byte loads
ONE, MINUS_LOG2E = np.float32(1.0), np.float32(-np.log2(np.e))
NO_BITS = np.uint32(0)
FORWARD_SIGNATURE = (*(types.uint64,) * 3, types.int64)
BACKWARD_SIGNATURE = (*(types.uint64,) * 4, types.int64)


@cuda.jit(device=True)
def sigmoid(x):
    """1 / (1 + exp(-x)); exp overflows to infinity below -88, which gives 0."""
    return rcp(ONE + ex2(x * MINUS_LOG2E))


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
                a, b = low(g, k, j), high(g, k, j)
                set_pair(g, k, j, a * sigmoid(a) * low(u, k, j), b * sigmoid(b) * high(u, k, j))
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
    CompileCase(factory, {"F": F, "absmax": absmax, "dtype": dtype}, signature, THREADS)
    for factory, signature in (
        (make_swiglu_forward, FORWARD_SIGNATURE),
        (make_swiglu_backward, BACKWARD_SIGNATURE),
    )
    for F, absmax, dtype in ((4864, True, "bf16"), (8960, False, "bf16"), (4864, False, "fp32"))
]
