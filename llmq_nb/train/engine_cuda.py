"""The cuda engine: the steps of `train.step` recorded once into CUDA graphs and replayed.

    prepare   run the step functions with launches left out: kernels compile and load, products
              are planned
    tune      time the products' candidates, once for a machine; the choices are saved with the run
    record    capture a micro-step (one graph for the first of an accumulation, one for the
              others), the optimizer step and an evaluation step, each when it is first used
    replay    copy a slot of the pinned ring into the fixed input buffers, launch the graph

Graphs read device buffers only: learning rate, counts and the random counter lie in
`inputs/scalars`. An event frees a slot, so the host may fill the next one while the GPU works. With
`run.cuda_graphs = false` the same functions are called each time: the same launches in the same
order, so the same bits.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import Config
from llmq_nb.core.device import (
    Device,
    DeviceError,
    allocate,
    check,
    create_event,
    create_stream,
    current_device,
    driver,
    free,
    open_device,
    record_event,
    synchronize_stream,
)
from llmq_nb.core.errors import UserError
from llmq_nb.core.graph import Graph, capture
from llmq_nb.core.pinned import Pinned
from llmq_nb.core.tensor import Tensor
from llmq_nb.data.loader import StepBatch
from llmq_nb.kernels.fp8 import UNITS_CC
from llmq_nb.kernels.launch import loaded, preparing
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cuda.ops import CudaOps
from llmq_nb.model.engine_cuda.scalars import pack_scalars
from llmq_nb.model.ops import Scalars
from llmq_nb.offload.cuda_transfer import CudaTransfer
from llmq_nb.plan.buffers import Group, make_plan
from llmq_nb.plan.limits import RING_SLOTS
from llmq_nb.plan.workspace import workspace_buffers
from llmq_nb.report.console import announce
from llmq_nb.report.metrics import TensorHealth
from llmq_nb.train.cuda_memory import check_memory, check_offload, host_memory, tensors_at
from llmq_nb.train.eager import Kind
from llmq_nb.train.engine import StepResult, result, step_scalars
from llmq_nb.train.health import FP8_SLOTS, tensor_health
from llmq_nb.train.rank import Rank, State, make_rank
from llmq_nb.train.step import evaluation_step, micro_step, optimizer_step
from llmq_nb.train.tuning import keep_machine_tuning, known_tuning


class CudaEngine:
    """One rank on one GPU. Raises UserError where there is no usable GPU or too little memory.

    tuning: the choices of an earlier start of the run (tuning.py).
    """

    kind: Kind = "cuda"

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        *,
        ordinal: int = 0,
        tuning: dict[str, int] | None = None,
    ) -> None:
        self.device = open_device(ordinal)
        config = with_fp8_units(config, self.device)
        self.config, self.model = config, model
        self.plan = make_plan(config, model, extra=workspace_buffers(config, model))
        check_offload(config, self.device)
        check_memory(self.plan, self.device, config)
        self.host = host_memory(self.plan, config)
        self.base = allocate(self.plan.total)
        self.tensors = tensors_at(self.plan, self.base, self.host)
        self.stream = int(create_stream())
        known = known_tuning(self.device, tuning)
        self.ops = CudaOps(
            config, model, self.tensors, device=self.device, stream=self.stream, tuning=known
        )
        copies = functools.partial(CudaTransfer, self.stream)
        self.ranks = [make_rank(config, model, self.tensors, self.ops, copies)]
        self._ring = _Ring(self.tensors, self.stream)
        self._graphs: dict[str, Graph] = {}
        self._eager = config.run.cuda_graphs is False
        self._fp8_weights = self.ranks[0].fp8_weights
        self._stale = True
        """Whether weights were written since their absmax (and codes) were found."""
        self.host_seconds = 0.0
        """Python's time for the last step: what was spent before waiting for the GPU."""
        self._prepare()

    @property
    def states(self) -> list[State]:
        return self.ranks[0].states

    @property
    def tuning(self) -> dict[str, int]:
        """The choices of products and attention, to be saved with the run."""
        return self.ops.products.choices

    def train_step(
        self,
        batch: StepBatch,
        *,
        step: int,
        updates: int,
        learning_rate: float,
        health: bool = False,
    ) -> StepResult:
        self.device.make_current()
        self._refresh_weights()
        start = time.perf_counter()
        for m in range(batch.tokens.shape[0]):
            scalars = step_scalars(self.config, batch, step, m, updates, learning_rate)
            arrays = (batch.tokens[m, 0], batch.targets[m, 0], batch.segment_start[m, 0])
            self._ring.send(*arrays, batch.token_order(m, 0), scalars)
            first, counted = m == 0, health and m == batch.tokens.shape[0] - 1
            name = ("first micro-step" if first else "micro-step") + ", counted" * counted
            self._run(name, functools.partial(run_micro_step, self.ranks, first, counted))
        self._run("optimizer step", lambda: optimizer_step(self.ranks))
        self.host_seconds = time.perf_counter() - start
        found = result(self.ranks)
        return dataclasses.replace(found, health=self._health()) if health else found

    def _health(self) -> tuple[TensorHealth, ...]:
        if FP8_SLOTS not in self.tensors:
            return ()
        for weight in self._fp8_weights:  # their slots were cleared before the update
            self.ops.fp8.count_health(weight)
        return tensor_health(self.config, self.model, self.read(self.tensors[FP8_SLOTS]))

    def evaluate(
        self, tokens: NDArray[Any], targets: NDArray[Any], segment_start: NDArray[Any]
    ) -> float:
        self.device.make_current()
        self._refresh_weights()
        order = np.zeros(tokens.size, np.int32)  # only a backward reads it
        self._ring.send(tokens, targets, segment_start, order, Scalars())
        self._run("evaluation step", lambda: evaluation_step(self.ranks))
        losses = self.read(self.ranks[0].model.head.loss)
        return float(losses.sum(dtype=np.float64))

    def read(self, tensor: Tensor) -> NDArray[Any]:
        self.device.make_current()
        return self.ops.read(tensor)

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        self.device.make_current()
        self._stale = True
        self.ops.write(tensor, array)

    def fill_normal(self, tensor: Tensor, *, std: float, tensor_id: int) -> None:
        self.device.make_current()
        self._stale = True
        self.ops.fill_normal(tensor, std=std, tensor_id=tensor_id)

    def close(self) -> None:
        """Give the device's and the pinned memory back."""
        synchronize_stream(self.stream)
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._ring.close()
        free(self.base)
        self.host.close()

    def _refresh_weights(self) -> None:
        if self._stale and self._fp8_weights:
            self.ops.refresh_weights(self._fp8_weights)
        self._stale = False

    def _prepare(self) -> None:
        """Load every kernel and choose every product before anything is captured."""
        prepare_steps(self.ranks)
        needed = 3 * 4 * max(max(s.N * s.M, s.N * s.K, s.M * s.K) for s in self.ops.products.shapes)
        if needed <= self.plan.total:
            self.ops.fill_memory(self.base, self.plan.total)  # zeros would draw less power
            self.ops.products.tune(self.base, stream=self.stream)
            keep_machine_tuning(self.device, self.tuning)
        synchronize_stream(self.stream)
        check(driver().cuMemsetD8(self.base, 0, self.plan.total), "clearing device memory")
        check(driver().cuCtxSynchronize(), "clearing device memory")
        self.ops.write_tables()

    def _run(self, name: str, work: Callable[[], None]) -> None:
        if self._eager:
            work()
            return
        graph = self._graphs.get(name)
        if graph is None:
            try:
                graph = self._graphs[name] = capture(self.stream, work, name=name)
            except DeviceError as error:
                if self.config.run.cuda_graphs is True:
                    raise
                self._eager = True
                announce(f"CUDA graphs are off, steps are launched one by one ({error})")
                work()
                return
        graph.launch(self.stream)


def with_fp8_units(config: Config, device: Device) -> Config:
    """The config with `precision.fp8_units` resolved for a GPU. UserError: it has none."""
    p = config.precision
    if p.matmul != "e4m3":
        return config
    has = device.cc >= UNITS_CC
    if p.fp8_units == "hardware" and not has:
        what = f"{device.name} has no FP8 units"
        raise UserError(what, where="precision.fp8_units", mend="set it to auto or emulate")
    units = p.fp8_units if p.fp8_units != "auto" else "hardware" if has else "emulate"
    return dataclasses.replace(config, precision=dataclasses.replace(p, fp8_units=units))


def run_micro_step(ranks: list[Rank], first: bool, counted: bool) -> None:
    """A micro-step; counted: its FP8 products tell what the codes of their operands lose."""
    fp8 = [rank.ops.fp8 for rank in ranks if isinstance(rank.ops, CudaOps)]
    for products in fp8:
        products.counts_health = counted
    try:
        micro_step(ranks, first=first)
    finally:
        for products in fp8:
            products.counts_health = False


def prepare_steps(ranks: list[Rank]) -> None:
    """Run every step with launches left out: kernels compile and load, products are planned."""
    with preparing():
        for first in (True, False):
            run_micro_step(ranks, first, True)
        optimizer_step(ranks)
        evaluation_step(ranks)
        for rank in ranks:
            rank.ops.refresh_weights(rank.fp8_weights)


def compile_kernels(config: Config, model: ModelConfig, announce: Callable[[str], None]) -> CudaOps:
    """Compile what a run launches, without its memory; returns operations that know the products.

    announce: takes the name of each kernel once it is ready.
    """
    device = open_device((config.parallel.devices or (0,))[0])
    config = with_fp8_units(config, device)
    plan = make_plan(config, model, extra=workspace_buffers(config, model))
    tensors = tensors_at(plan, 1 << 20, None)  # any aligned address: nothing is launched
    stream = int(create_stream())
    ops = CudaOps(config, model, tensors, device=device, stream=stream)
    prepare_steps([make_rank(config, model, tensors, ops, functools.partial(CudaTransfer, stream))])
    for name in loaded():
        announce(name)
    return ops


def allocate_cuda(
    config: Config, model: ModelConfig, groups: frozenset[Group], shared: Mapping[str, Tensor]
) -> tuple[CudaOps, dict[str, Tensor], Callable[[], None]]:
    """Memory and operations of an eager rank on the current GPU, and what frees the memory."""
    device = current_device()
    config = with_fp8_units(config, device)
    extra = workspace_buffers(config, model, quants=False)
    plan = make_plan(config, model, groups, extra=extra)
    check_memory(plan, device)
    base = allocate(plan.total)
    check(driver().cuMemsetD8(base, 0, plan.total), "clearing device memory")
    check(driver().cuCtxSynchronize(), "clearing device memory")
    tensors = tensors_at(plan, base, None) | dict(shared)
    ops = CudaOps(
        config, model, tensors, device=device, stream=int(create_stream()), measures_weights=True
    )
    ops.write_tables()

    def close() -> None:
        synchronize_stream(ops.stream)
        free(base)

    return ops, tensors, close


@dataclasses.dataclass(slots=True)
class _Slot:
    memory: Pinned
    free: Any
    """Recorded after the slot's copies: the host may write it again when the event is done."""


class _Ring:
    """Pinned slots for a micro-step's inputs."""

    NAMES = ("tokens", "targets", "segment_start", "order", "scalars")

    def __init__(self, tensors: dict[str, Tensor], stream: int) -> None:
        self.targets = [tensors[f"inputs/{name}"] for name in self.NAMES]
        self.stream = stream
        sizes = [-(-t.nbytes // 256) * 256 for t in self.targets]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.slots = [_Slot(Pinned(sum(sizes)), create_event()) for _ in range(RING_SLOTS)]
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
