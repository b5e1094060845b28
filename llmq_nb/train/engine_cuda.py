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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.comm.cluster import Cluster
from llmq_nb.comm.wire import Wire
from llmq_nb.config import Config
from llmq_nb.core.device import (
    Device,
    DeviceError,
    allocate,
    check,
    create_stream,
    current_device,
    driver,
    free,
    open_device,
    record_event,
    synchronize_stream,
    wait_event,
)
from llmq_nb.core.errors import UserError
from llmq_nb.core.graph import Graph, capture
from llmq_nb.core.tensor import Tensor
from llmq_nb.data.loader import StepBatch
from llmq_nb.kernels.fp8 import UNITS_CC
from llmq_nb.kernels.launch import loaded, preparing
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cuda.ops import CudaOps
from llmq_nb.model.ops import Scalars
from llmq_nb.offload.cuda_transfer import CudaFence, CudaTransfer
from llmq_nb.offload.disk import OnDisk, check_disk
from llmq_nb.plan.buffers import Buffer, Group, make_plan
from llmq_nb.plan.places import DISK_STAGES
from llmq_nb.plan.workspace import workspace_buffers
from llmq_nb.report.console import announce
from llmq_nb.report.metrics import TensorHealth
from llmq_nb.train.cuda_memory import check_host, check_memory, check_offload, tensors_at
from llmq_nb.train.cuda_seat import check_alike, make_wire, ranks_of, take_seat
from llmq_nb.train.eager import Kind
from llmq_nb.train.engine import (
    StepResult,
    read_part,
    result,
    step_scalars,
    write_on_disk,
    write_part,
)
from llmq_nb.train.health import FP8_SLOTS, tensor_health
from llmq_nb.train.host_stores import on_disk
from llmq_nb.train.rank import Rank
from llmq_nb.train.sharding import Spread, parts_of, read_spread, write_spread
from llmq_nb.train.step import evaluation_step, micro_step, optimizer_step, refresh_weights
from llmq_nb.train.tuning import Choices, keep_apart, keep_machine_tuning, known_tuning
from llmq_nb.train.wiring import make_rank, make_ranks, run_states

UPDATE = "optimizer step"
"""The graph's name."""


class CudaEngine:
    """This machine's ranks, those of `parallel.devices`, on their GPUs, driven by this thread.

    Raises UserError where there is no usable GPU or too little memory. tuning: the choices of an
    earlier start of the run (tuning.py). cluster: the other machines; None: there are none. wire:
    to their ranks; None: NCCL's.
    """

    kind: Kind = "cuda"

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        *,
        tuning: dict[str, int] | None = None,
        cluster: Cluster | None = None,
        wire: Wire | None = None,
    ) -> None:
        devices = [open_device(ordinal) for ordinal in config.parallel.devices or (0,)]
        self.device = devices[0]
        self.cluster = cluster = cluster or Cluster()
        check_alike(devices, cluster)
        config = with_fp8_units(config, self.device)
        self.config, self.model = config, model
        self.plan = make_plan(config, model, extra=workspace_buffers(config, model))
        check_offload(config, self.device)
        for device in dict.fromkeys(devices):
            check_memory(self.plan, device, config, ranks=devices.count(device))
        check_host(self.plan, config)
        check_disk(Path(config.out_dir), self.plan.disk_total)
        known = known_tuning(self.device, tuning)
        self.seats = [take_seat(config, model, self.plan, device, known) for device in devices]
        first = self.seats[0]
        self.tensors, self.stream, self.ops = first.tensors, first.stream, first.ops
        self.base, self.host = first.base, first.host
        self.disk = on_disk(config, model, self.tensors, announce)
        fence = CudaFence(self.device, self.stream, DISK_STAGES)
        self.local = cluster.local(config.ranks_each)
        self.wire = wire or make_wire(cluster, devices)
        seats, transfers = ranks_of(config, self.plan, self.seats, self.local, self.wire)
        self.ranks = make_ranks(config, model, seats, transfers, disk=(self.disk, fence))
        self.states = run_states(config, model, self.ranks, seats)
        self._graphs: dict[str, Graph] = {}
        self._eager = config.run.cuda_graphs is False
        self._stale = True
        """Whether weights were written since their absmax (and codes) were found."""
        self.host_seconds = 0.0
        """Python's time for the last step: what was spent before waiting for the GPU."""
        self._prepare(tuning)

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
        self.refresh_weights()
        start, micro_steps = time.perf_counter(), batch.tokens.shape[0]
        for m in range(micro_steps):
            scalars = step_scalars(self.config, batch, step, m, updates, learning_rate)
            for r, seat in zip(self.local, self.seats, strict=True):
                arrays = (batch.tokens[m, r], batch.targets[m, r], batch.segment_start[m, r])
                seat.device.make_current()
                seat.ring.send(*arrays, batch.token_order(m, r), scalars)
            first, last = m == 0, m == micro_steps - 1
            counted = health and last
            name = ("first micro-step" if first else "micro-step") + ", counted" * counted
            if last and self.config.world_size > 1 and not self.config.parallel.shard_gradients:
                name += ", reduced"
            self._run(name, functools.partial(run_micro_step, self.ranks, first, last, counted))
        self._run(UPDATE, lambda: optimizer_step(self.ranks))
        self.host_seconds = time.perf_counter() - start
        found = result(self.ranks, self.cluster)
        return dataclasses.replace(found, health=self._health()) if health else found

    def _health(self) -> tuple[TensorHealth, ...]:
        """As rank 0 has it: its micro-batch, and its shards of weights that are cut."""
        if FP8_SLOTS not in self.tensors:
            return ()
        self.device.make_current()
        for weight in self.ranks[0].fp8_weights:  # their slots were cleared before the update
            self.ops.fp8.count_health(weight)
        return tensor_health(self.config, self.model, self.read(self.tensors[FP8_SLOTS]))

    def evaluate(
        self, tokens: NDArray[Any], targets: NDArray[Any], segment_start: NDArray[Any]
    ) -> float:
        self.refresh_weights()
        self.device.make_current()
        order = np.zeros(tokens.size, np.int32)  # only a backward reads it
        self.seats[0].ring.send(tokens, targets, segment_start, order, Scalars())
        self._run("evaluation step", lambda: evaluation_step(self.ranks[:1]))
        losses = self.read(self.ranks[0].model.head.loss)
        return float(losses.sum(dtype=np.float64))

    def read(self, tensor: Tensor) -> NDArray[Any]:
        here = [seat.read for seat in self.seats]
        if isinstance(tensor, Spread):
            return read_spread(tensor, lambda part: read_part(part, self.cluster, here))
        if isinstance(tensor.data, OnDisk):
            return tensor.data.read(tensor.shape, tensor.dtype.numpy)
        return here[0](tensor)

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        self._stale, here = True, [seat.write for seat in self.seats]
        if isinstance(tensor, Spread):
            write_spread(tensor, array, lambda part, a: write_part(part, a, self.local, here))
        elif isinstance(tensor.data, OnDisk):
            write_on_disk(tensor, array)
        else:
            here[0](tensor, array)

    def fill_normal(self, tensor: Tensor, *, std: float, tensor_id: int) -> None:
        self._stale = True
        for part in parts_of(tensor, self.local):
            seat = self.seats[part.rank - self.local.start]
            seat.device.make_current()
            seat.ops.fill_normal(part.tensor, std=std, tensor_id=tensor_id, first=part.first)

    def close(self) -> None:
        """Give the device's and the pinned memory back."""
        for seat in self.seats:
            seat.synchronize()
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self.wire.close()
        for seat in self.seats:
            seat.close()
        if self.disk is not None:
            self.disk.close()

    def refresh_weights(self) -> None:
        if self._stale:
            self.device.make_current()
            refresh_weights(self.ranks)
        self._stale = False

    def _prepare(self, saved: Choices | None) -> None:
        """Load every kernel and choose every product before anything is captured."""
        prepare_steps(self.ranks)
        products = self.ops.products
        keep_apart(products, saved)
        self.device.make_current()
        self.ops.fill_memory(self.base, self.plan.total)  # zeros would draw less power
        said: list[str] = []

        def progress(line: str) -> None:
            if not said:
                announce(f"timing products, once on this machine for each shape ({line}, ...)")
            said.append(line)

        made = products.tune(self.base, self.plan.total, stream=self.stream, progress=progress)
        keep_machine_tuning(self.device, made)  # not what the run had: keep_apart assumes some
        products.take(self.cluster.gather(products.choices)[0])  # one choice, the same bits
        for seat, rank in zip(self.seats, self.ranks, strict=True):
            seat.ops.products.take(products.choices)
            seat.clear(self.plan.total)
            seat.ops.write_tables(rank.gradients)

    def _run(self, name: str, work: Callable[[], None]) -> None:
        self.device.make_current()
        if self._eager or (self.disk is not None and name == UPDATE):
            work()  # an update waits for the disk: no graph holds that
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
        first, *others = self.seats
        for seat in others:  # their inputs come on streams of their own
            seat.device.make_current()
            record_event(seat.ready, seat.stream)
        first.device.make_current()
        for seat in others:
            wait_event(first.stream, seat.ready)
        graph.launch(first.stream)
        if others:
            record_event(first.ready, first.stream)
        for seat in others:
            wait_event(seat.stream, first.ready)


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


def run_micro_step(ranks: list[Rank], first: bool, last: bool, counted: bool) -> None:
    """A micro-step; counted: its FP8 products tell what the codes of their operands lose."""
    fp8 = [rank.ops.fp8 for rank in ranks if isinstance(rank.ops, CudaOps)]
    for products in fp8:
        products.counts_health = counted
    try:
        micro_step(ranks, first=first, last=last)
    finally:
        for products in fp8:
            products.counts_health = False


def prepare_steps(ranks: list[Rank]) -> None:
    """Run every step with launches left out: kernels compile and load, products are planned."""
    with preparing():
        for first in (True, False):
            run_micro_step(ranks, first, True, True)
        optimizer_step(ranks)
        evaluation_step(ranks)
        refresh_weights(ranks)


def compile_kernels(config: Config, model: ModelConfig, announce: Callable[[str], None]) -> CudaOps:
    """Compile what a run launches, without its memory; returns operations that know the products.

    announce: takes the name of each kernel once it is ready.
    """
    device = open_device((config.parallel.devices or (0,))[0])
    alone = dataclasses.replace(config.parallel, devices=(device.ordinal,))
    config = with_fp8_units(dataclasses.replace(config, parallel=alone), device)
    plan = make_plan(config, model, extra=workspace_buffers(config, model))
    tensors = tensors_at(plan, 1 << 20, None)  # any aligned address: nothing is launched
    stream = int(create_stream())
    ops = CudaOps(config, model, tensors, device=device, stream=stream)
    prepare_steps([make_rank(config, model, tensors, ops, functools.partial(CudaTransfer, stream))])
    for name in loaded():
        announce(name)
    return ops


def allocate_cuda(
    config: Config,
    model: ModelConfig,
    groups: frozenset[Group],
    shared: Mapping[str, Tensor],
    *,
    extra: Sequence[Buffer] = (),
    positions: int | None = None,
) -> tuple[CudaOps, dict[str, Tensor], Callable[[], None]]:
    """Memory and operations of an eager rank on the current GPU, and what frees the memory."""
    device = current_device()
    config = with_fp8_units(config, device)
    own = workspace_buffers(config, model, quants=False, positions=positions)
    plan = make_plan(config, model, groups, extra=[*own, *extra])
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
