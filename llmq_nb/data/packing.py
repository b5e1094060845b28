r"""Cuts a token store into windows of T tokens with targets and document borders.

    targets[t]       = tokens[t + 1]  if that token is in t's document and supervised, else -100
    segment_start[t] = index in the window of the first token of t's document;
                       0 if the document began before the window

stream   Windows follow each other through the concatenated documents; the last one is padded.
pack     Whole documents, first fit, each window padded at its end. Only documents longer than T
         are split.

Padding is a segment of its own, token 0 and target -100. Targets are those of the uncut stream
(T + 1 tokens are read), so cutting loses and adds none. A document's first token is nobody's
target: nothing leads to it.
Windows come in *blocks*: block b covers tokens bounds[b] to bounds[b + 1], so that one contiguous
read serves many windows. The windows are a function of the store, T and the mode alone.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError
from llmq_nb.data.store import TokenSource

IGNORE = -100
"""Target of a token that trains nothing."""
BLOCK_TOKENS = 2**18  # a block's read decodes at most one chunk in four twice
Mode = Literal["stream", "pack"]
Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Windows:
    """tokens, targets, segment_start: int32 [windows, T]."""

    tokens: Array
    targets: Array
    segment_start: Array

    def __len__(self) -> int:
        return len(self.tokens)


class Packing:
    """The windows of one store; `read(block)` builds those of a block.

    first_window: int64 [blocks + 1], number of each block's first window, then that of all windows.
    Raises UserError if the store has fewer than T + 1 tokens or no supervised one.
    """

    def __init__(self, store: TokenSource, seq_len: int, mode: Mode = "stream") -> None:
        if seq_len < 1:
            raise ValueError(f"{seq_len=}")
        if mode not in ("stream", "pack"):
            raise ValueError(f"{mode=} is neither 'stream' nor 'pack'")
        _check_store(store, seq_len)
        self.store, self.seq_len = store, seq_len
        self._starts = store.document_starts
        if mode == "stream":
            self.bounds, self.first_window = self._stream_blocks()
            self._pieces = None
        else:
            self._pieces = _pieces(self._starts, len(store), seq_len)
            self.bounds, self.first_window, self._place = self._packed_blocks()

    def __len__(self) -> int:
        return int(self.first_window[-1])

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.first_window) - 1

    def _stream_blocks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bounds and first window of each block."""
        T = self.seq_len
        # Not len(store): a last token alone in its window would train nothing.
        windows = -(-(len(self.store) - 1) // T)
        per_block = max(BLOCK_TOKENS // T, 1)
        first = np.append(np.arange(0, windows, per_block), windows)
        return np.minimum(first * T, len(self.store)), first

    def _packed_blocks(
        self,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Bounds and first window of each block; each piece's offset in the row of all windows."""
        assert self._pieces is not None
        T, pieces = self.seq_len, self._pieces
        place = np.empty(len(pieces) - 1, np.int64)
        bounds, first = [0], [0]
        lengths = np.diff(pieces)
        # At least 16 windows a block, or first fit has nothing to choose from.
        block_ends = _group(pieces, max(BLOCK_TOKENS, 16 * T))
        begin = 0
        for end in block_ends:
            windows = _first_fit(lengths[begin:end], T, place[begin:end])
            place[begin:end] += first[-1] * T
            bounds.append(int(pieces[end]))
            first.append(first[-1] + windows)
            begin = end
        return np.array(bounds), np.array(first), place

    def read(self, block: int) -> Windows:
        """All windows of a block, in order."""
        begin, end = int(self.bounds[block]), int(self.bounds[block + 1])
        windows, T = int(self.first_window[block + 1] - self.first_window[block]), self.seq_len
        tokens, targets, segment_start = (np.empty(windows * T, np.int32) for _ in range(3))
        if self._pieces is None:
            place = slice(0, end - begin)
            tokens[end - begin :], targets[end - begin :] = 0, IGNORE
            self._stream_segments(segment_start, begin, end)
        else:
            tokens[:], targets[:] = 0, IGNORE
            place = self._packed_segments(segment_start, block, begin, end)
        self._read_stream(tokens, targets, place, begin, end)
        return Windows(*(a.reshape(windows, T) for a in (tokens, targets, segment_start)))

    def _read_stream(
        self, tokens: Array, targets: Array, place: slice | NDArray[np.int64], begin: int, end: int
    ) -> None:
        """Write tokens begin to end and their targets at their places."""
        ahead = min(end + 1, len(self.store))
        stream = self.store.read(begin, ahead)
        following = np.full(end - begin, IGNORE, np.int32)
        following[: ahead - begin - 1] = stream[1:]
        mask = self.store.read_mask(begin, ahead)
        if mask is not None:
            following[: ahead - begin - 1][~mask[1:]] = IGNORE
        # Document starts in (begin, end]: the token before one is the last of its document.
        a, b = np.searchsorted(self._starts, [begin, end], side="right")
        following[self._starts[a:b] - begin - 1] = IGNORE
        tokens[place], targets[place] = stream[: end - begin], following

    def _stream_segments(self, segment_start: Array, begin: int, end: int) -> None:
        """Write each token's segment start; `end` and beyond is padding, a segment of its own."""
        a, b = np.searchsorted(self._starts, [begin, end], side="left")
        first = np.concatenate([[begin], self._starts[a:b], [end, begin + len(segment_start)]])
        first -= begin
        segment_start[:] = np.repeat(first[:-1].astype(np.int32), np.diff(first))
        rows = segment_start.reshape(-1, self.seq_len)
        rows -= np.arange(0, rows.size, self.seq_len, dtype=np.int32)[:, None]
        np.maximum(rows, 0, out=rows)

    def _packed_segments(
        self, segment_start: Array, block: int, begin: int, end: int
    ) -> NDArray[np.int64]:
        """Write each place's segment start; return each token's place in the row of windows."""
        assert self._pieces is not None
        T = self.seq_len
        a, b = np.searchsorted(self._pieces, [begin, end])
        lengths = np.diff(self._pieces[a : b + 1])
        offset = self._place[a:b] - self.first_window[block] * T
        place = np.repeat(offset - (self._pieces[a:b] - begin), lengths) + np.arange(end - begin)
        used = np.bincount(offset // T, lengths, minlength=len(segment_start) // T)
        segment_start[:] = np.repeat(used.astype(np.int32), T)  # padding is at each window's end
        segment_start[place] = np.repeat((offset % T).astype(np.int32), lengths)
        return place


def _check_store(store: TokenSource, seq_len: int) -> None:
    if len(store) < seq_len + 1:
        raise UserError(
            f"{len(store)} tokens are fewer than seq_len + 1 = {seq_len + 1}",
            where=store.name,
            mend="add data or lower seq_len",
        )
    if store.supervised == 0:
        raise UserError(
            "all-masked data: no token is supervised",
            where=store.name,
            mend="tokenize data with something to learn, such as chats with an assistant",
        )


def _pieces(starts: NDArray[np.int64], total: int, T: int) -> NDArray[np.int64]:
    """Document borders, those inside documents longer than T, and the end: int64 [pieces + 1]."""
    lengths = np.diff(np.append(starts, total))
    counts = -(-lengths // T)
    first = np.cumsum(counts) - counts
    within = np.arange(counts.sum()) - np.repeat(first, counts)
    return np.append(np.repeat(starts, counts) + within * T, total)


def _group(pieces: NDArray[np.int64], tokens: int) -> list[int]:
    """Ends of groups of consecutive pieces, each the longest of at most `tokens` tokens."""
    ends, begin = [], 0
    while begin < len(pieces) - 1:
        begin = max(
            int(np.searchsorted(pieces, pieces[begin] + tokens, side="right")) - 1, begin + 1
        )
        ends.append(begin)
    return ends


def _first_fit(lengths: NDArray[np.int64], T: int, place: NDArray[np.int64]) -> int:
    """Put each piece into the first window with room: write its offset; return the windows used."""
    used = np.zeros(len(lengths), np.int64)
    windows = 0
    for i, length in enumerate(lengths.tolist()):
        window = int(np.argmax(used[: windows + 1] <= T - length))
        place[i] = window * T + used[window]
        used[window] += length
        windows = max(windows, window + 1)
    return windows
