"""What crosses between machines when all ranks pull: the ranks of one process are one machine's.

Every process knows all ranks' tensors by size and goes through the same steps, so each knows the
pulls of all ranks: those within its machine are copies as ever (link.py), and of the others it
sends what it has and receives what it lacks. Nothing is asked for and nothing is negotiated: two
processes name the parcels between them in one order.

    rank 0 | machine 0   copies 0, 1 -> 0    sends to 2, 3      receives from 2, 3    accumulate
    rank 1 |             copies 0, 1 -> 1    sends to 2, 3      receives from 2, 3    accumulate
    rank 2 | machine 1   copies 2, 3 -> 2    sends to 0, 1      ...

What arrives lies where a copy would have put it, so the sums that follow have the order of the
ranks and the bits of one process with as many ranks.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from llmq_nb.comm.link import Pull


@dataclasses.dataclass(frozen=True, slots=True)
class Parcel:
    """nbytes from rank `source` to rank `target`, of two machines. address: in the memory of the
    one that is here. sends: whether that is the source."""

    source: int
    target: int
    address: int
    nbytes: int
    sends: bool

    @property
    def here(self) -> int:
        """The rank of this machine."""
        return self.source if self.sends else self.target

    @property
    def there(self) -> int:
        """The rank of the other one."""
        return self.target if self.sends else self.source


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """What all ranks pull at once. pulls: of each rank of this machine, from ranks of it, numbered
    within it. parcels: what crosses, in the order that all processes name it."""

    pulls: tuple[tuple[Pull, ...], ...]
    parcels: tuple[Parcel, ...] = ()

    def __bool__(self) -> bool:
        return any(self.pulls) or bool(self.parcels)


def split(pulls: Sequence[Sequence[Pull]], local: range) -> Phase:
    """The pulls of all ranks, in their order, as the machine of the ranks `local` sees them."""
    parcels: list[Parcel] = []
    for target, own in enumerate(pulls):
        for pull in own:
            if (pull.rank in local) == (target in local) or not pull.nbytes:
                continue
            sends = pull.rank in local
            address = pull.source if sends else pull.target
            parcels.append(Parcel(pull.rank, target, address, pull.nbytes, sends))
    inside = tuple(
        tuple(
            dataclasses.replace(pull, rank=pull.rank - local.start)
            for pull in pulls[rank]
            if pull.rank in local
        )
        for rank in local
    )
    return Phase(inside, tuple(parcels))


class Wire(Protocol):
    """Carries parcels. Between two machines they arrive in the order in which they were sent."""

    def exchange(self, parcels: Sequence[Parcel], queues: Sequence[Any]) -> None:
        """Send and receive all of them, each on its rank's queue. queues: one for each rank of this
        machine; None: there are no streams, and it is done on return."""
        ...

    def close(self) -> None:
        """Nothing is in flight, and nothing will be sent."""
        ...


class NoWire:
    """One machine: nothing crosses."""

    def exchange(self, parcels: Sequence[Parcel], queues: Sequence[Any]) -> None:
        assert not parcels, "a parcel for another machine, and there is no other"

    def close(self) -> None:
        pass
