"""Prompts of files and options, in ids put together by hand; what ends a text."""

import json
from pathlib import Path

import numpy as np
import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.data.prompts import Prompt, PromptCoder, read_prompts
from llmq_nb.data.tokenizer import ByteTokenizer, FileTokenizer

START, END = 257, 258
MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = [START, *b"user\nhi", END, 10, START, *b"assistant\n"]


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("one\n\n  two \n", encoding="utf-8")
    assert read_prompts(file) == [Prompt(f"{file}:1", "one"), Prompt(f"{file}:3", "  two ")]
    file.write_text("\n")
    with pytest.raises(UserError, match="no prompt"):
        read_prompts(file)


def test_lines_of_a_jsonl_file(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "a\\nb"}}\n{json.dumps({"messages": MESSAGES})}\n')
    first, second = read_prompts(file)
    assert first == Prompt(f"{file}:1", "a\nb")
    assert second == Prompt(f"{file}:2", messages=MESSAGES)
    for bad, words in (
        ('{"text": "a"}', "unknown key 'text'"),
        ("{}", '"prompt" and'),
        ("x", "JSON"),
    ):
        file.write_text('{"prompt": "a"}\n' + bad)
        with pytest.raises(UserError, match=words) as error:
            read_prompts(file)
        assert f"{file}:2" in str(error.value)


def test_ids() -> None:
    coder = PromptCoder(ByteTokenizer(), 259)
    assert coder.encode(Prompt("p", "a<|im_end|>")).tolist() == list(b"a<|im_end|>")
    assert coder.encode(Prompt("p", messages=MESSAGES)).tolist() == ASKED
    chat = PromptCoder(ByteTokenizer(), 259, chat=True, system="be")
    system = [START, *b"system\nbe", END, 10]
    assert chat.encode(Prompt("p", "hi")).tolist() == system + ASKED
    with pytest.raises(UserError, match="empty prompt in p"):
        coder.encode(Prompt("p", ""))
    with pytest.raises(UserError, match="token 258 of tokenizer bytes in p: the model has 258"):
        PromptCoder(ByteTokenizer(), 258, chat=True).encode(Prompt("p", "hi"))


def test_what_ends_a_text(tmp_path: Path, word_tokenizer: Path) -> None:
    coder = PromptCoder(ByteTokenizer(), 259)
    assert coder.end_ids([7], chat=False) == {7, 256}
    assert coder.end_ids([7], chat=True) == {7, 256, END}
    tokenizer = FileTokenizer(word_tokenizer)
    beside = word_tokenizer.with_name("generation_config.json")
    for value, more in ((5, {5}), ([5, 6], {5, 6}), (None, set())):
        beside.write_text(json.dumps({"eos_token_id": value}))
        assert PromptCoder(tokenizer, 99).end_ids([], chat=False) == {tokenizer.eos_id, *more}
    beside.write_text("[")
    with pytest.raises(UserError, match="generation_config.json"):
        PromptCoder(tokenizer, 99).end_ids([], chat=False)
    assert np.int32(tokenizer.eos_id) == tokenizer.eos_id


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json of words with one special token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "<eos>": 2}, "the"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<eos>"])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return tmp_path / "tokenizer.json"
