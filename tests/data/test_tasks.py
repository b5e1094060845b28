"""Task files: every line is read and checked as the format says, by hand-written examples."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.data.tasks import ExactMatch, MultipleChoice, normalised, read_task

CHOICE = {"prompt": "The sky is", "choices": [" blue", " green"], "answer": 0}
EXACT = {"prompt": "2 + 2 =", "answer": "4"}


def write(folder: Path, *records: Any) -> Path:
    file = folder / "task.jsonl"
    lines = (r if isinstance(r, str) else json.dumps(r) for r in records)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_both_kinds_of_questions(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "Sum?"}]
    more = {"messages": said, "answer": ["4", "four"], "regex": r"(\d+)", "stop": ["\n"], "id": "a"}
    file = write(tmp_path, CHOICE, "", EXACT, more)
    choice, exact, last = read_task(file)
    assert isinstance(choice, MultipleChoice) and isinstance(exact, ExactMatch)
    assert (choice.choices, choice.answer) == ((" blue", " green"), 0)
    assert (choice.prompt.text, choice.prompt.where) == ("The sky is", f"{file}:1")
    assert (exact.answers, exact.regex, exact.stop, exact.id) == (("4",), None, (), None)
    assert isinstance(last, ExactMatch) and last.prompt.messages == said and last.id == "a"
    assert exact.prompt.where == f"{file}:3"  # the blank line counts


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not JSON"),
    "list": ([1], "not a JSON object"),
    "prompt": ({"answer": "4"}, '"prompt" and "messages"'),
    "both": ({**EXACT, "messages": [{"role": "user", "content": "a"}]}, '"prompt" and "messages"'),
    "empty prompt": ({**EXACT, "prompt": ""}, '"prompt" is no text'),
    "messages": ({"messages": [{"role": "user"}], "answer": "4"}, '"messages" is no conversation'),
    "no messages": ({"messages": [], "answer": "4"}, '"messages" is no conversation'),
    "key": ({**EXACT, "anwser": "4"}, "did you mean 'answer'?"),
    "regex of choices": ({**CHOICE, "regex": "a"}, "unknown key 'regex'"),
    "no answer": ({"prompt": "a"}, 'no "answer"'),
    "number": ({**EXACT, "answer": 4}, '"answer" is no list of texts'),
    "empty answer": ({**EXACT, "answer": []}, '"answer" is empty'),
    "one choice": ({**CHOICE, "choices": ["a"]}, "one choice"),
    "empty choice": ({**CHOICE, "choices": ["a", ""]}, '"choices" is no list of texts'),
    "index": ({**CHOICE, "answer": 2}, "0 to 1"),
    "true": ({**CHOICE, "answer": True}, '"answer" is True'),
    "text index": ({**CHOICE, "answer": "0"}, "\"answer\" is '0'"),
    "pattern": ({**EXACT, "regex": "("}, "regex '('"),
    "stop": ({**EXACT, "stop": "\n"}, '"stop" is no list of texts'),
    "id": ({**EXACT, "id": 1}, '"id" is no string'),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named(name: str, tmp_path: Path) -> None:
    """The lines before it are right."""
    record, words = BAD[name]
    file = write(tmp_path, CHOICE, EXACT, record)
    with pytest.raises(UserError) as error:
        read_task(file)
    assert words in str(error.value) and f"{file}:3" in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*none.jsonl"):
        read_task(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no question"):
        read_task(write(tmp_path, ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{}\n"\xfc"\n')
    with pytest.raises(UserError, match=r"UTF-8.*latin.jsonl:2"):
        read_task(tmp_path / "latin.jsonl")
    with pytest.raises(UserError, match=r"regex '\['.*--regex"):
        read_task(write(tmp_path, EXACT), "[")


@pytest.mark.parametrize(
    ("question", "text", "answer", "right"),
    [
        ({"answer": "4"}, " 4.\n", " 4.\n", True),
        ({"answer": "4"}, "4 apples", "4 apples", False),
        ({"answer": ["Paris", "PARIS, France"]}, "paris,  france", "paris,  france", True),
        ({"answer": "1234", "regex": r"-?[\d,]+"}, "5 and 6 make 1,234", "1,234", True),
        ({"answer": "1234", "regex": r"-?[\d,]+"}, "no idea", None, False),
        ({"answer": "because\n#### 42", "regex": "#### (.+)"}, "so\n#### 42", "42", True),
        ({"answer": "b", "regex": "(a)|(b)"}, "b", None, False),  # its first group is empty
        ({"answer": "4", "stop": ["\nQ"]}, "4\nQ: 5", "4", True),
    ],
)
def test_answers(
    question: dict[str, Any], text: str, answer: str | None, right: bool, tmp_path: Path
) -> None:
    (found,) = read_task(write(tmp_path, {"prompt": "?", **question}))
    assert isinstance(found, ExactMatch)
    assert found.answer_in(text) == answer
    assert found.right(answer) is right


def test_a_pattern_for_lines_without_one(tmp_path: Path) -> None:
    own = {**EXACT, "regex": "[a-z]+"}
    first, second = read_task(write(tmp_path, EXACT, own), r"\d")
    assert isinstance(first, ExactMatch) and isinstance(second, ExactMatch)
    assert (first.answer_in("x 7"), second.answer_in("x 7")) == ("7", "x")


def test_what_makes_answers_equal() -> None:
    assert normalised("  The\tEnd. ") == normalised("the end") == "the end"
    assert normalised("１,000,000") == "1000000"  # NFKC: full-width digits
    assert normalised("a, b") == "a, b" and normalised("3.5") == "3.5"
