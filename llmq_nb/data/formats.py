"""Input files, read as streams of documents: text, JSONL, parquet, chat JSONL and token files.

text      one file is one document, UTF-8; long files come in parts
jsonl     one object a line, the document under "text"
chat      one object a line, the conversation under "messages": [{"role", "content"}, ...]
parquet   column "text", one row a document (needs pyarrow)
llmq-bin, llmc-bin   see `bin_formats`
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmq_nb.core.errors import UserError
from llmq_nb.data.bin_formats import LLMC_KINDS, LLMQ_MAGIC, open_bin, read_bin
from llmq_nb.data.documents import Chat, Document, Text
from llmq_nb.data.tokenizer import Tokenizer

FORMATS = ("text", "jsonl", "parquet", "chat", "llmq-bin", "llmc-bin")
LLMC_MAGICS = tuple(magic.to_bytes(4, "little") for magic, _ in LLMC_KINDS)
TEXT_PIECE = 2**18  # bytes; with 2**20 a BPE of one 40 MB text took 522 MiB, with this 238 MiB
JSONL_SUFFIXES = (".jsonl", ".ndjson")


class NotText(UserError):
    """A file is not UTF-8."""


def detect_format(path: Path) -> str:
    """The format, by the first bytes and the suffix; text if nothing else fits.

    Raises UserError on a JSONL file whose first object has neither "text" nor "messages".
    """
    with path.open("rb") as file:
        head = file.read(8)
    if head == LLMQ_MAGIC:
        return "llmq-bin"
    if head.startswith(LLMC_MAGICS):
        return "llmc-bin"
    if head.startswith(b"PAR1") or path.suffix == ".parquet":
        return "parquet"
    return _jsonl_kind(path) if path.suffix in JSONL_SUFFIXES else "text"


def _jsonl_kind(path: Path) -> str:
    for line, record in _records(path):
        if "messages" in record:
            return "chat"
        if "text" in record:
            return "jsonl"
        raise UserError('neither "text" nor "messages"', where=f"{path}:{line}")
    return "jsonl"


def has_mask(path: Path, kind: str) -> bool:
    """Whether the file says of each token if it is supervised."""
    return kind == "chat" or (kind == "llmq-bin" and open_bin(path, kind).has_mask)


def read_documents(path: Path, kind: str, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of one file. Raises UserError with file and line, row or position."""
    if kind == "text":
        return _read_text(path)
    if kind == "jsonl":
        return _read_jsonl(path)
    if kind == "chat":
        return _read_chat(path)
    if kind == "parquet":
        return _read_parquet(path)
    if kind in ("llmq-bin", "llmc-bin"):
        file = open_bin(path, kind)
        return read_bin(file, tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id)
    raise UserError(f"unknown format {kind!r}", mend=f"known are auto, {', '.join(FORMATS)}")


def check_text(path: Path) -> None:
    """Raise NotText, with the line, unless the file is UTF-8."""
    for _ in _decoded(path):
        pass


def _decoded(path: Path) -> Iterator[str]:
    """The file's text in parts of about `TEXT_PIECE` bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = 1
    with path.open("rb") as file:
        while True:
            data = file.read(TEXT_PIECE)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line = lines + error.object[: error.start].count(b"\n")
                raise NotText(
                    "not UTF-8 text", where=f"{path}:{line}", mend="convert it or leave it out"
                ) from error
            if not data and not text:
                return
            lines += text.count("\n")
            yield text


def _read_text(path: Path) -> Iterator[Text]:
    """One document, in parts that a tokenizer of words sees as it sees the whole."""
    rest = ""
    for text in _decoded(path):
        rest += text
        if len(rest) > TEXT_PIECE // 2:
            cut = _last_cut(rest)
            yield Text(rest[:cut], ends_document=False)
            rest = rest[cut:]
    yield Text(rest)


# After a lone line end, before a lone space: whatever splits text into words splits there.
_CUTS = (re.compile(r"\S\n(?=\S)"), re.compile(r"\S(?= \S)"))


def _last_cut(text: str) -> int:
    """The last place among the text's last 64 Ki characters that is safe to cut, else its end."""
    for pattern in _CUTS:
        ends = [match.end() for match in pattern.finditer(text, max(len(text) - 2**16, 0))]
        if ends:
            return ends[-1]
    return len(text)


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of each line that is not blank."""
    with path.open("rb") as file:
        for line, data in enumerate(file, start=1):
            if not data.strip():
                continue
            try:
                record = json.loads(data.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise NotText("not UTF-8 text", where=f"{path}:{line}") from error
            except ValueError as error:
                raise UserError(f"not JSON ({error})", where=f"{path}:{line}") from error
            if not isinstance(record, dict):
                raise UserError("not a JSON object", where=f"{path}:{line}")
            if b"\\u" in data:  # an escape may be half of a character
                _check_escapes(record, f"{path}:{line}")
            yield line, record


def _check_escapes(record: dict[str, Any], where: str) -> None:
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        mend = "a \\ud8xx escape without its other half: write the character itself"
        raise UserError("not UTF-8 text", where=where, mend=mend) from error


def _read_jsonl(path: Path) -> Iterator[Text]:
    for line, record in _records(path):
        text = record.get("text")
        if not isinstance(text, str):
            raise UserError('no string under "text"', where=f"{path}:{line}")
        yield Text(text)


def _read_chat(path: Path) -> Iterator[Chat]:
    for line, record in _records(path):
        where = f"{path}:{line}"
        messages = record.get("messages")
        if not isinstance(messages, list) or not messages:
            raise UserError('no list under "messages"', where=where)
        for message in messages:
            if not isinstance(message, dict) or not (
                isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
            ):
                raise UserError('a message without "role" and "content" strings', where=where)
        yield Chat(messages, where)


def _read_parquet(path: Path) -> Iterator[Text]:
    try:
        from pyarrow import ArrowException  # type: ignore[attr-defined]
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(
            "reading parquet needs pyarrow", where=str(path), mend="pip install 'llmq-nb[parquet]'"
        ) from error
    try:
        file = ParquetFile(path)
        names = file.schema_arrow.names
        if "text" not in names:
            raise UserError(f'no column "text" among {", ".join(names)}', where=str(path))
        row = 0
        for batch in file.iter_batches(batch_size=256, columns=["text"]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str):
                    raise UserError(f'no string in "text" of row {row}', where=str(path))
                yield Text(text)
                row += 1
    except (ArrowException, OSError) as error:
        raise UserError(f"not readable as parquet ({error})", where=str(path)) from error
