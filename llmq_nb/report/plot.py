"""Curves of one or more runs from their log.jsonl: loss, learning rate, gradient norm, speed, and
FP8 health where it was logged.

`.png`: 1200 x 800 pixels. `.html`: one file that needs nothing else, with the same picture as SVG
and the final figures as a table.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError
from llmq_nb.report.html import write_html
from llmq_nb.report.jsonl import read_log

Over = Literal["steps", "tokens"]
SMOOTHED_FROM = 50
"""A curve of at least this many points is drawn smoothed, over a faint one of the points."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What is drawn of a run: one float64 array a quantity, NaN where a record has none."""

    name: str
    steps: dict[str, NDArray[np.float64]]
    """step, tokens_seen, loss, learning_rate, grad_norm, tokens_per_second, seconds by record."""
    evaluations: dict[str, NDArray[np.float64]]
    """step, tokens_seen, loss by evaluation."""
    health: dict[str, NDArray[np.float64]]
    """step, tokens_seen, underflowed, saturated by FP8 health record: of the worst tensor [%]."""

    @property
    def summary(self) -> dict[str, str]:
        """The final figures, as text by heading."""
        loss, evals = self.steps["loss"], self.evaluations["loss"]
        seconds = np.nansum(self.steps["seconds"])
        out = {
            "run": self.name,
            "steps": f"{self.steps['step'][-1]:,.0f}",
            "tokens": f"{self.steps['tokens_seen'][-1]:,.0f}",
            "loss (mean of the last 10)": _figure(_mean(loss[-10:])),
            "validation loss": "none",
            "best validation loss": "none",
            "tokens/s (median)": _figure(_median(self.steps["tokens_per_second"]), ",.0f"),
            "training time": f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds:.0f} s",
        }
        if np.isfinite(evals).any():
            best = int(np.nanargmin(evals))
            out["validation loss"] = _figure(float(evals[-1]))
            at = f" (step {self.evaluations['step'][best]:,.0f})"
            out["best validation loss"] = _figure(float(evals[best])) + at
        return out


def plot_runs(run_dirs: Sequence[Path], out: Path, *, over: Over = "steps") -> None:
    """Draw the runs over each other into `out`, a .png or .html file.

    run_dirs: folders with a log.jsonl, or such files. over: the horizontal axis. Raises UserError:
    no such run, a log without steps, another kind of `out`, a folder that cannot be written.
    """
    if out.suffix not in (".png", ".html"):
        raise UserError(f"cannot draw {str(out)!r}", mend="--out takes a .png or .html file")
    if not run_dirs:
        raise UserError("no run to plot", mend="give the folder of at least one run")
    names = _names([Path(d) for d in run_dirs])
    runs = [load_run(Path(d), name) for d, name in zip(run_dirs, names, strict=True)]
    figure = draw(runs, over)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".png":
            figure.savefig(out, dpi=100)
        else:
            write_html(out, figure, [run.summary for run in runs])
    except OSError as error:
        raise UserError(f"cannot write {out}", mend=error.strerror or str(error)) from None


def load_run(path: Path, name: str) -> Run:
    """The curves of a run's folder (or log file). Raises UserError as `plot_runs` does."""
    log = path / "log.jsonl" if path.is_dir() else path
    if not log.is_file():
        raise UserError(f"no such run: {path}", mend="give a run's folder, with its log.jsonl")
    records = read_log(log)
    steps = [r for r in records if r.get("log") == "step"]
    if not steps:
        raise UserError(f"nothing to plot: no step is logged in {log}", mend="train a step first")
    keys = ("step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "seconds", "tokens")
    columns = {key: _column(steps, key) for key in keys}
    # a record stands for the steps since the one before it (log.every)
    made = np.diff(columns["step"], prepend=0.0)
    columns["tokens_seen"] = np.cumsum(np.nan_to_num(columns.pop("tokens") * made))
    columns["seconds"] *= made
    evals = [r for r in records if r.get("log") == "eval"]
    evaluations = {key: _column(evals, key) for key in ("step", "loss")}
    evaluations["tokens_seen"] = np.interp(
        evaluations["step"], columns["step"], columns["tokens_seen"], left=0.0
    )
    return Run(name, columns, evaluations, _health(records, columns))


def _health(
    records: Sequence[dict[str, Any]], columns: dict[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float64]]:
    """The largest shares of each health record that has tensors."""
    found = [r for r in records if r.get("log") == "health" and r.get("tensors")]
    health = {"step": _column(found, "step")}
    for key in ("underflowed", "saturated"):
        health[key] = np.array([100 * _column(r["tensors"], key).max() for r in found])
    health["tokens_seen"] = np.interp(
        health["step"], columns["step"], columns["tokens_seen"], left=0.0
    )
    return health


def draw(runs: Sequence[Run], over: Over = "steps") -> Figure:
    """The panels as a figure of 12 x 8 inches: four, and two where a run logged FP8 health."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's matplotlib is set to
    health = any(len(run.health["step"]) for run in runs)
    grid = figure.subplots(2, 3 if health else 2)
    panels = [*grid[:, :2].ravel(), *grid[:, 2:].ravel()]
    titles: tuple[tuple[str, str], ...] = (
        ("loss", "Loss [nats per token]"),
        ("learning_rate", "Learning rate"),
        ("grad_norm", "Gradient norm before clipping"),
        ("tokens_per_second", "Speed [tokens/s]"),
    )
    if health:
        titles += (
            ("underflowed", "FP8 underflow, worst tensor [%]"),
            ("saturated", "FP8 saturation, worst tensor [%]"),
        )
    for panel, (key, title) in zip(panels, titles, strict=True):
        for index, run in enumerate(runs):
            _draw_run(panel, run, key, over, color=f"C{index % 10}")
        panel.set_title(title, fontsize=11)
        panel.set_xlabel("tokens" if over == "tokens" else "optimizer steps")
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=9)
    panels[3].yaxis.set_major_formatter(EngFormatter(sep=""))
    panels[3].set_ylim(bottom=0)
    panels[1].set_ylim(bottom=0)
    return figure


def _draw_run(panel: Axes, run: Run, key: str, over: Over, color: str) -> None:
    axis = "tokens_seen" if over == "tokens" else "step"
    table = run.health if key in ("underflowed", "saturated") else run.steps
    x, y = table[axis], table[key]
    label = run.name
    if key != "learning_rate" and len(y) >= SMOOTHED_FROM:
        panel.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
        panel.plot(x, _smooth(y), color=color, linewidth=1.6, label=label)
    else:
        marker = "o" if len(y) == 1 else None
        panel.plot(x, y, color=color, linewidth=1.4, marker=marker, label=label)
    evals = run.evaluations
    if key == "loss" and len(evals["loss"]):
        style = {"color": color, "marker": "o", "markersize": 5, "linestyle": "--"}
        panel.plot(
            evals[axis],
            evals["loss"],
            label=f"{label}, validation",
            markerfacecolor="white",
            zorder=3,
            **style,
        )


def _smooth(y: NDArray[np.float64]) -> NDArray[np.float64]:
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


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, or their whole paths where two are the same."""
    folders = [(p if p.is_dir() else p.parent).resolve() for p in paths]
    short = [folder.name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _column(records: Sequence[dict[str, Any]], key: str) -> NDArray[np.float64]:
    values = (r.get(key) for r in records)
    return np.array([v if isinstance(v, int | float) else math.nan for v in values], np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _median(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


def _figure(value: float, form: str = ".4f") -> str:
    return format(value, form) if math.isfinite(value) else "not finite"
