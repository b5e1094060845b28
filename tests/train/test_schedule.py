"""learning_rate against closed forms in exact rational arithmetic or NumPy float64.

Tolerance: the implementation does at most eight float64 operations on numbers up to the peak, so
8 * 2^-53 relative to the peak; ends are exact.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq_nb.config import ScheduleConfig
from llmq_nb.core.errors import UserError
from llmq_nb.train.schedule import check_schedule, learning_rate

BOUND = 8 * 2.0**-53


def rates(schedule: ScheduleConfig, peak: float, total: int) -> np.ndarray:
    check_schedule(schedule, total)
    return np.array([learning_rate(schedule, peak, step, total) for step in range(total)])


def test_q4_cosine_ends_exactly_at_the_floor():
    """LLMQ's Q4: 1000 steps, 100 of warm-up, ended 2.4 % of (peak - floor) above the floor."""
    schedule = ScheduleConfig(kind="cosine", warmup_steps=100, final_fraction=0.1)
    got = rates(schedule, 6e-4, 1000)
    assert got[999] == 0.1 * 6e-4
    assert got[998] > got[999]
    assert got[100] == 6e-4
    assert got[0] == 0.0


def test_warmup_is_linear_from_zero():
    got = rates(ScheduleConfig(kind="linear", warmup_steps=7), 0.3, 20)
    for step in range(7):
        assert math.isclose(got[step], Fraction(step, 7) * Fraction(3, 10), rel_tol=BOUND)


def test_cosine_is_its_closed_form():
    got = rates(ScheduleConfig(kind="cosine", warmup_steps=10, final_fraction=0.25), 2.0, 61)
    x = np.linspace(0.0, np.pi, 51)
    np.testing.assert_allclose(got[10:], 0.5 + 1.5 * np.cos(x / 2) ** 2, rtol=0, atol=2 * BOUND)


def test_linear_is_its_closed_form():
    got = rates(ScheduleConfig(kind="linear", warmup_steps=3, final_fraction=0.5), 1.0, 14)
    for step in range(3, 14):
        assert abs(got[step] - (1 - Fraction(step - 3, 10) / 2)) <= BOUND


def test_wsd_is_constant_and_then_falls_as_one_minus_sqrt():
    schedule = ScheduleConfig(kind="wsd", warmup_steps=5, cooldown_steps=17, final_fraction=0.0)
    got = rates(schedule, 1.0, 40)
    assert (got[5:24] == 1.0).all()  # step 23 is the first of 17: the cooldown starts at the top
    np.testing.assert_allclose(got[23:], 1 - np.sqrt(np.arange(17) / 16), rtol=0, atol=BOUND)
    assert got[39] == 0.0
    assert got[27] == 0.5  # a quarter of the way: 1 - sqrt(1/4)


def test_wsd_without_a_cooldown_stays_at_the_peak():
    assert (rates(ScheduleConfig(kind="wsd"), 0.7, 9) == 0.7).all()


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_cooldown_starts_from_the_rate_of_its_kind(kind):
    """The same schedule without the cooldown is the oracle up to the cooldown's start."""
    plain = rates(ScheduleConfig(kind=kind, warmup_steps=4), 1.0, 50)
    cooled = rates(ScheduleConfig(kind=kind, warmup_steps=4, cooldown_steps=10), 1.0, 50)
    assert (cooled[:41] == plain[:41]).all()
    fall = 1 - np.sqrt(np.arange(10) / 9)
    np.testing.assert_allclose(cooled[40:], 0.1 + (plain[40] - 0.1) * fall, rtol=0, atol=BOUND)
    assert cooled[49] == 0.1


def test_single_steps_have_the_floor():
    assert learning_rate(ScheduleConfig(), 1.0, 0, 1) == 0.1
    assert learning_rate(ScheduleConfig(kind="wsd", cooldown_steps=1), 1.0, 8, 9) == 0.1
    assert learning_rate(ScheduleConfig(warmup_steps=4), 1.0, 4, 5) == 0.1


def test_steps_outside_of_the_run_have_the_nearest_rate():
    schedule = ScheduleConfig(warmup_steps=2)
    assert learning_rate(schedule, 1.0, -3, 10) == 0.0
    assert learning_rate(schedule, 1.0, 10, 10) == learning_rate(schedule, 1.0, 99, 10) == 0.1


@pytest.mark.parametrize(
    ("warmup", "cooldown", "total", "fits"),
    [
        (0, 0, 1, True), (9, 0, 10, True), (5, 5, 10, True), (0, 10, 10, True),
        (10, 0, 10, False), (5, 6, 10, False), (0, 11, 10, False), (1, 0, 1, False),
    ],
)  # fmt: skip
def test_phases_that_do_not_fit_are_refused(warmup, cooldown, total, fits):
    schedule = ScheduleConfig(warmup_steps=warmup, cooldown_steps=cooldown)
    if fits:
        check_schedule(schedule, total)
        return
    with pytest.raises(UserError) as caught:
        check_schedule(schedule, total)
    assert f"warmup_steps = {warmup}" in str(caught.value)
    assert f"cooldown_steps = {cooldown}" in str(caught.value)


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["cosine", "linear", "wsd"]),
    lengths=st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(0, 60)),
    fraction=st.floats(0, 1),
    peak=st.floats(1e-12, 1e3),
)
def test_rises_then_falls_between_zero_and_peak_to_the_floor(kind, lengths, fraction, peak):
    warmup, middle, cooldown = lengths
    total = warmup + middle + cooldown
    schedule = ScheduleConfig(
        kind=kind, warmup_steps=warmup, cooldown_steps=cooldown, final_fraction=fraction
    )
    got = rates(schedule, peak, total)
    assert (got >= 0).all() and (got <= peak).all()
    assert (np.diff(got[: warmup + 1]) > 0).all() or total == warmup + 1
    # rounding may lift a step over the one before it by an ulp where the true values are closer
    assert (np.diff(got[warmup:]) <= BOUND * peak).all()
    if kind != "wsd" or cooldown:
        assert got[-1] == fraction * peak
    if total > warmup + 1 and not (cooldown and total == warmup + cooldown):
        assert got[warmup] == peak
