"""What a token store holds, counted: what is trained on, and what usually goes wrong with data.

One pass, chunk by chunk: memory is one chunk and 33 bytes a document. Trained means supervised as a
target: in a store without loss mask every token but the first of its document.

An *end* is the tokenizer's EOS or another special token that closes a turn or a text (`END_NAMES`).
Documents are equal if their ids are; equality is that of a 64-bit hash of (position, id), so among
10^7 documents a wrong pair has a chance of 3e-6.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError
from llmq_nb.data.store import REDO, TokenizerInfo, TokenStore

CHUNK = 2**20
"""Tokens that are looked at together."""
EXAMPLES = 5
"""Documents that a finding names."""
END_NAMES = frozenset(
    ["<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<eos>"]
    + ["<end_of_turn>", "<|end|>"]
)
"""Special tokens that end a text or a turn in the families we train."""
U64 = np.uint64


@dataclass(frozen=True, slots=True)
class Found:
    """How many documents have a fault, and the first of them (numbers from 0)."""

    documents: int
    examples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The counts of one store."""

    tokens: int
    documents: int
    supervised: int
    """Tokens that are trained on."""
    shortest: int
    median: float
    longest: int
    """Length of the documents [tokens]."""
    dropped: int
    """Empty documents that tokenizing left out."""
    out_of_vocabulary: int
    """Tokens whose id the tokenizer does not have."""
    largest_id: int
    duplicate_tokens: int
    """Tokens of the documents that equal an earlier one."""
    most_copies: int
    """Of one document, itself included."""
    faults: dict[str, Found] = field(default_factory=dict)
    """By key of FAULTS."""


FAULTS = {
    "untrained": "no token is trained",
    "empty": "nothing but special tokens",
    "truncated": "the trained text does not come to an end token",
    "untrained_eos": "an end token after trained text is not trained",
    "double_bos": "two BOS in a row",
    "out_of_vocabulary": "ids that the tokenizer does not have",
    "duplicate": "equal to an earlier document",
    "long": "longer than a window: cut",
}
"""What each fault of a document means, in a few words."""


def inspect_store(store: TokenStore, *, seq_len: int | None = None) -> Findings:
    """Count everything. seq_len: also count the documents that a window of it would cut.

    Raises UserError on a damaged store and on one in which nothing is trained.
    """
    starts = _checked_starts(store)
    total = len(store)
    lengths = np.diff(np.append(starts, total))
    scan = _Scan(store.tokenizer, min(store.vocab_size, store.tokenizer.vocab_size), starts)
    for chunk in _chunks(store, starts):
        scan.take(chunk)
    if scan.supervised == 0:
        raise UserError(
            "all-masked data: no token is supervised",
            where=store.name,
            mend="tokenize data with something to learn, such as chats with an assistant",
        )
    later, most = _duplicates(scan.hashes)
    marks = {
        "untrained": scan.trained == 0,
        "empty": scan.special == lengths,
        "truncated": scan.open,
        "untrained_eos": scan.untrained_eos,
        "double_bos": scan.double_bos,
        "out_of_vocabulary": scan.unknown,
        "duplicate": later,
    }
    if seq_len is not None:
        marks["long"] = lengths > seq_len
    return Findings(
        tokens=total,
        documents=len(starts),
        supervised=scan.supervised,
        shortest=int(lengths.min()),
        median=float(np.median(lengths)),
        longest=int(lengths.max()),
        dropped=store.attributes["appended"] - len(starts),
        out_of_vocabulary=scan.unknown_tokens,
        largest_id=scan.largest,
        duplicate_tokens=int(lengths[later].sum()),
        most_copies=most,
        faults={key: _found(mark) for key, mark in marks.items()},
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some tokens in a row, and the (parts of) documents first .. first + len(begins) - 1 in it."""

    ids: NDArray[Any]
    trained: NDArray[np.bool_]
    position: NDArray[np.int64]
    """Of each token in its document."""
    first: int
    begins: NDArray[np.int64]
    """Index in the chunk of each part's first token."""


def _chunks(store: TokenStore, starts: NDArray[np.int64]) -> Iterator[_Chunk]:
    for a in range(0, len(store), CHUNK):
        b = min(a + CHUNK, len(store))
        low = int(np.searchsorted(starts, a, side="right")) - 1
        high = int(np.searchsorted(starts, b, side="left"))
        begins = np.maximum(starts[low:high] - a, 0)
        counts = np.diff(np.append(begins, b - a))
        position = np.arange(a, b) - np.repeat(starts[low:high], counts)
        mask = store.read_mask(a, b)
        trained = position > 0 if mask is None else mask & (position > 0)
        yield _Chunk(store.read_any(a, b), trained, position, low, begins)


class _Scan:
    """What is known of each document after the chunks that were taken, in order."""

    def __init__(self, info: TokenizerInfo, vocab_size: int, starts: NDArray[np.int64]) -> None:
        documents = len(starts)
        self.hashes = np.zeros(documents, U64)
        self.trained = np.zeros(documents, np.int64)
        self.special = np.zeros(documents, np.int64)
        self.open, self.untrained_eos, self.double_bos, self.unknown = (
            np.zeros(documents, np.bool_) for _ in range(4)
        )
        self.supervised = self.unknown_tokens = self.largest = 0
        self._bos, self._vocab_size = info.bos_id, vocab_size
        ends = {i for name, i in info.special_ids.items() if name in END_NAMES} | {info.eos_id}
        self._ends = _table(ends, vocab_size)
        self._special = _table({*info.special_ids.values(), *ends}, vocab_size)
        self._before = (False, False)  # of the token before the chunk: trained, a BOS

    def take(self, c: _Chunk) -> None:
        """The next tokens."""
        here = slice(c.first, c.first + len(c.begins))
        most = min(self._vocab_size, np.iinfo(c.ids.dtype).max)
        known = np.minimum(c.ids, most)  # the tables' last row stands for all unknown ids
        end, special, inside = self._ends[known], self._special[known], c.position > 0
        self.hashes[here] += np.add.reduceat(_mix(c.ids, c.position), c.begins)
        self.trained[here] += np.add.reduceat(c.trained, c.begins, dtype=np.int64)
        self.special[here] += np.add.reduceat(special, c.begins, dtype=np.int64)
        self.supervised += int(np.count_nonzero(c.trained))
        self.largest = max(self.largest, int(c.ids.max()))
        unknown = c.ids >= self._vocab_size
        if unknown.any():
            self.unknown_tokens += int(np.count_nonzero(unknown))
            self.unknown[here] |= np.logical_or.reduceat(unknown, c.begins)
        after_trained = np.append(self._before[0], c.trained[:-1])
        unlearnt = end & ~c.trained & after_trained & inside
        self.untrained_eos[here] |= np.logical_or.reduceat(unlearnt, c.begins)
        bos = c.ids == self._bos if self._bos is not None else np.zeros(len(c.ids), np.bool_)
        twice = bos & np.append(self._before[1], bos[:-1]) & inside
        self.double_bos[here] |= np.logical_or.reduceat(twice, c.begins)
        self._leave_open(c, end, here)
        self._before = (bool(c.trained[-1]), bool(bos[-1]))

    def _leave_open(self, c: _Chunk, end: NDArray[np.bool_], here: slice) -> None:
        """A trained token opens its document, an end closes it: the last of them counts."""
        told = np.where(c.trained | end, np.arange(len(c.ids)), -1)
        last = np.maximum.reduceat(told, c.begins)
        self.open[here] = np.where(last >= 0, ~end[last], self.open[here])


def _table(ids: set[int], size: int) -> NDArray[np.bool_]:
    """Whether an id is one of `ids`; one more row, false, for those beyond the vocabulary."""
    table = np.zeros(size + 1, np.bool_)
    table[[i for i in ids if i < size]] = True
    return table


def _mix(ids: NDArray[Any], position: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 well-mixed bits of each (position, id), to be added up. (SplitMix64's finaliser.)"""
    x = (position.astype(U64) << U64(32)) | ids.astype(U64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x += U64(0x9E3779B97F4A7C15)
        x ^= x >> U64(shift)
        x *= U64(factor)
    return x ^ (x >> U64(31))


def _duplicates(hashes: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], int]:
    """(true for each document that equals an earlier one, most copies of one document)."""
    _, first, counts = np.unique(hashes, return_index=True, return_counts=True)
    later = np.ones(len(hashes), np.bool_)
    later[first] = False
    return later, int(counts.max())


def _found(mark: NDArray[np.bool_]) -> Found:
    examples = np.flatnonzero(mark)
    return Found(len(examples), tuple(examples[:EXAMPLES].tolist()))


def _checked_starts(store: TokenStore) -> NDArray[np.int64]:
    """The document starts, which all counting by document builds on."""
    starts = store.document_starts
    if not len(starts):
        raise UserError("no document in the token store", where=store.name, mend=REDO)
    if starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= len(store):
        raise UserError("document starts are not ascending from 0", where=store.name, mend=REDO)
    return starts
