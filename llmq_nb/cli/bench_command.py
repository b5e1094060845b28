"""`llmq-nb bench`: measurements of this machine."""

import json
from pathlib import Path
from typing import Any

import click


@click.command("bench")
@click.argument("what", type=click.Choice(["data", "step"]))
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures."
)
@click.option("--model", "models", multiple=True, default=("qwen2.5-0.5b",), show_default=True)
@click.option("--micro-batch", default=8, show_default=True, type=click.IntRange(1))
@click.option("--grad-accumulation", default=4, show_default=True, type=click.IntRange(1))
@click.option("--seq-len", default=1024, show_default=True, type=click.IntRange(1))
@click.option("--head-chunks", default=1, show_default=True, type=click.IntRange(1))
@click.option("--recompute", multiple=True, help="Repeat for several; see memory.recompute.")
@click.option("--breakdown", is_flag=True, help="Milliseconds an operation.")
def command(what: str, json_file: Path | None, breakdown: bool, **options: Any) -> None:
    """Measure WHAT: data, the token loader; step, whole training steps on the GPU."""
    figures = _data() if what == "data" else _steps(breakdown, **options)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _data() -> dict[str, Any]:
    from llmq_nb.data.bench import run

    figures = run()
    for key, value in figures.items():
        click.echo(f"{key}: {value}")
    return figures


def _steps(breakdown: bool, models: tuple[str, ...], **options: Any) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.table import Table

    from llmq_nb.train.bench_step import Setting, measure

    table = Table("model", "batch", "tokens/s", "MFU %", "s/step", "device GiB", "first step s")
    rows = []
    for model in models:
        row = measure(Setting(model=model, **options), breakdown=breakdown)
        rows.append(row)
        table.add_row(
            model,
            f"{row['micro_batch']}x{row['grad_accumulation']}",
            f"{row['tokens_per_second']:,}",
            f"{100 * row['mfu']:.1f}",
            f"{row['seconds_per_step']:.3f}",
            f"{row['device_gib']:.1f}",
            f"{row['first_step_seconds']:.1f}",
        )
    Console().print(table)
    for row in rows if breakdown else ():
        for operation, milliseconds in row["breakdown_ms"].items():
            click.echo(f"{row['model']}  {operation:32} {milliseconds:10.3f} ms")
    return rows
