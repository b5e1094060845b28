"""Runs of the cpu engine on several ranks, with every way of sharding."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from llmq_nb.comm.link import Link, immediate_links
from llmq_nb.config import Config
from llmq_nb.data.loader import Position, StepBatch
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import model_parameters
from llmq_nb.offload.transfer import ImmediateTransfer
from llmq_nb.train.engine import CpuEngine
from llmq_nb.train.initial import set_weights
from tests.model.harness import make_config, random_batch, random_weights, small_model
from tests.offload.harness import Poison, finished

T = 17
MODEL = small_model(family="qwen2", L=4, qkv_bias=True, H=2, G=1)
TIED = small_model(family="qwen2", L=3, qkv_bias=True, H=2, G=1, tied=True)
STORAGE: dict[str, dict[str, Any]] = {
    "fp32": dict(precision="fp32", master="fp32", m="fp32", v="fp32"),
    "bf16": dict(precision="bf16", master="bf16", m="bf16", v="bf16"),
    "bf16, fp32 master": dict(precision="bf16", m="e4m3", v="bf16"),
    "e4m3, kept quants": dict(precision="e4m3", master="bf16", m="e4m3", v="bf16"),
    "e4m3, no quants": dict(precision="e4m3", master="bf16", m="bf16", v="bf16"),
    "e4m3, bf16 ends": dict(precision="e4m3", master="fp32", m="bf16", v="fp32"),
}
Links = Callable[[int], list[Link]]


def config_of(
    storage: str,
    ranks: int,
    *,
    weights: bool = False,
    gradients: bool = False,
    accumulation: int = 2,
    micro_batch: int = 1,
    offload: Sequence[str] = (),
    transfer: Any = "auto",
    recompute: Sequence[str] = (),
    seq_len: int = T,
) -> Config:
    config = make_config(
        micro_batch=micro_batch,
        seq_len=seq_len,
        head_chunks=2,
        epsilon=1e-6,
        recompute=recompute,
        **STORAGE[storage],
    )
    moved: Any = tuple(offload)
    return dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, grad_accumulation=accumulation),
        precision=dataclasses.replace(
            config.precision, bf16_layers=(0, -1) if storage == "e4m3, bf16 ends" else ()
        ),
        memory=dataclasses.replace(
            config.memory,
            offload=moved,
            transfer=transfer,
            keep_quants=storage != "e4m3, no quants",
        ),
        parallel=dataclasses.replace(
            config.parallel,
            devices=(0,) * ranks,
            shard_weights=weights,
            shard_gradients=gradients,
        ),
    )


@cache
def windows(count: int, seed: int, V: int, seq_len: int) -> Any:
    return random_batch(np.random.default_rng(seed), count, seq_len, V)


def batch(config: Config, model: ModelConfig, seed: int) -> StepBatch:
    """The same windows for any split of one total batch over ranks and micro-steps."""
    b = config.batch
    shape = (b.grad_accumulation, config.world_size, b.micro_batch, b.seq_len)
    whole = windows(shape[0] * shape[1] * shape[2], seed, model.V, b.seq_len)
    arrays = (a.reshape(shape) for a in (whole.tokens, whole.targets, whole.segment_start))
    return StepBatch(*arrays, supervised=whole.supervised, position=Position())


def engine_of(
    config: Config, model: ModelConfig, links: Links = immediate_links, transfer: Any = None
) -> CpuEngine:
    engine = CpuEngine(config, model, transfer or ImmediateTransfer, links)
    set_weights(engine, iter(random_weights(model, model_parameters(model), 1)))
    for r, rank in enumerate(engine.ranks):
        rank.host_stores.append(Poison(engine, r))
    return engine


def run(
    config: Config,
    model: ModelConfig = MODEL,
    links: Links = immediate_links,
    *,
    steps: int = 2,
    transfer: Any = None,
    prepare: Callable[[Any], None] = lambda ops: None,
) -> tuple[Any, ...]:
    """(losses and norms of the steps and an evaluation, the whole state as bits).

    prepare: takes each rank's operations before the first step.
    """
    engine = engine_of(config, model, links, transfer)
    for rank in engine.ranks:
        prepare(rank.ops)
    results = []
    for step in range(steps):
        data = batch(config, model, step)
        r = engine.train_step(data, step=step, updates=step, learning_rate=1e-2)
        assert r.finite
        results.append((r.loss, r.grad_norm, r.lse_max))
    return finished(engine, results, batch(config, model, 0))


@cache
def plain(storage: str, ranks: int, gradients: bool, accumulation: int) -> tuple[Any, ...]:
    """The yardstick: the same ranks, weights not sharded."""
    return run(config_of(storage, ranks, gradients=gradients, accumulation=accumulation))
