"""An engine runs the steps of `train.step` on some device; the trainer knows no more of it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmq_nb.comm.cluster import Cluster
from llmq_nb.comm.link import Link, immediate_links
from llmq_nb.comm.wire import NoWire, Wire
from llmq_nb.config import Config
from llmq_nb.core.host import check_host_memory
from llmq_nb.core.tensor import Tensor
from llmq_nb.data.loader import StepBatch, stable_order
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu import CpuOps
from llmq_nb.model.engine_cpu.linear import count_health
from llmq_nb.model.ops import Scalars
from llmq_nb.model.parameters import model_parameters
from llmq_nb.offload.disk import OnDisk
from llmq_nb.offload.disk_states import Done
from llmq_nb.offload.transfer import ImmediateTransfer
from llmq_nb.plan.buffers import kept_quants, make_plan
from llmq_nb.plan.places import offloads_quants
from llmq_nb.plan.shards import LINKS, shards_quants
from llmq_nb.report.console import announce
from llmq_nb.report.metrics import TensorHealth
from llmq_nb.train.eager import Kind
from llmq_nb.train.health import FP8_SLOTS, tensor_health
from llmq_nb.train.host_stores import MakeTransfer, on_disk
from llmq_nb.train.rank import Rank, State
from llmq_nb.train.sharding import (
    Part,
    Seats,
    Spread,
    all_tensors,
    parts_of,
    read_spread,
    write_spread,
)
from llmq_nb.train.step import evaluation_step, micro_step, optimizer_step, refresh_weights
from llmq_nb.train.wiring import allocate, make_ranks, run_states


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

    def refresh_weights(self) -> None:
        """Make what hangs on the weights, if they were written since: all ranks together."""
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
    kind: str,
    config: Config,
    model: ModelConfig,
    tuning: dict[str, int] | None = None,
    cluster: Cluster | None = None,
) -> "Engine":
    """The engine of a device, "cpu" or "cuda". cluster: None: this process is alone."""
    cluster = cluster or Cluster()
    if kind == "cpu":
        return CpuEngine(config, model, cluster=cluster, wire=cluster.wire(config.ranks_each))
    from llmq_nb.train.engine_cuda import CudaEngine

    return CudaEngine(config, model, tuning=tuning, cluster=cluster)


class CpuEngine:
    """NumPy: every step runs as it is called, rank after rank of this machine."""

    kind: Kind = "cpu"

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        transfer: MakeTransfer = ImmediateTransfer,
        links: Callable[[int], list[Link]] = immediate_links,
        cluster: Cluster | None = None,
        wire: Wire | None = None,
    ) -> None:
        """transfer: copies to and from what `memory.offload` calls the host, for tests: here all
        memory is the host's. links: makes a link for each rank. cluster, wire: to the other
        machines; None: there are none."""
        self.config, self.model, self.cluster = config, model, cluster or Cluster()
        # codes are kept where the host or shards would keep them; else a product makes them
        kept = offloads_quants(config) or shards_quants(config)
        self.plan = make_plan(config, model, extra=kept_quants(config, model) if kept else [])
        ranks = config.ranks_each
        self.local = self.cluster.local(ranks)
        check_host_memory(ranks * (self.plan.total + self.plan.host_total))
        self.rank_tensors = [allocate(self.plan) for _ in range(ranks)]
        self.tensors = self.rank_tensors[0]
        self.disk = on_disk(config, model, self.tensors, announce)
        T, seed = config.batch.seq_len, config.run.seed
        self.rank_ops = [
            CpuOps(model, config.optimizer, seq_len=T, seed=seed) for _ in range(ranks)
        ]
        self.ops = self.rank_ops[0]
        ends = [links(ranks) for _ in range(LINKS)]
        seats = Seats(
            all_tensors(self.plan, self.rank_tensors, self.local, config.world_size),
            list(self.rank_ops),
            [tuple(end[r] for end in ends) for r in range(ranks)],
            [lambda: None] * ranks,
            self.local,
            wire or NoWire(),
        )
        disk = self.disk, Done()
        self.ranks = make_ranks(config, model, seats, [transfer] * ranks, disk)
        self.states = run_states(config, model, self.ranks, seats)
        for ops, rank in zip(self.rank_ops, self.ranks, strict=True):
            ops.shared_slots = rank.slots
        self._stale = True
        """Whether weights were written since their codes were made."""

    def train_step(
        self,
        batch: StepBatch,
        *,
        step: int,
        updates: int,
        learning_rate: float,
        health: bool = False,
    ) -> StepResult:
        self.refresh_weights()
        micro_steps = batch.tokens.shape[0]
        for m in range(micro_steps):
            scalars = step_scalars(self.config, batch, step, m, updates, learning_rate)
            for r, rank in zip(self.local, self.ranks, strict=True):
                rank.ops.set_scalars(scalars)
                load(
                    rank,
                    batch.tokens[m, r],
                    batch.targets[m, r],
                    batch.segment_start[m, r],
                    batch.token_order(m, r),
                )
            self.ops.counts_health = health and m == micro_steps - 1
            micro_step(self.ranks, first=m == 0, last=m == micro_steps - 1)
        self.ops.counts_health = False
        optimizer_step(self.ranks)
        found = result(self.ranks, self.cluster)
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
        self.refresh_weights()
        rank = self.ranks[0]
        load(rank, tokens, targets, segment_start, None)
        evaluation_step(self.ranks[:1])
        return float(rank.ops.read(rank.model.head.loss).sum(dtype=np.float64))

    @property
    def tuning(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        for tensors in self.rank_tensors:
            tensors.clear()
        if self.disk is not None:
            self.disk.close()

    def read(self, tensor: Tensor) -> NDArray[Any]:
        if isinstance(tensor, Spread):
            here = [ops.read for ops in self.rank_ops]
            return read_spread(tensor, lambda part: read_part(part, self.cluster, here))
        if isinstance(tensor.data, OnDisk):
            return tensor.data.read(tensor.shape, tensor.dtype.numpy)
        return self.ops.read(tensor)

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        self._stale = True
        if isinstance(tensor, Spread):
            here = [ops.write for ops in self.rank_ops]
            write_spread(tensor, array, lambda part, a: write_part(part, a, self.local, here))
        elif isinstance(tensor.data, OnDisk):
            write_on_disk(tensor, array)
        else:
            self.ops.write(tensor, array)

    def fill_normal(self, tensor: Tensor, *, std: float, tensor_id: int) -> None:
        self._stale = True
        for part in parts_of(tensor, self.local):
            ops = self.rank_ops[part.rank - self.local.start]
            ops.fill_normal(part.tensor, std=std, tensor_id=tensor_id, first=part.first)

    def refresh_weights(self) -> None:
        if self._stale:
            refresh_weights(self.ranks)
        self._stale = False


def read_part(
    part: Part, cluster: Cluster, here: Sequence[Callable[[Tensor], NDArray[Any]]]
) -> NDArray[Any]:
    """A part of a tensor; all processes read it together where it is another machine's. here: reads
    a tensor of each of this machine's ranks."""
    local = cluster.local(len(here))
    own = part.rank in local
    if own:
        array = here[part.rank - local.start](part.tensor)
    else:
        array = np.empty(part.tensor.shape, part.tensor.dtype.numpy)
    return cluster.share(array, part.rank // len(here)) if part.shared else array


def write_part(
    part: Part,
    array: NDArray[Any],
    local: range,
    here: Sequence[Callable[[Tensor, NDArray[Any]], None]],
) -> None:
    """Set a part of a tensor, if it is this machine's: the others write their own."""
    if part.rank in local:
        here[part.rank - local.start](part.tensor, array)


def write_on_disk(tensor: Tensor, array: NDArray[Any]) -> None:
    """What `Ops.write` does, for a tensor of `memory.disk`: rounded, and made as large."""
    whole = np.broadcast_to(array, tensor.shape).astype(tensor.dtype.numpy, copy=False)
    tensor.data.write(np.ascontiguousarray(whole))


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


def result(ranks: list[Rank], cluster: Cluster | None = None) -> StepResult:
    """The step's numbers from the result buffers of all ranks, those of other machines too."""
    own = []
    for rank in ranks:
        rank.activate()
        own.append([float(x) for x in rank.ops.read(rank.model.head.total)])
    totals = itertools.chain(*cluster.gather(own)) if cluster is not None else own
    losses, peaks = zip(*(total[:2] for total in totals), strict=True)
    first = ranks[0]
    first.activate()
    norm, _, finite = (float(x) for x in first.ops.read(first.norm_total))
    bad = None
    if not finite:
        norms = first.ops.read(first.norms)
        names = [p.name for p in model_parameters(first.model.config)]
        bad = names[int(np.flatnonzero(~np.isfinite(norms))[0])]
    return StepResult(
        loss=math.fsum(losses),
        grad_norm=norm,
        lse_max=max(peaks),
        finite=bool(finite),
        non_finite_tensor=bad,
    )
