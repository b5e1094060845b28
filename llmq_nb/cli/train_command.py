"""`llmq-nb train`: one run from one TOML file."""

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
    """Train the model of CONFIG, a TOML file."""
    from llmq_nb.config_file import load_config, to_toml
    from llmq_nb.train.run import run
    from llmq_nb.train.trainer import Trainer

    parsed = load_config(config, overrides)
    if dry_run:
        with Trainer(parsed, resume=resume) as trainer:
            click.echo(to_toml(trainer.config))
            click.echo(f"# {trainer.total_steps} steps, {trainer.progress.step} of them done")
        return 0
    return run(parsed, resume=resume, argv=sys.argv[1:])
