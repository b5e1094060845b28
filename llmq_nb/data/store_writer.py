"""Writes token stores: append-only, in bounded memory, survives kill -9 at any moment.

How: values gather in memory until a shard is full. A *commit*, always at a document's end, writes
the full shards and the begun one, then the totals into the group's attributes. Every single file is
replaced atomically, so at any moment the attributes describe tokens that are on the disk. What lies
beyond the totals is cut off on resuming. `closed` comes last, after an fsync of everything. A lock
on the folder keeps a second writer out.
"""

import fcntl
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import zarr
from numpy.typing import ArrayLike, NDArray
from zarr.codecs import BloscCodec, Crc32cCodec

from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.core.files import fsync_path
from llmq_nb.data.store import (
    FORMAT,
    FORMAT_VERSION,
    REDO,
    TokenizerInfo,
    read_attributes,
    token_dtype,
)

CHUNK = 2**16  # tokens a read decodes at least
SHARD = 2**22  # tokens a file; also what a kill can cost, and twice what waits in memory
DOCUMENT_CHUNK, DOCUMENT_SHARD = 2**13, 2**19


class StoreWriter:
    """Writes one store, document by document; continues an unclosed one of the same identity.

    Identity: tokenizer, vocabulary, mask or none, sources (a JSON object that the caller chooses).
    appended: number of documents handed over so far, empty ones included; after a resume the
    caller goes on with document number `appended`.
    `with` closes the store on success and leaves it resumable on an exception.
    Raises UserError if `path` holds anything else, is closed, is being written or cannot be made.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: TokenizerInfo,
        with_mask: bool = False,
        vocab_size: int | None = None,
        *,
        sources: dict[str, Any] | None = None,
        chunk: int = CHUNK,
        shard: int = SHARD,
    ) -> None:
        self.path = Path(path)
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        identity = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "tokenizer": asdict(tokenizer),
            "vocab_size": self.vocab_size,
            "with_mask": with_mask,
            "sources": sources or {},
        }
        if read_attributes(self.path) is None:
            zeros = {"tokens": 0, "documents": 0, "supervised": 0, "appended": 0, "closed": False}
            _create(self.path, identity | zeros, chunk, shard)
        self._lock = _lock(self.path)
        self._begun = False  # a document is open: nothing may be committed
        try:
            self._resume(identity)
        except OSError as error:
            self.release()
            raise _write_error(self.path, error) from error
        except UserError:
            self.release()
            raise

    def _resume(self, identity: dict[str, Any]) -> None:
        """Take up the store where its last commit left it."""
        attributes = read_attributes(self.path)
        assert attributes is not None
        self._check_resumable(attributes, identity)
        self.tokens: int = attributes["tokens"]
        self.documents: int = attributes["documents"]
        self.supervised: int = attributes["supervised"]
        self.appended: int = attributes["appended"]
        for litter in self.path.rglob("*.partial"):  # zarr's files that a kill left half-written
            litter.unlink()
        with_mask = attributes["with_mask"]
        # `_create` asked for it too, but an array on disk does not remember it
        with zarr.config.set({"array.write_empty_chunks": True}):
            self._group = zarr.open_group(self.path, mode="r+")
            self._tokens = _Column(self._group["tokens"], self.tokens)
            self._starts = _Column(self._group["document_starts"], self.documents)
            self._mask = _Column(self._group["loss_mask"], self.tokens) if with_mask else None

    def _check_resumable(self, attributes: dict[str, Any], identity: dict[str, Any]) -> None:
        if attributes["closed"]:
            raise UserError("the token store is complete", where=str(self.path), mend=REDO)
        for key, value in identity.items():
            if key == "sources" and "fingerprint" in value:  # what it says besides is for people
                same = attributes[key].get("fingerprint") == value["fingerprint"]
            else:
                same = attributes[key] == value
            if not same:
                raise UserError(
                    f"unfinished token store with other {key}", where=str(self.path), mend=REDO
                )

    def append(self, tokens: ArrayLike, loss_mask: ArrayLike | None = None) -> None:
        """Append one document: integer ids [n] and, in a masked store, bool [n].

        An empty document leaves no trace but in `appended`. Raises UserError on an id beyond the
        vocabulary.
        """
        self.append_part(tokens, loss_mask)
        self.end_document()

    def append_part(self, tokens: ArrayLike, loss_mask: ArrayLike | None = None) -> None:
        """Append a part of the open document, so that a document need not fit in memory."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise ValueError(f"tokens are integers [n], not {ids.dtype} {ids.shape}")
        if (loss_mask is None) != (self._mask is None):
            raise ValueError(
                "a loss mask comes with every document of a masked store and with no other"
            )
        if not len(ids):
            return
        self._check_ids(ids)
        if not self._begun:
            self._starts.append(np.array([self.tokens], np.uint64))
            self.documents += 1
        if self._mask is None:
            self.supervised += len(ids) - (not self._begun)
        else:
            mask = np.asarray(loss_mask, np.bool_)
            if mask.shape != ids.shape:
                raise ValueError(f"loss mask {mask.shape} for tokens {ids.shape}")
            self._mask.append(mask)
            # The first token of a document is nobody's target.
            self.supervised += int(np.count_nonzero(mask[0 if self._begun else 1 :]))
        self._tokens.append(ids)
        self.tokens += len(ids)
        self._begun = True
        if self._tokens.pending >= self._tokens.shard:
            self._write(full_shards_only=True)

    def _check_ids(self, ids: NDArray[Any]) -> None:
        if ids.max() >= self.vocab_size or ids.min() < 0:
            at = int(np.argmax((ids >= self.vocab_size) | (ids < 0)))
            raise UserError(
                f"token id {ids[at]} at position {self.tokens + at} is beyond the vocabulary "
                f"of {self.vocab_size}",
                where=str(self.path),
                mend="take the tokenizer that made the ids",
            )

    def end_document(self) -> None:
        """End the open document; commits when a shard was filled since the last commit."""
        self._begun = False
        self.appended += 1
        if self._tokens.dirty_shards:
            self.commit()

    def commit(self) -> None:
        """Make everything up to here survive a kill. Only between documents."""
        if self._begun:
            raise ValueError("commit inside a document")
        self._write(full_shards_only=False)
        self._set(closed=False)

    def close(self) -> None:
        """Commit, sync to the disk, mark as closed: from here on read, and written no more."""
        self.commit()
        try:
            _fsync_tree(self.path)
            self._set(closed=True)
            fsync_path(self.path / "zarr.json")
        except OSError as error:
            raise _write_error(self.path, error) from error
        self.release()

    def discard(self) -> None:
        """Delete the store, unless it was closed."""
        if self._lock >= 0:
            shutil.rmtree(self.path)
            self.release()

    def _write(self, *, full_shards_only: bool) -> None:
        try:
            for column in (self._tokens, self._mask, self._starts):
                if column is not None:
                    column.write(full_shards_only=full_shards_only)
        except OSError as error:
            raise _write_error(self.path, error) from error

    def _set(self, *, closed: bool) -> None:
        totals = {k: getattr(self, k) for k in ("tokens", "documents", "supervised", "appended")}
        try:  # one write of one file: attrs.update() would write it once for each key
            self._group.update_attributes(totals | {"closed": closed})
        except OSError as error:
            raise _write_error(self.path, error) from error

    def release(self) -> None:
        """Let another writer continue the store; this one writes no more."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        self.release()


class _Column:
    """One growing array. Memory holds what lies after the last full shard written."""

    def __init__(self, array: Any, length: int) -> None:
        assert isinstance(array, zarr.Array)
        self.array = array
        self.shard: int = (array.shards or array.chunks)[0]
        self.dirty_shards = False
        """Full shards were written since the last complete write."""
        self.base = length - length % self.shard  # everything before is written for good
        if array.shape != (length,):  # a kill came between a write and its commit
            self.array.resize((length,))
        self.pending = length - self.base
        self.buffer = np.empty(self.shard, array.dtype)
        self.buffer[: self.pending] = array[self.base : length]

    def append(self, values: NDArray[Any]) -> None:
        total = self.pending + len(values)
        if total > len(self.buffer):
            self.buffer = np.concatenate([self.buffer, np.empty(total, self.buffer.dtype)])
        self.buffer[self.pending : total] = values
        self.pending = total

    def write(self, *, full_shards_only: bool) -> None:
        full = self.pending - self.pending % self.shard
        count = full if full_shards_only else self.pending
        if self.base + count > self.array.shape[0]:
            self.array.resize((self.base + count,))
        for start in range(0, count, self.shard):
            stop = min(start + self.shard, count)
            self.array[self.base + start : self.base + stop] = self.buffer[start:stop]
        self.dirty_shards = full_shards_only and (full > 0 or self.dirty_shards)
        self.base += full
        self.pending -= full
        self.buffer[: self.pending] = self.buffer[full : full + self.pending].copy()
        self.buffer = self.buffer[: max(self.shard, self.pending)]


def _create(path: Path, attributes: dict[str, Any], chunk: int, shard: int) -> None:
    """An empty store at `path`, there in one rename."""
    staging = path.with_name(f".{path.name}.new")
    codecs = [BloscCodec(cname="zstd", clevel=1, shuffle="shuffle"), Crc32cCodec()]
    dtype = token_dtype(attributes["vocab_size"])
    arrays: dict[str, tuple[Any, int, int]] = {
        "tokens": (dtype, chunk, shard),
        "document_starts": (np.dtype(np.uint64), DOCUMENT_CHUNK, DOCUMENT_SHARD),
    }
    if attributes["with_mask"]:
        arrays["loss_mask"] = (np.dtype(np.bool_), chunk, shard)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed here
        group = zarr.create_group(staging, attributes=attributes)
        for name, (kind, chunk_length, shard_length) in arrays.items():
            group.create_array(
                name,
                shape=(0,),
                dtype=kind,
                chunks=(chunk_length,),
                shards=(shard_length,),
                compressors=codecs,
                fill_value=False if kind.kind == "b" else int(np.iinfo(kind).max),
                config={"write_empty_chunks": True},  # so that an absent file is always an error
            )
        os.rename(staging, path)
    except OSError as error:
        raise UserError(
            f"cannot create a token store ({error.strerror})", where=str(path)
        ) from error


def _lock(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise UserError("another process writes this token store", where=str(path)) from error
    return handle


def _fsync_tree(path: Path) -> None:
    for folder, _, files in os.walk(path):
        for file in files:
            fsync_path(Path(folder, file))
        fsync_path(folder)


def _write_error(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"cannot write {path} ({error.strerror}): make room and tokenize again, it resumes"
    )
