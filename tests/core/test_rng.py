"""Random bits against the Philox oracle (Python integers, sharing nothing with llmq_nb)."""

import itertools
import math

import numpy as np
import pytest

from llmq_nb.core.rng import Purpose, bits16, normal, philox, words
from tests.oracles.philox import KNOWN_ANSWERS, philox4x32

BITS = {"seed": 42, "purpose": Purpose.MASTER, "tensor_id": 7, "update": 3}


def test_known_answers():
    for counter, key, output in KNOWN_ANSWERS:
        assert tuple(philox(counter, key).tolist()) == output


def test_many_counters_agree_with_the_oracle():
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 2**32, (50, 4), dtype=np.uint64)
    key = (0xDEADBEEF, 5)
    got = philox(tuple(counters.T), key)
    assert got.dtype == np.uint32
    assert [tuple(r) for r in got.tolist()] == [philox4x32(c, key) for c in counters.tolist()]


# 2^35: group 2^32, where the counter's second word starts to count
@pytest.mark.parametrize("first", [0, 8, 1024, 2**35 - 16, 2**35, 2**40 + 1024])
def test_layout_of_the_bits(first):
    """Element i: half (i % 2) of word (i % 8) / 2 of counter (i / 8 low, high, tensor, update)."""
    got = bits16(first, 40, **BITS)
    assert got.dtype == np.uint16
    for i, bits in zip(range(first, first + 40), got.tolist(), strict=True):
        group = i // 8
        counter = (group % 2**32, group >> 32, 7, 3)
        word = philox4x32(counter, (42, int(Purpose.MASTER)))[i % 8 // 2]
        assert bits == (word >> 16 if i % 2 else word & 0xFFFF), i


def test_shards_cut_at_multiples_of_1024_have_the_bits_of_the_whole():
    size = 5000
    whole = bits16(0, size, **BITS)
    for cut in (1024, 2048, 4096):
        parts = [bits16(s, min(cut, size - s), **BITS) for s in range(0, size, cut)]
        assert np.array_equal(np.concatenate(parts), whole)


def test_a_cut_inside_a_group_is_refused():
    with pytest.raises(ValueError, match="multiple of 8"):
        words(4, 8, **BITS)


def test_purposes_tensors_updates_and_seeds_never_share_a_counter():
    """All streams of a small run: among 64-bit pairs of words a common one would be a shared call.

    21,504 pairs of random 64-bit words hold an equal one with probability 1.3e-11.
    """
    rows = [
        words(0, 256, seed=seed, purpose=purpose, tensor_id=tensor, update=update)
        for seed, purpose, tensor, update in itertools.product(
            (0, 1, 2**32 - 1), Purpose, (0, 1, 2, 3), (0, 1, 2**32 - 1)
        )
    ]
    pairs = np.concatenate(rows)[:, :2].astype(np.uint64)
    assert len(np.unique(pairs[:, 0] << np.uint64(32) | pairs[:, 1])) == len(pairs)


def test_bits_are_uniform():
    """Each of the 16 bits is set half of the time within five deviations of a binomial."""
    n = 1 << 16
    bits = bits16(0, n, **BITS)
    for b in range(16):
        ones = int((bits >> b & 1).sum())
        assert abs(ones - n / 2) <= 5 * math.sqrt(n) / 2, b


def test_normal_is_box_muller_of_the_oracles_words():
    got = normal(0, 64, seed=9, tensor_id=2)
    assert got.dtype == np.float32
    for group in range(16):
        w = philox4x32((group, 0, 2, 0), (9, int(Purpose.INIT)))
        want = []
        for u, v in (w[:2], w[2:]):
            radius = math.sqrt(-2.0 * math.log((u + 1) / 2**32))
            want += [radius * f(2.0 * math.pi * v / 2**32) for f in (math.cos, math.sin)]
        # computed in float64, so one rounding to float32; cos near 0 keeps absolute 1e-15
        np.testing.assert_allclose(got[4 * group : 4 * group + 4], want, rtol=2**-24, atol=1e-14)


def test_moments_of_normal_within_five_deviations():
    n = 1 << 20
    x = normal(0, n, seed=3, tensor_id=1).astype(np.float64)
    # variances of the sample moments of a normal: 1, 2, 15, 96 over n
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - mean) <= 5 * math.sqrt(variance / n), power
    # neighbours share words, so their correlation (and that of their squares) is looked at
    for lag in (1, 2, 3, 4):
        a, b = x[:-lag], x[lag:]
        assert abs((a * b).mean()) <= 5 / math.sqrt(n), lag
        assert abs(((a**2 - 1) * (b**2 - 1)).mean()) <= 5 * 2 / math.sqrt(n), lag


@pytest.mark.parametrize("first", [1, 2, 3, 4, 1024, 4095])
def test_normal_does_not_depend_on_where_it_is_cut(first):
    whole = normal(0, 6000, seed=3, tensor_id=1)
    assert np.array_equal(normal(first, 1000, seed=3, tensor_id=1), whole[first : first + 1000])
    assert not np.array_equal(normal(first, 1000, seed=3, tensor_id=2), whole[first : first + 1000])
    assert np.isfinite(whole).all()
