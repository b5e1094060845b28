"""Byte tokenizer against str.encode, file tokenizer against the Rust tokenizer it wraps."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmq_nb.core.errors import UserError
from llmq_nb.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer, tokenizer_info

TEXT = st.text() | st.text("a é😀\n<|endoftext|>", max_size=40)


@given(TEXT)
def test_bytes_are_the_utf8_bytes(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert [x.tolist() for x in tokenizer.encode_batch([text, "x"])] == [ids.tolist(), [120]]


def test_decoding_bytes_leaves_out_specials_and_survives_broken_utf8():
    assert ByteTokenizer().decode([257, 104, 105, 258, 256]) == "hi"
    assert ByteTokenizer().decode([104, 0xC3]) == "h\ufffd"


@given(
    st.lists(TEXT | st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>"]), max_size=6)
)
def test_byte_offsets(parts):
    tokenizer, text = ByteTokenizer(), "".join(parts)
    ids, starts = tokenizer.encode_offsets(text, special=False)
    expected = [(b, i) for i, c in enumerate(text) for b in c.encode()]
    assert list(zip(ids.tolist(), starts.tolist(), strict=True)) == expected

    ids, starts = tokenizer.encode_offsets(text, special=True)
    expected, i = [], 0
    while i < len(text):
        name = next((n for n in tokenizer.special_ids if text.startswith(n, i)), None)
        if name is None:
            expected += [(b, i) for b in text[i].encode()]
        else:
            expected.append((tokenizer.special_ids[name], i))
        i += len(name or "x")
    assert list(zip(ids.tolist(), starts.tolist(), strict=True)) == expected


def test_byte_tokenizer_ids():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (259, 256, None)
    assert sorted(tokenizer.special_ids.values()) == [256, 257, 258]
    info = tokenizer_info(tokenizer)
    assert (info.name, info.sha256) == ("bytes", tokenizer.sha256)


def test_file_tokenizer_is_the_rust_one(bpe_folder):
    tokenizer = load_tokenizer(bpe_folder)
    rust = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    texts = ["the quick brown fox", "", "ünïcode 😀\n\tx"]
    expected = [rust.encode(text, add_special_tokens=False).ids for text in texts]
    assert [tokenizer.encode(text).tolist() for text in texts] == expected
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
    assert [tokenizer.decode(ids) for ids in expected] == texts
    assert tokenizer.eos_id == rust.token_to_id("<|im_end|>")
    assert tokenizer.bos_id == rust.token_to_id("<s>")
    assert tokenizer.vocab_size == rust.get_vocab_size()
    file = load_tokenizer(bpe_folder / "tokenizer.json")
    assert (file.sha256, file.name) == (tokenizer.sha256, tokenizer.name)


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_special_tokens_in_text_stay_text(bpe_folder, kind):
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else bpe_folder)
    text = "a<|endoftext|>b<|im_end|>"
    for ids in (
        tokenizer.encode(text),
        tokenizer.encode_batch([text])[0],
        tokenizer.encode_offsets(text, special=False)[0],
    ):
        assert not set(ids.tolist()) & set(tokenizer.special_ids.values())
        assert tokenizer.decode(ids) == text
    ids, starts = tokenizer.encode_offsets(text, special=True)
    names = tokenizer.special_ids
    assert {names["<|endoftext|>"], names["<|im_end|>"]} <= set(ids.tolist())
    assert starts[-1] == text.index("<|im_end|>")
    assert not set(tokenizer.encode(text).tolist()) & set(names.values())  # and still


def test_ids_may_have_holes(tmp_path, bpe_folder):
    record = json.loads((bpe_folder / "tokenizer.json").read_text())
    record["added_tokens"].append(record["added_tokens"][0] | {"id": 1000, "content": "<far>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    tokenizer = FileTokenizer(tmp_path)
    assert tokenizer.special_ids["<far>"] < tokenizer.vocab_size
    ids, _ = tokenizer.encode_offsets("<far>", special=True)
    assert ids.max() == tokenizer.vocab_size - 1


def copy(bpe_folder, tmp_path, config):
    shutil.copy(bpe_folder / "tokenizer.json", tmp_path)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    return tmp_path


def test_without_a_config_the_end_of_text_token_is_found(tmp_path, bpe_folder):
    tokenizer = FileTokenizer(copy(bpe_folder, tmp_path, None))
    assert tokenizer.eos_id == tokenizer.special_ids["<|endoftext|>"]
    assert (tokenizer.bos_id, tokenizer.chat_template) == (None, None)


def test_chat_template_is_found_in_each_place(tmp_path, bpe_folder):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = copy(bpe_folder, tmp_path, json.dumps({"chat_template": named}))
    assert FileTokenizer(folder).chat_template == "D"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "C"}))
    assert FileTokenizer(folder).chat_template == "C"
    (folder / "chat_template.jinja").write_text("J")
    assert FileTokenizer(folder).chat_template == "J"


def test_bad_tokenizers_are_refused(tmp_path, bpe_folder):
    with pytest.raises(UserError, match="no such tokenizer"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer.json"):
        load_tokenizer(tmp_path)
    for config, what in [
        ("{", "malformed JSON"),
        ("[]", "not a JSON object"),
        ('{"eos_token": "<nope>"}', "eos_token '<nope>' is not in the vocabulary"),
    ]:
        with pytest.raises(UserError, match=what):
            FileTokenizer(copy(bpe_folder, tmp_path, config))
    record = json.loads((bpe_folder / "tokenizer.json").read_text())
    for token in record["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="no end-of-document token"):
        FileTokenizer(tmp_path)
