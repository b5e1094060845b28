"""Token files of LLMQ (read, write) and llm.c (read).

LLMQ     1024 bytes of header: "BIN.TOK\\n", then int32 version (1 or 2), bytes per token (4),
         tokens n, vocabulary size (version 2), has-masks (1 = yes), filler. Then n int32 tokens.
         Then, if there are masks, ceil(n / 8) bytes: bit t % 8 of byte t // 8 for token t.
llm.c    256 int32 of header: magic, version, tokens n. Then n uint16 (20240520, version 1: GPT-2)
         or n uint32 (20240801, version 7: Llama 3).

Neither has a document index: the tokenizer's EOS ends a document, its BOS (if another id) begins
one. A mask bit stays with its token: bit t becomes loss_mask[t], "token t is supervised as a
target". (LLMQ's own loader applies bit t to target t, which is token t + 1, so the first token of
each response is never trained.)
Source  byte layouts: IST-DASLab/llmq (reference/llmq.md 1.2) and karpathy/llm.c
        (dev/data/data_common.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError
from llmq_nb.core.files import atomic_file
from llmq_nb.data.documents import PIECE, Ids
from llmq_nb.data.store import TokenSource

LLMQ_MAGIC = b"BIN.TOK\n"
LLMC_KINDS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
HEADER = 1024  # bytes, of both


@dataclass(frozen=True, slots=True)
class BinFile:
    """A checked header: where tokens and mask bits lie. vocab_size: None if the file has none."""

    path: Path
    dtype: np.dtype[Any]
    tokens: int
    vocab_size: int | None = None
    has_mask: bool = False


def open_bin(path: Path, kind: str) -> BinFile:
    """Read and check the header. kind: "llmq-bin" or "llmc-bin". Raises UserError."""
    with path.open("rb") as file:
        header = file.read(HEADER)
    if len(header) < HEADER:
        raise UserError(f"{len(header)} bytes are fewer than a header's {HEADER}", where=str(path))
    found = _llmq_header(path, header) if kind == "llmq-bin" else _llmc_header(path, header)
    need = HEADER + found.tokens * found.dtype.itemsize + (-(-found.tokens // 8)) * found.has_mask
    if found.tokens < 0 or path.stat().st_size != need:
        raise UserError(
            f"{path.stat().st_size} bytes, but {found.tokens} tokens take {need}",
            where=str(path),
            mend="the file is cut off or damaged; make it again",
        )
    return found


def _llmq_header(path: Path, header: bytes) -> BinFile:
    if not header.startswith(LLMQ_MAGIC):
        raise UserError("not an LLMQ token file", where=str(path))
    version, token_bytes, tokens, vocab_size, has_mask = np.frombuffer(header, "<i4", 5, 8).tolist()
    if version not in (1, 2):
        raise UserError(f"LLMQ token file of version {version}, known are 1 and 2", where=str(path))
    if token_bytes != 4:
        raise UserError(f"{token_bytes} bytes a token, LLMQ writes 4", where=str(path))
    known = vocab_size if version == 2 else None
    return BinFile(path, np.dtype("<i4"), tokens, known, has_mask == 1)


def _llmc_header(path: Path, header: bytes) -> BinFile:
    magic, version, tokens = np.frombuffer(header, "<i4", 3).tolist()
    if (magic, version) not in LLMC_KINDS:
        raise UserError(
            f"magic {magic}, version {version} is no llm.c token file",
            where=str(path),
            mend="known are 20240520 version 1 and 20240801 version 7",
        )
    return BinFile(path, LLMC_KINDS[magic, version], tokens)


def read_bin(file: BinFile, vocab_size: int, eos_id: int, bos_id: int | None) -> Iterator[Ids]:
    """The file's documents, in parts of at most `PIECE` tokens.

    Raises UserError on a token beyond the vocabulary, with file and position.
    """
    tokens = np.memmap(file.path, file.dtype, "r", HEADER, (file.tokens,)) if file.tokens else ()
    for begin in range(0, file.tokens, PIECE):
        ids = np.array(tokens[begin : begin + PIECE])
        bad = (ids < 0) | (ids >= vocab_size)
        if bad.any():
            at = int(np.argmax(bad))
            raise UserError(
                f"token id {ids[at]} at position {begin + at} is beyond the vocabulary "
                f"of {vocab_size}",
                where=str(file.path),
                mend="take the tokenizer that made the file",
            )
        mask = _read_mask(file, begin, len(ids)) if file.has_mask else None
        # The document that begins after this piece is cut there if its first token is a BOS.
        after = tokens[begin + len(ids)] if begin + len(ids) < file.tokens else None
        last = after is None or ids[-1] == eos_id or (after == bos_id and bos_id is not None)
        yield from _split(ids, mask, eos_id, bos_id, last)


def _read_mask(file: BinFile, begin: int, count: int) -> NDArray[np.bool_]:
    assert begin % 8 == 0
    offset = HEADER + file.tokens * file.dtype.itemsize + begin // 8
    packed = np.fromfile(file.path, np.uint8, -(-count // 8), offset=offset)
    return np.unpackbits(packed, count=count, bitorder="little").astype(np.bool_)


def _split(
    ids: NDArray[Any],
    mask: NDArray[np.bool_] | None,
    eos_id: int,
    bos_id: int | None,
    last: bool,
) -> Iterator[Ids]:
    """Documents of one piece; `last`: its end ends a document."""
    cuts = np.flatnonzero(ids[:-1] == eos_id) + 1
    if bos_id is not None and bos_id != eos_id:
        cuts = np.union1d(cuts, np.flatnonzero(ids[1:] == bos_id) + 1)
    edges = [0, *cuts.tolist(), len(ids)]
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        yield Ids(ids[a:b], None if mask is None else mask[a:b], last or b < len(ids))


def write_llmq_bin(path: str | Path, store: TokenSource, *, version: int = 2) -> None:
    """Write a store as an LLMQ token file, with masks if it has them.

    `path` appears, or is replaced, when the file is complete.
    Raises UserError if the store has 2^31 tokens or more, which the header cannot say.
    """
    if version not in (1, 2):
        raise ValueError(f"{version=}")
    if len(store) >= 2**31:
        raise UserError(
            f"{len(store)} tokens, an LLMQ token file holds fewer than 2^31", where=store.name
        )
    vocab_size = store.vocab_size if version == 2 else 0
    fields = np.array([version, 4, len(store), vocab_size, store.has_mask], "<i4")
    header = (LLMQ_MAGIC + fields.tobytes()).ljust(HEADER - 1, b"*") + b"\n"
    with atomic_file(path) as file:
        file.write(header)
        for begin in range(0, len(store), PIECE):
            file.write(store.read(begin, min(begin + PIECE, len(store))).astype("<i4").tobytes())
        for begin in range(0, len(store), PIECE):
            mask = store.read_mask(begin, min(begin + PIECE, len(store)))
            if mask is not None:
                file.write(np.packbits(mask, bitorder="little").tobytes())
