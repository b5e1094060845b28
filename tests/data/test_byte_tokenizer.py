"""The byte tokenizer as a tokenizer.json, run by the tokenizers library, against ByteTokenizer."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llmq_nb.data.byte_tokenizer import ByteTokenizer, byte_tokenizer_files
from llmq_nb.data.tokenizer import FileTokenizer, export_source, load_tokenizer, tokenizer_info

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# every kind of character: control, Latin-1, two to four bytes, combining, and names of specials
TEXT = st.lists(
    st.text() | st.sampled_from([*SPECIAL, " ", "  ", "\r\n", "\x00", "é", "e\u0301", "😀", "İ"]),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    for name, data in byte_tokenizer_files().items():
        (folder / name).write_bytes(data)
    return folder


@given(TEXT)
def test_text_has_the_same_ids_and_comes_back(folder: Path, text: str) -> None:
    file, ours = FileTokenizer(folder), ByteTokenizer()
    assert file.encode(text).tolist() == list(text.encode())
    assert file.decode(file.encode(text)) == text
    assert [a.tolist() for a in file.encode_batch([text, ""])] == [list(text.encode()), []]
    for special in (False, True):
        ids, starts = file.encode_offsets(text, special=special)
        expected_ids, expected_starts = ours.encode_offsets(text, special=special)
        assert ids.tolist() == expected_ids.tolist()
        assert starts.tolist() == expected_starts.tolist()


@given(st.lists(st.integers(0, 258), max_size=40))
def test_any_ids_decode_alike(folder: Path, ids: list[int]) -> None:
    """Bytes that are no UTF-8, and specials among them, too."""
    assert FileTokenizer(folder).decode(ids) == ByteTokenizer().decode(ids)


def test_the_vocabulary_is_the_bytes_and_the_specials(folder: Path) -> None:
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert rust.get_vocab_size(with_added_tokens=True) == 259
    assert [rust.token_to_id(name) for name in SPECIAL] == [256, 257, 258]
    assert [rust.decode([byte]) for byte in range(128)] == [chr(byte) for byte in range(128)]
    for i in range(0x80, 0x110000, 97):
        if not 0xD800 <= i < 0xE000:
            assert rust.encode(chr(i)).ids == list(chr(i).encode())
    file, ours = FileTokenizer(folder), ByteTokenizer()
    assert (file.eos_id, file.bos_id, file.vocab_size) == (256, None, 259)
    assert file.special_ids == ours.special_ids


def test_the_exported_file_is_the_byte_tokenizer_again(folder: Path, tmp_path: Path) -> None:
    """Else the stores made with `bytes` would not go with the exported model."""
    for path in (folder, folder / "tokenizer.json"):
        assert tokenizer_info(load_tokenizer(path)) == tokenizer_info(ByteTokenizer())
    changed = json.loads((folder / "tokenizer.json").read_bytes())
    changed["added_tokens"][2]["content"] = "<|end|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    assert load_tokenizer(tmp_path).special_ids["<|end|>"] == 258


def test_the_source_of_an_export() -> None:
    assert export_source("some/folder") == "some/folder"
    assert export_source("bytes") == byte_tokenizer_files()
