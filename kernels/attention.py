r"""Causal attention with grouped heads and document starts, forward and backward.

    S[t, s]   = q[t] . k[s] / sqrt(D)          segment_start[t] <= s <= t, all other pairs masked
    lse[t]    = log(sum_s exp(S[t, s]))
    out[t]    = sum_s P[t, s] v[s]                                    P = exp(S - lse)
    delta[t]  = sum_d dout[t, d] out[t, d]
    dS[t, s]  = P[t, s] (dout[t] . v[s] - delta[t])
    dv[s]     = sum_t P[t, s] dout[t]
    dk[s]     = sum_t dS[t, s] q[t] / sqrt(D)
    dq[t]     = sum_s dS[t, s] k[s] / sqrt(D)

Query head h reads key/value head h // (H / G); dk and dv sum over the H / G heads of the group.

Shapes   B sequences of any length T; H query heads, G key/value heads, H a multiple of G; D = 64
         or 128. The engine's qkv: (B, T, (H + 2 G) D), rows [q; k; v]; out: (B, T, H, D); lse:
         (B, H, T); segment_start: (B, T) int32, index of the first token of t's document, not
         decreasing.
Dtypes   bfloat16 in and out, float32 lse and sums (P and dS are rounded to bfloat16 before their
         products); or everything float32 (attention_simt.py: tests, no speed goal).
Errors   bfloat16: P and dS carry 2^-8 relative each, out and gradients round once more; lse is
         exact to the score's float32 rounding, about 1e-6. No sum by atomics: bitwise reproducible.
Cost     attention_flops, attention_backward_flops. Scratch: two float32 rows a head, backward only.
Where    mma.sync, every card from sm_80: attention_forward; attention_backward (dQ); dK and dV by
         attention_dkdv, where query heads share keys by attention_dkdv_parts. wgmma and TMA, sm_90:
         attention_hopper; attention_hopper_backward (dQ); dK and dV by attention_hopper_dkdv at
         D = 64, attention_hopper_items at 128. attention_launch chooses.
Source   Dao 2023, arXiv:2307.08691; Ainslie et al. 2023, arXiv:2305.13245. Written from the
         equations.
"""

import math
from typing import Any

import numpy as np

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.arrays import Array, current_stream, describe, empty_like
from llmq_nb.kernels.attention_backward import padded_length
from llmq_nb.kernels.attention_launch import Tiles, launch_backward, launch_forward
from llmq_nb.kernels.attention_tiles import Problem

HEAD_DIMS = (64, 128)


# ---- launches ----------------------------------------------------------------------------------
def _packed(qkv: int, H: int, G: int, D: int, dtype: DType) -> tuple[int, int, int]:
    """Addresses of q, k, v in rows [q; k; v]."""
    size = D * dtype.itemsize
    return qkv, qkv + H * size, qkv + (H + G) * size


def attention_launch(
    out: int, lse: int, qkv: int, segment_start: int, *, B: int, T: int, H: int, G: int, D: int,
    dtype: DType = DType.BF16, tiles: Tiles | None = None, stream: Any,
) -> None:  # fmt: skip
    """Write out and lse from packed qkv (device addresses; segment_start 0: one document)."""
    stride = (H + 2 * G) * D * dtype.itemsize
    problem = Problem(B, T, H, G, D, stride, stride, segment_start, True, dtype)
    launch_forward(out, lse, *_packed(qkv, H, G, D, dtype), problem, tiles, stream)


def attention_backward_launch(
    dqkv: int, stats: int, dout: int, out: int, lse: int, qkv: int, segment_start: int, *,
    B: int, T: int, H: int, G: int, D: int, dtype: DType = DType.BF16,
    tiles: Tiles | None = None, stream: Any,
) -> None:  # fmt: skip
    """Write dqkv, packed like qkv. stats: attention_scratch_bytes of scratch (bfloat16 only)."""
    stride = (H + 2 * G) * D * dtype.itemsize
    problem = Problem(B, T, H, G, D, stride, stride, segment_start, True, dtype)
    launch_backward(
        _packed(dqkv, H, G, D, dtype), (stride, stride), stats, dout, out, lse,
        _packed(qkv, H, G, D, dtype), problem, tiles, stream,
    )  # fmt: skip


def attention_scratch_bytes(B: int, T: int, H: int) -> int:
    """Size of `stats`: two float32 rows a head, padded to multiples of 128."""
    return B * H * 2 * padded_length(T) * 4


# ---- users -------------------------------------------------------------------------------------
def _describe_inputs(
    q: Any, k: Any, v: Any, segment_start: Any, causal: bool
) -> tuple[Array, Array, Array, Problem]:
    """The three arrays and what they say about the problem; ValueError where they do not fit."""
    name = str(getattr(q, "dtype", ""))
    dtype = DType.FP32 if "float32" in name or name == DType.FP32.value else DType.BF16
    q = describe(q, dtype=dtype, shape=(None,) * 4, name="q")
    B, T, H, D = q.shape
    k = describe(k, dtype=dtype, shape=(B, T, None, D), name="k")
    G = k.shape[2]
    v = describe(v, dtype=dtype, shape=(B, T, G, D), name="v")
    if D not in HEAD_DIMS:
        raise ValueError(f"attention: head_dim {D}, must be one of {HEAD_DIMS}")
    if G == 0 or H % G:
        raise ValueError(f"attention: {H} query heads are no multiple of {G} key/value heads")
    start = 0
    if segment_start is not None:
        if not causal:
            raise ValueError("attention: segment_start needs causal=True")
        starts = describe(segment_start, dtype=DType.INT32, shape=(B, T), name="segment_start")
        start = starts.address
    row = D * dtype.itemsize
    return q, k, v, Problem(B, T, H, G, D, H * row, G * row, start, causal, dtype)


def forward(
    q: Any, k: Any, v: Any, segment_start: Any = None, *, causal: bool = True
) -> tuple[Any, Any]:
    """Attention of GPU arrays (DLPack or __cuda_array_interface__): returns (out, lse).

    q: (B, T, H, D), k and v: (B, T, G, D), bfloat16 (or float32, slow); segment_start: (B, T) int32
    keeps documents apart. out: (B, T, H, D) like q; lse: (B, H, T) float32. Runs on q's current
    stream. Raises ValueError on any other shape or dtype.

    >>> out, lse = attention.forward(q, k, v, segment_start)
    """
    x, y, z, problem = _describe_inputs(q, k, v, segment_start, causal)
    out = empty_like(x)
    lse = empty_like(x, shape=(problem.B, problem.H, problem.T), dtype=DType.FP32)
    addresses = describe(out, dtype=x.dtype).address, describe(lse, dtype=DType.FP32).address
    launch_forward(*addresses, x.address, y.address, z.address, problem, None, current_stream(x))
    return out, lse


def backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, segment_start: Any = None, *,
    causal: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients (dq, dk, dv) from dout, forward's inputs and its results; shapes as forward.

    >>> dq, dk, dv = attention.backward(dout, q, k, v, out, lse, segment_start)
    """
    x, y, z, problem = _describe_inputs(q, k, v, segment_start, causal)
    dout = describe(dout, dtype=x.dtype, shape=x.shape, name="dout")
    out = describe(out, dtype=x.dtype, shape=x.shape, name="out")
    rows = (problem.B, problem.H, problem.T)
    lse = describe(lse, dtype=DType.FP32, shape=rows, name="lse")
    gradients = [empty_like(a) for a in (x, y, z)]
    shape = (problem.B, problem.H, 2, padded_length(problem.T))
    stats = empty_like(x, shape=shape, dtype=DType.FP32)
    dq, dk, dv = (describe(g, dtype=x.dtype).address for g in gradients)
    launch_backward(
        (dq, dk, dv), (problem.q_stride, problem.kv_stride),
        describe(stats, dtype=DType.FP32).address, dout.address, out.address, lse.address,
        (x.address, y.address, z.address), problem, None, current_stream(x),
    )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


# ---- cost --------------------------------------------------------------------------------------
def attention_flops(B: int, T: int, H: int, D: int) -> int:
    """Two products over half the square."""
    return 2 * B * H * T * T * D


def attention_backward_flops(B: int, T: int, H: int, D: int) -> int:
    """Five products over half the square, whatever is recomputed."""
    return 5 * B * H * T * T * D


# ---- reference ---------------------------------------------------------------------------------
def attention_mask_ref(T: int, segment_start: Any = None, *, causal: bool = True) -> np.ndarray:
    """Which pairs are seen: bool (B or 1, 1, T, T) over (query, key)."""
    t, s = np.arange(T)[:, None], np.arange(T)[None, :]
    seen = (s <= t) if causal else np.ones((T, T), bool)
    seen = seen[None, None]
    if segment_start is not None:
        seen = seen & (s >= np.asarray(segment_start)[:, None, :, None])
    return seen


def _probabilities_ref(q: Any, k: Any, segment_start: Any, causal: bool) -> tuple[Any, Any, Any]:
    q64 = np.asarray(q).astype(np.float64).swapaxes(1, 2)  # (B, H, T, D)
    k64 = np.asarray(k).astype(np.float64).swapaxes(1, 2).repeat(q.shape[2] // k.shape[2], 1)
    scores = q64 @ k64.swapaxes(2, 3) / math.sqrt(q.shape[3])
    seen = attention_mask_ref(q.shape[1], segment_start, causal=causal)
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    lse = top[..., 0] + np.log(np.exp(scores - top).sum(-1))
    return q64, k64, (np.exp(scores - lse[..., None]), lse)


def attention_forward_ref(
    q: Any, k: Any, v: Any, segment_start: Any = None, *, causal: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """float64 NumPy oracle: (out, lse), the first three equations above and nothing else."""
    _, _, (P, lse) = _probabilities_ref(q, k, segment_start, causal)
    v64 = np.asarray(v).astype(np.float64).swapaxes(1, 2).repeat(q.shape[2] // v.shape[2], 1)
    return (P @ v64).swapaxes(1, 2), lse


def attention_backward_ref(
    dout: Any, q: Any, k: Any, v: Any, segment_start: Any = None, *, causal: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float64 NumPy oracle: (dq, dk, dv), the other equations, with its own out and lse."""
    B, T, H, D = q.shape
    G = k.shape[2]
    q64, k64, (P, _) = _probabilities_ref(q, k, segment_start, causal)
    v64 = np.asarray(v).astype(np.float64).swapaxes(1, 2).repeat(H // G, 1)
    d64 = np.asarray(dout).astype(np.float64).swapaxes(1, 2)
    delta = (d64 * (P @ v64)).sum(-1, keepdims=True)
    dS = P * (d64 @ v64.swapaxes(2, 3) - delta) / math.sqrt(D)
    dk, dv = dS.swapaxes(2, 3) @ q64, P.swapaxes(2, 3) @ d64
    by_group = (B, G, H // G, T, D)
    dk, dv = dk.reshape(by_group).sum(2), dv.reshape(by_group).sum(2)
    return (dS @ k64).swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2)
