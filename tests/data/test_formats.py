"""Input files against the documents they were written from; token files against struct.

Bit and byte layouts are packed here by hand, so that reader and writer cannot agree on a mistake.
"""

import json
import struct
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.data import bin_formats, formats
from llmq_nb.data.bin_formats import write_llmq_bin
from llmq_nb.data.documents import Chat, Ids, Text
from llmq_nb.data.formats import NotText, check_text, detect_format, has_mask, read_documents
from llmq_nb.data.tokenizer import ByteTokenizer, FileTokenizer


def read_texts(path, kind):
    """The documents of a file, parts joined."""
    documents, text = [], ""
    for part in read_documents(path, kind, ByteTokenizer()):
        assert isinstance(part, Text)
        text += part.text
        if part.ends_document:
            documents.append(text)
            text = ""
    assert text == ""
    return documents


def read_ids(path, kind, tokenizer=None):
    """The tokenized documents of a file, parts joined: (ids, mask or None)."""
    documents, ids, masks = [], [], []
    for part in read_documents(path, kind, tokenizer or ByteTokenizer()):
        assert isinstance(part, Ids)
        ids += part.ids.tolist()
        masks += [] if part.loss_mask is None else part.loss_mask.tolist()
        if part.ends_document:
            documents.append((ids, masks or None))
            ids, masks = [], []
    assert ids == []
    return documents


def random_text(seed, length):
    rng = np.random.default_rng(seed)
    return "".join(rng.choice(list("ab é😀\n\n  \r\t"), length))


# 300000 characters are more than a part; the one without spaces has no good place to be cut.
@pytest.mark.parametrize("text", ["", "a\r\nb\n", random_text(0, 300_000), "é" * 700_000])
def test_a_text_file_is_one_document(tmp_path, text):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert detect_format(path) == "text"
    assert read_texts(path, "text") == [text]


def test_parts_of_a_text_have_the_ids_of_the_whole(tmp_path, bpe_folder, monkeypatch):
    monkeypatch.setattr(formats, "TEXT_PIECE", 2**12)
    rng = np.random.default_rng(1)
    words = ["the", "quick", "fox", "é", "!", "\n\n", "\n", "  ", " ", "\t\n", "hello"]
    text = "".join(rng.choice(words, 60_000))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    tokenizer = FileTokenizer(bpe_folder)
    parts = [
        tokenizer.encode(part.text)
        for part in read_documents(path, "text", tokenizer)
        if isinstance(part, Text)
    ]
    assert len(parts) > 20
    np.testing.assert_array_equal(np.concatenate(parts), tokenizer.encode(text))


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthr\xe9e\nfour")
    for read in (check_text, lambda p: read_texts(p, "text")):
        with pytest.raises(NotText, match=f"not UTF-8 text in {path}:3"):
            read(path)
    path.write_bytes(b"x\n" * 2**20 + "é".encode()[:1])  # cut off inside a character, in part 9
    with pytest.raises(NotText, match=f":{2**20 + 1}"):
        check_text(path)


def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["one", "", "two\nlines é", "x" * 10]
    path.write_text("\n\n".join(json.dumps({"text": t, "id": 1}) for t in texts))
    assert detect_format(path) == "jsonl"
    assert read_texts(path, "jsonl") == texts
    assert not has_mask(path, "jsonl")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"text": 1}', 'no string under "text"'),
        (b'{"txt": "a"}', 'no string under "text"'),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "not UTF-8"),
    ],
)
def test_bad_jsonl_is_refused_with_its_line(tmp_path, line, what):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=f"{what}.*{path}:3"):
        read_texts(path, "jsonl")


def test_jsonl_of_neither_kind_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "a"}\n')
    with pytest.raises(UserError, match=f'neither "text" nor "messages" in {path}:2'):
        detect_format(path)


def test_chat(tmp_path):
    path = tmp_path / "a.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert detect_format(path) == "chat" and has_mask(path, "chat")
    (chat,) = read_documents(path, "chat", ByteTokenizer())
    assert isinstance(chat, Chat)
    assert (chat.messages, chat.where) == (messages, f"{path}:1")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": []},
        {"messages": "x"},
        {},
        {"messages": [1]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": None}]},
    ],
)
def test_bad_chat_is_refused_with_its_line(tmp_path, record):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(record))
    with pytest.raises(UserError, match=f"{path}:2"):
        list(read_documents(path, "chat", ByteTokenizer()))


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=100)


def test_parquet(tmp_path):
    path, texts = tmp_path / "a.parquet", [f"text {i} é" for i in range(700)]
    write_parquet(path, id=list(range(700)), text=texts)
    assert detect_format(path) == "parquet"
    assert read_texts(path, "parquet") == texts


def test_bad_parquet_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    write_parquet(path, body=["a"], id=[1])
    with pytest.raises(UserError, match='no column "text" among body, id'):
        read_texts(path, "parquet")
    write_parquet(path, text=["a"] * 400 + [None])
    with pytest.raises(UserError, match='no string in "text" of row 400'):
        read_texts(path, "parquet")
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UserError, match="not readable as parquet"):
        read_texts(path, "parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'llmq-nb\[parquet\]'"):
        read_texts(path, "parquet")


def llmq_bytes(version, tokens, mask=None, vocab_size=259):
    """An LLMQ token file, packed by hand."""
    header = b"BIN.TOK\n" + struct.pack(
        "<5i", version, 4, len(tokens), vocab_size, int(mask is not None)
    )
    data = header + b"*" * (1023 - len(header)) + b"\n" + struct.pack(f"<{len(tokens)}i", *tokens)
    if mask is not None:
        for begin in range(0, len(mask), 8):
            data += bytes([sum(bit << i for i, bit in enumerate(mask[begin : begin + 8]))])
    return data


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 16 tokens, so that documents and mask bytes span them."""
    monkeypatch.setattr(bin_formats, "PIECE", 16)


def expected_documents(tokens, mask, ends):
    documents, begin = [], 0
    for end in [*ends, len(tokens)]:
        if end > begin:
            documents.append((tokens[begin:end], mask and mask[begin:end]))
            begin = end
    return documents


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 203])
def test_llmq_bin_is_read(tmp_path, small_pieces, version, masked, length):
    rng = np.random.default_rng(length)
    tokens = rng.choice([*range(20), 256], length).tolist()
    mask = (rng.random(length) < 0.5).tolist() if masked else None
    path = tmp_path / "a.bin"
    path.write_bytes(llmq_bytes(version, tokens, mask))
    assert detect_format(path) == "llmq-bin"
    assert has_mask(path, "llmq-bin") == masked
    ends = [i + 1 for i, token in enumerate(tokens) if token == 256]
    assert read_ids(path, "llmq-bin") == expected_documents(tokens, mask, ends)


def test_q2_mask_bits_stay_with_their_tokens(tmp_path):
    """Q2: bit t says "token t is supervised": of P P P P P R R R EOS exactly R R R EOS."""
    tokens = [11, 12, 13, 14, 15, 21, 22, 23, 256]
    path = tmp_path / "a.bin"
    path.write_bytes(llmq_bytes(2, tokens, [False] * 5 + [True] * 4))
    assert path.read_bytes()[-2:] == bytes([0b11100000, 0b1])
    ((ids, mask),) = read_ids(path, "llmq-bin")
    assert [i for i, supervised in zip(ids, mask, strict=True) if supervised] == [21, 22, 23, 256]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_llmq_bin_is_written(tmp_path, small_pieces, memory_store, version, masked):
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 259, n) for n in (3, 40, 7)]
    masks = [rng.random(len(document)) < 0.5 for document in documents] if masked else None
    path = tmp_path / "a.bin"
    write_llmq_bin(path, memory_store(documents, masks, vocab_size=259), version=version)
    mask = np.concatenate(masks).tolist() if masks else None
    tokens = np.concatenate(documents).tolist()
    assert path.read_bytes() == llmq_bytes(version, tokens, mask, 259 if version == 2 else 0)
    assert list(tmp_path.iterdir()) == [path]


def test_llmq_bin_cannot_hold_2_to_the_31_tokens(tmp_path, memory_store):
    class Huge(memory_store):
        def __len__(self):
            return 2**31

    with pytest.raises(UserError, match="fewer than 2\\^31"):
        write_llmq_bin(tmp_path / "a.bin", Huge([np.arange(3)]))
    assert list(tmp_path.iterdir()) == []


def llmc_bytes(magic, version, tokens, code):
    header = struct.pack("<3i", magic, version, len(tokens)) + bytes(253 * 4)
    return header + struct.pack(f"<{len(tokens)}{code}", *tokens)


@pytest.mark.parametrize(
    ("magic", "version", "code"), [(20240520, 1, "H"), (20240801, 7, "I")], ids=["gpt2", "llama3"]
)
def test_llmc_bin_is_read(tmp_path, small_pieces, bpe_folder, magic, version, code):
    tokenizer = FileTokenizer(bpe_folder)
    eos, bos = tokenizer.eos_id, tokenizer.bos_id
    assert bos is not None
    rng = np.random.default_rng(6)
    tokens = rng.choice([*range(100, 120), eos, bos], 200).tolist()
    path = tmp_path / "a.bin"
    path.write_bytes(llmc_bytes(magic, version, tokens, code))
    assert detect_format(path) == "llmc-bin"
    ends = {i + 1 for i, token in enumerate(tokens) if token == eos}
    ends |= {i for i, token in enumerate(tokens) if token == bos}
    expected = expected_documents(tokens, None, sorted(ends))
    assert read_ids(path, "llmc-bin", tokenizer) == expected


def test_bad_token_files_are_refused(tmp_path):
    path = tmp_path / "a.bin"
    good = llmq_bytes(2, [1, 2, 3], [True, False, True])
    cases = [
        (good[:-1], "llmq-bin", "1036 bytes, but 3 tokens take 1037"),
        (good + b"x", "llmq-bin", "1038 bytes, but 3 tokens take 1037"),
        (good[:100], "llmq-bin", "fewer than a header"),
        (llmq_bytes(3, [1]), "llmq-bin", "version 3, known are 1 and 2"),
        (good[:12] + struct.pack("<i", 2) + good[16:], "llmq-bin", "2 bytes a token"),
        (llmq_bytes(2, []).replace(b"BIN", b"BAN"), "llmq-bin", "not an LLMQ token file"),
        (llmc_bytes(20240520, 2, [1], "H"), "llmc-bin", "version 2 is no llm.c"),
        (llmc_bytes(20240801, 7, [1, 2], "H"), "llmc-bin", "but 2 tokens take 1032"),
        (llmq_bytes(2, [1] * 40 + [259]), "llmq-bin", "token id 259 at position 40 "),
        (llmq_bytes(2, [1, -5]), "llmq-bin", "token id -5 at position 1 "),
    ]
    for data, kind, what in cases:
        path.write_bytes(data)
        with pytest.raises(UserError, match=what) as error:
            read_ids(path, kind)
        assert str(path) in str(error.value)


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(UserError, match="unknown format 'docx': known are auto, text"):
        read_documents(tmp_path / "a", "docx", ByteTokenizer())
    assert set(formats.FORMATS) == {"text", "jsonl", "parquet", "chat", "llmq-bin", "llmc-bin"}
