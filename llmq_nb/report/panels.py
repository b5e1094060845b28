"""Which curves a picture or a page of runs has: the same for both."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from llmq_nb.report.runs import Column, Run, Table

Over = Literal["steps", "tokens", "hours"]
AXES: dict[Over, tuple[str, str]] = {
    "steps": ("step", "optimizer steps"),
    "tokens": ("tokens_seen", "tokens"),
    "hours": ("hours", "hours of training"),
}
"""Column and label of a horizontal axis."""
SMOOTHED_FROM = 50
"""A curve of at least this many points is drawn smoothed, over a faint one of the points."""
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")
"""Of the runs, in their order and then again."""
TableName = Literal["steps", "health", "devices"]


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One quantity of all runs. columns: the main one, and others that are drawn dotted."""

    title: str
    table: TableName
    columns: tuple[str, ...]
    labels: tuple[str, ...] = ("",)
    """What a curve is called after the run's name, by column."""
    smoothed: bool = True
    from_zero: bool = False
    page_only: bool = False


PANELS: tuple[Panel, ...] = (
    Panel("Loss [nats per token]", "steps", ("loss",)),
    Panel("Learning rate", "steps", ("learning_rate",), smoothed=False, from_zero=True),
    Panel("Gradient norm before clipping", "steps", ("grad_norm",)),
    Panel("Speed [tokens/s]", "steps", ("tokens_per_second",), from_zero=True),
    Panel("FP8 underflow, worst tensor [%]", "health", ("underflowed",)),
    Panel("FP8 saturation, worst tensor [%]", "health", ("saturated",)),
    Panel("Model FLOP utilisation [%]", "steps", ("mfu",), from_zero=True),
    Panel("GPU memory in use [GiB]", "devices", ("memory",), smoothed=False, from_zero=True),
    Panel("GPU power [W]", "devices", ("power",), from_zero=True),
    Panel("GPU clock [MHz]", "devices", ("clock",)),
    Panel("GPU temperature [°C]", "devices", ("temperature",)),
    Panel("GPU throttled [% of samples]", "devices", ("throttled",), from_zero=True),
    Panel(
        "PCIe [GB/s]",
        "devices",
        ("pcie_received", "pcie_sent"),
        (" received", " sent"),
        from_zero=True,
    ),
    Panel("Largest lse of the logits", "steps", ("lse_max",), page_only=True),
)


def shown_panels(runs: Sequence[Run], *, page: bool = False) -> list[Panel]:
    """The panels that have something to show: four always, others where a run has figures."""
    return [
        panel
        for i, panel in enumerate(PANELS)
        if i < 4 or ((page or not panel.page_only) and any(_known(run, panel) for run in runs))
    ]


def _known(run: Run, panel: Panel) -> bool:
    return any(bool(np.isfinite(table_of(run, panel)[c]).any()) for c in panel.columns)


def table_of(run: Run, panel: Panel) -> Table:
    """The table that the panel's columns are in."""
    return getattr(run, panel.table)


def smooth(y: Column) -> Column:
    """Mean of a centred window of about 1/25 of the points; NaN points do not count.

    The window is narrower at both ends, so that it stays centred.
    """
    index = np.arange(len(y))
    half = np.minimum(max(1, len(y) // 50), np.minimum(index, index[::-1]))
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    low, high = index - half, index + half + 1
    count = counts[high] - counts[low]
    mean = (sums[high] - sums[low]) / np.maximum(count, 1)
    return np.where(count > 0, mean, np.nan)
