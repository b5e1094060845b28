"""`llmq-nb compile`: build a run's GPU kernels before it starts."""

import time

import click


@click.command("compile")
@click.argument("config", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="section.key=value", help="Override.")
def command(config: str, overrides: tuple[str, ...]) -> None:
    """Compile every kernel that the run of CONFIG launches into the disk cache (needs the GPU)."""
    from llmq_nb.config_file import load_config
    from llmq_nb.train.engine_cuda import compile_kernels
    from llmq_nb.train.setup import resolve_model

    parsed = load_config(config, overrides)
    model = resolve_model(parsed, click.echo).model
    start = time.perf_counter()
    count = compile_kernels(parsed, model, lambda name: click.echo(f"  {name}"))
    click.echo(f"{count} kernels ready in {time.perf_counter() - start:.1f} s")
