"""`llmq-nb generate`: text from a prompt."""

import click


@click.command("generate", short_help="Continue a prompt, or answer one (--chat).")
@click.argument("model", type=click.Path())
@click.option("--prompt", required=True, help="The text to go on from.")
@click.option("--chat", is_flag=True, help="The prompt is a user's message: let it answer.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0))
@click.option(
    "--top-p", default=0.95, show_default=True, type=click.FloatRange(0, 1, min_open=True)
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1))
@click.option("--tokenizer", default=None, help="`bytes`, a tokenizer.json or its folder.")
@click.option("--seq-len", default=None, type=click.IntRange(1), help="Most tokens in sight.")
def command(
    model: str,
    prompt: str,
    chat: bool,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    tokenizer: str | None,
    seq_len: int | None,
) -> None:
    """Continue a prompt with MODEL: a Hugging Face folder, a checkpoint or a run's folder."""
    from llmq_nb.core.errors import UserError
    from llmq_nb.data.tokenizer import load_tokenizer
    from llmq_nb.train.inference import Inference, open_model
    from llmq_nb.train.setup import inference_kind

    opened = open_model(model)
    name = tokenizer or opened.tokenizer
    if name is None:
        raise UserError(f"{model} has no tokenizer", mend="give one with --tokenizer")
    coder = load_tokenizer(name)
    ids = coder.encode(prompt)
    if chat:
        from llmq_nb.data.chat import ChatRenderer

        if not prompt:
            raise UserError("empty prompt", where="--prompt", mend="say something")
        ids = ChatRenderer(coder).prompt([{"role": "user", "content": prompt}], where="--prompt")
    length = min(seq_len or len(ids) + tokens, opened.model.max_position)
    inference = Inference(
        opened.model,
        micro_batch=1,
        seq_len=length,
        base=opened.precision,
        arrays=opened.arrays,
        kind=inference_kind(opened.precision, opened.model),
    )
    made = list(map(int, ids))
    shown = coder.decode(made)
    if not chat:  # of a chat the answer alone
        click.echo(shown, nl=False)
    for token in inference.generate(ids, tokens, temperature=temperature, top_p=top_p, seed=seed):
        made.append(token)
        text = coder.decode(made)
        if text.endswith("\ufffd"):
            continue  # half a character: the next token may complete it
        click.echo(text[len(shown) :], nl=False)
        shown = text
    click.echo()
