"""`llmq-nb replay`: a step of a run again, with every tensor looked at."""

import dataclasses
import json
from pathlib import Path

import click


@click.command("replay", short_help="Make a step again and name its first bad tensor.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--step", required=True, type=int, help="The first is 1.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(run_dir: Path, step: int, as_json: bool) -> None:
    """Make a step of RUN_DIR again and name the first tensor that is not finite.

    It begins at the newest checkpoint before the step and writes nothing.
    """
    from llmq_nb.report.console import announce
    from llmq_nb.train.replay import replay

    found = replay(run_dir, step, (lambda _: None) if as_json else announce)
    m = found.metrics
    if as_json:
        facts = {
            "step": m.step,
            "begin": found.begin,
            "loss": repr(m.loss),
            "grad_norm": repr(m.grad_norm),
            "same_bits": found.same_bits,
            "bad": None if found.bad is None else dataclasses.asdict(found.bad),
        }
        click.echo(json.dumps(facts))
        return
    click.echo(f"step {m.step}, from the state after step {found.begin}")
    log = {None: "", True: " (the log's bits)", False: " (the log has other numbers)"}
    click.echo(f"loss {m.loss:.6f}, gradient norm {m.grad_norm:.6g}{log[found.same_bits]}")
    if found.bad is not None:
        click.echo(f"first bad tensor: {found.bad}")
    else:
        click.echo("every tensor is finite")
