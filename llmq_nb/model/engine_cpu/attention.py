"""RoPE and causal attention with document starts, forward and backward, on NumPy arrays.

    rope       (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), the two halves of a head
    attention  S = q k^T / sqrt(D), P = softmax(S) over keys segment_start[t] <= s <= t, out = P v
    cached     the same over keys and values 0 <= s <= t - segment_start[t] of a cache
    backward   P = exp(S - lse), dP = dout v^T, delta = sum(dout out), dS = P (dP - delta)
               dq = dS k / sqrt(D), dk = dS^T q / sqrt(D), dv = P^T dout

A sequence is done in blocks of queries against the keys that any of them sees, so neither the upper
triangle nor other documents cost anything, and P never exists whole.

Source   Su et al. 2021, arXiv:2104.09864 (RoPE, in the half-split form of Hugging Face's models);
         Dao 2023, arXiv:2307.08691 (backward from lse). Written from the equations.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.rounding import to_float32
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu.rows import each, each_rows

Array = NDArray[Any]
Float = NDArray[np.float32]
QUERIES = 128
"""Queries of a block."""


def rope_tables(config: ModelConfig, length: int) -> tuple[Float, Float]:
    """(cos, sin) of every position below `length`: (length, D / 2) float32, computed in float64."""
    half = np.arange(0, config.D, 2, dtype=np.float64) / config.D
    frequency = config.rope_theta**-half
    if config.rope_scaling is not None:
        s = config.rope_scaling
        turns = s.original_max_position * frequency / (2.0 * np.pi)  # within the original context
        smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)  # 0: slow, fully stretched; 1: fast, as it was
        frequency = frequency * (smooth + (1.0 - smooth) / s.factor)
    angle = np.arange(length, dtype=np.float64)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(heads: Array, positions: NDArray[np.int64], cos: Float, sin: Float, sign: float) -> None:
    """Rotate (N, heads, D) in place by sign * angle of each row's position."""
    half = heads.shape[-1] // 2

    def work(rows: slice) -> None:
        c, s = cos[positions[rows], None], sin[positions[rows], None] * np.float32(sign)
        x = to_float32(heads[rows])
        x1, x2 = x[..., :half], x[..., half:]
        heads[rows] = np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s], axis=-1)

    each_rows(work, heads.shape[0], heads.shape[1] * heads.shape[2])


def _blocks(starts: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """(first query, end of queries, first key) of each block of a sequence."""
    T = starts.size
    blocks = ((q, min(q + QUERIES, T)) for q in range(0, T, QUERIES))
    return [(q, end, int(starts[q:end].min())) for q, end in blocks]


def _scores(q: Float, k: Float, starts: NDArray[np.int32], block: tuple[int, int, int]) -> Float:
    """Masked scores of one block: (repeat, queries, keys). q: (repeat, T, D) scaled, k: (T, D)."""
    first, end, key = block
    scores = q[:, first:end] @ k[key:end].T
    t, s = np.arange(first, end)[:, None], np.arange(key, end)
    hidden = (s > t) | (s < starts[first:end, None])
    scores += np.where(hidden, np.float32(-np.inf), np.float32(0.0))
    return scores


def _split(heads: Array, config: ModelConfig, b: int, g: int) -> tuple[Float, Float, Float]:
    """One key/value group as float32: q (H / G, T, D) over sqrt(D), k and v (T, D).

    heads: (B, T, H + 2 G, D).
    """
    repeat = config.H // config.G
    q = to_float32(heads[b, :, g * repeat : (g + 1) * repeat]).transpose(1, 0, 2)
    scale = np.float32(1.0 / np.sqrt(config.D))
    k = to_float32(heads[b, :, config.H + g])
    v = to_float32(heads[b, :, config.H + config.G + g])
    return np.ascontiguousarray(q) * scale, np.ascontiguousarray(k), np.ascontiguousarray(v)


def attention(
    out: Array, lse: Float, heads: Array, segment_start: NDArray[np.int32], config: ModelConfig
) -> None:
    """out: (B, T, H, D), lse: (B, H, T), heads: (B, T, H + 2 G, D), segment_start: (B, T)."""
    repeat = config.H // config.G

    def work(i: int) -> None:
        b, g = divmod(i, config.G)
        own = slice(g * repeat, (g + 1) * repeat)
        q, k, v = _split(heads, config, b, g)
        for block in _blocks(segment_start[b]):
            first, end, key = block
            p = _scores(q, k, segment_start[b], block)
            top = p.max(axis=-1, keepdims=True)
            np.exp(np.subtract(p, top, out=p), out=p)
            total = p.sum(axis=-1, keepdims=True)
            out[b, first:end, own] = ((p @ v[key:end]) / total).transpose(1, 0, 2)
            lse[b, own, first:end] = (top + np.log(total))[..., 0]

    each(work, heads.shape[0] * config.G)


def cached_attention(
    out: Array, heads: Array, cache: Array, segment_start: NDArray[np.int32], config: ModelConfig
) -> None:
    """out: (B, T, H, D), heads: (B, T, H + 2 G, D), cache: (B, S, 2 G D); see `Ops`."""
    T, S = heads.shape[1], cache.shape[1]
    repeat, G = config.H // config.G, config.G
    positions = np.arange(T) - segment_start
    for b in range(heads.shape[0]):
        kept = positions[b] < S
        cache[b, positions[b][kept]] = heads[b, kept, config.H :].reshape(-1, cache.shape[2])
    scale = np.float32(1.0 / np.sqrt(config.D))

    def work(i: int) -> None:
        b, g = divmod(i, G)
        own = slice(g * repeat, (g + 1) * repeat)
        length = min(int(positions[b].max()) + 1, S)
        kv = to_float32(cache[b, :length]).reshape(length, 2, G, config.D)
        q = to_float32(heads[b, :, own]).transpose(1, 0, 2) * scale
        hidden = np.arange(length) > positions[b][:, None]
        p = np.where(hidden, np.float32(-np.inf), q @ kv[:, 0, g].T)
        np.exp(np.subtract(p, p.max(axis=-1, keepdims=True), out=p), out=p)
        summed = p @ np.ascontiguousarray(kv[:, 1, g])
        out[b, :, own] = (summed / p.sum(axis=-1, keepdims=True)).transpose(1, 0, 2)

    each(work, heads.shape[0] * G)


def attention_backward(
    dheads: Array,
    dout: Array,
    out: Array,
    lse: Float,
    heads: Array,
    segment_start: NDArray[np.int32],
    config: ModelConfig,
) -> None:
    """dheads: as heads; dout: as out."""
    repeat = config.H // config.G
    scale = np.float32(1.0 / np.sqrt(config.D))

    def work(i: int) -> None:
        b, g = divmod(i, config.G)
        own = slice(g * repeat, (g + 1) * repeat)
        q, k, v = _split(heads, config, b, g)
        do = np.ascontiguousarray(to_float32(dout[b, :, own]).transpose(1, 0, 2))
        delta = np.einsum("rtd,trd->rt", do, to_float32(out[b, :, own]))
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        for block in _blocks(segment_start[b]):
            first, end, key = block
            p = _scores(q, k, segment_start[b], block)
            np.exp(np.subtract(p, lse[b, own, first:end, None], out=p), out=p)
            flat = (repeat * (end - first), -1)
            block_do = do[:, first:end].reshape(flat)
            dv[key:end] += p.reshape(flat).T @ block_do
            ds = do[:, first:end] @ v[key:end].T
            ds -= delta[:, first:end, None]
            ds *= p
            dheads[b, first:end, own] = ((ds @ k[key:end]) * scale).transpose(1, 0, 2)
            dk[key:end] += ds.reshape(flat).T @ q[:, first:end].reshape(flat)  # q holds the scale
        dheads[b, :, config.H + g] = dk
        dheads[b, :, config.H + config.G + g] = dv

    each(work, heads.shape[0] * config.G)
