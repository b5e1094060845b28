"""Embedding, norms, SwiGLU of the cpu engine against the float64 oracles.

Inputs are rounded to the storage format first, and the oracle gets those values: what is left is
float32 arithmetic (a bound from the count of roundings, U = 2^-24) and one store.
"""

import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from tests import oracles
from tests.model.harness import U, assert_within, f64, garbage, ints, make_ops, small_model, tensor

STORAGE = [DType.FP32, DType.BF16]
# one row, odd, more rows than a slice of 65,536 elements holds at C = 896
ROWS = [(1, 32), (7, 48), (150, 896)]


@pytest.mark.parametrize("dtype", STORAGE)
def test_embedding_copies(dtype):
    rng = np.random.default_rng(1)
    table, tokens = tensor(rng.standard_normal((48, 32)), dtype), ints(rng.integers(0, 37, (3, 5)))
    x = garbage(15, 32, dtype=dtype)
    make_ops().embedding(x, tokens, table)
    assert np.array_equal(f64(x), oracles.embedding(tokens.data.ravel(), f64(table)))


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("N", "V"), [(1, 48), (17, 16), (600, 48)])  # 600: each token many times
def test_embedding_backward(dtype, accumulate, N, V):
    rng = np.random.default_rng(2)
    dx, tokens = tensor(rng.standard_normal((N, 32)), dtype), ints(rng.integers(0, V - 3, (1, N)))
    before = rng.standard_normal((V, 32))
    dtable = tensor(before, dtype) if accumulate else garbage(V, 32, dtype=dtype)
    start = f64(dtable) if accumulate else np.zeros((V, 32))
    order = ints(np.argsort(tokens.data.ravel(), kind="stable"))
    make_ops().embedding_backward(dtable, dx, tokens, order, accumulate=accumulate)
    want = start + oracles.embedding_backward(f64(dx), tokens.data.ravel(), V)
    count = np.bincount(tokens.data.ravel(), minlength=V)[:, None]
    size = np.abs(start) + oracles.embedding_backward(np.abs(f64(dx)), tokens.data.ravel(), V)
    assert_within(dtable, want, (count + 1) * U * size)
    untouched = count[:, 0] == 0
    assert np.array_equal(f64(dtable)[untouched], start[untouched])


def rstd_bound(C: int) -> float:
    """Relative: C products and C sums of one sign, mean, eps, root (halves) and reciprocal."""
    return ((C + 3) / 2 + 2) * U


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("N", "C"), ROWS)
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])  # 1e-4: eps is most of the mean square
def test_rmsnorm(dtype, N, C, magnitude):
    rng = np.random.default_rng(3)
    x = tensor(magnitude * rng.standard_normal((N, C)), dtype)
    weight = tensor(1 + rng.standard_normal(C), dtype)
    y, rstd = garbage(N, C, dtype=dtype), garbage(N)
    make_ops().rmsnorm(y, rstd, x, weight)
    want, want_rstd = oracles.rmsnorm(f64(x), f64(weight), eps=1e-5)
    assert_within(rstd, want_rstd, rstd_bound(C) * want_rstd)
    assert_within(y, want, (rstd_bound(C) + 3 * U) * np.abs(want))


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("N", "C"), ROWS)
def test_residual_rmsnorm_norms_the_rounded_sum(dtype, N, C):
    rng = np.random.default_rng(4)
    residual, x = (tensor(rng.standard_normal((N, C)), dtype) for _ in range(2))
    weight = tensor(1 + rng.standard_normal(C), dtype)
    out, y, rstd = garbage(N, C, dtype=dtype), garbage(N, C, dtype=dtype), garbage(N)
    ops = make_ops()
    ops.residual_rmsnorm(out, y, rstd, residual, x, weight)
    total = f64(residual) + f64(x)
    assert_within(out, total, U * np.abs(total))
    again, rstd_again = garbage(N, C, dtype=dtype), garbage(N)
    ops.rmsnorm(again, rstd_again, out, weight)  # what recomputation does: the same bits
    assert np.array_equal(f64(again), f64(y)) and np.array_equal(rstd_again.data, rstd.data)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("N", "C"), ROWS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_rmsnorm_backward(dtype, N, C, accumulate, residual):
    rng = np.random.default_rng(5)
    x, dy = (tensor(rng.standard_normal((N, C)), dtype) for _ in range(2))
    weight, stream = tensor(1 + rng.standard_normal(C), dtype), rng.standard_normal((N, C))
    rstd64 = oracles.rmsnorm(f64(x), f64(weight), eps=1e-5)[1]
    dx = tensor(stream, dtype) if residual else garbage(N, C, dtype=dtype)
    through = f64(dx) if residual else np.zeros((N, C))
    dweight = tensor(stream[0], dtype) if accumulate else garbage(C, dtype=dtype)
    start = f64(dweight) if accumulate else np.zeros(C)
    make_ops().rmsnorm_backward(  # in place, as the block uses it
        dx, dweight, dy, dx if residual else None, x, weight, tensor(rstd64), accumulate=accumulate
    )
    want, want_dweight = oracles.rmsnorm_backward(f64(dy), f64(x), f64(weight), eps=1e-5)
    # x_hat: rstd's rounding and a product, 2 U; the mean: C sums of products of three roundings
    x_hat, g = np.abs(f64(x)) * rstd64[:, None], np.abs(f64(dy) * f64(weight))
    mean = (g * x_hat).mean(axis=1, keepdims=True)
    bound = rstd64[:, None] * U * (4 * g + (C + 10) * x_hat * mean) + U * np.abs(through + want)
    assert_within(dx, through + want, bound)
    size = np.abs(start) + (np.abs(f64(dy)) * x_hat).sum(axis=0)
    assert_within(dweight, start + want_dweight, (N + 4) * U * size)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("H", "G"), [(1, 1), (4, 2), (7, 1)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_qk_norm_and_its_backward(dtype, H, G, accumulate):
    rng = np.random.default_rng(6)
    B, T, D = 1, 13, 16
    N, width, n = B * T, (H + 2 * G) * D, H + G
    ops = make_ops(small_model(H=H, G=G, qk_norm=True))
    qkv, dheads = (tensor(rng.standard_normal((N, width)), dtype) for _ in range(2))
    wq, wk = (tensor(1 + 0.5 * rng.standard_normal(D), dtype) for _ in range(2))
    weights = (wq, wk)
    heads, rstd = garbage(N, width, dtype=dtype), garbage(N, n)
    ops.qk_norm(heads, rstd, qkv, wq, wk)

    def split(t):
        return oracles.split_qkv(f64(t).reshape(B, T, width), H, G, D)

    q, k, v = split(qkv)
    got_q, got_k, got_v = (tensor(part) for part in split(heads))
    want = oracles.qk_norm(q, k, f64(weights[0]), f64(weights[1]), eps=1e-5)
    want_rstd = np.concatenate(want[2:], axis=-1).reshape(N, n)
    assert_within(rstd, want_rstd, rstd_bound(D) * want_rstd)
    for got, part in ((got_q, want[0]), (got_k, want[1])):
        got.dtype = dtype
        assert_within(got, part, (rstd_bound(D) + 3 * U) * np.abs(part))
    assert np.array_equal(got_v.data, v)

    dqkv = garbage(N, width, dtype=dtype)
    before = rng.standard_normal((2, D))
    dweights = [tensor(b, dtype) if accumulate else garbage(D, dtype=dtype) for b in before]
    start = [f64(d) if accumulate else np.zeros(D) for d in dweights]
    stored = tensor(want_rstd)
    dwq, dwk = dweights
    ops.qk_norm_backward(dqkv, dwq, dwk, dheads, qkv, wq, wk, stored, accumulate=accumulate)
    dq, dk, dv = split(dheads)
    want = oracles.qk_norm_backward(dq, dk, q, k, f64(weights[0]), f64(weights[1]), eps=1e-5)
    got = split(dqkv)
    assert np.array_equal(got[2], dv)
    for i, (dy, x) in enumerate(((dq, q), (dk, k))):
        r = oracles.rmsnorm(x, f64(weights[i]), eps=1e-5)[1][..., None]
        x_hat, g = np.abs(x) * r, np.abs(dy * f64(weights[i]))
        mean = (g * x_hat).mean(axis=-1, keepdims=True)
        part = tensor(got[i])
        part.dtype = dtype
        assert_within(part, want[i], r * U * (4 * g + (D + 10) * x_hat * mean))
        size = np.abs(start[i]) + (np.abs(dy) * x_hat).reshape(-1, D).sum(axis=0)
        assert_within(dweights[i], start[i] + want[2 + i], (N * x.shape[2] + 4) * U * size)


# sigmoid: exp within 4 units (its own test below), sum, reciprocal: 6 U; silu and product 2 U
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize(("N", "F"), [(1, 16), (5, 48), (100, 896)])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 60.0])  # 60: exp overflows for some
def test_swiglu_and_its_backward(dtype, N, F, magnitude):
    rng = np.random.default_rng(7)
    gate_up, dy = tensor(rng.standard_normal((N, 2 * F)), dtype), tensor(rng.random((N, F)), dtype)
    gate_up.data[:, :F] *= np.asarray(magnitude, gate_up.data.dtype)
    gate, up, grad = f64(gate_up)[:, :F], f64(gate_up)[:, F:], f64(dy)
    y, d = garbage(N, F, dtype=dtype), garbage(N, 2 * F, dtype=dtype)
    ops = make_ops()
    ops.swiglu(y, gate_up)
    ops.swiglu_backward(d, dy, gate_up)
    vanished = 1e-36 * np.abs(up)  # where exp overflows silu is 0 instead of at most 1e-36
    want = oracles.swiglu(gate, up)
    assert_within(y, want, 8 * U * np.abs(want) + vanished)
    dgate, dup = oracles.swiglu_backward(grad, gate, up)
    # 1 - sigmoid keeps sigmoid's absolute error, which silu multiplies
    size = oracles.swiglu(gate, 1.0)
    slope = 1 / (1 + np.exp(np.minimum(-gate, 700))) + np.abs(size)
    bound = np.concatenate(
        [16 * U * np.abs(grad * up) * slope + vanished * 100, 8 * U * np.abs(dup) + 1e-36], axis=1
    )
    assert_within(d, np.concatenate([dgate, dup], axis=1), bound)


def test_exp_of_float32_is_within_four_units():
    x = np.random.default_rng(8).uniform(-87, 87, 1 << 20).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    assert (np.abs(np.exp(x) - want) <= 4 * U * want).all()
