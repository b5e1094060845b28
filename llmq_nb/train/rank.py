"""One rank: a model, the optimizer's states and the buffers of its results.

`train/wiring.py` makes it from the plan's tensors.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

from llmq_nb.core.tensor import Tensor
from llmq_nb.model.ops import Ops
from llmq_nb.model.parameters import Parameter
from llmq_nb.model.transformer import Transformer
from llmq_nb.train.sharding import Group


@dataclasses.dataclass(slots=True)
class State:
    """What the optimizer keeps for one parameter. master is weight where their formats are one.

    A slice of it, or a rank's shard, has `whole` false and begins at element `first`; then all
    tensors are flat.
    """

    parameter: Parameter
    tensor_id: int
    weight: Tensor
    master: Tensor
    m: Tensor
    m_scale: Tensor | None
    v: Tensor
    gradient: Tensor
    first: int = 0
    whole: bool = True


class HostStore(Protocol):
    """A store with copies in flight during a step, and none between two."""

    @property
    def idle(self) -> bool: ...

    def reset(self) -> None: ...

    def finish(self) -> None: ...


def _stay() -> None:
    """There is one device, or none."""


@dataclasses.dataclass(slots=True)
class Rank:
    """A model, its states and the buffers of its results.

    states: of every parameter, or a rank's shards of those it has any of. gradients: what the norm
    is taken of, one a parameter. updates: what the optimizer goes over: the states, or slices of
    those that live on the host. fp8_weights: of FP8 products, in forward order; shards where only
    those are here. recoded: weights whose kept codes are made after all slices and shards are
    updated. host_stores: what has copies in flight. group: what it shares with other ranks; None:
    it is alone. activate: makes its device current.
    """

    model: Transformer
    states: list[State]
    norms: Tensor
    norm_total: Tensor
    gradients: list[Tensor] = dataclasses.field(default_factory=list)
    updates: Iterable[State] = ()
    fp8_weights: list[Tensor] = dataclasses.field(default_factory=list)
    recoded: list[Tensor] = dataclasses.field(default_factory=list)
    host_stores: list[HostStore] = dataclasses.field(default_factory=list)
    group: Group | None = None
    activate: Callable[[], None] = _stay
    all_norms: Tensor | None = None
    slots: Tensor | None = None
    all_slots: Tensor | None = None

    def begin(self) -> None:
        """Before a step: nothing is in flight."""
        for store in self.host_stores:
            store.reset()

    def finish(self) -> None:
        """After a step: what follows waits for every copy."""
        for store in self.host_stores:
            store.finish()

    @property
    def ops(self) -> Ops:
        return self.model.ops
