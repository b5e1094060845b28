"""is_spike against the formula in NumPy, and what it must not take for a spike."""

import numpy as np
import pytest

from llmq_nb.train.spikes import LEAST, WINDOW, is_spike, remember


@pytest.mark.parametrize("deviations", [3.0, 6.0])
@pytest.mark.parametrize("count", [LEAST, 33, WINDOW])
def test_the_threshold(count: int, deviations: float) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        recent = rng.normal(2.0, rng.choice([1e-4, 0.2]), count)
        middle = np.median(recent)
        spread = max(1.4826 * np.median(np.abs(recent - middle)), 0.01 * abs(middle))
        limit = float(middle + deviations * spread)
        assert is_spike(limit * (1 + 1e-12), recent.tolist(), deviations)
        assert not is_spike(limit * (1 - 1e-12), recent.tolist(), deviations)


def test_few_losses_say_nothing() -> None:
    assert not is_spike(1e9, [1.0] * (LEAST - 1), 6.0)
    assert is_spike(1e9, [1.0] * LEAST, 6.0)


def test_a_run_that_learns_has_no_spike() -> None:
    """A falling loss with 5 % of noise: nothing in 2000 steps; a doubled loss is found."""
    rng = np.random.default_rng(1)
    recent: tuple[float, ...] = ()
    for step in range(2000):
        loss = float((2 + 8 / (1 + step / 20)) * (1 + 0.05 * rng.standard_normal()))
        assert not is_spike(loss, recent, 6.0), step
        assert is_spike(2 * loss + 10, recent, 6.0) == (step >= LEAST)
        recent = remember(recent, loss)
        assert len(recent) == min(step + 1, WINDOW) and recent[-1] == loss


def test_a_few_outliers_do_not_hide_the_next() -> None:
    recent = [2.0 + 0.01 * (i % 7) for i in range(100)]
    recent[50:60] = [50.0] * 10
    assert is_spike(50.0, recent, 6.0)
