"""A picture and its figures as one HTML file that needs nothing else."""

import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em }}
svg {{ width: 100%; height: auto }}
.figures {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .3em 1em .3em 0; text-align: left; border-bottom: 1px solid #ddd }}
</style>
<h1>{title}</h1>
<div class="figures">
<table>
<tr>{head}</tr>
{rows}
</table>
</div>
{picture}
</html>
"""


def write_html(path: Path, figure: Figure, rows: Sequence[Mapping[str, str]]) -> None:
    """Write the table (a row a run, the same keys in each) and the figure. Raises OSError."""
    title = ", ".join(row["run"] for row in rows)
    head = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    page = PAGE.format(title=html.escape(title), head=head, rows=body, picture=_svg(figure))
    path.write_text(page, encoding="utf-8")


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element; text stays text, the same figure gives the same bytes."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "llmq-nb"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    element = text[text.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
