"""A rank of any shape that runs as it is called: for gradients of one batch, evaluation and text.

It may share the weights of a run: then only activations (and gradients) are allocated.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, Self

from llmq_nb.config import Config
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu import CpuOps
from llmq_nb.plan.buffers import Group, make_plan
from llmq_nb.train.rank import Rank, allocate, make_rank

Kind = Literal["cpu", "cuda"]


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
) -> Eager:
    """groups: what to allocate. weights: tensors of the device to share, by the plan's names."""
    shared = weights or {}
    if kind == "cuda":
        from llmq_nb.train.engine_cuda import allocate_cuda

        ops, tensors, close = allocate_cuda(config, model, groups, shared)
    else:
        tensors = allocate(make_plan(config, model, groups)) | dict(shared)
        ops = CpuOps(model, config.optimizer, seq_len=config.batch.seq_len, seed=config.run.seed)
        close = tensors.clear
    return Eager(make_rank(config, model, tensors, ops), tensors, close)
