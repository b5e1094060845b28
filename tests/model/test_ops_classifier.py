"""Cross entropy and the loss's reduction of the cpu engine against the float64 oracle."""

import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from tests import oracles
from tests.model.harness import U, assert_within, f64, garbage, ints, make_ops, small_model, tensor

STORAGE = [DType.FP32, DType.BF16]
IGNORED = -100


def case(N, V, dtype, *, magnitude=3.0, shift=0.0, masked=0.4, seed=1):
    """(model, logits with rubbish in the padded columns, targets)."""
    rng = np.random.default_rng(seed)
    model = small_model(V=V)
    logits = magnitude * rng.standard_normal((N, model.padded_vocab)) + shift
    logits[:, V:] = 1e3  # would be the largest of each row
    targets = np.where(rng.random(N) < masked, IGNORED, rng.integers(0, V, N))
    return model, tensor(logits, dtype), targets


def row_terms(x, V):
    """(softmax, relative error of it, error of lse): a difference, exp, V sums, a logarithm."""
    top = x.max(axis=1, keepdims=True)
    p = np.exp(x - top)
    p /= p.sum(axis=1, keepdims=True)
    spread = np.abs(x - top).max(axis=1)
    relative = (V + 16 + 2 * spread) * U
    lse = np.log(np.exp(x - top).sum(axis=1)) + top[:, 0]
    return p, relative, (V + 8 + spread) * U + 2 * U * np.abs(lse)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("V", [16, 37, 101, 1000])  # 37, 101, 1000: padded columns
@pytest.mark.parametrize("N", [1, 33])
@pytest.mark.parametrize(
    ("z_loss", "shift"), [(0.0, 0.0), (1e-2, 0.0), (1e-2, -40.0), (1.0, -200.0)]
)
def test_cross_entropy(dtype, V, N, z_loss, shift):
    """shift < 0: negative lse, with which LLMQ's z-loss is NaN (Q15).

    Q7: a masked row is zero up to the last padded column of a V that is no multiple of 8, and has
    its lse.
    """
    model, logits, targets = case(N, V, dtype, shift=shift)
    x = f64(logits)[:, :V]
    ops = make_ops(model, z_loss=z_loss)
    ops.scalars.inv_supervised = 1 / 7
    loss, lse = garbage(N), garbage(N)
    ops.cross_entropy(logits, loss, lse, ints(targets), gradient=True)
    want, want_lse = oracles.cross_entropy_rows(x, targets, z_loss=z_loss)
    p, relative, error = row_terms(x, V)
    masked = targets == IGNORED
    if shift:
        assert (want_lse < 0).all()
    assert_within(lse, want_lse, error)  # Q7: of masked rows too
    slope = 1 + 2 * z_loss * np.abs(want_lse)
    terms = np.abs(want_lse) + np.abs(x).max(axis=1) + z_loss * want_lse**2
    assert_within(loss, want, error * slope + 4 * U * terms)
    assert (f64(loss)[masked] == 0).all()

    dlogits = oracles.cross_entropy_backward(x, targets, z_loss=z_loss, supervised=7)
    bound = p * (slope * (relative + 4 * U) + 2 * z_loss * error)[:, None] / 7
    onehot = np.zeros_like(p)
    onehot[np.arange(N), np.where(masked, 0, targets)] = 1
    bound = bound + 3 * U * onehot / 7 + U * np.abs(dlogits)
    got = tensor(f64(logits)[:, :V])
    got.dtype = dtype
    assert_within(got, dlogits, np.where(masked[:, None], 0, bound))
    rows = f64(logits)
    assert (rows[masked] == 0).all() and (rows[:, V:] == 0).all()  # Q7: padded columns too


@pytest.mark.parametrize("V", [37, 1000])
def test_without_gradient_the_logits_stay_and_z_is_zero(V):
    model, logits, targets = case(9, V, DType.BF16)
    before = logits.data.copy()
    loss, lse = garbage(9), garbage(9)
    make_ops(model, z_loss=0.5).cross_entropy(logits, loss, lse, ints(targets), gradient=False)
    assert np.array_equal(logits.data, before)
    x = f64(logits)[:, :V]
    want, want_lse = oracles.cross_entropy_rows(x, targets)
    error = row_terms(x, V)[2]
    assert_within(lse, want_lse, error)
    assert_within(loss, want, error + 4 * U * (np.abs(want_lse) + np.abs(x).max(axis=1)))


def test_infinite_logits():
    """-inf is probability 0; +inf and NaN make the row's loss NaN, and masked rows stay zero."""
    model, logits, _ = case(6, 37, DType.FP32)
    targets = np.array([0, 1, 2, IGNORED, IGNORED, 3])
    logits.data[0, 5], logits.data[1, 5], logits.data[2, 5] = -np.inf, np.inf, np.nan
    logits.data[3, 5], logits.data[4, 5] = np.inf, np.nan
    ops = make_ops(model)
    ops.scalars.inv_supervised = 1.0
    loss, lse = garbage(6), garbage(6)
    x = f64(logits)[:, :37]
    with np.errstate(invalid="ignore"):
        ops.cross_entropy(logits, loss, lse, ints(targets), gradient=True)
    assert np.isnan(f64(loss)[[1, 2]]).all() and np.isnan(f64(lse)[[1, 2, 3, 4]]).all()
    assert (f64(loss)[[3, 4]] == 0).all() and (f64(logits)[[3, 4]] == 0).all()
    assert f64(logits)[0, 5] == 0
    good = [0, 5]
    want, _ = oracles.cross_entropy_rows(x[good], targets[good])
    assert np.abs(f64(loss)[good] - want).max() < 100 * U
    assert np.isnan(f64(logits)[1, :37]).any() and np.isnan(f64(logits)[2, :37]).any()


def test_large_logits_do_not_overflow():
    model, logits, targets = case(8, 37, DType.FP32, magnitude=1e30, masked=0.0)
    ops = make_ops(model)
    ops.scalars.inv_supervised = 1.0
    loss, lse = garbage(8), garbage(8)
    x = f64(logits)[:, :37]
    ops.cross_entropy(logits, loss, lse, ints(targets), gradient=True)
    want, want_lse = oracles.cross_entropy_rows(x, targets)
    size = np.abs(x).max(axis=1)
    assert_within(loss, want, 4 * U * size)
    assert_within(lse, want_lse, 4 * U * size)
    assert_within(logits, np.pad(oracles.cross_entropy_backward(x, targets, supervised=1),
                                 ((0, 0), (0, 11))), 4 * U)  # fmt: skip


def test_reduce_loss_sums_means_and_keeps_the_largest_lse():
    rng = np.random.default_rng(2)
    losses, lses = rng.random((3, 5000)) * 10, rng.standard_normal((3, 5000)) - 20
    ops, total = make_ops(), garbage(2)
    ops.scalars.inv_supervised = 1 / 9000
    for i in range(3):
        ops.reduce_loss(total, tensor(losses[i]), tensor(lses[i]), accumulate=i > 0)
    want = losses.astype(np.float32).sum(dtype=np.float64) / 9000
    # each partial mean rounds to float32, and each addition of it
    assert abs(f64(total)[0] - want) <= 5 * U * want
    assert f64(total)[1] == lses.astype(np.float32).max()  # negative: no zero of the start in it
