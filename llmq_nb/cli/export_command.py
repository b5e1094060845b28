"""`llmq-nb export`: a checkpoint as a Hugging Face folder."""

import click


@click.command("export")
@click.argument("checkpoint", type=click.Path())
@click.argument("out_dir", type=click.Path())
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="For example 2GB or 500MiB."
)
@click.option(
    "--quantize",
    type=click.Choice(["e4m3"]),
    default=None,
    help="Store the weights of FP8 products as FP8 codes and scales.",
)
def command(
    checkpoint: str, out_dir: str, dtype: str, max_shard_size: str, quantize: str | None
) -> None:
    """Write CHECKPOINT (or the newest one of a run's folder) to OUT_DIR for transformers.

    --quantize e4m3 writes the codes that FP8 products multiply, at half the size: transformers
    multiplies them on GPUs with FP8 units and makes BF16 of them elsewhere.
    """
    from llmq_nb.core.dtype import DType
    from llmq_nb.core.sizes import parse_bytes
    from llmq_nb.data.tokenizer import export_source
    from llmq_nb.io.export import check_target, export_model
    from llmq_nb.io.export_fp8 import find_absmax
    from llmq_nb.train.inference import open_model

    size = parse_bytes(max_shard_size, where="--max-shard-size")
    opened = open_model(checkpoint)
    fp8 = None
    if quantize is not None:
        check_target(out_dir)  # before all weights are read
        precision = opened.precision.precision
        exact = precision.bf16_layers if precision.matmul == quantize else ()
        fp8 = find_absmax(opened.model, opened.read, exact)
    out = export_model(
        out_dir,
        opened.model,
        opened.read,
        dtype=DType(dtype),
        tokenizer=None if opened.tokenizer is None else export_source(opened.tokenizer),
        max_shard_size=size,
        fp8=fp8,
    )
    click.echo(f"exported {out}")
