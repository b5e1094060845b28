"""Curves of one or more runs as a picture; `.html` is the whole report (`report.html`)."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from llmq_nb.core.errors import UserError
from llmq_nb.report.html import write_report
from llmq_nb.report.panels import (
    AXES,
    COLOURS,
    SMOOTHED_FROM,
    Over,
    Panel,
    shown_panels,
    smooth,
    table_of,
)
from llmq_nb.report.runs import Run, load_runs


def plot_runs(run_dirs: Sequence[Path], out: Path, *, over: Over = "steps") -> None:
    """Draw the runs over each other into `out`, a .png or .html file.

    run_dirs: folders with a log.jsonl, or such files. over: the horizontal axis. Raises UserError:
    no such run, a log without steps, another kind of `out`, a folder that cannot be written.
    """
    if out.suffix not in (".png", ".html"):
        raise UserError(f"cannot draw {str(out)!r}", mend="--out takes a .png or .html file")
    runs = load_runs(run_dirs)
    if out.suffix == ".html":
        write_report(runs, out, over=over)
        return
    figure = draw(runs, over)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=100)
    except OSError as error:
        raise UserError(f"cannot write {out}", mend=error.strerror or str(error)) from None


def draw(runs: Sequence[Run], over: Over = "steps") -> Figure:
    """The panels as a figure: four on 12 x 8 inches, in three columns where there are more."""
    shown = shown_panels(runs)
    columns = 2 if len(shown) <= 4 else 3
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(12, 4 * rows), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's matplotlib is set to
    for i, panel in enumerate(shown):
        axes = figure.add_subplot(rows, columns, i + 1)
        for index, run in enumerate(runs):
            _draw_run(axes, run, panel, over, color=COLOURS[index % len(COLOURS)])
        axes.set_title(panel.title, fontsize=11)
        axes.set_xlabel(AXES[over][1])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        if panel.columns[0] == "tokens_per_second":
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        if panel.from_zero:
            axes.set_ylim(bottom=0)
        if i == 0 or len(panel.columns) > 1:
            axes.legend(fontsize=9)
    return figure


def _draw_run(axes: Axes, run: Run, panel: Panel, over: Over, color: str) -> None:
    table, axis = table_of(run, panel), AXES[over][0]
    styles = ("-", ":")
    for column, more, style in zip(panel.columns, panel.labels, styles, strict=False):
        x, y, label = table[axis], table[column], run.name + more
        if panel.smoothed and len(y) >= SMOOTHED_FROM:
            axes.plot(x, y, style, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(x, smooth(y), style, color=color, linewidth=1.6, label=label)
        else:
            marker = "o" if len(y) == 1 else None
            axes.plot(x, y, style, color=color, linewidth=1.4, marker=marker, label=label)
    evals = run.evaluations
    if panel.columns == ("loss",) and len(evals["loss"]):
        axes.plot(
            evals[axis],
            evals["loss"],
            color=color,
            marker="o",
            markersize=5,
            linestyle="--",
            label=f"{run.name}, validation",
            markerfacecolor="white",
            zorder=3,
        )
