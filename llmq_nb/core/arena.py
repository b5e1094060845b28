"""Offsets in one block of memory for buffers that are not all alive at once.

A buffer with a lifetime (first, last) may share bytes with any buffer whose lifetime does not touch
it; one without lives for the whole run. Placement is first fit by size, largest first, and after
that what lives for the whole run in the order given: deterministic.
"""

import dataclasses
from collections.abc import Sequence

ALIGNMENT = 256
"""Bytes: what cuBLASLt asks of a workspace, and more than any load needs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A request: bytes, and the first and last tick of its life (None: always alive)."""

    nbytes: int
    lifetime: tuple[int, int] | None = None

    def meets(self, other: "Slot") -> bool:
        """Whether both are alive at some tick."""
        if self.lifetime is None or other.lifetime is None:
            return True
        return self.lifetime[0] <= other.lifetime[1] and other.lifetime[0] <= self.lifetime[1]


def assign_offsets(slots: Sequence[Slot]) -> tuple[list[int], int]:
    """(offset of each slot, total bytes). No two slots alive at one tick share a byte."""
    offsets = [0] * len(slots)
    shared = [i for i in range(len(slots)) if slots[i].lifetime is not None]
    placed: list[int] = []
    for i in sorted(shared, key=lambda i: (-slots[i].nbytes, i)):
        size = aligned(slots[i].nbytes)
        taken = sorted(
            (offsets[j], offsets[j] + aligned(slots[j].nbytes))
            for j in placed
            if slots[i].meets(slots[j])
        )
        offset = 0
        for start, end in taken:
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[i] = offset
        placed.append(i)
    total = max((offsets[i] + aligned(slots[i].nbytes) for i in placed), default=0)
    for i, slot in enumerate(slots):  # what always lives shares with nothing: one after the other
        if slot.lifetime is None:
            offsets[i] = total
            total += aligned(slot.nbytes)
    return offsets, total


def aligned(nbytes: int) -> int:
    """nbytes rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
