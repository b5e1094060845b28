"""Measured times of a step's operations beside what the time model gives them.

An operation is over its budget from `OVER` times on, if that costs the step more than `NOTABLE` of
its time: between two events even an empty launch measures some microseconds.
"""

import dataclasses
from collections.abc import Mapping

from llmq_nb.config import Config
from llmq_nb.model.config import ModelConfig
from llmq_nb.plan.cost import by_operation, micro_step_work, optimizer_work
from llmq_nb.plan.rates import Rates

OVER = 1.3
NOTABLE = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One operation. budget_ms: None where the time model does not know it."""

    operation: str
    ms: float
    budget_ms: float | None
    ratio: float | None
    over: bool


def budget_ms(config: Config, model: ModelConfig, rates: Rates) -> dict[str, float]:
    """Milliseconds by operation of one micro-step and one optimizer step."""
    works = micro_step_work(config, model, rates) + optimizer_work(config, model, rates)
    return {name: 1e3 * seconds for name, seconds in by_operation(works).items()}


def compare(measured_ms: Mapping[str, float], budget: Mapping[str, float]) -> list[Row]:
    """A row for each operation, largest first; what was budgeted and never ran has 0 ms."""
    step = sum(measured_ms.values())
    names = [*measured_ms, *(name for name in budget if name not in measured_ms)]
    rows = []
    for name in names:
        ms, own = measured_ms.get(name, 0.0), budget.get(name)
        ratio = None if own is None else ms / own
        over = ratio is not None and ratio > OVER and ms - (own or 0.0) > NOTABLE * step
        rows.append(Row(name, ms, own, ratio, over))
    return sorted(rows, key=lambda row: -row.ms)
