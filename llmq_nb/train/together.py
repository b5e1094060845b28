"""Work of the first process that reads tensors of all machines: a checkpoint, an export.

The first process says which of the optimizer's states it reads next, and all read it together: each
shard comes from the machine that has it. So the work itself is written as for one machine, and the
others need not know its order.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from numpy.typing import NDArray

from llmq_nb.comm.cluster import Cluster
from llmq_nb.core.tensor import Tensor
from llmq_nb.train.engine import Engine
from llmq_nb.train.rank import State

T = TypeVar("T")
FIELDS = ("master", "m", "m_scale", "v", "weight")


class Reader:
    """An engine's states, to be read by all processes at once."""

    def __init__(self, engine: Engine, cluster: Cluster) -> None:
        self._engine, self._cluster = engine, cluster
        self.states: list[State] = engine.states
        self._fields = {
            id(getattr(state, field)): (index, field)
            for index, state in enumerate(self.states)
            for field in FIELDS
        }

    def read(self, tensor: Tensor) -> NDArray[Any]:
        """In the first process: the whole content of a state's tensor."""
        self._cluster.gather(self._fields[id(tensor)])
        return self._engine.read(tensor)

    def serve(self) -> None:
        """In the others: what it reads, until it says that the work is done."""
        nothing: Any = None
        while (wanted := self._cluster.gather(nothing)[0]) is not None:
            index, field = wanted
            self._engine.read(getattr(self.states[index], field))


def together(engine: Engine, cluster: Cluster, work: Callable[[Reader], T]) -> T:
    """The first process does the work; all get its result when it is done."""
    reader, result = Reader(engine, cluster), None
    if not cluster.leads:
        reader.serve()
    else:
        result = work(reader)
        cluster.gather(None)
    return cluster.first(lambda: result)  # type: ignore[return-value]
