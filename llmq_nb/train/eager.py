"""A rank of any shape that runs as it is called: for gradients of one batch, evaluation and text.

It may share the weights of a run: then only activations (and gradients) are allocated.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, Self

from numpy.typing import NDArray

from llmq_nb.config import Config, ParallelConfig
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu import CpuOps
from llmq_nb.model.parameters import Parameter
from llmq_nb.plan.buffers import Buffer, Group, make_plan
from llmq_nb.train.rank import Rank, State, allocate, make_rank
from llmq_nb.train.sharding import Spread

Kind = Literal["cpu", "cuda"]


class Engine(Protocol):
    """A run's engine, as far as its weights go."""

    @property
    def states(self) -> list[State]: ...

    def read(self, tensor: Tensor) -> NDArray[Any]: ...


@dataclasses.dataclass(slots=True)
class Eager:
    """A rank, its tensors by the plan's names, and how to free them; a context manager."""

    rank: Rank
    tensors: dict[str, Tensor]
    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_eager(
    kind: Kind,
    config: Config,
    model: ModelConfig,
    groups: frozenset[Group],
    weights: Mapping[str, Tensor] | None = None,
    *,
    extra: Sequence[Buffer] = (),
    positions: int | None = None,
) -> Eager:
    """groups: what to allocate, and `extra`. weights: tensors to share, by the plan's names.

    Those that live on the host come through staging buffers of this rank's own. positions: that
    tokens may have; None: those of a sequence.
    """
    shared = weights or {}
    config = _reads_host(config, any(t.host for t in shared.values()))
    if kind == "cuda":
        from llmq_nb.offload.cuda_transfer import CudaTransfer
        from llmq_nb.train.engine_cuda import allocate_cuda

        ops, tensors, close = allocate_cuda(
            config, model, groups, shared, extra=extra, positions=positions
        )
        rank = make_rank(config, model, tensors, ops, partial(CudaTransfer, ops.stream))
    else:
        tensors = allocate(make_plan(config, model, groups, extra)) | dict(shared)
        length = positions or config.batch.seq_len
        ops = CpuOps(model, config.optimizer, seq_len=length, seed=config.run.seed)
        close = tensors.clear
        rank = make_rank(config, model, tensors, ops)
    return Eager(rank, tensors, close)


def _reads_host(config: Config, host: bool) -> Config:
    """The config of one rank without the levers of offload, but for that of shared weights on the
    host."""
    levers: dict[str, Any] = {"offload": ("master",) if host else ()}
    if host:  # this rank makes codes from the values each time
        levers["keep_quants"] = False
    alone = ParallelConfig(devices=(config.parallel.devices or (0,))[:1])
    memory = dataclasses.replace(config.memory, **levers)
    return dataclasses.replace(config, memory=memory, parallel=alone)


def shared_weights(engine: Engine) -> dict[str, Tensor] | None:
    """A run's weights by parameter, for a rank of another shape on its first device.

    None: no device has all of them.
    """
    whole: dict[str, Tensor] = {}
    for state in engine.states:
        weight = state.weight
        if isinstance(weight, Spread):
            first = weight.parts[0]
            if first.tensor.size < weight.size:
                return None
            weight = first.tensor.view(*weight.shape)
        whole[state.parameter.name] = weight
    return whole


def weight_arrays(engine: Engine) -> Iterator[tuple[Parameter, NDArray[Any]]]:
    """A run's weights, read one at a time."""
    for state in engine.states:
        yield state.parameter, engine.read(state.weight)
