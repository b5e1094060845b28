"""Runs of the cpu engine with every lever, its copies done as early and as late as they may be.

The real copies run beside the compute stream, at some time between the call that starts them and
the wait for their mark. `ImmediateTransfer` copies at the call, `LatestTransfer` at the wait: a
missing wait, or memory that is written too early, changes bits in one of the two.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llmq_nb.config import Config
from llmq_nb.core.tensor import Tensor
from llmq_nb.data.loader import Position, StepBatch
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import model_parameters
from llmq_nb.offload.transfer import Copy
from llmq_nb.train.engine import CpuEngine
from llmq_nb.train.initial import set_weights
from tests.model.harness import bits, make_config, random_batch, random_weights, small_model

T = 17
MODEL = small_model(family="qwen2", L=5, qkv_bias=True, H=2, G=1)
LEVERS = ("m", "v", "master", "quants", "gradients", "residual")
STORAGE: dict[str, dict[str, Any]] = {
    "bf16": dict(precision="bf16", master="bf16", m="bf16", v="bf16"),
    "bf16, fp32 master": dict(precision="bf16", m="e4m3", v="bf16"),
    "e4m3, kept quants": dict(precision="e4m3", master="bf16", m="e4m3", v="bf16"),
    "e4m3, no quants": dict(precision="e4m3", master="bf16", m="bf16", v="bf16"),
    "e4m3, bf16 ends": dict(precision="e4m3", master="bf16", m="bf16", v="bf16"),
}


class Mark:
    """Where a queue stood: what must have run when the mark is reached."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] | None = None
        self.count = 0


class LatestTransfer:
    """Two queues whose copies run when somebody waits for them, and not before."""

    def __init__(self) -> None:
        self.queues: tuple[list[Callable[[], None]], ...] = ([], [])
        self.done = [0, 0]

    def mark(self) -> Mark:
        return Mark()

    def to_device(self, copies: Sequence[Copy], *, done: Mark, after: Mark | None = None) -> None:
        self._add(0, lambda: [move(c.device, c.host, c.nbytes) for c in copies], done, after)

    def to_host(self, copies: Sequence[Copy], *, done: Mark, after: Mark | None = None) -> None:
        self._add(1, lambda: [move(c.host, c.device, c.nbytes) for c in copies], done, after)

    def wait(self, mark: Mark) -> None:
        index = 0 if mark.queue is self.queues[0] else 1
        assert mark.queue is self.queues[index], "a wait for a mark of another transfer, or unset"
        while self.done[index] < mark.count:
            self.done[index] += 1
            self.queues[index][self.done[index] - 1]()

    def free(self, staging: Tensor) -> None:
        def poison() -> None:
            ctypes.memset(staging.address, 0xFF, staging.nbytes)

        if self.done[1] == len(self.queues[1]):
            poison()
        else:  # right after the last copy to the host, which may still read it
            last = self.queues[1][-1]
            self.queues[1][-1] = lambda: (last(), poison()) and None

    def join(self) -> None:
        for queue, count in ((0, len(self.queues[0])), (1, len(self.queues[1]))):
            mark = Mark()
            mark.queue, mark.count = self.queues[queue], count
            self.wait(mark)

    def reset(self) -> None:
        assert self.done == [len(q) for q in self.queues], "copies are in flight between two steps"

    def _add(self, index: int, work: Callable[[], Any], done: Mark, after: Mark | None) -> None:
        before = None if after is None else (after.queue, after.count)

        def run() -> None:
            if before is not None:
                mark = Mark()
                mark.queue, mark.count = before
                self.wait(mark)
            work()

        self.queues[index].append(run)
        done.queue, done.count = self.queues[index], len(self.queues[index])


def move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


class Poison:
    """Fills a rank's scratch with NaN before each step: nothing may be left from the last one."""

    idle = True

    def __init__(self, engine: CpuEngine, rank: int = 0) -> None:
        tensors = engine.rank_tensors[rank]
        self.scratch = [tensors[b.name] for b in engine.plan.buffers if b.lifetime]

    def reset(self) -> None:
        for tensor in self.scratch:
            ctypes.memset(tensor.address, 0xFF, tensor.nbytes)

    def finish(self) -> None:
        pass


def config_of(
    storage: str,
    *,
    accumulation: int = 2,
    offload: Sequence[str] = (),
    recompute: Sequence[str] = (),
    transfer: Any = "auto",
) -> Config:
    options = dict(STORAGE[storage])
    config = make_config(
        micro_batch=1, seq_len=T, recompute=recompute, head_chunks=2, epsilon=1e-6, **options
    )
    moved: Any = tuple(offload)
    layers = (0, -1) if storage == "e4m3, bf16 ends" else ()
    return dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, grad_accumulation=accumulation),
        precision=dataclasses.replace(config.precision, bf16_layers=layers),
        memory=dataclasses.replace(
            config.memory,
            offload=moved,
            transfer=transfer,
            keep_quants=storage != "e4m3, no quants",
        ),
    )


@cache
def batch(accumulation: int, seed: int) -> StepBatch:
    import numpy as np

    whole = random_batch(np.random.default_rng(seed), accumulation, T, MODEL.V).split(1)
    arrays = (a[:, None] for a in (whole.tokens, whole.targets, whole.segment_start))
    return StepBatch(*arrays, supervised=whole.supervised, position=Position())


@cache
def initial_weights() -> list[Any]:
    return random_weights(MODEL, model_parameters(MODEL), 1)


def engine_of(config: Config, transfer: Any, model: ModelConfig = MODEL) -> CpuEngine:
    engine = CpuEngine(config, model, transfer)
    set_weights(engine, iter(initial_weights()))
    return engine


def run(config: Config, transfer: Any, steps: int = 2) -> tuple[Any, ...]:
    """Losses, norms, an evaluation and the whole state after some steps, as bits."""
    engine = engine_of(config, transfer)
    rank = engine.ranks[0]
    rank.host_stores.append(Poison(engine))
    results = []
    for step in range(steps):
        data = batch(config.batch.grad_accumulation, step)
        r = engine.train_step(data, step=step, updates=step, learning_rate=1e-2)
        assert r.finite and all(store.idle for store in rank.host_stores)
        results.append((r.loss, r.grad_norm, r.lse_max))
    return finished(engine, results, batch(config.batch.grad_accumulation, 0))


def finished(
    engine: CpuEngine, results: list[Any], data: StepBatch
) -> tuple[tuple[Any, ...], list[Any]]:
    """(results and an evaluation, the whole state as bits)."""
    evaluated = engine.evaluate(data.tokens[0, 0], data.targets[0, 0], data.segment_start[0, 0])
    state = []
    for s in engine.states:
        found = (s.master, s.weight, s.m, s.m_scale, s.v, s.gradient)
        state += [bits(engine.read(t)) for t in found if t is not None]
    return (*results, evaluated), state


@cache
def resident(storage: str, accumulation: int) -> tuple[Any, ...]:
    """The yardstick: nothing offloaded, everything kept."""
    from llmq_nb.offload.transfer import ImmediateTransfer

    return run(config_of(storage, accumulation=accumulation), ImmediateTransfer)
