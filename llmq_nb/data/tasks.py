"""Tasks with right answers, from a JSONL file: multiple choice and exact match.

    {"prompt": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}
    {"prompt": "Q: 2 + 2?\\nA:", "answer": "4", "regex": "(\\\\d+)", "stop": ["\\nQ:"]}

    prompt     text, or "messages": [{"role": ..., "content": ...}, ...] for the chat template
    choices    two or more continuations. Each is encoded on its own and follows the prompt as it
               is, so it begins with the space that it needs; "answer" is the index of the right one
    answer     of exact match: a text, or several of which any is right
    regex      exact match: the answer is this pattern's last match in the model's text, its first
               group if it has one; no match is a wrong answer. It is taken of the right answers too
               where it matches. --regex gives one for lines without
    stop       exact match: texts that end the model's answer, which is cut before them
    id         kept for --details

Every line is checked when the file is read. A file may mix both kinds.

Two answers are equal if they are the same after Unicode NFKC, case folding, single spaces, without
commas between digits, and without a full stop at the end.
"""

import dataclasses
import difflib
import re
import unicodedata
from pathlib import Path
from typing import Any

from llmq_nb.core.errors import UserError
from llmq_nb.data.prompts import Prompt, json_lines, prompt_of

_PROMPT, _EXTRA = {"prompt", "messages"}, {"id"}
_KEYS = {
    "multiple choice": _PROMPT | _EXTRA | {"choices", "answer"},
    "exact match": _PROMPT | _EXTRA | {"answer", "regex", "stop"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class MultipleChoice:
    """prompt, its continuations, and the index of the right one."""

    id: str | None
    prompt: Prompt
    choices: tuple[str, ...]
    answer: int


@dataclasses.dataclass(frozen=True, slots=True)
class ExactMatch:
    """prompt, the right answers, how an answer is found and what ends it."""

    id: str | None
    prompt: Prompt
    answers: tuple[str, ...]
    regex: re.Pattern[str] | None
    stop: tuple[str, ...]

    def answer_in(self, text: str) -> str | None:
        """The model's answer in its text; None: the pattern matches nowhere."""
        for end in self.stop:
            text = text.partition(end)[0]
        return text if self.regex is None else found(self.regex, text)

    def right(self, answer: str | None) -> bool:
        """Whether an answer is one of the right ones."""
        if answer is None:
            return False
        wanted = [(self.regex and found(self.regex, a)) or a for a in self.answers]
        return normalised(answer) in map(normalised, wanted)


Question = MultipleChoice | ExactMatch


def read_task(path: str | Path, regex: str | None = None) -> list[Question]:
    """The questions of a file. regex: for exact-match lines without one of their own.

    UserError names file and line of the first fault.
    """
    path = Path(path).expanduser()
    default = None if regex is None else _pattern(regex, "--regex")
    questions = [_question(record, where, default) for where, record in json_lines(path)]
    if not questions:
        raise UserError("no question", where=str(path), mend="a line is one")
    return questions


def found(pattern: re.Pattern[str], text: str) -> str | None:
    """The pattern's last match in the text, its first group if it has one."""
    matches = list(pattern.finditer(text))
    return matches[-1].group(1 if pattern.groups else 0) if matches else None


def normalised(answer: str) -> str:
    """What is compared; see the module."""
    text = " ".join(unicodedata.normalize("NFKC", answer).casefold().split())
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    return text.removesuffix(".").rstrip()


def _question(record: dict[str, Any], where: str, regex: re.Pattern[str] | None) -> Question:
    kind = "multiple choice" if "choices" in record else "exact match"
    for key in record:
        if key not in _KEYS[kind]:
            near = difflib.get_close_matches(key, _KEYS[kind], 1)
            mend = f"did you mean {near[0]!r}?" if near else f"{kind} has {_listed(_KEYS[kind])}"
            raise UserError(f"unknown key {key!r}", where=where, mend=mend)
    prompt = prompt_of(record, where)
    if "answer" not in record:
        raise UserError('no "answer"', where=where, mend="a task needs the right one")
    name = record.get("id")
    if name is not None and not isinstance(name, str):
        raise UserError('"id" is no string', where=where)
    if kind == "multiple choice":
        choices = _texts(record["choices"], "choices", where)
        answer = record["answer"]
        if len(choices) < 2:
            raise UserError("one choice", where=where, mend="give two or more")
        if type(answer) is not int or not 0 <= answer < len(choices):
            mend = f"the index of the right choice, 0 to {len(choices) - 1}"
            raise UserError(f'"answer" is {answer!r}', where=where, mend=mend)
        return MultipleChoice(name, prompt, choices, answer)
    answers = record["answer"]
    answers = _texts([answers] if isinstance(answers, str) else answers, "answer", where)
    if not answers:
        raise UserError('"answer" is empty', where=where, mend="a text, or several")
    own = record.get("regex")
    if own is not None and not isinstance(own, str):
        raise UserError('"regex" is no string', where=where)
    stop = _texts(record.get("stop", []), "stop", where)
    return ExactMatch(name, prompt, answers, _pattern(own, where) if own else regex, stop)


def _texts(value: Any, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise UserError(f'"{key}" is no list of texts', where=where, mend="none may be empty")
    return tuple(value)


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(f"regex {text!r} ({error})", where=where) from error


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys))
