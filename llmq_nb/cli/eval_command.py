"""`llmq-nb eval`: the loss of a model on a token store."""

import json
import math

import click


@click.command("eval", short_help="The mean loss of a model on a token store.")
@click.argument("model", type=click.Path())
@click.option("--data", required=True, type=click.Path(), help="A token store (.zarr).")
@click.option(
    "--seq-len",
    default=None,
    type=click.IntRange(1),
    help="Tokens in a window; default: the run's batch.seq_len; 1024 for a folder.",
)
@click.option("--micro-batch", default=4, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=None, type=click.IntRange(1), help="Micro-batches; default: all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str, data: str, seq_len: int | None, micro_batch: int, steps: int | None, as_json: bool
) -> None:
    """The mean loss of MODEL (Hugging Face folder, checkpoint or run's folder) on a store."""
    from llmq_nb.core.errors import UserError
    from llmq_nb.data.loader import eval_batches
    from llmq_nb.data.store import TokenStore, check_tokenizer, check_vocabulary
    from llmq_nb.data.tokenizer import load_tokenizer, tokenizer_info
    from llmq_nb.train.inference import Inference, open_model
    from llmq_nb.train.setup import inference_kind

    opened, store = open_model(model, seq_len=seq_len or 1), TokenStore(data)
    check_vocabulary(store, opened.model.V)
    if opened.tokenizer is not None:
        check_tokenizer(store, tokenizer_info(load_tokenizer(opened.tokenizer)))
    if seq_len is None:
        seq_len = min(opened.precision.batch.seq_len, opened.model.max_position)
    if seq_len > opened.model.max_position:
        mend = f"the model has {opened.model.max_position} positions"
        raise UserError(f"{seq_len}", where="--seq-len", mend=mend)
    inference = Inference(
        opened.model,
        micro_batch=micro_batch,
        seq_len=seq_len,
        base=opened.precision,
        arrays=opened.arrays,
        kind=inference_kind(opened.precision, opened.model),
    )
    packing = opened.precision.data.packing
    batches = eval_batches(store, micro_batch, seq_len, steps, packing=packing)
    loss, tokens = inference.loss(batches)
    if as_json:
        click.echo(json.dumps({"loss": loss, "perplexity": math.exp(loss), "tokens": tokens}))
    else:
        click.echo(f"loss {loss:.6f}, perplexity {math.exp(loss):.4f}, on {tokens:,} tokens")
