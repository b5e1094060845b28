"""`llmq-nb train`: one run from one TOML file."""

import contextlib
import os
import sys

import click


@click.command("train")
@click.argument("config", type=click.Path())
@click.option(
    "--set", "overrides", multiple=True, metavar="section.key=value", help="Override a key."
)
@click.option("--resume", default="auto", metavar="auto|none|DIR", help="Where to go on from.")
@click.option(
    "--dry-run", is_flag=True, help="Check all (making missing stores), print the config, stop."
)
def command(config: str, overrides: tuple[str, ...], resume: str, dry_run: bool) -> int:
    """Train the model of CONFIG, a TOML file.

    Under mpirun or srun, with a process on each machine, all GPUs of all of them."""
    from llmq_nb.comm.cluster import open_cluster
    from llmq_nb.config_file import load_config, to_toml
    from llmq_nb.train.run import run
    from llmq_nb.train.trainer import Trainer

    cluster = open_cluster()
    with cluster.guard(), contextlib.ExitStack() as stack:
        if not cluster.leads:  # one process speaks for all
            sys.stdout.flush()
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
        parsed = cluster.first(lambda: load_config(config, overrides))
        if dry_run:
            with Trainer(parsed, resume=resume, cluster=cluster) as trainer:
                click.echo(to_toml(trainer.config))
                click.echo(f"# {trainer.total_steps} steps, {trainer.progress.step} of them done")
            return 0
        return run(parsed, resume=resume, argv=sys.argv[1:], cluster=cluster)
