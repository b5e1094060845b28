"""The report: one HTML file that needs nothing else, whatever happens to the network.

The figures, the config and the FP8 health are plain HTML; the curves are data in the page, drawn as
SVG by `report.js`, which is put into the page as `report.css` is. A content security policy forbids
the page to load anything. The same logs give the same bytes.
"""

import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import tomli

from llmq_nb.core.errors import UserError
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
from llmq_nb.report.runs import Column, Run

MOST_POINTS = 1000
"""Of a curve in a page; longer ones are means of pieces, with the smallest and largest beside."""
MOST_EVENTS = 200
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
<h1>{title}</h1>
{figures}
<div id="controls"></div>
<noscript><p>The curves are drawn by this page's own script.</p></noscript>
<div id="panels"></div>
{sections}
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def write_report(runs: Sequence[Run], out: Path, *, over: Over = "steps") -> None:
    """Write the page of these runs. Raises UserError where `out` cannot be written."""
    page = report_page(runs, over=over)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}", mend=error.strerror or str(error)) from None


def report_page(runs: Sequence[Run], *, over: Over = "steps") -> str:
    """The page as text."""
    assets = files("llmq_nb.report")
    sections = [_health_section(runs), _config_section(runs), _event_section(runs)]
    return PAGE.format(
        policy=POLICY,
        title=_e(", ".join(run.name for run in runs)),
        css=assets.joinpath("report.css").read_text(encoding="utf-8"),
        figures=_figures(runs),
        sections="\n".join(section for section in sections if section),
        data=_script_json(_data(runs, over)),
        script=assets.joinpath("report.js").read_text(encoding="utf-8"),
    )


def _figures(runs: Sequence[Run]) -> str:
    """A row a run; columns that no run has are left out."""
    rows = [run.summary | run.details for run in runs]
    keys = [key for key in rows[0] if any(row[key] for row in rows)]
    return _table(keys, [[row[key] for key in keys] for row in rows], "figures")


def _health_section(runs: Sequence[Run]) -> str:
    """A map of the last FP8 health record of each run: a row a tensor, a column a layer."""
    parts = []
    for run in runs:
        tensors = run.last_health
        for key in ("underflowed", "saturated") if tensors else ():
            parts.append(f"<h3>{_e(run.name)}: share {key} [%], step {_last_health_step(run)}</h3>")
            parts.append(_health_map(tensors, key))
    return "\n".join(["<h2>FP8 health by tensor and layer</h2>", *parts]) if parts else ""


def _last_health_step(run: Run) -> str:
    return f"{run.health['step'][-1]:,.0f}"


def _health_map(tensors: Sequence[Mapping[str, Any]], key: str) -> str:
    layers = sorted({t["layer"] for t in tensors})
    names = list(dict.fromkeys(t["name"] for t in tensors))
    at = {(t["name"], t["layer"]): t for t in tensors}
    head = "".join(f"<th>{layer}</th>" for layer in layers)
    rows = []
    for name in names:
        cells = "".join(_health_cell(at.get((name, layer)), key) for layer in layers)
        rows.append(f"<tr><th>{_e(name)}</th>{cells}</tr>")
    table = f'<table class="map"><tr><th></th>{head}</tr>{"".join(rows)}</table>'
    return f'<div class="scroll">{table}</div>'


def _health_cell(tensor: Mapping[str, Any] | None, key: str) -> str:
    """Coloured by the logarithm of the share: from 0.001 % on to 10 % and more."""
    share = None if tensor is None else tensor.get(key)
    if tensor is None or share is None:
        return "<td>–</td>"
    depth = min(max((math.log10(max(share, 1e-9)) + 5) / 4, 0), 1)
    absmax = tensor.get("absmax")
    shown = tensor.get("absmax_text", "?") if absmax is None else f"{absmax:.4g}"
    note = f"{tensor['format']}, absmax {shown}"
    colour = f"rgba(214,39,40,{depth:.2f})"
    return f'<td style="background:{colour}" title="{_e(note)}">{100 * share:.3g}</td>'


def _config_section(runs: Sequence[Run]) -> str:
    """What differs between the runs, then each whole config."""
    known = [run for run in runs if run.toml]
    if not known:
        return ""
    parts = ["<h2>Config</h2>"]
    flat = [_flat(run.toml) for run in known]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    differ = [key for key in keys if len({values.get(key, "") for values in flat}) > 1]
    if differ:
        rows = [[key, *(values.get(key, "(none)") for values in flat)] for key in differ]
        parts.append("<h3>What differs</h3>")
        parts.append(_table(["key", *(run.name for run in known)], rows, "config"))
    for run in known:
        text = _e(run.toml.strip())
        opened = " open" if len(known) == 1 else ""
        parts.append(
            f"<details{opened}><summary>{_e(run.name)}</summary><pre>{text}</pre></details>"
        )
    return "\n".join(parts)


def _flat(toml: str) -> dict[str, str]:
    """section.key -> value as text; nothing of a text that is no TOML."""
    try:
        tables = tomli.loads(toml)
    except tomli.TOMLDecodeError:
        return {}
    return {
        f"{section}.{key}": json.dumps(value, ensure_ascii=False, default=str)
        for section, table in tables.items()
        if isinstance(table, dict)
        for key, value in table.items()
    }


def _event_section(runs: Sequence[Run]) -> str:
    parts = ["<h2>Events</h2>"]
    for run in runs:
        rows = [
            [time, "" if step is None else f"{step:,}", text] for time, step, text in run.events
        ]
        left_out = len(rows) - MOST_EVENTS
        note = f"<p>{left_out:,} earlier ones are in the log.</p>" if left_out > 0 else ""
        table = _table(["time", "step", "what"], rows[-MOST_EVENTS:], "events")
        parts.append(f"<details><summary>{_e(run.name)}</summary>{note}{table}</details>")
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str) -> str:
    top = "".join(f"<th>{_e(cell)}</th>" for cell in head)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{_e(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table class="{kind}"><tr>{top}</tr>\n{body}</table></div>'


def _data(runs: Sequence[Run], over: Over) -> dict[str, Any]:
    """What the script draws: x by axis and y of every curve of every panel."""
    return {
        "over": over,
        "axes": {key: label for key, (_, label) in AXES.items()},
        "runs": [
            {"name": run.name, "colour": COLOURS[i % len(COLOURS)]} for i, run in enumerate(runs)
        ],
        "panels": [
            {
                "title": panel.title,
                "fromZero": panel.from_zero,
                "curves": [c for i, run in enumerate(runs) for c in _curves(run, i, panel)],
            }
            for panel in shown_panels(runs, page=True)
        ],
    }


def _curves(run: Run, index: int, panel: Panel) -> list[dict[str, Any]]:
    table = table_of(run, panel)
    curves = [
        _curve(table, column, panel.smoothed) | {"run": index, "label": run.name + label}
        for column, label in zip(panel.columns, panel.labels, strict=True)
        if len(table["step"])
    ]
    for curve in curves[1:]:
        curve["dotted"] = True
    if panel.columns == ("loss",) and len(run.evaluations["step"]):
        marks = {"run": index, "label": f"{run.name}, validation", "dotted": True, "marks": True}
        curves.append(_curve(run.evaluations, "loss", False) | marks)
    return curves


def _curve(table: Mapping[str, Column], column: str, smoothed: bool) -> dict[str, Any]:
    """x: by axis; y; s: smoothed y; low, high: where a point stands for several records."""
    y = table[column]
    edges = np.unique(np.linspace(0, len(y), MOST_POINTS + 1).astype(int))
    pieces = len(y) > MOST_POINTS
    out: dict[str, Any] = {"x": {}}
    for key, (axis, _) in AXES.items():
        out["x"][key] = _plain(_means(table[axis], edges) if pieces else table[axis])
    out["y"] = _plain(_means(y, edges) if pieces else y)
    if smoothed and len(y) >= SMOOTHED_FROM:
        out["s"] = _plain(_means(smooth(y), edges) if pieces else smooth(y))
    if pieces:
        low, high = np.where(np.isfinite(y), y, np.inf), np.where(np.isfinite(y), y, -np.inf)
        out["low"] = _plain(np.minimum.reduceat(low, edges[:-1]))
        out["high"] = _plain(np.maximum.reduceat(high, edges[:-1]))
    return out


def _means(values: Column, edges: Any) -> Column:
    """The mean of the finite values of each piece."""
    finite = np.isfinite(values)
    total = np.add.reduceat(np.where(finite, values, 0.0), edges[:-1])
    count = np.add.reduceat(finite.astype(np.float64), edges[:-1])
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _plain(values: Column) -> list[float | None]:
    """Six figures are more than a screen has; JSON has no NaN."""
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in values.tolist()]


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it is in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _e(text: str) -> str:
    """Text for HTML; a file name may hold bytes that are no text."""
    return html.escape(text.encode("utf-8", "replace").decode())
