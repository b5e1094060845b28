"""`llmq-nb export`: a checkpoint as a Hugging Face folder."""

import click


@click.command("export", short_help="Write a checkpoint as a Hugging Face folder.")
@click.argument("checkpoint", type=click.Path())
@click.argument("out_dir", type=click.Path())
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="For example 2GB or 500MiB."
)
def command(checkpoint: str, out_dir: str, dtype: str, max_shard_size: str) -> None:
    """Write CHECKPOINT (or the newest one of a run's folder) to OUT_DIR for transformers."""
    from llmq_nb.core.dtype import DType
    from llmq_nb.core.sizes import parse_bytes
    from llmq_nb.data.tokenizer import export_source
    from llmq_nb.io.export import export_model
    from llmq_nb.model.parameters import model_parameters
    from llmq_nb.train.inference import open_model

    size = parse_bytes(max_shard_size, where="--max-shard-size")
    opened = open_model(checkpoint)
    arrays = opened.arrays
    # both walk the parameters in forward order, so one array is in memory at a time
    order = iter(model_parameters(opened.model))

    def get(parameter):
        expected = next(order)
        assert parameter == expected, (parameter.name, expected.name)
        return next(arrays)[1]

    out = export_model(
        out_dir,
        opened.model,
        get,
        dtype=DType(dtype),
        tokenizer=None if opened.tokenizer is None else export_source(opened.tokenizer),
        max_shard_size=size,
    )
    click.echo(f"exported {out}")
