"""Token stores: tokenized documents in a zarr v3 group, read here, written by `store_writer`.

    tokens           uint16 if the vocabulary has at most 65536 ids, else uint32; all documents in
                     a row
    document_starts  uint64, index in `tokens` of each document's first token, ascending from 0
    loss_mask        bool, optional: loss_mask[i] says "token i is supervised as a target"

Attributes: format, format_version, tokenizer (name, sha256, vocab_size, eos_id, bos_id,
special_ids), vocab_size, sources, tokens, documents, supervised, appended, closed. `closed` is
written last: a store without it is not read. Chunks are compressed and carry a CRC, shards are
files of a few MiB; reading in order costs one chunk per 2^16 tokens.
"""

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError

FORMAT = "llmq-nb tokens"
FORMAT_VERSION = 1
REDO = "delete it and tokenize again"
OTHER = f"name another path, or {REDO}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """What a store remembers of its tokenizer: enough to refuse another one."""

    name: str
    sha256: str
    """Of the tokenizer's definition: two tokenizers are the same if it is."""
    vocab_size: int
    eos_id: int
    bos_id: int | None = None
    special_ids: dict[str, int] = field(default_factory=dict)


class TokenSource(Protocol):
    """What packing and loading need of a store: one, or several in a row (`ConcatStore`)."""

    @property
    def name(self) -> str:
        """For error messages: the path, or the paths."""
        ...

    @property
    def tokenizer(self) -> TokenizerInfo: ...

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def supervised(self) -> int:
        """Tokens that are targets."""
        ...

    @property
    def has_mask(self) -> bool: ...

    @property
    def document_starts(self) -> NDArray[np.int64]:
        """Index of the first token of each document, ascending, from 0."""
        ...

    def __len__(self) -> int:
        """Tokens."""
        ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start .. stop - 1, uint16 or uint32. Raises UserError on damaged data."""
        ...

    def read_mask(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """True where the token is a target; None in a store without masks."""
        ...


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 where it holds every id of the vocabulary, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def read_attributes(path: Path) -> dict[str, Any] | None:
    """The attributes of the token store at `path`; None if nothing is there.

    Raises UserError if something else is there, or a store of another format version.
    """
    if not path.exists():
        return None
    attributes: dict[str, Any] = {}
    try:
        attributes = json.loads((path / "zarr.json").read_text())["attributes"]
        known = attributes["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise UserError("not a token store", where=str(path), mend="name another path")
    if attributes["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"token store of format version {attributes['format_version']}, not {FORMAT_VERSION}",
            where=str(path),
            mend=REDO,
        )
    return attributes


class TokenStore:
    """A closed token store, open for reading. `len(store)` is its number of tokens.

    Raises UserError if there is no store, it is unclosed, or a file of it is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        attributes = read_attributes(self.path)
        if attributes is None:
            raise UserError("no such token store", where=str(path), mend="make it with tokenize")
        if not attributes["closed"]:
            raise UserError(
                "unclosed token store",
                where=str(path),
                mend="tokenize again, it resumes where it was",
            )
        self.attributes = attributes
        self.tokenizer = TokenizerInfo(**attributes["tokenizer"])
        self.vocab_size: int = attributes["vocab_size"]
        self.supervised: int = attributes["supervised"]
        self.name = str(path)
        group = zarr.open_group(self.path, mode="r")
        self._tokens = self._array(group, "tokens", attributes["tokens"])
        self._starts = self._array(group, "document_starts", attributes["documents"])
        self.has_mask = "loss_mask" in group
        self._mask = (
            self._array(group, "loss_mask", attributes["tokens"]) if self.has_mask else None
        )

    def _array(self, group: zarr.Group, name: str, length: int) -> zarr.Array:
        """The array `name`, with every shard present: zarr reads an absent one as fill values."""
        array = group[name]
        assert isinstance(array, zarr.Array)
        if array.shape != (length,):
            raise UserError(
                f"{name} holds {array.shape[0]} values, {length} were recorded",
                where=self.name,
                mend=REDO,
            )
        for shard in range(-(-length // _shard(array))):
            file = self.path / name / "c" / str(shard)
            if not file.exists():
                raise UserError("missing shard of a token store", where=str(file), mend=REDO)
        return array

    def __len__(self) -> int:
        return self._tokens.shape[0]

    @property
    def document_starts(self) -> NDArray[np.int64]:
        """Index of each document's first token, int64 [documents]. Read anew at each call."""
        return self._read(self._starts, 0, self._starts.shape[0]).astype(np.int64)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start <= i < stop, in the stored dtype.

        Raises UserError on an id beyond the vocabulary (with its position) and on a damaged shard.
        """
        tokens = self.read_any(start, stop)
        if len(tokens) and tokens.max() >= self.vocab_size:
            at = int(np.argmax(tokens >= self.vocab_size))
            raise UserError(
                f"token id {tokens[at]} at position {start + at} is beyond the vocabulary "
                f"of {self.vocab_size}",
                where=self.name,
                mend=REDO,
            )
        return tokens

    def read_any(self, start: int, stop: int) -> NDArray[Any]:
        """`read` that hands over ids beyond the vocabulary as well."""
        return self._read(self._tokens, start, stop)

    def read_mask(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Loss mask of tokens start <= i < stop; None if every token is supervised."""
        return None if self._mask is None else self._read(self._mask, start, stop)

    def _read(self, array: zarr.Array, start: int, stop: int) -> NDArray[Any]:
        if not 0 <= start <= stop <= array.shape[0]:
            raise ValueError(f"{start}:{stop} of {array.shape[0]} values")
        try:
            return np.asarray(array[start:stop])
        except (RuntimeError, ValueError) as error:  # what codecs raise on damaged bytes
            raise UserError(
                f"damaged token store ({error})",
                where=f"{self.name}, {array.name} {start}:{stop}",
                mend=REDO,
            ) from error


def _shard(array: zarr.Array) -> int:
    return (array.shards or array.chunks)[0]


class ConcatStore:
    """Several stores of one tokenizer, read as one. Every store ends a document.

    Raises UserError if the tokenizers differ or only some stores have a loss mask.
    """

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        first = stores[0]
        for other in stores[1:]:
            check_tokenizer(first, other)
        masked = sum(store.has_mask for store in stores)
        if 0 < masked < len(stores):
            without = next(store for store in stores if not store.has_mask)
            raise UserError(
                f"no loss mask, but {masked} of the stores beside it have one", where=without.name
            )
        self.stores = list(stores)
        self.tokenizer = first.tokenizer
        self.vocab_size = max(store.vocab_size for store in stores)
        self.supervised = sum(store.supervised for store in stores)
        self.has_mask = masked > 0
        self.name = ", ".join(store.name for store in stores)
        self._offsets = [0, *np.cumsum([len(store) for store in stores]).tolist()]

    def __len__(self) -> int:
        return self._offsets[-1]

    @property
    def document_starts(self) -> NDArray[np.int64]:
        """Index of each document's first token in the concatenation, int64 [documents]."""
        offsets = self._offsets[:-1]
        return np.concatenate(
            [s.document_starts + offset for s, offset in zip(self.stores, offsets, strict=True)]
        )

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start <= i < stop of the concatenation."""
        parts = [store.read(a, b) for store, a, b in self._parts(start, stop)]
        return np.concatenate(parts) if parts else self.stores[0].read(0, 0)

    def read_mask(self, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Loss mask of tokens start <= i < stop; None if the stores have none."""
        parts = [store.read_mask(a, b) for store, a, b in self._parts(start, stop)]
        present = [part for part in parts if part is not None]
        if present:
            return np.concatenate(present)
        return np.zeros(0, np.bool_) if self.has_mask else None

    def _parts(self, start: int, stop: int) -> list[tuple[TokenStore, int, int]]:
        parts = []
        index = max(bisect.bisect_right(self._offsets, start) - 1, 0)
        while start < stop:
            offset, end = self._offsets[index], min(stop, self._offsets[index + 1])
            if start < end:
                parts.append((self.stores[index], start - offset, end - offset))
                start = end
            index += 1
        return parts


def open_stores(paths: Sequence[str | Path]) -> TokenSource:
    """One store, or the concatenation of several, in the order given."""
    stores = [TokenStore(path) for path in paths]
    return stores[0] if len(stores) == 1 else ConcatStore(stores)


def check_vocabulary(store: TokenSource, vocab_size: int) -> None:
    """Raise UserError if the store may hold ids that a model of `vocab_size` ids does not have."""
    if store.vocab_size > vocab_size:
        raise UserError(
            f"vocabulary of {store.vocab_size} ids, the model has {vocab_size}",
            where=store.name,
            mend="tokenize with the model's tokenizer",
        )


def check_tokenizer(store: TokenSource, other: TokenSource | TokenizerInfo) -> None:
    """Raise UserError if `store` was made with another tokenizer than `other`."""
    info = other if isinstance(other, TokenizerInfo) else other.tokenizer
    if store.tokenizer.sha256 != info.sha256:
        beside = "expected" if isinstance(other, TokenizerInfo) else f"{other.name} has"
        raise UserError(
            f"made with tokenizer {store.tokenizer.name} ({store.tokenizer.sha256[:12]}), "
            f"{beside} {info.name} ({info.sha256[:12]})",
            where=store.name,
            mend="tokenize both with one tokenizer",
        )
