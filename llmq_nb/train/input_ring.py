"""Pinned slots for a micro-step's inputs: the host fills the next one while the GPU works.

Graphs read fixed device buffers; one copy from a slot sets them before each launch. An event frees
the slot.
"""

import dataclasses
from typing import Any

from numpy.typing import NDArray

from llmq_nb.core.device import check, create_event, driver, record_event
from llmq_nb.core.pinned import Pinned
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.engine_cuda.scalars import pack_scalars
from llmq_nb.model.ops import Scalars
from llmq_nb.plan.limits import RING_SLOTS


@dataclasses.dataclass(slots=True)
class Slot:
    memory: Pinned
    free: Any
    """Recorded after the slot's copies: the host may write it again when the event is done."""


class InputRing:
    """One rank's slots."""

    NAMES = ("tokens", "targets", "segment_start", "order", "scalars")

    def __init__(self, tensors: dict[str, Tensor], stream: int) -> None:
        self.targets = [tensors[f"inputs/{name}"] for name in self.NAMES]
        self.stream = stream
        sizes = [-(-t.nbytes // 256) * 256 for t in self.targets]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.slots = [Slot(Pinned(sum(sizes)), create_event()) for _ in range(RING_SLOTS)]
        self.next = 0

    def close(self) -> None:
        """Give the pinned memory back; nothing is in flight."""
        for slot in self.slots:
            slot.memory.close()

    def send(
        self,
        tokens: NDArray[Any],
        targets: NDArray[Any],
        segment_start: NDArray[Any],
        order: NDArray[Any],
        scalars: Scalars,
    ) -> None:
        """Copy a micro-step's inputs into the fixed buffers, in stream order."""
        d = driver()
        slot = self.slots[self.next]
        self.next = (self.next + 1) % RING_SLOTS
        check(d.cuEventSynchronize(slot.free), "waiting for an input slot")
        arrays = (tokens, targets, segment_start, order, pack_scalars(scalars))
        for tensor, offset, array in zip(self.targets, self.offsets, arrays, strict=True):
            slot.memory.array(offset, array.shape, array.dtype)[...] = array
            source = slot.memory.address + offset
            check(
                d.cuMemcpyHtoDAsync(tensor.data, source, array.nbytes, self.stream),
                f"copying {tensor.name}",
            )
        record_event(slot.free, self.stream)
