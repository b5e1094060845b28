"""A rank of any shape that runs as it is called: for gradients of one batch, evaluation and text.

It may share the weights of a run: then only activations (and gradients) are allocated.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Self

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
    """groups: what to allocate. weights: a run's tensors to share, by the plan's names.

    Those that live on the host come through staging buffers of this rank's own.
    """
    shared = weights or {}
    config = _reads_host(config, any(t.host for t in shared.values()))
    if kind == "cuda":
        from llmq_nb.offload.cuda_transfer import CudaTransfer
        from llmq_nb.train.engine_cuda import allocate_cuda

        ops, tensors, close = allocate_cuda(config, model, groups, shared)
        rank = make_rank(config, model, tensors, ops, partial(CudaTransfer, ops.stream))
    else:
        tensors = allocate(make_plan(config, model, groups)) | dict(shared)
        ops = CpuOps(model, config.optimizer, seq_len=config.batch.seq_len, seed=config.run.seed)
        close = tensors.clear
        rank = make_rank(config, model, tensors, ops)
    return Eager(rank, tensors, close)


def _reads_host(config: Config, host: bool) -> Config:
    """The config without the levers of offload, but for that of shared weights on the host."""
    levers: dict[str, Any] = {"offload": ("master",) if host else ()}
    if host:  # this rank makes codes from the values each time
        levers["keep_quants"] = False
    return dataclasses.replace(config, memory=dataclasses.replace(config.memory, **levers))
