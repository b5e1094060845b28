"""Prompts for generation and tasks: plain text, or conversations by the tokenizer's chat template.

a text file     each line that is not blank is a prompt
a .jsonl file   an object a line: {"prompt": "..."} or {"messages": [{"role": ..., "content":
                ...}, ...]}; messages go through the chat template up to where the assistant
                begins to speak
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from llmq_nb.core.errors import UserError
from llmq_nb.data.chat import ChatRenderer, Messages
from llmq_nb.data.formats import NotText
from llmq_nb.data.tokenizer import Ids, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """Text, or messages. where: for errors, file and line or the option."""

    where: str
    text: str | None = None
    messages: Messages | None = None


class PromptCoder:
    """Prompts to ids of a model with `vocab` ids. chat: plain text is what a user says."""

    def __init__(
        self, tokenizer: Tokenizer, vocab: int, *, chat: bool = False, system: str | None = None
    ) -> None:
        self.tokenizer, self.vocab, self.chat, self.system = tokenizer, vocab, chat, system

    @cached_property
    def renderer(self) -> ChatRenderer:
        """The chat template. UserError if there is none."""
        return ChatRenderer(self.tokenizer)

    def encode(self, prompt: Prompt) -> Ids:
        """Ids int32 [n], n > 0. UserError for an empty prompt, or ids that the model lacks."""
        if prompt.messages is not None:
            ids = self.renderer.prompt(prompt.messages, prompt.where)
        elif self.chat:
            before = [{"role": "system", "content": self.system}] if self.system else []
            said = [*before, {"role": "user", "content": prompt.text or ""}]
            ids = self.renderer.prompt(said, prompt.where)
        else:
            ids = self.tokenizer.encode(prompt.text or "")
        return self.checked(ids, prompt.where)

    def checked(self, ids: Ids, where: str) -> Ids:
        """The ids, if there are any and the model has them."""
        if not len(ids):
            raise UserError("empty prompt", where=where, mend="give at least one token")
        if int(ids.max()) >= self.vocab:
            raise UserError(
                f"token {int(ids.max())} of tokenizer {self.tokenizer.name}",
                where=where,
                mend=f"the model has {self.vocab}: use the model's tokenizer",
            )
        return ids

    def end_ids(self, own: Iterable[int], *, chat: bool) -> frozenset[int]:
        """What ends a text: the model's own ids, the tokenizer's, and with chat the turn's end."""
        ids = {*own, self.tokenizer.eos_id, *_generation_ends(self.tokenizer)}
        if chat:
            turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            tokens, supervised = self.renderer.render(turn)
            last = int(tokens[supervised][-1])
            if last in self.tokenizer.special_ids.values():
                ids.add(last)
        return frozenset(ids)


def _generation_ends(tokenizer: Tokenizer) -> list[int]:
    """eos_token_id of the generation_config.json beside the tokenizer."""
    path = getattr(tokenizer, "path", None)
    file = None if path is None else path.with_name("generation_config.json")
    if file is None or not file.is_file():
        return []
    try:
        found = json.loads(file.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UserError(f"not a JSON object ({error})", where=str(file)) from error
    ids = found if isinstance(found, list) else [found]
    return [i for i in ids if isinstance(i, int)]


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file, every line checked. UserError names file and line."""
    path = Path(path).expanduser()
    if path.suffix == ".jsonl":
        found = [_prompt(record, where) for where, record in json_lines(path)]
    else:
        lines = _text(path).splitlines()
        found = [Prompt(f"{path}:{i}", text) for i, text in enumerate(lines, 1) if text.strip()]
    if not found:
        raise UserError("no prompt", where=str(path), mend="a line is one; see --help")
    return found


def _prompt(record: dict[str, Any], where: str) -> Prompt:
    unknown = sorted(set(record) - {"prompt", "messages"})
    if unknown:
        raise UserError(
            f"unknown key {unknown[0]!r}", where=where, mend='a prompt has "prompt" or "messages"'
        )
    return prompt_of(record, where)


def prompt_of(record: dict[str, Any], where: str) -> Prompt:
    """The prompt of an object with "prompt" or "messages"."""
    if ("prompt" in record) == ("messages" in record):
        raise UserError('not one of "prompt" and "messages"', where=where, mend="give one of them")
    if "prompt" in record:
        if not isinstance(record["prompt"], str) or not record["prompt"]:
            raise UserError('"prompt" is no text', where=where, mend="a string that is not empty")
        return Prompt(where, record["prompt"])
    messages = record["messages"]
    good = isinstance(messages, list) and len(messages) > 0
    for message in messages if good else []:
        good = good and isinstance(message, dict)
        good = good and all(isinstance(message.get(key), str) for key in ("role", "content"))
    if not good:
        mend = 'a list of objects with "role" and "content" strings'
        raise UserError('"messages" is no conversation', where=where, mend=mend)
    return Prompt(where, messages=messages)


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, object) of each line that is not blank. UserError: what is no object."""
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"not JSON ({error})", where=where) from error
        if not isinstance(record, dict):
            raise UserError("not a JSON object", where=where)
        yield where, record


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise NotText("not UTF-8 text", where=f"{path}:{line}") from error
