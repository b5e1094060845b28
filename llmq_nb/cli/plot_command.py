"""`llmq-nb plot`: pictures of runs; an .html file is what `llmq-nb report` writes."""

from pathlib import Path

import click


@click.command("plot", short_help="The curves of runs as a picture.")
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="A .png, or .html: the report."
)
@click.option(
    "--over", type=click.Choice(["steps", "tokens", "hours"]), default="steps", show_default=True
)
def command(run_dirs: tuple[Path, ...], out: Path, over: str) -> None:
    """Loss, gradient norm, learning rate and speed of RUN_DIRS, overlaid."""
    from typing import cast

    from llmq_nb.report.panels import Over
    from llmq_nb.report.plot import plot_runs

    plot_runs(run_dirs, out, over=cast(Over, over))
    click.echo(f"wrote {out}")
