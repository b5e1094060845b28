"""Gradients of blocks that live on the host: backward writes a staging buffer, one copy sends it.

While gradients are added up over micro-steps, what the host has comes back first (gather, a block
ahead), because products add to what is there. Without a gather the buffer's content is not defined
and backward overwrites it.
"""

from collections.abc import Mapping
from typing import Generic

from llmq_nb.offload.host_weights import Resident, Staged, Unit, W
from llmq_nb.offload.transfer import Transfer


class HostGradients(Generic[W]):
    """A gradient store: `staged` units go to the host, the others are `resident`."""

    def __init__(
        self, resident: Resident[W], staged: Mapping[Unit, Staged[W]], transfer: Transfer
    ) -> None:
        self._resident, self._staged, self._transfer = resident, staged, transfer
        self._ready = [transfer.mark(), transfer.mark()]
        self._sent = [transfer.mark(), transfer.mark()]
        self.reset()

    def gather(self, unit: Unit) -> None:
        staged = self._staged.get(unit)
        if staged is None or self._held[staged.turn] == unit:
            return
        turn = staged.turn
        assert self._held[turn] is None, f"unit {unit} needs the buffer of one in use"
        after = self._sent[turn] if self._sending[turn] else None
        self._transfer.to_device(staged.copies, done=self._ready[turn], after=after)
        self._held[turn] = unit

    def get(self, unit: Unit) -> W:
        staged = self._staged.get(unit)
        if staged is None:
            return self._resident.get(unit)
        turn = staged.turn
        if self._held[turn] == unit:
            self._transfer.wait(self._ready[turn])
        elif self._sending[turn]:
            self._transfer.wait(self._sent[turn])
        self._held[turn] = unit
        return staged.weights

    def release(self, unit: Unit) -> None:
        staged = self._staged.get(unit)
        if staged is None:
            return
        turn = staged.turn
        self._transfer.to_host(staged.copies, done=self._sent[turn])
        self._transfer.free(staged.staging)
        self._held[turn], self._sending[turn] = None, True

    @property
    def idle(self) -> bool:
        """Whether no unit is held."""
        return self._held == [None, None]

    def reset(self) -> None:
        """Begin with nothing held or in flight."""
        self._held: list[Unit | None] = [None, None]
        self._sending = [False, False]
        self._transfer.reset()

    def finish(self) -> None:
        """End with nothing held or in flight."""
        assert self.idle, f"units {self._held} are still held"
        self._transfer.join()
        self._sending = [False, False]
