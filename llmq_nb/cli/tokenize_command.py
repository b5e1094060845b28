"""`llmq-nb tokenize`: files to a token store."""

import click

FORMATS = ["auto", "text", "jsonl", "parquet", "chat", "llmq-bin", "llmc-bin"]


@click.command("tokenize", short_help="Make a token store of text, JSONL, parquet or chats.")
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, type=click.Path(), help="The store to make (.zarr).")
@click.option("--tokenizer", required=True, help="`bytes`, a tokenizer.json or its folder.")
@click.option("--format", "kind", type=click.Choice(FORMATS), default="auto", show_default=True)
def command(inputs: tuple[str, ...], out: str, tokenizer: str, kind: str) -> None:
    """Tokenize INPUTS, files or globs (`${stdlib}` is Python's standard library), into a store."""
    from llmq_nb.data.tokenize import tokenize
    from llmq_nb.data.tokenizer import load_tokenizer

    made = tokenize(list(inputs), out, load_tokenizer(tokenizer), kind)
    verb = "found" if made.reused else "wrote"
    skipped = f", {made.skipped} files skipped (not UTF-8)" if made.skipped else ""
    click.echo(f"{verb} {made.path}: {made.documents:,} documents, {made.tokens:,} tokens{skipped}")
