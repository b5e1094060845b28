"""Global norm and AdamW of the cpu engine against the float64 oracles.

Arithmetic is checked in float32 storage, one update at a time from the engine's own state. Storage
below float32 must be that float32 result, rounded stochastically with the bits of the counter:
compared to the bit with the oracle's rounding.
"""

from typing import Any

import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.core.rng import Purpose, bits16
from tests import oracles
from tests.model.harness import U, assert_within, f64, garbage, make_ops, tensor

# float32 values of the hyper-parameters, so that the oracle has the same numbers
BETA1, BETA2, EPSILON, DECAY, RATE = (float(np.float32(x)) for x in (0.9, 0.95, 1e-8, 0.1, 3e-3))
SEED, ID = 11, 5
# one value, a group of 128 and a bit, over one slice of 65,536
SIZES = [(1,), (130,), (257, 300)]


def norm_of(ops, grads):
    norms, total = garbage(len(grads)), garbage(3)
    ops.global_norm(norms, total, grads)
    return norms, total


def scaled_to(norm, dtype=DType.FP32):
    rng = np.random.default_rng(1)
    parts = [rng.standard_normal(s) for s in ((5, 7), (1,), (300, 11), (1024,), (3, 1025))]
    length = oracles.global_norm(parts)
    return [tensor(p * norm / length, dtype) for p in parts]


@pytest.mark.parametrize(
    ("norm", "clip", "clipped"), [(4, 1, 1.0), (0.6, 0.25, 0.25), (0.6, 1, 0.6), (1e3, 1e-3, 1e-3)]
)
def test_clipped_gradients_have_the_norm_asked_for(norm, clip, clipped):
    """Q1: LLMQ scaled by clip / norm^2."""
    grads = scaled_to(norm)
    _, total = norm_of(make_ops(max_grad_norm=clip), grads)
    assert f64(total)[0] == pytest.approx(norm, rel=1e-6)
    assert f64(total)[2] == 1
    after = oracles.global_norm([f64(g) * f64(total)[1] for g in grads])
    assert after == pytest.approx(clipped, rel=1e-6)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_norm_within_its_sums(dtype, size):
    grads = scaled_to(size, dtype)
    norms, total = norm_of(make_ops(max_grad_norm=np.inf), grads)
    want = np.array([oracles.global_norm([f64(g)]) for g in grads])
    # rows of 1024 products in float32, the rows in float64, one rounding
    assert_within(norms, want, (1024 + 3) * U * want)
    length = oracles.global_norm([f64(g) for g in grads])
    assert f64(total)[0] == pytest.approx(length, rel=(1024 / 2 + 2) * U, abs=0)
    assert f64(total)[1] == 1  # inf never clips


def test_norm_of_zero_gradients_is_zero_and_clips_nothing():
    _, total = norm_of(make_ops(), [tensor(np.zeros((3, 3))), tensor(np.zeros(2))])
    assert f64(total).tolist() == [0, 1, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_names_its_tensor_and_nothing_is_written(bad):
    grads = scaled_to(1.0)
    grads[3].data[1000] = bad
    grads[4].data[0, 0] = np.nan
    ops = make_ops()
    norms, total = norm_of(ops, grads)
    assert np.flatnonzero(~np.isfinite(f64(norms))).tolist() == [3, 4]
    assert f64(total)[2] == 0
    s = State((5, 7), m="e4m3")
    before = s.copies()
    s.update(ops, grads[0], total=total)
    assert all(np.array_equal(a, b) for a, b in zip(before, s.copies(), strict=True))


class State:
    """Master, weight, m and v of one tensor, random (v positive), in any storage."""

    def __init__(self, shape, *, master="fp32", weight=None, m="fp32", v="fp32", seed=1):
        rng = np.random.default_rng(seed)
        self.master = tensor(rng.standard_normal(shape), DType(master))
        self.weight = self.master if weight is None else tensor(np.zeros(shape), DType(weight))
        self.v = tensor(1e-4 * rng.random(shape), DType(v))
        self.m_scale = None
        value = np.asarray(1e-2 * rng.standard_normal(shape))
        if m == "e4m3":
            groups = -(-value.size // 128)
            self.m_scale = tensor(rng.random(groups) * 1e-4)
            value = rng.standard_normal(shape) * 100
        self.m = tensor(value, DType(m))

    def copies(self):
        return [np.array(t.data).view(np.uint8) for t in self.tensors()]

    def tensors(self):
        all_ = (self.master, self.weight, self.m, self.v, self.m_scale)
        return [t for t in all_ if t is not None]

    def m_values(self):
        """float32 values of m, as the update reads them: code * scale, rounded once."""
        if self.m_scale is None:
            return self.m.data.astype(np.float32)
        scale = np.repeat(self.m_scale.data, 128)[: self.m.size].reshape(self.m.shape)
        return self.m.data.astype(np.float32) * scale

    def as_float32(self):
        """The same values in float32 storage."""
        out = State((1,))
        out.master, out.v = tensor(f64(self.master)), tensor(f64(self.v))
        out.weight, out.m = out.master, tensor(self.m_values())
        return out

    def update(self, ops, grad, *, step=1, total=None, decayed=True):
        ops.scalars.learning_rate, ops.scalars.update = RATE, step
        ops.scalars.correction1, ops.scalars.correction2 = 1 - BETA1**step, 1 - BETA2**step
        total = total or tensor([1.0, 1.0, 1.0])
        ops.adamw(
            self.master,
            self.weight,
            self.m,
            self.v,
            grad,
            total,
            tensor_id=ID,
            decayed=decayed,
            m_scale=self.m_scale,
        )


def engine(**options):
    return make_ops(seed=SEED, epsilon=EPSILON, weight_decay=DECAY, **options)


def noise(size, purpose, step):
    return bits16(0, size, seed=SEED, purpose=purpose, tensor_id=ID, update=step)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("decayed", [True, False])
@pytest.mark.parametrize("clip", [1.0, 0.3])
def test_adamw_in_float32(shape, decayed, clip):
    s, ops, rng = State(shape), engine(), np.random.default_rng(2)
    factor = float(np.float32(clip))
    for step in range(1, 6):
        grad = tensor(rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 1, shape))
        p0, m0, v0 = f64(s.master), f64(s.m), f64(s.v)
        s.update(ops, grad, step=step, total=tensor([1.0, clip, 1.0]), decayed=decayed)
        g = f64(grad) * factor
        options = dict(learning_rate=RATE, beta1=BETA1, beta2=BETA2, epsilon=EPSILON)
        w, m, v = oracles.adamw(p0, m0, v0, g, step=step, **options, weight_decay=DECAY * decayed)
        size = np.abs(BETA1 * m0) + np.abs((1 - BETA1) * g)
        assert_within(s.m, m, 4 * U * size)
        assert_within(s.v, v, 6 * U * v + 1e-44)
        # m's error against the root of v, then ten roundings of the update
        root = np.sqrt(v / (1 - BETA2**step)) + EPSILON
        update = 4 * U * size / (1 - BETA1**step) / root + 12 * U * np.abs(m / root) / (
            1 - BETA1**step
        )
        decay = 4 * U * DECAY * np.abs(p0)
        assert_within(s.master, w, RATE * (update + decay) + 2 * U * np.abs(p0))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize(
    "storage",
    [
        {"master": "bf16"},
        {"m": "bf16"},
        {"v": "bf16"},
        {"m": "e4m3"},
        {"weight": "bf16"},
        {"master": "bf16", "m": "e4m3", "v": "bf16", "weight": "fp32"},
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_storage_is_the_float32_result_rounded_with_the_counters_bits(shape, storage):
    s, ops, rng = State(shape, **storage), engine(), np.random.default_rng(3)
    for step in (1, 2, 9):
        grad = tensor(rng.standard_normal(shape), DType.BF16)
        exact = s.as_float32()
        exact.update(ops, grad, step=step)
        s.update(ops, grad, step=step)
        for name, purpose in (("master", Purpose.MASTER), ("v", Purpose.V), ("m", Purpose.M)):
            got, value = getattr(s, name), getattr(exact, name).data.reshape(-1)
            bits = noise(value.size, purpose, step)
            if got.dtype is DType.BF16:
                want = oracles.encode_stochastic(value, bits, "bf16")
                assert np.array_equal(got.data.reshape(-1).view(np.uint16), want), name
            elif got.dtype is DType.E4M3:
                check_e4m3(s, value, bits)
            else:
                assert np.array_equal(got.data.reshape(-1), value), name
        # the working copy is the stored master, rounded to nearest
        if s.weight is not s.master:
            want = f64(s.master)
            want = oracles.bf16(want) if s.weight.dtype is DType.BF16 else want
            assert np.array_equal(f64(s.weight), want)


def check_e4m3(s, value, bits):
    """Codes and scales of each group of 128, by the rule of every other scale."""
    groups = np.zeros((s.m_scale.size, 128), np.float32)
    groups.reshape(-1)[: value.size] = value
    top = np.abs(groups).max(axis=1)
    assert np.array_equal(s.m_scale.data, top / np.float32(448))
    scaled = groups * (np.float32(448) / np.maximum(top, np.float32(1e-30)))[:, None]
    want = oracles.encode_stochastic(scaled.reshape(-1)[: value.size], bits, "e4m3")
    assert np.array_equal(s.m.data.reshape(-1).view(np.uint8), want)


def test_an_e4m3_first_moment_stays_near_the_float32_one():
    """Each store errs by at most one step, 2^-3 of a value (or 2^-9 of 448 ths of the group's
    largest below its normals), mean 0, damped by beta1 a step: deviation at most
    step / 2 / sqrt(1 - beta1^2), and five of them for each of 1280 values after 200 steps."""
    shape, ops, rng = (10, 128), engine(learning_rate=0.0), np.random.default_rng(4)
    size = 10.0 ** rng.uniform(-3, 0, (10, 1))
    s = State(shape, m="e4m3")
    s.m.data[...] = 0
    mean, exact = rng.standard_normal(shape) * size, np.zeros(shape)
    for step in range(1, 201):
        grad = tensor(mean + 0.1 * size * rng.standard_normal(shape))
        exact = BETA1 * exact + (1 - BETA1) * f64(grad)
        s.update(ops, grad, step=step)
    top = np.abs(exact).max(axis=1, keepdims=True)
    step_size = np.maximum(2.0**-3 * np.abs(exact), 1.5 * top / 448 * 2.0**-9)
    # values move over binades while they settle: twice the step of where they are
    deviation = 2 * step_size / 2 / np.sqrt(1 - BETA1**2)
    error = s.m_values().astype(np.float64) - exact
    assert (np.abs(error) <= 5 * deviation).all()
    # unbiased: the mean of all errors in units of their deviations
    assert abs((error / deviation).mean()) <= 5 / np.sqrt(error.size)


@pytest.mark.parametrize("m", ["fp32", "bf16", "e4m3"])
def test_m_of_a_row_without_gradients_fades_to_zero_and_never_to_nan(m):
    """A token unseen for 1500 steps: m shrinks by beta1 a step, through float32's subnormals."""
    s, ops = State((2, 128), m=m), engine(learning_rate=0.0)
    s.m.data[0, :64] = 0  # zeros beside what fades
    grad = tensor(np.zeros((2, 128)))
    for step in range(1, 1501):
        s.update(ops, grad, step=step)
        assert np.isfinite(s.m_values()).all(), step
    assert np.isfinite(f64(s.master)).all()
    assert np.abs(s.m_values()).max() < 1e-30


def test_zero_rows_stay_exactly_zero():
    """Padded rows of the vocabulary: no gradient, so nothing, whatever the bits."""
    storages: list[dict[str, Any]] = [{}, dict(master="bf16", m="bf16", v="bf16"), dict(m="e4m3")]
    for storage in storages:
        s, ops, rng = State((48, 32), **storage), engine(), np.random.default_rng(5)
        for t in (s.master, s.m, s.v):
            t.data[37:] = 0
        for step in range(1, 5):
            grad = tensor(rng.standard_normal((48, 32)), DType.BF16)
            grad.data[37:] = 0
            s.update(ops, grad, step=step)
            for t in (s.master, s.m, s.v):
                assert not np.ascontiguousarray(t.data[37:]).view(np.uint8).any()
