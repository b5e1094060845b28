"""Optimizer states on the host, brought to the device in slices, updated there and sent back.

    to the device   0 1 2 3 ...         slice k + 1 comes while k is updated
    update            0 1 2 3 ...
    to the host         0 1 2 3 ...     slice k goes while k + 1 is updated

Two staging sets by turns; a slice waits until the one before the last has left its set. The other
way is zero-copy: the update reads and writes host memory itself, and nothing of this is needed.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from llmq_nb.core.tensor import Tensor
from llmq_nb.offload.transfer import Copy, Transfer

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True, slots=True)
class Slice(Generic[Item]):
    """item: what the update is given. turn: the staging set; copies: empty where none is needed."""

    item: Item
    turn: int = 0
    copies: tuple[Copy, ...] = ()


class StreamedStates(Generic[Item]):
    """Iterates over the items of all slices, each ready when it is given out.

    staging: the buffers of each set.
    """

    def __init__(
        self,
        slices: Sequence[Slice[Item]],
        staging: Sequence[Sequence[Tensor]],
        transfer: Transfer,
    ) -> None:
        self._slices, self._staging, self._transfer = slices, staging, transfer
        self._ready = [transfer.mark(), transfer.mark()]
        self._sent = [transfer.mark(), transfer.mark()]
        self.reset()

    @property
    def items(self) -> list[Item]:
        """All of them, ready or not."""
        return [part.item for part in self._slices]

    def __iter__(self) -> Iterator[Item]:
        staged = (s for s in self._slices if s.copies)
        self._fetch(next(staged, None))
        for part in self._slices:
            if not part.copies:
                yield part.item
                continue
            self._fetch(next(staged, None))
            self._transfer.wait(self._ready[part.turn])
            yield part.item
            self._transfer.to_host(part.copies, done=self._sent[part.turn])
            self._sending[part.turn] = True
            for tensor in self._staging[part.turn]:
                self._transfer.free(tensor)
        self.finish()

    def _fetch(self, part: Slice[Item] | None) -> None:
        if part is not None:
            after = self._sent[part.turn] if self._sending[part.turn] else None
            self._transfer.to_device(part.copies, done=self._ready[part.turn], after=after)

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way back."""
        return self._sending == [False, False]

    def reset(self) -> None:
        """Begin with nothing in flight."""
        self._sending = [False, False]
        self._transfer.reset()

    def finish(self) -> None:
        """End with nothing in flight."""
        self._transfer.join()
        self._sending = [False, False]
