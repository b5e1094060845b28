"""Input files to token stores: one store, or a training and a validation store in one pass.

A store of the same sources, options and tokenizer is reused; one that a kill left unfinished is
continued; any other at the path is refused. Wrong input leaves nothing behind.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq_nb.core.errors import UserError
from llmq_nb.core.files import check_space
from llmq_nb.data.chat import ChatRenderer
from llmq_nb.data.documents import PIECE, Chat, Document, Ids, Text
from llmq_nb.data.formats import NotText, check_text, has_mask, read_documents
from llmq_nb.data.sources import Source, fingerprint, resolve
from llmq_nb.data.store import OTHER, TokenStore, read_attributes
from llmq_nb.data.store_writer import StoreWriter
from llmq_nb.data.tokenizer import FileTokenizer, Tokenizer, tokenizer_info

Progress = Callable[[int, int], None]
"""Called with the bytes read and the bytes there are."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """What `tokenize` made. skipped: files of a glob left out because they are not UTF-8 text."""

    path: Path
    documents: int
    tokens: int
    skipped: int
    reused: bool


def tokenize(
    inputs: Sequence[str],
    out: str | Path,
    tokenizer: Tokenizer,
    format: str = "auto",
    append_eos: bool = True,
    progress: Progress | None = None,
) -> Tokenized:
    """Tokenize the inputs (files and globs, see `sources`) into the store `out`.

    append_eos: end each text with the tokenizer's EOS (a chat ends as its template says, a
    tokenized document as it is). Raises UserError.
    """
    return _tokenize(inputs, [Path(out)], 0.0, tokenizer, format, append_eos, progress)[0]


def tokenize_split(
    inputs: Sequence[str],
    train_out: str | Path,
    validation_out: str | Path,
    tokenizer: Tokenizer,
    validation_fraction: float = 0.05,
    format: str = "auto",
    append_eos: bool = True,
    progress: Progress | None = None,
) -> tuple[Tokenized, Tokenized]:
    """Tokenize into two stores: about `validation_fraction` of the documents for validation.

    A document's place depends on its file's path below the input's folder and its number in the
    file alone. Of a single text file the last part is the validation document. Raises UserError.
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"validation_fraction {validation_fraction} is not between 0 and 1")
    outs = [Path(train_out), Path(validation_out)]
    made = _tokenize(inputs, outs, validation_fraction, tokenizer, format, append_eos, progress)
    return made[0], made[1]


def _tokenize(
    inputs: Sequence[str],
    outs: list[Path],
    fraction: float,
    tokenizer: Tokenizer,
    kind: str,
    append_eos: bool,
    progress: Progress | None,
) -> list[Tokenized]:
    sources = resolve(inputs, kind)
    chats = any(source.kind == "chat" for source in sources)
    renderer = ChatRenderer(tokenizer) if chats else None
    masked = any(has_mask(source.path, source.kind) for source in sources)
    options: dict[str, Any] = {"append_eos": append_eos, "validation_fraction": fraction}
    if renderer is not None:
        options["chat_template"] = renderer.source
    content = fingerprint(sources, options)
    records = [
        {
            "inputs": list(inputs),
            "files": len(sources),
            "bytes": sum(source.bytes for source in sources),
            "part": part,
            "tokenizer": str(tokenizer.path if isinstance(tokenizer, FileTokenizer) else "bytes"),
            "fingerprint": content,
        }
        for part in ("train", "validation")[: len(outs)]
    ]
    done = [_finished(out, tokenizer, content) for out in outs]
    if all(store is not None for store in done):
        return [_report(store, 0, True) for store in done if store is not None]
    _check_space(outs[0], sum(source.bytes for source in sources))
    writers: list[StoreWriter | None] = []
    try:
        for out, record, store in zip(outs, records, done, strict=True):
            writers.append(
                StoreWriter(out, tokenizer_info(tokenizer), masked, sources=record)
                if store is None
                else None
            )
        run = _Run(tokenizer, writers, renderer, masked, append_eos)
        skipped = run.read(sources, fraction, progress)
        open_writers = [writer for writer in writers if writer is not None]
        for writer in open_writers:
            _check_not_empty(writer, open_writers, inputs)
        for writer in open_writers:
            writer.close()
    except UserError:  # the input must change, so there is nothing to continue
        for writer in writers:
            if writer is not None:
                writer.discard()
        raise
    finally:  # whatever else stopped us, the next run continues
        for writer in writers:
            if writer is not None:
                writer.release()
    return [
        _report(TokenStore(out), skipped, store is not None)
        for out, store in zip(outs, done, strict=True)
    ]


def _report(store: TokenStore, skipped: int, reused: bool) -> Tokenized:
    documents = store.attributes["documents"]
    return Tokenized(store.path, documents, len(store), skipped, reused)


def _finished(out: Path, tokenizer: Tokenizer, content: str) -> TokenStore | None:
    """The complete store of the same content; None if there is none or it is unfinished."""
    attributes = read_attributes(out)
    if attributes is None or not attributes["closed"]:
        return None
    store = TokenStore(out)
    if store.tokenizer.sha256 != tokenizer.sha256:
        raise UserError(
            f"token store of tokenizer {store.tokenizer.name}, not {tokenizer.name}",
            where=str(out),
            mend=OTHER,
        )
    if attributes["sources"].get("fingerprint") != content:
        raise UserError("token store of other sources or options", where=str(out), mend=OTHER)
    return store


def _check_space(out: Path, size: int) -> None:
    """Stores take 0.3 to 0.5 bytes per byte of text."""
    check_space(out.parent, size // 2, "the token store", mend="make room")


def _check_not_empty(
    writer: StoreWriter, writers: Sequence[StoreWriter], inputs: Sequence[str]
) -> None:
    if writer.tokens:
        return
    if not any(other.tokens for other in writers):
        mend = "the files are empty, name others"
        raise UserError("no text in the input files", where=", ".join(inputs), mend=mend)
    raise UserError(
        "no document fell into this part",
        where=str(writer.path),
        mend="add documents (or lines to a single text), or leave data.validation out",
    )


class _Run:
    """One pass over the sources. Texts are encoded in batches of about a MiB, on all cores."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        writers: list[StoreWriter | None],
        renderer: ChatRenderer | None,
        masked: bool,
        append_eos: bool,
    ) -> None:
        self.tokenizer, self.writers, self.renderer = tokenizer, writers, renderer
        self.masked, self.append_eos = masked, append_eos
        # Documents that an earlier, killed run has written already.
        self.to_skip = [0 if writer is None else writer.appended for writer in writers]
        self.pending: list[tuple[StoreWriter, Text]] = []
        self.pending_size = 0
        self.begun = False  # the open text has tokens

    def read(self, sources: Sequence[Source], fraction: float, progress: Progress | None) -> int:
        """Write every document to its store; returns the number of files skipped."""
        total, before, skipped = sum(source.bytes for source in sources), 0, 0
        for source in sources:
            try:
                if source.kind == "text" and source.from_glob:
                    check_text(source.path)
            except NotText:
                skipped += 1
                continue
            read = 0
            alone = len(sources) == 1
            for part, document in _assigned(source, fraction, alone, self.tokenizer):
                self._take(part, document)
                if progress is not None and isinstance(document, Text):
                    read += len(document.text)
                    progress(before + min(read, source.bytes), total)
            before += source.bytes
        self._flush()
        if progress is not None:
            progress(total, total)
        return skipped

    def _take(self, part: int, document: Document) -> None:
        writer = self.writers[part]
        ends = isinstance(document, Chat) or document.ends_document
        if writer is None:
            return
        if self.to_skip[part] > 0:
            self.to_skip[part] -= ends
            return
        if isinstance(document, Text):
            self.pending.append((writer, document))
            self.pending_size += len(document.text)
            if self.pending_size >= PIECE:
                self._flush()
            return
        self._flush()
        if isinstance(document, Chat):
            assert self.renderer is not None
            writer.append(*self.renderer.render(document.messages, document.where))
            return
        writer.append_part(document.ids, self._mask(document))
        if document.ends_document:
            writer.end_document()

    def _mask(self, document: Ids) -> Any:
        if self.masked and document.loss_mask is None:
            return np.ones(len(document.ids), np.bool_)
        return document.loss_mask

    def _flush(self) -> None:
        """Encode and write the waiting texts."""
        encoded = self.tokenizer.encode_batch([text.text for _, text in self.pending])
        for (writer, text), ids in zip(self.pending, encoded, strict=True):
            self.begun = self.begun or len(ids) > 0
            if text.ends_document and self.append_eos and self.begun:
                ids = np.append(ids, np.int32(self.tokenizer.eos_id))
            writer.append_part(ids, np.ones(len(ids), np.bool_) if self.masked else None)
            if text.ends_document:
                writer.end_document()
                self.begun = False
        self.pending, self.pending_size = [], 0


def _assigned(
    source: Source, fraction: float, alone: bool, tokenizer: Tokenizer
) -> Iterator[tuple[int, Document]]:
    """The documents of a file, each with the number of its store: 0 train, 1 validation."""
    documents = read_documents(source.path, source.kind, tokenizer)
    if not fraction:
        yield from ((0, document) for document in documents)
    elif alone and source.kind == "text":
        yield from _tail(documents, int(source.bytes * (1 - fraction)))
    else:
        number = 0
        for document in documents:
            yield _part(f"{source.key}#{number}", fraction), document
            number += isinstance(document, Chat) or document.ends_document


def _part(key: str, fraction: float) -> int:
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    return int(int.from_bytes(digest[:8], "big") < fraction * 2**64)


def _tail(documents: Iterator[Document], limit: int) -> Iterator[tuple[int, Document]]:
    """One text cut in two after the first line end at or beyond `limit` bytes."""
    seen = 0
    for document in documents:
        assert isinstance(document, Text)
        data = document.text.encode()
        cut = data.find(b"\n", max(limit - seen, 0)) + 1
        seen += len(data)
        if not cut or (cut == len(data) and document.ends_document):
            yield 0, document
            continue
        yield 0, Text(data[:cut].decode())
        yield 1, Text(data[cut:].decode(), document.ends_document)
        yield from ((1, rest) for rest in documents)
        return
