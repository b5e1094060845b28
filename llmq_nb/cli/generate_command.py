"""`llmq-nb generate`: text from prompts."""

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from llmq_nb.data.prompts import Prompt


@click.command("generate")
@click.argument("model", type=click.Path())
@click.option("--prompt", multiple=True, help="The text to go on from; may be given again.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(),
    help='A file: a prompt a line, or .jsonl with {"prompt"} or {"messages"} a line.',
)
@click.option("--chat", is_flag=True, help="A prompt is what a user says: use the chat template.")
@click.option("--system", default=None, help="With --chat: the system message.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0))
@click.option(
    "--top-p", default=0.95, show_default=True, type=click.FloatRange(0, 1, min_open=True)
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1))
@click.option("--batch", default=8, show_default=True, type=click.IntRange(1), help="At once.")
@click.option("--tokenizer", default=None, help="`bytes`, a tokenizer.json or its folder.")
@click.option("--seq-len", default=None, type=click.IntRange(1), help="Most tokens in sight.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each prompt.")
def command(
    model: str,
    prompt: tuple[str, ...],
    file: str | None,
    chat: bool,
    system: str | None,
    tokens: int,
    batch: int,
    tokenizer: str | None,
    seq_len: int | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Continue prompts with MODEL: a Hugging Face folder, a checkpoint or a run's folder.

    Temperature 0 takes the likeliest token. Prompts of one batch give what they give alone; equal
    ones differ. A text longer than the model's positions goes on from its last half.
    """
    from llmq_nb.core.errors import UserError
    from llmq_nb.data.prompts import Prompt, PromptCoder, read_prompts
    from llmq_nb.data.tokenizer import load_tokenizer
    from llmq_nb.train.generation import Generator, Sampling
    from llmq_nb.train.inference import open_model
    from llmq_nb.train.setup import inference_kind

    if bool(prompt) == (file is not None):
        raise UserError("not one of --prompt and --prompts", mend="give one of the two")
    if system is not None and not chat:
        raise UserError("--system without --chat", mend="add --chat")
    opened = open_model(model)
    name = tokenizer or opened.tokenizer
    if name is None:
        raise UserError(f"{model} has no tokenizer", mend="give one with --tokenizer")
    coder = PromptCoder(load_tokenizer(name), opened.model.V, chat=chat, system=system)
    found = [Prompt("--prompt", text) for text in prompt] if file is None else read_prompts(file)
    ids = [coder.encode(p) for p in found]
    talks = chat or any(p.messages is not None for p in found)
    longest = max(map(len, ids))
    rows = min(batch, len(ids))
    with Generator(
        opened.model,
        rows=rows,
        length=min(seq_len or longest + tokens, opened.model.max_position),
        prompt=longest,
        base=opened.precision,
        arrays=opened.arrays,
        kind=inference_kind(opened.precision, opened.model),
    ) as generator:
        show = _Shown(coder, found, as_json, streams=len(ids) == 1)
        for first in range(0, len(ids), rows):
            part = ids[first : first + rows]
            made = generator.generate(
                part,
                tokens,
                Sampling(**sampling),
                stop_ids=coder.end_ids(opened.model.eos_ids, chat=talks),
            )
            show.rows(first, part, made, tokens)


class _Shown:
    """Prints texts: one as it comes, several when they are done."""

    def __init__(self, coder: Any, prompts: "list[Prompt]", as_json: bool, *, streams: bool):
        self.coder, self.prompts, self.as_json = coder, prompts, as_json
        self.streams = streams and not as_json

    def rows(self, first: int, part: list[Any], made: Any, most: int) -> None:
        """A batch, whose first prompt has the number `first`."""
        decode = self.coder.tokenizer.decode
        new: list[list[int]] = [[] for _ in part]
        before = ["" if self._talks(first + i) else decode(part[i]) for i in range(len(part))]
        context = [
            [] if self._talks(first + i) else list(map(int, part[i])) for i in range(len(part))
        ]
        shown = before[0]
        if self.streams:
            click.echo(shown, nl=False)
        for row, token in made:
            new[row].append(token)
            text = decode([*context[row], *new[row]]) if self.streams else ""
            if not text or text.endswith("\ufffd"):
                continue  # half a character: the next token may complete it
            click.echo(text[len(shown) :], nl=False)
            shown = text
        if self.streams:
            click.echo(decode([*context[0], *new[0]])[len(shown) :])
            return
        for i, ids in enumerate(new):
            text = decode([*context[i], *ids])[len(before[i]) :]
            if self.as_json:
                end = "length" if len(ids) == most else "end"
                facts = {"text": text, "tokens": len(ids), "ended": end}
                p = self.prompts[first + i]
                asked = {"messages": p.messages} if p.messages is not None else {"prompt": p.text}
                click.echo(json.dumps(asked | facts, ensure_ascii=False))
            else:
                click.echo(f"── {first + i + 1}\n{before[i]}{text}")

    def _talks(self, index: int) -> bool:
        """Whether only the answer is shown."""
        return self.coder.chat or self.prompts[index].messages is not None
