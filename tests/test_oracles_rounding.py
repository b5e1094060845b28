"""The rounding oracles and Philox against ml_dtypes, integer arithmetic and published values."""

import ml_dtypes
import numpy as np
import pytest

from tests import oracles
from tests.oracles import rounding
from tests.oracles.philox import KNOWN_ANSWERS

DTYPES = {
    "e4m3": (ml_dtypes.float8_e4m3fn, np.uint8),
    "e5m2": (ml_dtypes.float8_e5m2, np.uint8),
    "bf16": (ml_dtypes.bfloat16, np.uint16),
}


def all_codes(format: str) -> np.ndarray:
    _, unsigned = DTYPES[format]
    return np.arange(np.iinfo(unsigned).max + 1)


def all_bf16() -> np.ndarray:
    """Every finite bfloat16 value, as float64."""
    codes = np.arange(65536, dtype=np.uint16)
    finite = codes & 0x7F80 != 0x7F80
    return codes[finite].view(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("format", DTYPES)
def test_decode_of_every_code_is_ml_dtypes(format):
    dtype, unsigned = DTYPES[format]
    codes = all_codes(format)
    with np.errstate(invalid="ignore"):  # NaN codes
        want = codes.astype(unsigned).view(dtype).astype(np.float64)
    np.testing.assert_array_equal(oracles.decode(codes, format), want)


def test_published_limits():
    """Micikevicius et al. 2022, table 1."""
    assert rounding.largest("e4m3") == 448.0
    assert rounding.largest("e5m2") == 57344.0
    assert oracles.decode([1, 8], "e4m3").tolist() == [2.0**-9, 2.0**-6]
    assert oracles.decode([1, 4], "e5m2").tolist() == [2.0**-16, 2.0**-14]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_encode_of_every_bf16_value_is_ml_dtypes(format):
    """ml_dtypes does not saturate, so it is asked up to the largest finite value only."""
    dtype, unsigned = DTYPES[format]
    x, limit = all_bf16(), rounding.largest(format)
    inside = np.abs(x) <= limit
    want = x[inside].astype(np.float32).astype(dtype).view(unsigned)
    assert np.array_equal(oracles.encode(x[inside], format), want)
    assert np.array_equal(oracles.round_nearest(x[~inside], format), np.sign(x[~inside]) * limit)


@pytest.mark.parametrize("format", DTYPES)
def test_encode_ties_to_the_even_code(format):
    """The midpoint of every pair of neighbours, and a float64 ulp to either side of it."""
    values = rounding.magnitudes(format)
    low = np.arange(len(values) - 1)
    middle = (values[:-1] + values[1:]) / 2.0
    assert np.array_equal(oracles.encode(middle, format), low + low % 2)
    assert np.array_equal(oracles.encode(np.nextafter(middle, 0.0), format), low)
    assert np.array_equal(oracles.encode(np.nextafter(middle, np.inf), format), low + 1)


@pytest.mark.parametrize("format", DTYPES)
def test_encode_of_special_values(format):
    got = oracles.encode([0.0, -0.0, np.inf, -np.inf, np.nan, 1e300], format)
    sign = len(all_codes(format)) // 2
    top = len(rounding.magnitudes(format)) - 1
    assert got[[0, 1, 2, 3, 5]].tolist() == [0, sign, top, sign + top, top]
    assert np.isnan(oracles.decode(got[4], format))


def test_bf16_of_float32_is_ml_dtypes():
    """Random bit patterns cover every exponent; half of them are made exact ties."""
    rng = np.random.default_rng(1)
    pattern = rng.integers(0, 2**32, 20000, dtype=np.uint32)
    pattern[::2] = (pattern[::2] & 0xFFFF0000) | 0x8000
    x = pattern.view(np.float32)
    x = np.append(x[np.isfinite(x)], np.array([3.3895e38, 3.3961e38, 3.4e38], np.float32))
    with np.errstate(over="ignore"):
        want = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(oracles.bf16(x), want)
    assert np.isinf(want[-1])


def test_stochastic_bf16_is_adding_the_bits_and_truncating():
    rng = np.random.default_rng(2)
    x = (rng.standard_normal(20000) * 10.0 ** rng.uniform(-30, 30, 20000)).astype(np.float32)
    bits = rng.integers(0, 2**16, 20000, dtype=np.uint32)
    want = (x.view(np.uint32) + bits) >> 16
    assert np.array_equal(oracles.encode_stochastic(x, bits, "bf16"), want)


@pytest.mark.parametrize("format", ["e4m3", "e5m2", "bf16"])
def test_stochastic_rounding_averages_to_the_value(format):
    """Over all 65536 bits the mean is x, short of at most 2^-16 of the interval (bf16: exact)."""
    for x in np.array([0.0, -1.0, 1.0625 + 2**-19, -3.3, 2**-8 + 2**-14, 300.1], np.float32):
        rounded = oracles.round_stochastic(x, np.arange(2**16), format)
        neighbours = np.unique(rounded)
        interval = np.ptp(neighbours)
        assert len(neighbours) <= 2
        assert 0.0 <= abs(float(x)) - abs(rounded.mean()) <= interval * 2.0**-16
        if format == "bf16":
            assert rounded.mean() == x


def test_stochastic_rounding_keeps_what_is_representable_and_saturates():
    bits = np.array([0, 65535])
    for format in DTYPES:
        for value in rounding.magnitudes(format)[::37]:
            assert set(oracles.round_stochastic(value, bits, format).tolist()) == {value}
    assert oracles.round_stochastic(-1e9, bits, "e4m3").tolist() == [-448.0, -448.0]


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_quantize_uses_the_whole_range_and_returns_within_half_a_step(format):
    x = oracles.bf16(np.random.default_rng(3).standard_normal(4096))
    codes, scale = oracles.quantize(x, format)
    values = oracles.decode(codes, format)
    limit = rounding.largest(format)
    assert np.abs(values).max() == limit
    # half a unit in the last place of the mantissa, or of the subnormals; float32 adds 4 u at most
    half_step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[format]
    floor = rounding.magnitude(1, format) / 2.0 * scale
    bound = np.maximum(np.abs(x) * (half_step + 4 * 2.0**-24), floor * (1 + 2.0**-20))
    assert np.all(np.abs(values * float(scale) - x) <= bound)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_quantize_of_zeros_is_zeros_with_a_finite_scale(format):
    codes, scale = oracles.quantize(np.zeros(8), format)
    assert codes.tolist() == [0] * 8 and scale == 0.0 and scale.dtype == np.float32


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, output):
    assert oracles.philox4x32(counter, key) == output
