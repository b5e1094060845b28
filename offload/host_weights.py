"""Weights of blocks that live on the host or in all ranks' shards, brought to the device a block
ahead of their use.

gather starts one copy of the block into the staging buffer that its layer takes by turns; get makes
the compute stream wait for it; release gives the buffer back. Backward gathers again: what is
copied twice a micro-step never takes more than two blocks of device memory.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from llmq_nb.core.tensor import Tensor
from llmq_nb.offload.transfer import Fetch

Unit = Any
"""A block's index, or another unit, which is resident."""
W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)


class Resident(Protocol[W_co]):
    """The store of what stays on the device."""

    def get(self, unit: Any) -> W_co: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Staged(Generic[W]):
    """A block in a staging buffer. weights: its tensors, those of the buffer among them. copies:
    what the transfer is given."""

    weights: W
    turn: int
    staging: Tensor
    copies: tuple[Any, ...]


class HostWeights(Generic[W]):
    """A weight store: `staged` units come from the host, the others are `resident`."""

    def __init__(
        self, resident: Resident[W], staged: Mapping[Unit, Staged[W]], transfer: Fetch
    ) -> None:
        self._resident, self._staged, self._transfer = resident, staged, transfer
        self._ready = [transfer.mark(), transfer.mark()]
        self._held: list[Unit | None] = [None, None]

    def gather(self, unit: Unit) -> None:
        staged = self._staged.get(unit)
        if staged is None or self._held[staged.turn] == unit:
            return
        assert self._held[staged.turn] is None, f"unit {unit} needs the buffer of one in use"
        self._transfer.to_device(staged.copies, done=self._ready[staged.turn])
        self._held[staged.turn] = unit

    def get(self, unit: Unit) -> W:
        staged = self._staged.get(unit)
        if staged is None:
            return self._resident.get(unit)
        self.gather(unit)
        self._transfer.wait(self._ready[staged.turn])
        return staged.weights

    def release(self, unit: Unit) -> None:
        staged = self._staged.get(unit)
        if staged is not None:
            self._held[staged.turn] = None
            self._transfer.free(staged.staging)

    @property
    def idle(self) -> bool:
        """Whether no unit is held."""
        return self._held == [None, None]

    def reset(self) -> None:
        """Begin with nothing held or in flight."""
        self._held = [None, None]
        self._transfer.reset()

    def finish(self) -> None:
        """End with nothing held or in flight."""
        assert self.idle, f"units {self._held} are still held"
        self._transfer.join()
