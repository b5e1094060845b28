r"""Rotary position embedding, forward and backward, in place on a packed qkv buffer.

    p          = t - segment_start[b, t]                              position inside the document
    a', b'     = a cos[p, i] - b sin[p, i],  b cos[p, i] + a sin[p, i]       forward
    da, db     = da' cos[p, i] + db' sin[p, i],  db' cos[p, i] - da' sin[p, i]     backward (the
    inverse)
    absmax     = max over all heads of the result        (optional; of the rounded values)

for every pair a = x[i], b = x[i + D / 2], i < D / 2, of each query and key head (half-split order,
as Hugging Face stores the weights). Value heads stay as they are.

Shapes   qkv: (N, (H + 2 G) D) row-major, a row is [H query heads; G key heads; G value heads], N =
         B T; cos, sin: (max_T, D / 2); segment_start: (B, T). D a multiple of 16; T <= max_T.
Dtypes   qkv: bfloat16 or float32 (`dtype`); cos, sin: float32; segment_start: int32; absmax:
         float32, 0 or an earlier maximum before.
Errors   Two products, one addition, one rounding to the storage format:
         |err| <= 3 * 2^-24 * (|a cos| + |b sin|) + the rounding. Backward rounds anew: it inverts
         forward to two roundings, not bit for bit. No sums between threads: bitwise reproducible.
Cost     Query and key heads are read and written once; for absmax the value heads are read too. A
         thread rotates HEADS heads with one set of cos and sin in registers; the tables stay in the
         caches.
Source   Su et al. 2021, arXiv:2104.09864, eq. 34. Written from the equation.
"""

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import current_stream, describe
from llmq_nb.kernels.compile import CompileCase
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import ffma, ldg32, ldg128f_nc
from llmq_nb.kernels.vector import PIECE, vector

THREADS = 128
HEADS = 2
"""Heads that a thread rotates with one set of cos and sin."""
SIGNATURE = (*(types.uint64,) * 5, types.int64, types.int32)
NO_BITS = np.uint32(0)


def make_rope(H: int, G: int, D: int, backward: bool, absmax: bool, dtype: str):
    """Kernel for one head layout; arguments are device addresses."""
    v = vector(dtype)
    WORDS, BYTES, load, store, low, high = v.words, v.bytes, v.load, v.store, v.low, v.high
    set_pair, track, absmax_update = v.set_pair, v.track, v.absmax_update
    ROTATED, ROW, ABSMAX = H + G, (H + 2 * G) * D, absmax
    READ = H + 2 * G if absmax else ROTATED
    PAIRS = D // (2 * PIECE)  # pieces of half a head
    GROUPS = cdiv(READ, HEADS)
    ROW_THREADS = PAIRS * GROUPS
    HALF = D // 2
    SIGN = np.float32(-1.0 if backward else 1.0)

    def rope(qkv, slot, cos, sin, segment_start, rows, T):
        running = NO_BITS
        i = np.int64(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x
        row = i // ROW_THREADS
        if row < rows:
            rest = i - row * ROW_THREADS
            group = rest // PAIRS
            column = (rest - group * PAIRS) * PIECE
            a = cuda.local.array((HEADS, WORDS), dtype=types.uint32)
            b = cuda.local.array((HEADS, WORDS), dtype=types.uint32)
            first = qkv + (row * ROW + group * (HEADS * D) + column) * BYTES
            for h in range(HEADS):
                inside = group * HEADS + h < READ
                load(a, h, first + h * D * BYTES, inside)
                load(b, h, first + (h * D + HALF) * BYTES, inside)
            # only now: the tables wait for the position, and nothing may wait behind them
            position = row % T - np.int32(ldg32(segment_start + row * 4))
            table = (position * HALF + column) * 4
            c = cuda.local.array(8, dtype=types.float32)
            s = cuda.local.array(8, dtype=types.float32)
            c[0], c[1], c[2], c[3] = ldg128f_nc(cos + table)
            c[4], c[5], c[6], c[7] = ldg128f_nc(cos + table + 16)
            s[0], s[1], s[2], s[3] = ldg128f_nc(sin + table)
            s[4], s[5], s[6], s[7] = ldg128f_nc(sin + table + 16)
            for h in range(HEADS):
                inside = group * HEADS + h < ROTATED
                if inside:
                    for j in range(4):
                        a0, a1, b0, b1 = low(a, h, j), high(a, h, j), low(b, h, j), high(b, h, j)
                        s0, s1 = s[2 * j] * SIGN, s[2 * j + 1] * SIGN
                        c0, c1 = c[2 * j], c[2 * j + 1]
                        set_pair(a, h, j, ffma(a0, c0, -(b0 * s0)), ffma(a1, c1, -(b1 * s1)))
                        set_pair(b, h, j, ffma(b0, c0, a0 * s0), ffma(b1, c1, a1 * s1))
                store(first + h * D * BYTES, a, h, inside)
                store(first + (h * D + HALF) * BYTES, b, h, inside)
                if ABSMAX:
                    for j in range(4):
                        running = track(track(running, a, h, j), b, h, j)
        if ABSMAX:
            absmax_update(slot, running)

    return rope


# ---- launch ------------------------------------------------------------------------------------
def _launch(
    backward: bool, qkv: int, cos: int, sin: int, segment_start: int, *, rows: int, T: int, H: int,
    G: int, D: int, absmax: int = 0, dtype: str, stream: Any,
) -> None:  # fmt: skip
    constants = {
        "H": H, "G": G, "D": D, "backward": backward, "absmax": bool(absmax), "dtype": dtype
    }  # fmt: skip
    k = kernel(make_rope, SIGNATURE, threads=THREADS, **constants)
    row_threads = cdiv(H + (2 if absmax else 1) * G, HEADS) * D // (2 * PIECE)
    grid = (cdiv(rows * row_threads, THREADS),)
    k(stream, grid, qkv, absmax, cos, sin, segment_start, rows, T)


def rope_forward_launch(
    qkv: int, cos: int, sin: int, segment_start: int, *, rows: int, T: int, H: int, G: int, D: int,
    dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Rotate the query and key heads of qkv (rows, (H + 2 G) D) in place; rows = B T."""
    _launch(
        False, qkv, cos, sin, segment_start, rows=rows, T=T, H=H, G=G, D=D, dtype=dtype,
        stream=stream,
    )  # fmt: skip


def rope_backward_launch(
    dqkv: int, cos: int, sin: int, segment_start: int, *, rows: int, T: int, H: int, G: int, D: int,
    absmax: int = 0, dtype: str = "bf16", stream: Any,
) -> None:  # fmt: skip
    """Turn the gradient of the rotated heads into that of the unrotated ones, in place; raise
    absmax, of value heads too, unless 0."""
    _launch(
        True, dqkv, cos, sin, segment_start, rows=rows, T=T, H=H, G=G, D=D, absmax=absmax,
        dtype=dtype, stream=stream,
    )  # fmt: skip


# ---- users -------------------------------------------------------------------------------------
def _rotate(
    backward: bool, qkv: Any, cos: Any, sin: Any, segment_start: Any, heads: int, kv_heads: int
) -> Any:
    a = describe(qkv, dtype=DType.BF16, shape=(None, None, None), name="qkv")
    B, T, width = a.shape
    D, rest = divmod(width, heads + 2 * kv_heads)
    if rest or D % (2 * PIECE):
        raise ValueError(
            f"qkv has rows of {width}, which {heads} + 2 * {kv_heads} heads do not share as a "
            "multiple of 16 each"
        )
    tables = [
        describe(t, dtype=DType.FP32, shape=(None, D // 2), name=n)
        for t, n in ((cos, "cos"), (sin, "sin"))
    ]
    if min(t.shape[0] for t in tables) < T:
        raise ValueError(f"cos and sin have {tables[0].shape[0]} positions, T is {T}")
    start = describe(segment_start, dtype=DType.INT32, shape=(B, T), name="segment_start")
    _launch(
        backward, a.address, tables[0].address, tables[1].address, start.address, rows=B * T, T=T,
        H=heads, G=kv_heads, D=D, dtype="bf16", stream=current_stream(a),
    )  # fmt: skip
    return qkv


def forward(qkv: Any, cos: Any, sin: Any, segment_start: Any, *, heads: int, kv_heads: int) -> Any:
    """Rotate the query and key heads of a bfloat16 GPU array (B, T, (heads + 2 kv_heads) D) in
    place.

    cos, sin: (at least T, D / 2) float32; segment_start: (B, T) int32, the first token of each
    token's document (zeros: one document a row). Returns qkv. ValueError on other shapes or dtypes.

    >>> rope.forward(qkv, cos, sin, segment_start, heads=14, kv_heads=2)
    """
    return _rotate(False, qkv, cos, sin, segment_start, heads, kv_heads)


def backward(
    dqkv: Any, cos: Any, sin: Any, segment_start: Any, *, heads: int, kv_heads: int
) -> Any:
    """The gradient before rope.forward from the one after it, in place; arguments alike.

    >>> rope.backward(dqkv, cos, sin, segment_start, heads=14, kv_heads=2)
    """
    return _rotate(True, dqkv, cos, sin, segment_start, heads, kv_heads)


# ---- cost --------------------------------------------------------------------------------------
def rope_bytes(N: int, H: int, G: int, D: int, *, itemsize: int = 2) -> int:
    """Read and write the query and key heads; the tables count once a row of half a head."""
    return 2 * N * (H + G) * D * itemsize


# ---- reference ---------------------------------------------------------------------------------
def rope_ref(
    qkv: np.ndarray, cos: np.ndarray, sin: np.ndarray, segment_start: np.ndarray, H: int, G: int,
    *, backward: bool = False,
) -> np.ndarray:  # fmt: skip
    """float64 NumPy oracle on qkv (B, T, (H + 2 G) D)."""
    B, T, width = qkv.shape
    heads = qkv.astype(np.float64).reshape(B, T, H + 2 * G, -1)
    half = heads.shape[-1] // 2
    position = np.arange(T) - segment_start
    c, s = (t.astype(np.float64)[position][:, :, None, :] for t in (cos, sin))
    s = -s if backward else s
    a, b = heads[:, :, : H + G, :half], heads[:, :, : H + G, half:]
    rotated = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    return np.concatenate([rotated, heads[:, :, H + G :]], axis=2).reshape(B, T, width)


COMPILE_CASES = [
    CompileCase(
        make_rope, {"H": H, "G": G, "D": D, "backward": b, "absmax": absmax, "dtype": dtype},
        SIGNATURE, THREADS,
    )
    for H, G, D, b, absmax, dtype in (
        (14, 2, 64, False, False, "bf16"), (12, 2, 128, True, True, "bf16"),
        (14, 2, 64, True, False, "fp32"),
    )
]  # fmt: skip
