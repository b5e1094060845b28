"""RoPE and attention of the cpu engine against the float64 oracles.

Bounds follow the roundings of the equations (U = 2^-24); a score is a sum of D products, so it is
wrong by at most (D + 2) U sum |q k| / sqrt(D), and everything after it is first order in that.
"""

import math

import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.model.config import Llama3Rope
from llmq_nb.model.engine_cpu.attention import QUERIES, rope_tables, rotate
from tests import oracles
from tests.model.harness import (
    U,
    assert_within,
    f64,
    garbage,
    half_ulp,
    ints,
    make_ops,
    small_model,
    tensor,
)

STORAGE = [DType.FP32, DType.BF16]
D = 16


def starts_of(documents: list[list[int]], T: int) -> np.ndarray:
    return np.array([[max(s for s in row if s <= t) for t in range(T)] for row in documents])


# name: (B, T, first tokens of the documents of each sequence)
LAYOUTS = {
    "one_token": (1, 1, [[0]]),
    "odd": (2, 37, [[0], [0, 1, 2, 20]]),
    "one_block": (1, QUERIES, [[0, 127]]),
    "past_a_block": (1, QUERIES + 1, [[0]]),
    "documents_across_blocks": (2, 300, [[0, 100, 128, 129, 255, 257, 299], [0, 250]]),
    "all_single": (1, 140, [list(range(140))]),
}


def case(layout: str, H: int, G: int, dtype: DType, seed: int):
    B, T, documents = LAYOUTS[layout]
    rng = np.random.default_rng(seed)
    heads = tensor(rng.standard_normal((B * T, (H + 2 * G) * D)), dtype)
    q, k, v = oracles.split_qkv(f64(heads).reshape(B, T, -1), H, G, D)
    return B, T, starts_of(documents, T), heads, q, k, v, rng


SCALINGS = [None, Llama3Rope(factor=8, low_freq_factor=1, high_freq_factor=4,
                             original_max_position=64)]  # fmt: skip


def hf_scaling(s: Llama3Rope | None):
    if s is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": s.factor,
        "low_freq_factor": s.low_freq_factor,
        "high_freq_factor": s.high_freq_factor,
        "original_max_position_embeddings": s.original_max_position,
    }


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("scaling", SCALINGS, ids=["default", "llama3"])
@pytest.mark.parametrize("layout", ["one_token", "odd", "documents_across_blocks"])
@pytest.mark.parametrize("backward", [False, True])
def test_rope_restarts_at_each_document(dtype, scaling, layout, backward):
    """Positions are t - segment_start[t]: attention cannot see it (rotations cancel), so look."""
    H, G = 4, 2
    B, T, starts, heads, q, k, v, _ = case(layout, H, G, dtype, 1)
    model = small_model(H=H, G=G, rope_theta=5e5, rope_scaling=scaling)
    ops = make_ops(model, seq_len=T)
    (ops.rope_backward if backward else ops.rope)(heads, ints(starts))
    frequencies = oracles.rope_frequencies(D, 5e5, hf_scaling(scaling))
    positions = np.arange(T) - starts
    assert (positions[:, 0] == 0).all() and positions.min() == 0
    turned = oracles.rope_backward if backward else oracles.rope
    got = oracles.split_qkv(f64(heads).reshape(B, T, -1), H, G, D)
    for x, y in ((q, got[0]), (k, got[1])):
        want = turned(x, positions, frequencies)
        out = tensor(y)
        out.dtype = dtype
        # each half: two products of a rounded table entry and a sum, 4 U of |x1| + |x2|
        half = np.abs(x[..., : D // 2]) + np.abs(x[..., D // 2 :])
        assert_within(out, want, 4 * U * np.concatenate([half, half], axis=-1))
    assert np.array_equal(got[2], v)


def test_rotation_of_two_documents_is_that_of_each_alone():
    """Without an oracle: the second document's rows have the bits of a sequence of its own."""
    cos, sin = rope_tables(small_model(), 64)
    x = np.random.default_rng(2).standard_normal((40, 3, D)).astype(np.float32)
    both, alone = x.copy(), x[25:].copy()
    rotate(both, np.concatenate([np.arange(25), np.arange(15)]), cos, sin, 1.0)
    rotate(alone, np.arange(15), cos, sin, 1.0)
    assert np.array_equal(both[25:], alone)
    assert np.array_equal(both[25], x[25])  # position 0 does not turn
    rotate(both, np.concatenate([np.arange(25), np.arange(15)]), cos, sin, -1.0)
    assert np.abs(both - x).max() <= 8 * U * 2 * np.abs(x).max()


def score_terms(q, k, starts):
    """(allowed, p, error of a score), (B, H, T, T) each; k repeated to the query heads."""
    T = q.shape[1]
    scale = 1 / math.sqrt(D)
    s = np.einsum("bthd,bshd->bhts", q, k) * scale
    size = np.einsum("bthd,bshd->bhts", np.abs(q), np.abs(k)) * scale
    t, u = np.arange(T)[:, None], np.arange(T)
    allowed = ((u <= t) & (u >= starts[:, :, None]))[:, None]
    s = np.where(allowed, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    # q scale rounds, D products and sums, subtraction of the largest score or of lse
    largest = np.where(allowed, np.abs(s), 0).max(-1, keepdims=True)
    error = np.where(allowed, (D + 3) * U * size + 2 * U * largest, 0)
    return p, error.max(-1, keepdims=True)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("H", "G"), [(2, 2), (4, 2), (7, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_and_its_backward(dtype, H, G, layout):
    B, T, starts, heads, q, k, v, rng = case(layout, H, G, dtype, 3)
    ops = make_ops(small_model(H=H, G=G), seq_len=T)
    out, lse = garbage(B * T, H * D, dtype=dtype), garbage(B, H, T)
    ops.attention(out, lse, heads, ints(starts))
    want, want_lse = oracles.attention(q, k, v, starts)
    K, V = k.repeat(H // G, axis=2), v.repeat(H // G, axis=2)
    p, es = score_terms(q, K, starts)
    # weights: both scores of a quotient, exp and T sums; then T products with v
    weight = 2 * es + (2 * T + 16) * U
    bound = np.einsum("bhts,bshd->bthd", p * weight, np.abs(V))
    assert_within(out, want.reshape(B * T, -1), bound.reshape(B * T, -1))
    lse_bound = es[..., 0] + (T + 8) * U + U * np.abs(want_lse)
    assert_within(lse, want_lse, lse_bound)

    dout = tensor(rng.standard_normal((B * T, H * D)), dtype)
    stored_out, stored_lse = tensor(want.reshape(B * T, -1), dtype), tensor(want_lse)
    d = garbage(*heads.shape, dtype=dtype)
    ops.attention_backward(d, dout, stored_out, stored_lse, heads, ints(starts))
    do = f64(dout).reshape(B, T, H, D)
    dq, dk, dv = oracles.attention_backward(do, q, k, v, starts)
    # p from the stored lse; dp: D products; delta: D products with the stored (rounded) output
    ep = es + 8 * U + U * np.abs(want_lse)[..., None]
    dp = np.einsum("bthd,bshd->bhts", do, V)
    edp = (D + 1) * U * np.einsum("bthd,bshd->bhts", np.abs(do), np.abs(V))
    delta = np.einsum("bthd,bthd->bht", do, want)[..., None]
    store = half_ulp(want) if dtype is DType.BF16 else U * np.abs(want)
    edelta = np.einsum("bthd,bthd->bht", np.abs(do), (D + 1) * U * np.abs(want) + store)[..., None]
    ds = p * (dp - delta)
    eds = np.abs(ds) * (ep + 2 * U) + p * (edp + edelta)
    scale, group = 1 / math.sqrt(D), (B, T, G, H // G, D)
    eds = (eds + (T + 3) * U * np.abs(ds)) * scale
    bounds = [
        np.einsum("bhts,bshd->bthd", eds, np.abs(K)),
        np.einsum("bhts,bthd->bshd", eds + H // G * T * U * np.abs(ds) * scale, np.abs(q)),
        np.einsum("bhts,bthd->bshd", p * (ep + (H // G * T + 3) * U), np.abs(do)),
    ]
    bounds[1:] = [b.reshape(group).sum(axis=3) for b in bounds[1:]]
    assert_within(d, join(B * T, dq, dk, dv), join(B * T, *bounds))


def join(rows, q, k, v):
    return oracles.join_qkv(q, k, v).reshape(rows, -1)


def test_another_document_changes_no_bit():
    """Q14: tokens before the start and after a row cannot be seen, not even by their values."""
    H, G = 4, 2
    B, T, starts, heads, *_ = case("documents_across_blocks", H, G, DType.FP32, 4)
    ops = make_ops(small_model(H=H, G=G), seq_len=T)
    out, lse = garbage(B * T, H * D), garbage(B, H, T)
    ops.attention(out, lse, heads, ints(starts))
    first, end = 129, 255  # the third long document of sequence 0
    changed = tensor(heads.data)
    changed.data[:first] *= 3
    changed.data[end:] -= 1
    out2, lse2 = garbage(B * T, H * D), garbage(B, H, T)
    ops.attention(out2, lse2, changed, ints(starts))
    assert np.array_equal(out.data[first:end], out2.data[first:end])
    assert not np.array_equal(out.data[:first], out2.data[:first])


def test_scores_far_apart_neither_overflow_nor_vanish():
    H, G, T = 2, 1, 50
    rng = np.random.default_rng(5)
    heads = tensor(rng.standard_normal((T, (H + 2 * G) * D)) * 30)  # scores of some thousand
    starts = np.zeros((1, T), np.int64)
    out, lse = garbage(T, H * D), garbage(1, H, T)
    make_ops(small_model(H=H, G=G)).attention(out, lse, heads, ints(starts))
    q, k, v = oracles.split_qkv(f64(heads).reshape(1, T, -1), H, G, D)
    want, want_lse = oracles.attention(q, k, v, starts)
    p, es = score_terms(q, k.repeat(H, axis=2), starts)
    bound = np.einsum("bhts,bshd->bthd", p * (2 * es + (2 * T + 16) * U), np.abs(v).repeat(H, 2))
    # a weight below float32's least normal is 0
    bound = bound + 1e-37 * np.abs(v).sum()
    # es is not small here (scores of 4000 are known to 4e-3), so first order needs its margin
    assert_within(out, want.reshape(T, -1), 1.1 * bound.reshape(T, -1))
    assert_within(lse, want_lse, es[..., 0] + (T + 8) * U + U * np.abs(want_lse))
