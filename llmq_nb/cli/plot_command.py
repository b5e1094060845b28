"""`llmq-nb plot`: pictures of runs."""

from pathlib import Path

import click


@click.command("plot")
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A .png or .html file.")
@click.option("--over", type=click.Choice(["steps", "tokens"]), default="steps", show_default=True)
def command(run_dirs: tuple[Path, ...], out: Path, over: str) -> None:
    """Loss, gradient norm, learning rate and speed of RUN_DIRS, overlaid."""
    from llmq_nb.report.plot import plot_runs

    plot_runs(run_dirs, out, over="tokens" if over == "tokens" else "steps")
    click.echo(f"wrote {out}")
