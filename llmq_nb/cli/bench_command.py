"""`llmq-nb bench`: measurements of this machine."""

import json
from pathlib import Path

import click


@click.command("bench")
@click.argument("what", type=click.Choice(["data"]))
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures."
)
def command(what: str, json_file: Path | None) -> None:
    """Measure WHAT: data, the token loader."""
    from llmq_nb.data.bench import run

    figures = run()
    for key, value in figures.items():
        click.echo(f"{key}: {value}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
