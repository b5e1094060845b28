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
         exact to the score's float32 rounding, about 1e-6. No atomics: bitwise reproducible.
Cost     attention_flops, attention_backward_flops. Scratch: two float32 rows a head, backward only.
Where    attention_forward, attention_backward, attention_dkdv: mma.sync, every card from sm_80;
         attention_hopper, attention_hopper_backward, attention_hopper_dkdv: wgmma and TMA, sm_90.
Source   Dao 2023, arXiv:2307.08691; Ainslie et al. 2023, arXiv:2305.13245. Written from the
         equations.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmq_nb.core.dtype import DType
from llmq_nb.kernels import (
    attention_backward,
    attention_dkdv,
    attention_forward,
    attention_hopper,
    attention_hopper_backward,
    attention_simt,
)
from llmq_nb.kernels.arrays import Array, current_stream, describe, empty_like
from llmq_nb.kernels.attention_backward import padded_length
from llmq_nb.kernels.attention_hopper_tiles import CC
from llmq_nb.kernels.attention_tiles import Problem, Tile
from llmq_nb.kernels.compile import Options
from llmq_nb.kernels.launch import cdiv, kernel
from llmq_nb.kernels.ptx import SIMULATED

HEAD_DIMS = (64, 128)
LOG2E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile shape of each kernel: what `compile --tune` chooses and the resolved config keeps."""

    forward: Tile
    dkdv: Tile
    dq: Tile
    wgmma_forward: bool = False
    """Take the sm_90 kernel instead (its tile is fixed by D; causal only)."""
    wgmma_backward: bool = False


def default_tiles(D: int, cc: tuple[int, int]) -> Tiles:
    """Tile shapes for a compute capability without tuning: two blocks a multiprocessor where it has
    100 KB of shared memory (8.6, 8.9, 12.x), the largest elsewhere."""
    small = cc not in ((8, 0), (9, 0), (10, 0))
    pick = -1 if small else 0
    return Tiles(
        forward=attention_forward.TILES[D][1 if small else 0],
        dkdv=attention_dkdv.TILES[D][pick],
        dq=attention_backward.TILES[D][pick],
        wgmma_forward=cc == CC,
        wgmma_backward=cc == CC,
    )


def candidate_tiles(D: int) -> list[Tiles]:
    """Every shape of every kernel at least once, for tuning (the kernels are timed one by one)."""
    shapes = attention_forward.TILES[D], attention_dkdv.TILES[D], attention_backward.TILES[D]
    padded = [
        [kind[min(i, len(kind) - 1)] for i in range(max(map(len, shapes)))] for kind in shapes
    ]
    return [Tiles(*row) for row in zip(*padded, strict=True)]


def _tiles(tiles: Tiles | None, D: int) -> Tiles:
    if tiles is not None:
        return tiles
    if SIMULATED:
        return default_tiles(D, (8, 0))
    from llmq_nb.core.device import current_device

    return default_tiles(D, current_device().cc)


# ---- launches ----------------------------------------------------------------------------------
def _forward(
    out: int, lse: int, q: int, k: int, v: int, p: Problem, tiles: Tiles | None, stream: Any
) -> None:
    if p.B * p.T == 0:
        return
    if p.dtype is DType.FP32:
        launch = kernel(
            attention_simt.make_attention_forward_fp32, attention_simt.FORWARD_SIGNATURE,
            attention_simt.THREADS, D=p.D,
        )  # fmt: skip
        rows = p.B * p.H * p.T
        launch(
            stream, (cdiv(rows, attention_simt.THREADS // 32),), out, lse, q, k, v,
            p.segment_start, rows, p.T, p.H, p.group, p.q_stride, p.kv_stride, int(p.causal),
            p.scale,
        )  # fmt: skip
        return
    chosen = _tiles(tiles, p.D)
    if chosen.wgmma_forward and p.causal:
        attention_hopper.forward_launch(out, lse, q, k, v, p, stream)
        return
    tile = chosen.forward
    launch = kernel(
        attention_forward.make_attention_forward, attention_forward.SIGNATURE, tile.warps * 32,
        attention_forward.shared_bytes(p.D, tile), Options(min_blocks=tile.blocks),
        **attention_forward.constants(p.D, tile, causal=p.causal),
    )  # fmt: skip
    heads, count = p.B * p.H, cdiv(p.T, tile.queries)
    launch(
        stream, (heads * count,), out, lse, q, k, v, p.segment_start, heads, p.T, p.H, p.group,
        count, p.swath(2) * p.group, p.q_stride, p.kv_stride, p.scale * LOG2E,
    )  # fmt: skip


def _backward_fp32(
    gradients: tuple[int, int, int], strides: tuple[int, int], inputs: tuple[int, ...],
    p: Problem, stream: Any,
) -> None:  # fmt: skip
    dq, dk, dv = gradients
    simt = attention_simt
    for factory, signature, outputs, stride, heads in (
        (simt.make_attention_dq_fp32, simt.DQ_SIGNATURE, (dq,), strides[0], p.H),
        (simt.make_attention_dkdv_fp32, simt.DKDV_SIGNATURE, (dk, dv), strides[1], p.G),
    ):
        launch = kernel(factory, signature, simt.THREADS, D=p.D)
        rows = p.B * heads * p.T
        launch(
            stream, (cdiv(rows, simt.THREADS // 32),), *outputs, *inputs, p.segment_start, rows,
            p.T, p.H, p.group, p.q_stride, p.kv_stride, stride, int(p.causal), p.scale,
        )  # fmt: skip


def _backward(
    gradients: tuple[int, int, int], strides: tuple[int, int], stats: int, dout: int, out: int,
    lse: int, qkv: tuple[int, int, int], p: Problem, tiles: Tiles | None, stream: Any,
) -> None:  # fmt: skip
    if p.B * p.T == 0:
        return
    if p.dtype is DType.FP32:
        _backward_fp32(gradients, strides, (*qkv, dout, out, lse), p, stream)
        return
    dq, dk, dv = gradients
    chosen, padded = _tiles(tiles, p.D), padded_length(p.T)
    attention_backward.statistics_launch(
        stats, out, dout, lse, B=p.B, T=p.T, H=p.H, D=p.D, stream=stream
    )
    if chosen.wgmma_backward and p.causal:
        attention_hopper_backward.backward_launch(gradients, strides, stats, dout, qkv, p, stream)
        return
    inputs = (*qkv, dout, stats, p.segment_start)
    tile = chosen.dkdv
    launch = kernel(
        attention_dkdv.make_attention_dkdv, attention_dkdv.SIGNATURE, tile.warps * 32,
        attention_dkdv.shared_bytes(p.D, tile), Options(min_blocks=tile.blocks),
        **attention_backward.constants(p.D, tile, causal=p.causal),
    )  # fmt: skip
    heads, count = p.B * p.G, cdiv(p.T, tile.keys)
    launch(
        stream, (heads * count,), dk, dv, *inputs, heads, p.T, padded, p.H, p.group, count,
        p.swath(2 * p.group), p.q_stride, p.kv_stride, strides[1], p.scale, p.scale * LOG2E,
    )  # fmt: skip
    tile = chosen.dq
    launch = kernel(
        attention_backward.make_attention_dq, attention_backward.DQ_SIGNATURE, tile.warps * 32,
        attention_backward.shared_bytes(p.D, tile), Options(min_blocks=tile.blocks),
        **attention_backward.constants(p.D, tile, causal=p.causal),
    )  # fmt: skip
    heads, count = p.B * p.H, cdiv(p.T, tile.queries)
    launch(
        stream, (heads * count,), dq, *inputs, heads, p.T, padded, p.H, p.group, count,
        p.swath(2) * p.group, p.q_stride, p.kv_stride, strides[0], p.scale, p.scale * LOG2E,
    )  # fmt: skip


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
    _forward(out, lse, *_packed(qkv, H, G, D, dtype), problem, tiles, stream)


def attention_backward_launch(
    dqkv: int, stats: int, dout: int, out: int, lse: int, qkv: int, segment_start: int, *,
    B: int, T: int, H: int, G: int, D: int, dtype: DType = DType.BF16,
    tiles: Tiles | None = None, stream: Any,
) -> None:  # fmt: skip
    """Write dqkv, packed like qkv. stats: attention_scratch_bytes of scratch (bfloat16 only)."""
    stride = (H + 2 * G) * D * dtype.itemsize
    problem = Problem(B, T, H, G, D, stride, stride, segment_start, True, dtype)
    _backward(
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
    """
    x, y, z, problem = _describe_inputs(q, k, v, segment_start, causal)
    out = empty_like(x)
    lse = empty_like(x, shape=(problem.B, problem.H, problem.T), dtype=DType.FP32)
    addresses = describe(out, dtype=x.dtype).address, describe(lse, dtype=DType.FP32).address
    _forward(*addresses, x.address, y.address, z.address, problem, None, current_stream(x))
    return out, lse


def backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, segment_start: Any = None, *,
    causal: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Gradients (dq, dk, dv) from dout, forward's inputs and its results; shapes as forward."""
    x, y, z, problem = _describe_inputs(q, k, v, segment_start, causal)
    dout = describe(dout, dtype=x.dtype, shape=x.shape, name="dout")
    out = describe(out, dtype=x.dtype, shape=x.shape, name="out")
    rows = (problem.B, problem.H, problem.T)
    lse = describe(lse, dtype=DType.FP32, shape=rows, name="lse")
    gradients = [empty_like(a) for a in (x, y, z)]
    shape = (problem.B, problem.H, 2, padded_length(problem.T))
    stats = empty_like(x, shape=shape, dtype=DType.FP32)
    dq, dk, dv = (describe(g, dtype=x.dtype).address for g in gradients)
    _backward(
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
