"""`llmq-nb report`: everything that is known of runs, in one HTML file."""

from pathlib import Path

import click


@click.command("report", short_help="One page with everything that runs have logged.")
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out", default=None, type=click.Path(path_type=Path), help="Default: RUN_DIR/report.html."
)
@click.option("--png", default=None, type=click.Path(path_type=Path), help="A picture as well.")
@click.option(
    "--over", type=click.Choice(["steps", "tokens", "hours"]), default="steps", show_default=True
)
def command(run_dirs: tuple[Path, ...], out: Path | None, png: Path | None, over: str) -> None:
    """Curves, figures, GPUs, FP8 health, config and events of RUN_DIRS, overlaid, in one page."""
    from typing import cast

    from llmq_nb.core.errors import UserError
    from llmq_nb.report.panels import Over
    from llmq_nb.report.plot import plot_runs

    first = run_dirs[0] if run_dirs[0].is_dir() else run_dirs[0].parent
    page = out or first / "report.html"
    for place, suffix, name in ((page, ".html", "--out"), (png, ".png", "--png")):
        if place is not None and place.suffix != suffix:
            raise UserError(f"{place}", where=name, mend=f"name a {suffix} file")
    for place in (page, png):
        if place is not None:
            plot_runs(run_dirs, place, over=cast(Over, over))
            click.echo(f"wrote {place}")
