"""Speed of whole optimizer steps on random tokens: tokens/s, MFU, host time, and time by operation.

The breakdown launches every operation between two events, eagerly: its sum is a little more than a
replayed step, and its shares are what they are there. Beside each stands the budget that the time
model (`plan.cost`) gives it on this card.
"""

import dataclasses
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from llmq_nb.config import (
    BatchConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelSection,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)
from llmq_nb.core.device import create_event, elapsed_seconds, record_event, synchronize_stream
from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.data.loader import Position, StepBatch
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.families import preset
from llmq_nb.plan.budget import Row, budget_ms, compare
from llmq_nb.plan.mfu import peak_of, utilisation
from llmq_nb.plan.rates import rates_of
from llmq_nb.train.engine_cuda import CudaEngine
from llmq_nb.train.initial import set_random_weights
from llmq_nb.train.step import micro_step, optimizer_step

WARM_STEPS, STEPS = 2, 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One row of a table."""

    model: str
    micro_batch: int
    grad_accumulation: int
    seq_len: int = 1024
    matmul: str = "bf16"
    head_chunks: int = 1
    recompute: tuple[Any, ...] = ()
    fast_accumulation: bool = False
    devices: tuple[int, ...] = (0,)
    shard_weights: bool = False
    shard_gradients: bool = False

    def config(self) -> Config:
        """BF16 states, as LLMQ's published runs have them."""
        return Config(
            run=RunConfig(device="cuda"),
            model=ModelSection(path=self.model),
            data=DataConfig(train="random tokens"),
            batch=BatchConfig(
                micro_batch=self.micro_batch,
                grad_accumulation=self.grad_accumulation,
                seq_len=self.seq_len,
            ),
            precision=PrecisionConfig(
                matmul="e4m3" if self.matmul == "e4m3" else None,
                fast_accumulation=self.fast_accumulation,
            ),
            optimizer=OptimizerConfig(master="bf16", m="bf16", v="bf16"),
            memory=MemoryConfig(head_chunks=self.head_chunks, recompute=self.recompute),
            parallel=ParallelConfig(
                devices=self.devices,
                shard_weights=self.shard_weights,
                shard_gradients=self.shard_gradients,
            ),
        )


REFERENCE: dict[tuple[str, str], tuple[int, int, int, int]] = {
    ("qwen2.5-0.5b", "bf16"): (32, 4, 1, 155_700),
    ("qwen2.5-1.5b", "bf16"): (32, 4, 4, 60_600),
    ("qwen2.5-3b", "bf16"): (16, 8, 1, 30_850),
    ("qwen2.5-7b", "bf16"): (4, 16, 1, 13_650),
    ("qwen2.5-0.5b", "e4m3"): (32, 4, 1, 178_800),
    ("qwen2.5-1.5b", "e4m3"): (32, 4, 4, 77_100),
    ("qwen2.5-3b", "e4m3"): (16, 8, 1, 41_800),
    ("qwen2.5-7b", "e4m3"): (8, 8, 1, 20_500),
}
"""LLMQ's own runs on an H200, seq_len 1024, of 2026-11-30: (micro_batch, grad_accumulation,
head_chunks, tokens/s) by model and products."""


def reference_setting(model: str, matmul: str, *, fast_accumulation: bool) -> Setting:
    """The batch of LLMQ's run. Raises UserError for a model that it was not run with."""
    if (model, matmul) not in REFERENCE:
        known = ", ".join(sorted({name for name, _ in REFERENCE}))
        raise UserError(f"no reference run of {model}", where="--model", mend=f"one of {known}")
    micro_batch, accumulation, chunks, _ = REFERENCE[model, matmul]
    return Setting(
        model=model,
        micro_batch=micro_batch,
        grad_accumulation=accumulation,
        matmul=matmul,
        head_chunks=chunks,
        fast_accumulation=fast_accumulation and matmul == "e4m3",
    )


def random_batch(config: Config, model: ModelConfig) -> StepBatch:
    """Uniformly random tokens, one document a row."""
    b = config.batch
    shape = (b.grad_accumulation, config.world_size, b.micro_batch, b.seq_len)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.V, shape, np.int32)
    targets = rng.integers(0, model.V, shape, np.int32)
    batch = StepBatch(tokens, targets, np.zeros(shape, np.int32), targets.size, Position())
    for m, r in itertools.product(range(b.grad_accumulation), range(config.world_size)):
        batch.token_order(m, r)
    return batch


def measure(setting: Setting, *, breakdown: bool = False) -> dict[str, Any]:
    """Train a few steps; returns the figures of one setting."""
    config, model = setting.config(), preset(setting.model)
    start = time.perf_counter()
    engine = CudaEngine(config, model)
    set_random_weights(engine, model)
    batch = random_batch(config, model)
    losses = []

    def step(index: int) -> None:
        result = engine.train_step(batch, step=index, updates=index, learning_rate=1e-4)
        losses.append(result.loss)

    step(0)
    first = time.perf_counter() - start
    for index in range(1, WARM_STEPS):
        step(index)
    start = time.perf_counter()
    for index in range(WARM_STEPS, WARM_STEPS + STEPS):
        step(index)
    seconds = (time.perf_counter() - start) / STEPS
    rate = batch.tokens.size / seconds
    figures: dict[str, Any] = {
        **dataclasses.asdict(setting),
        "device": engine.device.name,
        "tokens_per_second": round(rate),
        "seconds_per_step": round(seconds, 4),
        "first_step_seconds": round(first, 1),
        "host_ms": round(engine.host_seconds * 1e3, 3),
        "mfu": round(
            utilisation(
                rate,
                model,
                seq_len=setting.seq_len,
                matmul=DType.E4M3 if setting.matmul == "e4m3" else DType.BF16,
                peak=peak_of(engine.device.name),
                devices=len(set(setting.devices)),
            ),
            4,
        ),
        "gpu_idle_share": round(idle_share(engine, lambda: step(WARM_STEPS + STEPS)), 5),
        "device_gib": round(engine.plan.total / 2**30, 2),
        "losses": [round(loss, 4) for loss in losses],
    }
    if breakdown:
        measured = operation_times(engine)
        budget = budget_ms(engine.config, model, rates_of(engine.device.name))
        figures["breakdown_ms"] = measured
        figures["breakdown"] = [_rounded(row) for row in compare(measured, budget)]
    engine.close()
    return figures


def idle_share(engine: CudaEngine, step: Callable[[], None]) -> float:
    """Share of two steps in which the GPU had nothing to do between one graph and the next.

    The copies of a micro-step's inputs, between two graphs too, count as idle.
    """
    events: list[tuple[Any, Any]] = []
    run = engine._run

    def timed(name: str, work: Callable[[], None]) -> None:
        start, end = create_event(timing=True), create_event(timing=True)
        record_event(start, engine.stream)
        run(name, work)
        record_event(end, engine.stream)
        events.append((start, end))

    engine._run = timed
    try:
        step()
        step()
    finally:
        engine._run = run
    pairs = itertools.pairwise(events)
    idle = sum(elapsed_seconds(before[1], after[0]) for before, after in pairs)
    return idle / elapsed_seconds(events[0][0], events[-1][1])


def _rounded(row: Row) -> dict[str, Any]:
    """A row of the breakdown for JSON."""
    values = dataclasses.asdict(row)
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}


def measure_products(model: ModelConfig, rows: int) -> list[dict[str, Any]]:
    """TFLOP/s of the products of a model's training step in BF16, with the candidates' spread."""
    from llmq_nb.core.device import allocate, create_stream, free, open_device
    from llmq_nb.kernels.elementwise import fill_normal_launch
    from llmq_nb.kernels.matmul import WORKSPACE_BYTES, Kind, Product, Shape
    from llmq_nb.kernels.products import Products

    device, bf16 = open_device(), DType.BF16
    stream = int(create_stream())
    layers = {
        "qkv": (model.qkv_rows, model.C),
        "out": (model.C, model.attention_columns),
        "gate_up": (2 * model.F, model.C),
        "down": (model.C, model.F),
        "head": (model.padded_vocab, model.C),
    }
    room = 2 * max(max(rows * m, rows * k, m * k) for m, k in layers.values()) + 256
    memory = allocate(3 * room + WORKSPACE_BYTES)
    n = 3 * room // 32 * 16
    fill_normal_launch(memory, n=n, seed=0, tensor=0, std=1.0, dtype="bf16", stream=stream)
    products = Products(device=device.ordinal, workspace=memory + 3 * room)
    kinds: tuple[Kind, ...] = ("forward", "dgrad", "wgrad")
    out = []
    for name, (m, k) in layers.items():
        for kind in kinds:
            shape = Shape(kind, rows, m, k, bf16, bf16, accumulate=kind == "wgrad")
            plan: Product = products.plan(shape)
            seconds = products.times(plan, memory, stream=stream)
            rates = [round(shape.flops / s / 1e12, 1) for s in seconds if math.isfinite(s)]
            out.append({"product": name, "shape": str(shape), "tflop_per_s": rates})
    free(memory)
    return out


class TimedOps:
    """Stands for an engine's operations and times every call."""

    def __init__(self, ops: Any) -> None:
        self._ops, self.spans = ops, []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ops, name)
        if not callable(method):
            return method

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, end = create_event(timing=True), create_event(timing=True)
            record_event(start, self._ops.stream)
            out = method(*args, **kwargs)
            record_event(end, self._ops.stream)
            self.spans.append((label(name, args), start, end))
            return out

        return timed


def label(name: str, args: tuple[Any, ...]) -> str:
    """The operation, and for products which weight."""
    if name in ("linear", "linear_backward"):
        weight = args[2] if name == "linear" else args[5]
        return f"{name} {weight.name.rsplit('/', 1)[-1].split('.')[-2]}"
    return name


def operation_times(engine: CudaEngine) -> dict[str, float]:
    """Milliseconds by operation of one micro-step and one optimizer step, largest first."""
    rank = engine.ranks[0]
    timed = TimedOps(engine.ops)
    for _ in range(2):  # the first pass fills caches
        timed.spans.clear()
        rank.model.ops = timed  # pyright: ignore[reportAttributeAccessIssue]
        micro_step([rank], first=False)
        optimizer_step([rank])
        synchronize_stream(engine.stream)
    rank.model.ops = engine.ops
    total: dict[str, float] = defaultdict(float)
    for label, start, end in timed.spans:
        total[label] += elapsed_seconds(start, end) * 1e3
    return {k: round(v, 3) for k, v in sorted(total.items(), key=lambda item: -item[1])}
