"""Attention in float64: QK norm, rotary embedding, causal grouped attention, document starts.

Shapes: q [B, T, H, D]; k, v [B, T, G, D]; query head h reads key/value head h // (H / G).
segment_start: int [B, T], index of the first token of t's document. Shares nothing with llmq_nb.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tests.oracles.layers import Array, f64, rmsnorm, rmsnorm_backward


def split_qkv(qkv: ArrayLike, H: int, G: int, D: int) -> tuple[Array, Array, Array]:
    """(q, k, v) of the fused columns [q | k | v] of qkv [B, T, (H + 2 G) D]."""
    heads = f64(qkv).reshape(*np.shape(qkv)[:-1], H + 2 * G, D)
    return heads[..., :H, :], heads[..., H : H + G, :], heads[..., H + G :, :]


def join_qkv(q: Array, k: Array, v: Array) -> Array:
    """The inverse of split_qkv: [B, T, (H + 2 G) D]."""
    heads = np.concatenate([q, k, v], axis=-2)
    return heads.reshape(*heads.shape[:-2], -1)


def qk_norm(
    q: ArrayLike, k: ArrayLike, q_weight: ArrayLike, k_weight: ArrayLike, *, eps: float
) -> tuple[Array, Array, Array, Array]:
    """(q, k, q_rstd [B, T, H], k_rstd [B, T, G]): each head normalised over D; weights [D]."""
    q_out, q_rstd = rmsnorm(q, q_weight, eps=eps)
    k_out, k_rstd = rmsnorm(k, k_weight, eps=eps)
    return q_out, k_out, q_rstd, k_rstd


def qk_norm_backward(
    dq: ArrayLike,
    dk: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    q_weight: ArrayLike,
    k_weight: ArrayLike,
    *,
    eps: float,
) -> tuple[Array, Array, Array, Array]:
    """(dq, dk, dq_weight [D], dk_weight [D]); q, k are the inputs of the forward."""
    dq_in, dq_weight = rmsnorm_backward(dq, q, q_weight, eps=eps)
    dk_in, dk_weight = rmsnorm_backward(dk, k, k_weight, eps=eps)
    return dq_in, dk_in, dq_weight, dk_weight


def rope_frequencies(D: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Array:
    """Angle per position of each of the D / 2 planes, radians: theta^(-2 i / D).

    scaling with rope_type "llama3" (Llama 3.1): a plane that turns more than high_freq_factor times
    within the original context keeps its frequency, one that turns less than low_freq_factor times
    is slowed by factor, between them the two are blended linearly in the number of turns.
    Sources: Su et al. 2021, eq. 15; Meta's Llama 3.1 release.
    """
    frequencies = theta ** (-2.0 * np.arange(D // 2) / D)
    if scaling is None or scaling.get("rope_type", "default") == "default":
        return frequencies
    if scaling["rope_type"] != "llama3":
        raise ValueError(f"rope_type {scaling['rope_type']!r}")
    turns = scaling["original_max_position_embeddings"] * frequencies / (2.0 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling["factor"]


def rope(x: ArrayLike, positions: ArrayLike, frequencies: Array) -> Array:
    """Rotate plane (x[i], x[i + D/2]) by positions * frequencies[i]. x: [B, T, heads, D].

    The halves convention of Hugging Face, not the interleaved pairs of the paper.
    """
    x = f64(x)
    half = x.shape[-1] // 2
    angle = f64(positions)[:, :, None, None] * frequencies
    plane = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([plane.real, plane.imag], axis=-1)


def rope_backward(dy: ArrayLike, positions: ArrayLike, frequencies: Array) -> Array:
    """A rotation's transpose is the rotation back."""
    return rope(dy, -f64(positions), frequencies)


def _probabilities(q: Array, k: Array, segment_start: ArrayLike) -> tuple[Array, Array]:
    """(p [B, H, T, T], lse [B, H, T]) of scores q k^T / sqrt(D), k repeated to H heads."""
    T, D = q.shape[1], q.shape[3]
    scores = np.einsum("bthd,bshd->bhts", q, k) / math.sqrt(D)
    query, key = np.arange(T)[:, None], np.arange(T)[None, :]
    start = np.asarray(segment_start)[:, :, None]
    allowed = (key <= query) & (key >= start)
    scores = np.where(allowed[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(axis=-1, keepdims=True)
    return p / total, (top + np.log(total))[..., 0]


def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, segment_start: ArrayLike
) -> tuple[Array, Array]:
    """(out [B, T, H, D], lse [B, H, T]): softmax over the keys of the same document up to t.

    lse = ln sum_s exp(q_t k_s / sqrt(D)).
    """
    q, k, v = f64(q), f64(k), f64(v)
    group = q.shape[2] // k.shape[2]
    p, lse = _probabilities(q, k.repeat(group, axis=2), segment_start)
    return np.einsum("bhts,bshd->bthd", p, v.repeat(group, axis=2)), lse


def attention_backward(
    dout: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, segment_start: ArrayLike
) -> tuple[Array, Array, Array]:
    """(dq [B, T, H, D], dk, dv [B, T, G, D]): with p the softmax and s the scores,

    dp = dout v^T, ds = p (dp - sum_s p dp) / sqrt(D), dq = ds k, dk = ds^T q, dv = p^T dout;
    dk and dv are summed over the query heads of a group.
    """
    dout, q, k, v = f64(dout), f64(q), f64(k), f64(v)
    G, D = k.shape[2], k.shape[3]
    group = q.shape[2] // G
    k_heads, v_heads = k.repeat(group, axis=2), v.repeat(group, axis=2)
    p, _ = _probabilities(q, k_heads, segment_start)
    dp = np.einsum("bthd,bshd->bhts", dout, v_heads)
    ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True)) / math.sqrt(D)
    dq = np.einsum("bhts,bshd->bthd", ds, k_heads)
    dk = np.einsum("bhts,bthd->bshd", ds, q)
    dv = np.einsum("bhts,bthd->bshd", p, dout)
    shape = (*k.shape[:2], G, group, D)
    return dq, dk.reshape(shape).sum(axis=3), dv.reshape(shape).sum(axis=3)
