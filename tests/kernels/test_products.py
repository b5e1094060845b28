"""The choice among a product's candidates, on a card that is made up: short and long runs."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.kernels import products as module
from llmq_nb.kernels.matmul import Shape
from llmq_nb.kernels.products import LARGE, Products, best_of

SHAPE = Shape("wgrad", 64, 32, 48, DType.BF16, DType.BF16)


class Card:
    """Runs a candidate in `short` seconds at first, in `long` once it has run for 0.1 s."""

    def __init__(self, short: list[float], long: list[float]) -> None:
        self.short, self.long, self.busy = short, long, 0.0
        self.plan = SimpleNamespace(shape=SHAPE, count=len(short), choose=self.choose)
        self.long_runs: list[int] = []

    def choose(self, candidate: int) -> None:
        self.candidate, self.busy = candidate, 0.0

    def seconds(self, launch: Callable[[], None], count: int, stream: int) -> float:
        hot = self.busy > 0.1
        each = (self.long if hot else self.short)[self.candidate]
        if hot:
            self.long_runs.append(self.candidate)
        self.busy += count * each
        return each


def times(monkeypatch: pytest.MonkeyPatch, card: Card) -> list[float]:
    monkeypatch.setattr(module, "_seconds", card.seconds)
    plan: Any = card.plan
    return Products(device=0, workspace=0).times(plan, 0, stream=0)


def test_small_products_take_the_fastest_short_run(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [0.9 * LARGE, 0.5 * LARGE, 0.6 * LARGE]
    card = Card(short, [1.0, 3.0, 2.0])
    assert times(monkeypatch, card) == short and card.long_runs == []


def test_large_products_take_the_fastest_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidate 1 wins a short run, 3 a long one; 4 would, but no short run brought it near."""
    unit = 10 * LARGE
    short, long = (1.2, 1.0, 1.1, 1.05, 1.3), (1.5, 1.4, 1.35, 1.3, 1.0)
    card = Card([unit * s for s in short], [unit * s for s in long])
    found = times(monkeypatch, card)
    assert found == [unit * s for s in long[:4]] + [math.inf]
    assert sorted(card.long_runs) == [0, 1, 2, 3]  # the first is what the others are measured by
    assert best_of(found) == 3


def test_only_so_many_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = 10 * LARGE
    card = Card([unit * (1.1 - 0.001 * i) for i in range(16)], [unit] * 16)
    found = times(monkeypatch, card)
    assert sorted(card.long_runs) == [0, *range(10, 16)]
    assert [s == unit for s in found] == [i in card.long_runs for i in range(16)]


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [([1.0], 0), ([1.0, 0.992], 0), ([1.0, math.inf, 0.98], 2), ([1.0, 2.0], 0)],
)
def test_only_a_clearly_faster_candidate_is_chosen(seconds: list[float], chosen: int) -> None:
    assert best_of(seconds) == chosen


def test_tuning_says_that_it_takes_time_and_keeps_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card, lines = Card([10 * LARGE, 10 * LARGE], [11 * LARGE, 10 * LARGE]), list[str]()
    monkeypatch.setattr(module, "_seconds", card.seconds)
    products = Products(device=0, workspace=0, choices={"another": 3})
    products._plans[SHAPE] = card.plan
    assert products.tune(0, 0, stream=0, progress=lines.append) == {}  # no memory to time it in
    made = products.tune(0, SHAPE.timing_bytes, stream=0, progress=lines.append)
    assert made == {str(SHAPE): 1} and products.choices == {"another": 3, str(SHAPE): 1}
    assert card.candidate == 1 and len(lines) == 1 and str(SHAPE) in lines[0]
    assert products.tune(0, SHAPE.timing_bytes, stream=0, progress=lines.append) == {}
