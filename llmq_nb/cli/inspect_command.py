"""`llmq-nb inspect`: what a token store holds and what is trained on."""

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmq_nb.data.inspect import Findings
    from llmq_nb.data.store import TokenStore


@click.command("inspect", short_help="Show what a token store holds and what is trained on.")
@click.argument("store", type=click.Path())
@click.option("--samples", default=3, show_default=True, type=click.IntRange(0))
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1), help="A sample.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--seq-len", default=None, type=click.IntRange(1), help="Count cut documents.")
@click.option("--tokenizer", default=None, help="`bytes`, a tokenizer.json or its folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    store: str,
    samples: int,
    tokens: int,
    seed: int,
    seq_len: int | None,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Count the faults of STORE, a token store, and show what is trained on in some of it."""
    from llmq_nb.data.inspect import inspect_store
    from llmq_nb.data.samples import draw_samples, find_tokenizer
    from llmq_nb.data.store import TokenStore

    opened = TokenStore(store)
    coder = find_tokenizer(opened, tokenizer)
    findings = inspect_store(opened, seq_len=seq_len)
    drawn = draw_samples(opened, coder, count=samples, tokens=tokens, seed=seed)
    if as_json:
        facts = dataclasses.asdict(findings)
        pieces = [[dataclasses.asdict(piece) for piece in sample] for sample in drawn]
        about = {"store": store, "tokenizer": opened.tokenizer.name, "decoded": coder is not None}
        click.echo(json.dumps({**about, **facts, "samples": pieces}))
        return
    _show_samples(drawn)
    if drawn and coder is None:
        info = opened.tokenizer
        click.echo(
            f"(token ids: tokenizer {info.name}, sha256 {info.sha256[:12]}, was not found;"
            " name it with --tokenizer)"
        )
    for line in _facts(opened, findings, seq_len):
        click.echo(line)


def _show_samples(drawn: Any) -> None:
    """Green: trained; grey: not; without colours trained text is in brackets."""
    from rich.console import Console

    from llmq_nb.data.samples import CLOSE, OPEN, render

    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    colour = colour and os.environ.get("TERM") != "dumb"
    screen = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    for sample in drawn:
        for line in render(sample, colour=colour):
            if colour:
                screen.print(line, soft_wrap=True)
            else:
                click.echo(line.plain)
        click.echo()
    if drawn:
        legend = "green: trained on, grey: not" if colour else f"{OPEN} trained on {CLOSE}"
        click.echo(f"({legend}; ── begins a document)")


def _facts(store: "TokenStore", f: "Findings", seq_len: int | None) -> list[str]:
    """The counts, a line each; faults that were not found are in one line."""
    from llmq_nb.data.inspect import FAULTS

    info = store.tokenizer
    lines = [
        f"{store.name}: {f.documents:,} documents, {f.tokens:,} tokens,"
        f" tokenizer {info.name} ({info.vocab_size:,} ids)",
        f"trained on: {f.supervised:,} tokens ({f.supervised / f.tokens:.1%})",
        f"document lengths: {f.shortest:,} to {f.longest:,} tokens, median {f.median:,.0f}",
    ]
    if f.dropped:
        lines.append(f"empty documents that tokenizing left out: {f.dropped:,}")
    notes = {
        "out_of_vocabulary": f"; {f.out_of_vocabulary:,} tokens, largest id {f.largest_id:,}",
        "duplicate": f"; {f.duplicate_tokens:,} tokens, at most {f.most_copies:,} copies of one",
        "long": f" (--seq-len {seq_len})",
    }
    none = []
    for key, found in f.faults.items():
        if not found.documents:
            none.append(key.replace("_", " "))
            continue
        first = ", ".join(f"{i:,}" for i in found.examples)
        more = ", ..." if found.documents > len(found.examples) else ""
        lines.append(
            f"{key.replace('_', ' ')}: {found.documents:,} of the documents ({first}{more}):"
            f" {FAULTS[key]}{notes.get(key, '')}"
        )
    if info.bos_id is None and "double bos" in none:
        none[none.index("double bos")] = "double bos (the tokenizer has no BOS)"
    if none:
        lines.append(f"none found: {', '.join(none)}")
    return lines
