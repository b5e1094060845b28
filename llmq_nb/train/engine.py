"""An engine runs the steps of `train.step` on some device; the trainer knows no more of it."""

import dataclasses
import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import Config
from llmq_nb.core.tensor import Tensor
from llmq_nb.data.loader import StepBatch, stable_order
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu import CpuOps
from llmq_nb.model.engine_cpu.linear import count_health
from llmq_nb.model.ops import Scalars
from llmq_nb.offload.transfer import ImmediateTransfer
from llmq_nb.plan.buffers import kept_quants, make_plan
from llmq_nb.plan.places import offloads_quants
from llmq_nb.report.metrics import TensorHealth
from llmq_nb.train.eager import Kind
from llmq_nb.train.health import FP8_SLOTS, tensor_health
from llmq_nb.train.host_stores import MakeTransfer
from llmq_nb.train.rank import Rank, State, allocate, make_rank
from llmq_nb.train.step import evaluation_step, micro_step, optimizer_step


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step gave. loss: mean over the supervised tokens of the whole step.

    finite: whether the update was made. non_finite_tensor: the first gradient that was not finite.
    health: of the operands of FP8 products, where it was asked for.
    """

    loss: float
    grad_norm: float
    lse_max: float
    finite: bool
    non_finite_tensor: str | None
    health: tuple[TensorHealth, ...] = ()


class Engine(Protocol):
    """One run's memory and work on its device."""

    kind: Kind

    @property
    def states(self) -> list[State]:
        """What the optimizer keeps, a state for each parameter in forward order."""
        ...

    def train_step(
        self,
        batch: StepBatch,
        *,
        step: int,
        updates: int,
        learning_rate: float,
        health: bool = False,
    ) -> StepResult:
        """step: index from 0. updates: made before this one, for Adam's bias correction.

        health: whether to tell how the operands of FP8 products fit their formats.
        """
        ...

    def evaluate(
        self, tokens: NDArray[Any], targets: NDArray[Any], segment_start: NDArray[Any]
    ) -> float:
        """Sum of the losses of one micro-batch, (micro_batch, seq_len) int32 each."""
        ...

    def read(self, tensor: Tensor) -> NDArray[Any]: ...

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None: ...

    def fill_normal(self, tensor: Tensor, *, std: float, tensor_id: int) -> None: ...

    @property
    def tuning(self) -> dict[str, int]:
        """What was chosen by measurement and must stay for the run's bits; saved with it."""
        ...

    def close(self) -> None:
        """Give the device's memory back."""
        ...


def make_engine(
    kind: str, config: Config, model: ModelConfig, tuning: dict[str, int] | None = None
) -> "Engine":
    """The engine of a device, "cpu" or "cuda"."""
    if kind == "cpu":
        return CpuEngine(config, model)
    from llmq_nb.train.engine_cuda import CudaEngine

    ordinal = (config.parallel.devices or (0,))[0]
    return CudaEngine(config, model, ordinal=ordinal, tuning=tuning)


class CpuEngine:
    """NumPy: every step runs as it is called."""

    kind: Kind = "cpu"

    def __init__(
        self, config: Config, model: ModelConfig, transfer: MakeTransfer = ImmediateTransfer
    ) -> None:
        """transfer: copies to and from what `memory.offload` calls the host, for tests: here all
        memory is the host's."""
        self.config, self.model = config, model
        # codes are kept where the host would keep them; else a product makes them each time
        extra = kept_quants(config, model) if offloads_quants(config) else []
        self.plan = make_plan(config, model, extra=extra)
        self.tensors = allocate(self.plan)
        self.ops = CpuOps(
            model, config.optimizer, seq_len=config.batch.seq_len, seed=config.run.seed
        )
        self.ranks = [make_rank(config, model, self.tensors, self.ops, transfer)]
        self._stale = True
        """Whether weights were written since their codes were made."""

    @property
    def states(self) -> list[State]:
        return self.ranks[0].states

    def train_step(
        self,
        batch: StepBatch,
        *,
        step: int,
        updates: int,
        learning_rate: float,
        health: bool = False,
    ) -> StepResult:
        self._refresh_weights()
        for m in range(batch.tokens.shape[0]):
            scalars = step_scalars(self.config, batch, step, m, updates, learning_rate)
            for r, rank in enumerate(self.ranks):
                rank.ops.set_scalars(scalars)
                load(
                    rank,
                    batch.tokens[m, r],
                    batch.targets[m, r],
                    batch.segment_start[m, r],
                    batch.token_order(m, r),
                )
            self.ops.counts_health = health and m == batch.tokens.shape[0] - 1
            micro_step(self.ranks, first=m == 0)
        self.ops.counts_health = False
        optimizer_step(self.ranks)
        found = result(self.ranks)
        return dataclasses.replace(found, health=self._health()) if health else found

    def _health(self) -> tuple[TensorHealth, ...]:
        if FP8_SLOTS not in self.tensors:
            return ()
        for weight in self.ranks[0].fp8_weights:
            count_health(weight)
        return tensor_health(self.config, self.model, self.read(self.tensors[FP8_SLOTS]))

    def evaluate(
        self, tokens: NDArray[Any], targets: NDArray[Any], segment_start: NDArray[Any]
    ) -> float:
        self._refresh_weights()
        rank = self.ranks[0]
        load(rank, tokens, targets, segment_start, None)
        evaluation_step(self.ranks[:1])
        return float(rank.ops.read(rank.model.head.loss).sum(dtype=np.float64))

    @property
    def tuning(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.tensors.clear()

    def read(self, tensor: Tensor) -> NDArray[Any]:
        return self.ranks[0].ops.read(tensor)

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        self._stale = True
        self.ranks[0].ops.write(tensor, array)

    def fill_normal(self, tensor: Tensor, *, std: float, tensor_id: int) -> None:
        self._stale = True
        self.ranks[0].ops.fill_normal(tensor, std=std, tensor_id=tensor_id)

    def _refresh_weights(self) -> None:
        if self._stale:
            for rank in self.ranks:
                rank.ops.refresh_weights(rank.fp8_weights)
        self._stale = False


def step_scalars(
    config: Config, batch: StepBatch, step: int, micro_step: int, updates: int, learning_rate: float
) -> Scalars:
    """The values of one micro-step."""
    return Scalars(
        learning_rate=learning_rate,
        inv_supervised=1.0 / batch.supervised,
        correction1=1.0 - config.optimizer.beta1 ** (updates + 1),
        correction2=1.0 - config.optimizer.beta2 ** (updates + 1),
        update=step * batch.tokens.shape[0] + micro_step,
    )


def load(
    rank: Rank,
    tokens: NDArray[Any],
    targets: NDArray[Any],
    segment_start: NDArray[Any],
    order: NDArray[Any] | None,
) -> None:
    """Put a micro-batch into a rank's fixed input buffers. order: None where nothing needs it."""
    inputs, ops = rank.model.inputs, rank.ops
    ops.write(inputs.tokens, tokens)
    ops.write(inputs.targets, targets)
    ops.write(inputs.segment_start, segment_start)
    if order is not None:
        ops.write(inputs.order, order)


def load_with_order(
    rank: Rank, tokens: NDArray[Any], targets: NDArray[Any], segment_start: NDArray[Any]
) -> None:
    """`load`, working out the tokens' order here."""
    load(rank, tokens, targets, segment_start, stable_order(tokens.ravel()))


def result(ranks: list[Rank]) -> StepResult:
    """The step's numbers from the result buffers of all ranks."""
    totals = [rank.ops.read(rank.model.head.total) for rank in ranks]
    norm, _, finite = (float(x) for x in ranks[0].ops.read(ranks[0].norm_total))
    bad = None
    if not finite:
        norms = ranks[0].ops.read(ranks[0].norms)
        bad = ranks[0].states[int(np.flatnonzero(~np.isfinite(norms))[0])].parameter.name
    return StepResult(
        loss=math.fsum(float(t[0]) for t in totals),
        grad_norm=norm,
        lse_max=max(float(t[1]) for t in totals),
        finite=bool(finite),
        non_finite_tensor=bad,
    )
