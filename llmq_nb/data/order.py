"""The order of an epoch's windows: shuffled, yet read block by block.

Blocks are permuted, then windows are permuted inside runs of `SHUFFLE_BLOCKS` blocks. The order is
a function of the windows and (seed, epoch) alone: the batch, the ranks and the past are not in it.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmq_nb.data.packing import Packing, Windows

SHUFFLE_BLOCKS = 16  # 4 Mi tokens, 48 MiB of windows in memory


class EpochOrder:
    """The windows of one epoch, in order."""

    def __init__(self, packing: Packing, seed: int, epoch: int, shuffle: bool) -> None:
        self.packing, self.shuffle = packing, shuffle
        # (seed, epoch) is the whole key of the counter-based generator.
        self._key = np.array([seed % 2**64, epoch], np.uint64)
        self.blocks = np.arange(packing.blocks)
        if shuffle:
            self.blocks = self._permutation(0, packing.blocks)
        self.run = SHUFFLE_BLOCKS if shuffle else 1
        counts = np.diff(packing.first_window)[self.blocks]
        self._first = np.append(0, np.cumsum(counts))[:: self.run]

    def _permutation(self, use: int, count: int) -> NDArray[np.int64]:
        """A permutation of 0 to count - 1. use 0 orders the blocks, 1 + k the windows of run k.

        Sorted raw bits: NumPy keeps these for good, but not the stream of Generator.permutation.
        """
        bits = np.random.Philox(key=self._key, counter=np.array([0, 0, 0, use], np.uint64))
        return np.argsort(bits.random_raw(count), kind="stable")

    def windows(self, start: int) -> Iterator[Windows]:
        """From window `start` to the epoch's end, in pieces as they are read."""
        k = max(int(np.searchsorted(self._first, start, side="right")) - 1, 0)
        skip = start - int(self._first[k])
        while k * self.run < len(self.blocks):
            piece = self._read_run(k)
            yield Windows(piece.tokens[skip:], piece.targets[skip:], piece.segment_start[skip:])
            k, skip = k + 1, 0

    def _read_run(self, k: int) -> Windows:
        parts = [self.packing.read(int(b)) for b in self.blocks[k * self.run : (k + 1) * self.run]]
        count = sum(len(part) for part in parts)
        order = self._permutation(1 + k, count) if self.shuffle else np.arange(count)
        place = np.empty(count, np.int64)
        place[order] = np.arange(count)
        arrays = [np.empty((count, self.packing.seq_len), np.int32) for _ in range(3)]
        begin = 0
        for part in parts:  # scattered part by part: one copy, not two
            at = place[begin : begin + len(part)]
            for array, values in zip(
                arrays, (part.tokens, part.targets, part.segment_start), strict=True
            ):
                array[at] = values
            begin += len(part)
        return Windows(*arrays)
