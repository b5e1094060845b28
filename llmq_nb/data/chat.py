"""Conversations to ids and loss mask, by the tokenizer's Jinja chat template.

Supervised is what the assistant says, with the token that ends its turn, and nothing else. Where
that is, the template says itself with `{% generation %} ... {% endgeneration %}`. Without these,
the conversation is rendered message by message: turn i is what rendering i + 1 messages adds to
rendering i messages with the generation prompt. That needs each rendering to begin with the one
before; a template that rewrites earlier turns is refused.

The special tokens of the template become special ids; the same characters in a message stay text.
Source  template variables and extensions: Hugging Face transformers, "chat templates".
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError
from llmq_nb.data.tokenizer import Ids, Tokenizer

Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]
CHATML = (
    # Line ends as {{ '\n' }}: a bare one after a block tag belongs to the tag (trim_blocks).
    "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
"""The template of tokenizers that have these tokens and no template of their own."""


class _Generation(Extension):
    """The block tag {% generation %}: puts its body between the environment's two marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.globals["generation_marks"]
        return f"{begin}{caller()}{end}"


class ChatRenderer:
    """The chat template of one tokenizer.

    Raises UserError if the tokenizer has neither a template nor the tokens of ChatML, or the
    template is malformed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.source = _template_of(tokenizer)
        self.marks_turns = re.search(r"{%-?\s*generation\s*-?%}", self.source) is not None
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        self._environment.globals["raise_exception"] = _raise
        self._environment.filters["tojson"] = _to_json
        try:
            self._template = self._environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise UserError(f"malformed chat template ({error})", where=tokenizer.name) from error
        names = {i: name for name, i in tokenizer.special_ids.items()}
        self._tokens = {"eos_token": names.get(tokenizer.eos_id, "")}
        if tokenizer.bos_id is not None:
            self._tokens["bos_token"] = names.get(tokenizer.bos_id, "")
        self._special = re.compile(
            "|".join(map(re.escape, sorted(tokenizer.special_ids, key=len, reverse=True)))
            or r"(?!)"
        )

    def render(self, messages: Messages, where: str = "") -> tuple[Ids, NDArray[np.bool_]]:
        """Ids int32 [n] of a conversation and their loss mask bool [n].

        where: file and line, for the UserError that a conversation the template refuses raises.
        """
        marks = _free_characters(json.dumps(messages, ensure_ascii=False) + self.source, 4)
        safe, escapes = self._escape(messages, marks[2])
        if self.marks_turns:
            text, spans = _take_marks(self._text(safe, where, marks), marks)
        else:
            text, spans = self._turns(safe, where, marks)
        ids, starts = self._encode(text, escapes)
        supervised = np.zeros(len(text) + 1, np.bool_)
        for begin, end in spans:
            supervised[begin:end] = True
        return ids, supervised[starts]

    def prompt(self, messages: Messages, where: str = "") -> Ids:
        """Ids int32 [n] of a conversation up to where the assistant begins to speak."""
        marks = _free_characters(json.dumps(messages, ensure_ascii=False) + self.source, 4)
        safe, escapes = self._escape(messages, marks[2])
        text, _ = _take_marks(self._text(safe, where, marks, add_generation_prompt=True), marks)
        return self._encode(text, escapes)[0]

    def _text(
        self, messages: Messages, where: str, marks: str, *, add_generation_prompt: bool = False
    ) -> str:
        self._environment.globals["generation_marks"] = marks[:2]
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(
                f"the chat template refuses the messages ({error})", where=where
            ) from error

    def _turns(self, messages: Messages, where: str, marks: str) -> tuple[str, list[Span]]:
        """The text of all messages and the assistant's part of it, by incremental rendering."""
        whole = self._text(messages, where, marks)
        spans: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._text(messages[:i], where, marks)
            prompt = self._text(messages[:i], where, marks, add_generation_prompt=True)
            after = self._text(messages[: i + 1], where, marks)
            if not (whole.startswith(after) and after.startswith(prompt)):
                raise UserError(
                    f"the chat template rewrites earlier turns (message {i + 1})",
                    where=where,
                    mend="give it {% generation %} marks, or split the conversation",
                )
            begin = len(prompt)
            if prompt == before:  # no generation prompt: the turn's header is not the assistant's
                begin = self._content_start(messages[:i], message, where, marks)
            spans.append((begin, self._turn_end(after, begin)))
        return whole, spans

    def _content_start(
        self, before: Messages, message: dict[str, Any], where: str, marks: str
    ) -> int:
        """Where the last message's content begins: seen by putting a mark in its place."""
        probe = self._text([*before, message | {"content": marks[3]}], where, marks)
        if marks[3] not in probe:
            raise UserError(
                "the chat template leaves out what the assistant says",
                where=where,
                mend="give it {% generation %} marks",
            )
        return probe.index(marks[3])

    def _turn_end(self, text: str, begin: int) -> int:
        """End of the last special token after `begin` if only space follows, else of the text."""
        ends = [match.end() for match in self._special.finditer(text, begin)]
        return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)

    def _escape(self, messages: Messages, mark: str) -> tuple[Messages, dict[str, str]]:
        """Messages whose special tokens are replaced, and what each replacement stands for."""
        escapes: dict[str, str] = {}

        def replace(match: re.Match[str]) -> str:
            number = list(self.tokenizer.special_ids).index(match.group())
            escapes[f"{mark}{number}{mark}"] = match.group()
            return f"{mark}{number}{mark}"

        return [
            {k: self._special.sub(replace, v) if isinstance(v, str) else v for k, v in m.items()}
            for m in messages
        ], escapes

    def _encode(self, text: str, escapes: dict[str, str]) -> tuple[Ids, NDArray[np.int64]]:
        """Ids and their first characters in `text`."""
        if not escapes:
            return self.tokenizer.encode_offsets(text, special=True)
        ids: list[Ids] = []
        starts: list[NDArray[np.int64]] = []
        begin = 0
        escape = re.compile("|".join(map(re.escape, escapes)))
        edges = [edge for match in self._special.finditer(text) for edge in match.span()]
        for end in [*edges, len(text)]:
            part = text[begin:end]
            # `origin[i]`: index in `part` of the character that character i of the plain text is.
            plain, origin = _unescape(part, escape, escapes)
            special = self._special.fullmatch(part) is not None
            new, first = self.tokenizer.encode_offsets(plain, special=special)
            ids.append(new)
            starts.append(begin + origin[first])
            begin = end
        return np.concatenate(ids), np.concatenate(starts)


def _unescape(
    part: str, escape: re.Pattern[str], escapes: dict[str, str]
) -> tuple[str, NDArray[np.int64]]:
    plain, origin, begin = "", [np.empty(0, np.int64)], 0
    for match in escape.finditer(part):
        original = escapes[match.group()]
        plain += part[begin : match.start()] + original
        origin += [np.arange(begin, match.start()), np.full(len(original), match.start())]
        begin = match.end()
    return plain + part[begin:], np.concatenate([*origin, np.arange(begin, len(part))])


def _template_of(tokenizer: Tokenizer) -> str:
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.special_ids.keys():
        return CHATML
    raise UserError(
        "no chat template",
        where=tokenizer.name,
        mend="put a chat_template.jinja beside its tokenizer.json",
    )


def _take_marks(text: str, marks: str) -> tuple[str, list[Span]]:
    """The text without generation marks, and the spans that were between them."""
    plain, spans, begin = "", [], 0
    for part in re.split(f"([{marks[0]}{marks[1]}])", text):
        if part == marks[0]:
            begin = len(plain)
        elif part == marks[1]:
            spans.append((begin, len(plain)))
        else:
            plain += part
    return plain, spans


def _free_characters(text: str, count: int) -> str:
    """Private-use characters that are not in the text."""
    used = set(text)
    free = (chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
    return "".join(next(free) for _ in range(count))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
