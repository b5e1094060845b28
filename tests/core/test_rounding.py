"""Rounding and quantisation against the oracle's search in the list of a format's values."""

import math
import warnings

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import ABSMAX_FLOOR, FP8_MAX, DType
from llmq_nb.core.rng import Purpose, bits16
from llmq_nb.core.rounding import (
    absmax,
    quantize,
    scales,
    stochastic_bf16,
    stochastic_e4m3,
    to_float32,
)
from tests import oracles

FP8 = [DType.E4M3, DType.E5M2]
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
FINITE_BF16 = ALL_BF16[np.arange(65536) % 32768 < 0x7F80]


def f32(values) -> np.ndarray:
    return np.array(values, np.float32)


def codes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def floats(n: int, seed: int) -> np.ndarray:
    """float32 of all magnitudes, by random bit patterns; finite, none beyond the largest BF16."""
    patterns = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    x = patterns.view(np.float32)
    return x[np.isfinite(x) & (np.abs(x) <= float(ml_dtypes.finfo(ml_dtypes.bfloat16).max))]


def some_bits(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 65536, n).astype(np.uint16)


def test_stochastic_bf16_given_the_same_bits():
    x = np.concatenate([floats(200_000, 1), f32([0.0, -0.0, 1.0, -1.0, 1e-40, 2**-133])])
    for bits in (some_bits(x.size, 2), np.zeros(x.size, np.uint16), np.full(x.size, 65535, "u2")):
        got = stochastic_bf16(x, bits)
        want = oracles.encode_stochastic(x, bits, "bf16")
        assert np.array_equal(got.view(np.uint16), want)


def test_stochastic_bf16_keeps_what_is_exact_and_what_is_not_finite():
    x = f32([np.inf, -np.inf, np.nan, 3.0])
    # a NaN whose payload is in the dropped half, and the one that a carry would turn into -0
    x = np.concatenate([x, np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)])
    got = stochastic_bf16(x, np.full(x.size, 65535, np.uint16)).astype(np.float32)
    assert np.array_equal(got[[0, 1, 3]], f32([np.inf, -np.inf, 3.0]))
    assert np.isnan(got[[2, 4, 5]]).all()


def test_stochastic_e4m3_given_the_same_bits():
    rng = np.random.default_rng(3)
    spread = np.exp2(rng.uniform(-14, 8.8, 200_000)) * rng.choice([-1, 1], 200_000)
    values = oracles.decode(np.arange(256), "e4m3")
    exact = values[np.isfinite(values)]
    x = np.concatenate([np.clip(spread, -448, 448), exact, np.nextafter(exact, 0)]).astype("f4")
    for bits in (some_bits(x.size, 4), np.zeros(x.size, np.uint16), np.full(x.size, 65535, "u2")):
        got = stochastic_e4m3(x, bits)
        assert np.array_equal(codes_of(got), oracles.encode_stochastic(x, bits, "e4m3"))


@pytest.mark.parametrize("purpose", [Purpose.M, Purpose.V, Purpose.MASTER])
def test_stochastic_mean_is_the_value(purpose):
    """n roundings up or down by one step: deviation of the mean at most step / (2 sqrt(n)).

    Five of them, and 2^-16 of a step by which 16 bits can be short (e4m3; BF16 is exact).
    """
    n = 1 << 16
    bits = bits16(0, n, seed=5, purpose=purpose, tensor_id=0, update=0)
    for value in f32([1.00001, -1.7654321, 3e-3, 0.013, -200.7, 0.00171]):
        x = np.full(n, value)
        for name, rounded in (("bf16", stochastic_bf16), ("e4m3", stochastic_e4m3)):
            y = rounded(x, bits).astype(np.float64)
            step = abs(np.diff(np.unique(y))[0])
            assert len(np.unique(y)) == 2, name
            assert abs(y.mean() - value) <= step * (5 / (2 * math.sqrt(n)) + 2**-16), (name, value)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("top", [1.0, 448.0, 57344.0, 3e38, 2.0**-100, 0.7])
def test_quantize_of_every_bf16_value_is_exact(dtype, top):
    """Every finite BF16 within absmax; the ones beyond saturate to the largest code."""
    codes, scale = quantize(FINITE_BF16, dtype, np.float32(top))
    inv_scale = np.float32(FP8_MAX[dtype]) / max(np.float32(top), np.float32(1e-30))
    with np.errstate(over="ignore"):
        scaled = FINITE_BF16.astype(np.float32) * inv_scale
    assert np.array_equal(codes_of(codes), oracles.encode(scaled, dtype.value))
    assert scale == np.float32(top) / np.float32(FP8_MAX[dtype])


@pytest.mark.parametrize("dtype", FP8)
def test_every_code_decodes(dtype):
    codes = np.arange(256, dtype=np.uint8)
    got = to_float32(codes.view(dtype.numpy))
    assert np.array_equal(got, oracles.decode(codes, dtype.value), equal_nan=True)


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize(
    "x",
    [
        np.zeros(64),
        np.full(64, 1e-38),
        np.geomspace(1e-38, 1e-30, 64),
        np.geomspace(1e-30, 1e38, 64) * np.tile([1, -1], 32),
        np.concatenate([np.random.default_rng(6).standard_normal(63) * 1e-3, [1e4]]),  # an outlier
        np.float32(1e-40) * np.arange(64),  # subnormals
    ],
    ids=["zeros", "tiny", "below_floor", "wide", "outlier", "subnormal"],
)
def test_quantize_with_its_own_absmax(x, dtype):
    x = x.astype(ml_dtypes.bfloat16)
    top = absmax(x)
    codes, scale = quantize(x, dtype, top)
    want, want_scale = oracles.quantize(x, dtype.value)
    assert np.array_equal(codes_of(codes), want)
    assert scale == want_scale and np.isfinite(scale)
    # Half a step: 2^-(mantissa bits + 1) of the value, or of the least normal; inv_scale and the
    # product round twice in float32. Below the floor values may vanish, by less than the floor.
    half = 2.0 ** -(4 if dtype is DType.E4M3 else 3)
    least = 2.0 ** (-6 if dtype is DType.E4M3 else -14)
    value = x.astype(np.float64)
    error = np.abs(float(scale) * codes.astype(np.float64) - value)
    bound = half * (1 + 2**-21) * np.maximum(np.abs(value), least * float(scale))
    assert (error <= (bound if top >= ABSMAX_FLOOR else np.abs(value) + ABSMAX_FLOOR)).all()


@pytest.mark.parametrize("dtype", FP8)
def test_what_is_not_finite_comes_out_as_nan(dtype):
    """A NaN gives a NaN code, an infinity an infinite scale: the norm check of the step sees it."""
    for bad in (np.nan, np.inf, -np.inf):
        x = f32([1.0, bad, 0.0]).astype(ml_dtypes.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            codes, scale = quantize(x, dtype, absmax(x))
            values = codes.astype(np.float32) * scale
        assert np.isnan(values).any()


def test_absmax():
    assert absmax(np.zeros((0, 3), np.float32)) == 0
    assert absmax(f32([-3, 2])) == 3
    assert absmax(f32([[1, 2], [-0.5, 0]]).astype(ml_dtypes.bfloat16)) == 2
    assert absmax(f32([1, np.nan, -3])) == 3  # as the GPU's max instructions
    assert absmax(f32([np.nan, np.nan])) == 0
    assert not np.signbit(absmax(f32([-0.0])))
    assert absmax(f32([1, -np.inf])) == np.inf


def test_scales_elementwise_are_those_of_each():
    tops = f32([0, 1e-38, 1e-30, 1, 3e38])
    for got, one in zip(scales(tops, DType.E4M3), ("scale", "inv_scale"), strict=True):
        want = [scales(t, DType.E4M3)[one == "inv_scale"] for t in tops]
        assert np.isfinite(got).all() and np.array_equal(got, want)


def test_drift_of_a_bf16_first_moment_over_1000_steps():
    """Q5: m = beta1 m + (1 - beta1) g rounded stochastically with each step's own bits.

    Each step adds a rounding error of deviation at most ulp / 2 and mean 0, damped by beta1 a step,
    so m's error has deviation at most ulp / 2 / sqrt(1 - beta1^2); the mean over n elements is
    sqrt(n) smaller, and five of them bound it. Bits that repeat from step to step break it: shown.
    """
    n, beta1, g = 4096, np.float32(0.9), np.float32(0.0123)

    def errors_of_m(update_of_step) -> np.ndarray:
        m, exact = np.zeros(n, np.float32), 0.0
        for step in range(1000):
            noise = bits16(
                0, n, seed=1, purpose=Purpose.M, tensor_id=4, update=update_of_step(step)
            )
            m = stochastic_bf16(beta1 * m + (np.float32(1) - beta1) * g, noise).astype(np.float32)
            exact = float(beta1) * exact + (1 - float(beta1)) * float(g)
        return m.astype(np.float64) - exact

    ulp = 2.0 ** (math.floor(math.log2(g)) - 7)
    deviation = ulp / 2 / math.sqrt(1 - float(beta1) ** 2)
    assert abs(errors_of_m(lambda step: step).mean()) <= 5 * deviation / math.sqrt(n)
    # the same bits each step: an element's error is the same way each time, up to 10 ulp
    assert errors_of_m(lambda step: 0).std() > 2 * deviation
