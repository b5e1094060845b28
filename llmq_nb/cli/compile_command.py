"""`llmq-nb compile`: build a run's GPU kernels before it starts, and pick the fastest."""

import time
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from llmq_nb.train.tuning import Timed


@click.command("compile", short_help="Build a run's GPU kernels into the disk cache.")
@click.argument("config", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="section.key=value", help="Override.")
@click.option(
    "--tune",
    is_flag=True,
    help="Time attention's tile shapes and the products' algorithms at the run's shape on this GPU;"
    " later runs on this machine take the fastest.",
)
def command(config: str, overrides: tuple[str, ...], tune: bool) -> None:
    """Compile every kernel that the run of CONFIG launches into the disk cache (needs the GPU)."""
    from llmq_nb.config_file import load_config
    from llmq_nb.train import tuning
    from llmq_nb.train.engine_cuda import compile_kernels
    from llmq_nb.train.setup import resolve_model

    parsed = load_config(config, overrides)
    model = resolve_model(parsed, click.echo).model
    start = time.perf_counter()
    names: list[str] = []

    def ready(name: str) -> None:
        names.append(name)
        click.echo(f"  {name}")

    ops = compile_kernels(parsed, model, ready)
    click.echo(f"{len(names)} kernels ready in {time.perf_counter() - start:.1f} s")
    if tune:
        _print(tuning.tune(ops, lambda line: click.echo(f"  {line}")))
        click.echo(f"tuned in {time.perf_counter() - start:.1f} s; kept for new runs here")


def _print(rows: "list[Timed]") -> None:
    from rich.console import Console
    from rich.table import Column, Table

    numbers = [Column(name, justify="right") for name in ("default us", "chosen us")]
    table = Table("kernel or product", *numbers, "choice")
    for row in rows:
        seconds = (row.seconds[0], row.seconds[row.best])
        choice = row.labels[row.best] if row.best else "default"
        table.add_row(row.name, *(f"{1e6 * s:.1f}" for s in seconds), choice)
    Console(width=140).print(table)
