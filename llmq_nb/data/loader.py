"""Hands over whole optimizer steps of windows, shuffled, prefetched, resumable at any window.

Window i of a step goes to (micro_step m, rank r, row b) with i = (m * world_size + r) * micro_batch
+ b: any split of one total takes the same windows in the same order. A step across an epoch's end
goes on with the next epoch's order.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from llmq_nb.data.order import EpochOrder
from llmq_nb.data.packing import IGNORE, Array, Mode, Packing, Windows
from llmq_nb.data.prefetch import Prefetch
from llmq_nb.data.store import TokenSource

PREFETCH_STEPS = 2


@dataclass(frozen=True, slots=True)
class Position:
    """Number of windows handed over: `window` of them in epoch number `epoch`."""

    epoch: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step's windows.

    tokens, targets, segment_start: int32 [grad_accumulation, world_size, micro_batch, seq_len].
    supervised: number of targets that train (not -100) in the whole step.
    position: where the next step begins.
    """

    tokens: Array
    targets: Array
    segment_start: Array
    supervised: int
    position: Position
    _orders: dict[tuple[int, int], Array] = field(default_factory=dict, repr=False, compare=False)

    def token_order(self, micro_step: int, rank: int) -> Array:
        """Stable argsort of a micro-batch's tokens, int32 [micro_batch * seq_len]. Kept."""
        key = (micro_step, rank)
        if key not in self._orders:
            self._orders[key] = stable_order(self.tokens[micro_step, rank].ravel())
        return self._orders[key]


def stable_order(tokens: Array) -> Array:
    """Stable argsort of non-negative int32 [n], as int32.

    Two passes over 16 bits each: for these NumPy has a radix sort, for 32 bits a merge sort.
    """
    order = np.argsort((tokens & 0xFFFF).astype(np.uint16), kind="stable")
    high = (tokens >> 16).astype(np.uint16)
    if high.any():
        order = order[np.argsort(high[order], kind="stable")]
    return order.astype(np.int32)


class Loader:
    """Optimizer steps of `store` from `position` on, without end.

    Reads ahead in a thread: close it, or use `with`.
    position: where the next `next_step` begins. A loader made with it goes on with the same
    windows, whatever its micro_batch, grad_accumulation and world_size.
    token_order: work out each micro-batch's token order in the thread as well.
    Raises UserError if the store is shorter than seq_len + 1 tokens or has no supervised token.
    """

    def __init__(
        self,
        store: TokenSource,
        *,
        seq_len: int,
        micro_batch: int,
        grad_accumulation: int,
        world_size: int = 1,
        seed: int,
        packing: Mode = "stream",
        position: Position | None = None,
        shuffle: bool = True,
        token_order: bool = False,
        prefetch: int = PREFETCH_STEPS,
    ) -> None:
        if min(micro_batch, grad_accumulation, world_size, prefetch) < 1:
            raise ValueError(f"{micro_batch=} {grad_accumulation=} {world_size=} {prefetch=}")
        self.packing = Packing(store, seq_len, packing)
        self.position = position or Position()
        if not 0 <= self.position.window <= len(self.packing) or self.position.epoch < 0:
            raise ValueError(f"{self.position} in an epoch of {len(self.packing)} windows")
        shape = (grad_accumulation, world_size, micro_batch, seq_len)
        steps = _steps(self.packing, seed, shuffle, self.position, shape, token_order)
        self._reader = Prefetch(steps, prefetch)
        # Ends the thread when the loader is dropped and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._reader.stop)

    @property
    def windows_per_epoch(self) -> int:
        """Windows of seq_len tokens in one pass over the store."""
        return len(self.packing)

    def next_step(self) -> StepBatch:
        """The next step. Errors of reading are raised here."""
        batch = self._reader.get()
        self.position = batch.position
        return batch

    def close(self) -> None:
        """End the reading thread and wait for it."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _steps(
    packing: Packing,
    seed: int,
    shuffle: bool,
    position: Position,
    shape: tuple[int, int, int, int],
    token_order: bool,
) -> Iterator[StepBatch]:
    """Steps of the given shape from `position` on, for ever."""
    T = shape[-1]
    total = shape[0] * shape[1] * shape[2]
    epoch, window = position.epoch, position.window
    source = EpochOrder(packing, seed, epoch, shuffle).windows(window)
    piece, used = Windows(*(np.empty((0, T), np.int32),) * 3), 0
    while True:
        arrays = [np.empty((total, T), np.int32) for _ in range(3)]
        filled = 0
        while filled < total:
            if used == len(piece):
                following = next(source, None)
                if following is None:
                    epoch, window = epoch + 1, 0
                    source = EpochOrder(packing, seed, epoch, shuffle).windows(0)
                    continue
                piece, used = following, 0
            n = min(total - filled, len(piece) - used)
            parts = (piece.tokens, piece.targets, piece.segment_start)
            for array, values in zip(arrays, parts, strict=True):
                array[filled : filled + n] = values[used : used + n]
            filled, used, window = filled + n, used + n, window + n
        tokens, targets, segment_start = (array.reshape(shape) for array in arrays)
        supervised = int(np.count_nonzero(targets != IGNORE))
        batch = StepBatch(tokens, targets, segment_start, supervised, Position(epoch, window))
        if token_order:
            for m, r in np.ndindex(shape[:2]):
                batch.token_order(m, r)
        yield batch


@dataclass(frozen=True, slots=True)
class EvalBatch:
    """tokens, targets, segment_start: int32 [micro_batch, seq_len].

    supervised: number of targets that count.
    """

    tokens: Array
    targets: Array
    segment_start: Array
    supervised: int


def eval_batches(
    store: TokenSource,
    micro_batch: int,
    seq_len: int,
    limit: int | None = None,
    *,
    packing: Mode = "stream",
) -> Iterator[EvalBatch]:
    """Every window of the store once, in order; or `limit` batches drawn from all of it.

    The draw is always the same. The rows that fill up the last batch are padding: target -100
    everywhere.
    """
    plan = Packing(store, seq_len, packing)
    shape = (micro_batch, seq_len)
    batches = -(-len(plan) // micro_batch)
    # a part of the store is a fair sample only if it is drawn from all of it
    source = EpochOrder(plan, 0, 0, shuffle=limit is not None).windows(0)
    rest: list[NDArray[np.int32]] = [np.empty((0, seq_len), np.int32)] * 3
    for _ in range(batches if limit is None else min(limit, batches)):
        while len(rest[0]) < micro_batch and (piece := next(source, None)) is not None:
            new = (piece.tokens, piece.targets, piece.segment_start)
            rest = [np.concatenate(pair) for pair in zip(rest, new, strict=True)]
        n = min(micro_batch, len(rest[0]))
        arrays = [
            np.zeros(shape, np.int32),
            np.full(shape, IGNORE, np.int32),
            np.zeros(shape, np.int32),
        ]
        for array, values in zip(arrays, rest, strict=True):
            array[:n] = values[:n]
        rest = [values[n:] for values in rest]
        supervised = int(np.count_nonzero(arrays[1] != IGNORE))
        yield EvalBatch(arrays[0], arrays[1], arrays[2], supervised)
