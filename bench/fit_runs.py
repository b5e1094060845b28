"""Training steps of one config on random tokens, in a child: speed, memory, how much of the copies
is hidden.

    hidden share of a micro-step = 1 - (with offload - without) / (its copies with nothing beside)

The copies alone are a micro-step whose operations do nothing. The update is bound by the link: its
copies have nothing to hide behind.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any, cast

from bench.bench_offload import timed_graphs
from bench.fit_watch import Asked, in_child, process_mib
from llmq_nb.config import Config
from llmq_nb.config_file import load_config
from llmq_nb.core.device import (
    create_event,
    elapsed_seconds,
    open_device,
    record_event,
    synchronize_stream,
)
from llmq_nb.kernels import tensor_map
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.families import preset
from llmq_nb.plan.limits import LIMIT_RESERVE
from llmq_nb.train.bench_step import random_batch
from llmq_nb.train.engine_cuda import CudaEngine, run_micro_step
from llmq_nb.train.initial import set_random_weights

GIB, MIB = 1 << 30, 1 << 20
MARGIN, SHARE = 128 * MIB, 0.01
"""The process may differ from its plan by the larger of the two."""
PINNED = 1.02
"""Most pinned bytes, over the plan's."""


def load(
    name: str, accumulation: int | None, sets: Sequence[str] = ()
) -> tuple[Config, ModelConfig]:
    """A file of configs/; a model that must be downloaded is the preset in its name."""
    config = load_config(f"configs/{name}.toml", tuple(sets))
    path = name.partition("-1x")[0] if "/" in config.model.path else config.model.path
    if accumulation is not None:
        batch = dataclasses.replace(config.batch, grad_accumulation=accumulation)
        config = dataclasses.replace(config, batch=batch)
    return config, preset(path)


def uncapped(config: Config) -> Config:
    """The same run with everything on the device."""
    memory = dataclasses.replace(
        config.memory, offload=(), device_limit=None, host_limit=None, transfer="auto"
    )
    return dataclasses.replace(config, memory=memory)


def measured(name: str, config: Config, model: ModelConfig, steps: int) -> dict[str, Any]:
    """The figures of one config in a child of its own."""
    figures, taken = in_child(train, config, model, steps)
    return {
        "run": name,
        "batch": f"{config.batch.micro_batch} x {config.batch.grad_accumulation}",
        "seq_len": config.batch.seq_len,
        "offload": config.memory.offload,
        "device_limit": config.memory.device_limit,
        **figures,
        **held(figures, taken.device_mib),
        "rss_mib": round(taken.rss_mib),
        "child_seconds": round(taken.seconds, 1),
    }


def held(figures: dict[str, Any], device_mib: float) -> dict[str, Any]:
    """The process's memory beside its plan, and whether what is promised holds."""
    plan, planned = figures["plan_bytes"], figures["plan_bytes"] + LIMIT_RESERVE
    host, used = figures["plan_host_bytes"], device_mib * MIB
    pinned, ring = figures["pinned_bytes"], figures["ring_bytes"]
    return {
        "process_mib": round(device_mib, 1),
        "planned_mib": round(planned / MIB, 1),
        "process_minus_plan_mib": round((used - plan) / MIB, 1),
        "allocation_exact": figures["asked_bytes"] - figures["tensor_map_bytes"] == plan,
        "process_in_margin": abs(used - planned) <= max(SHARE * planned, MARGIN),
        "pinned_in_margin": pinned <= PINNED * (host + ring),
    }


def train(config: Config, model: ModelConfig, steps: int) -> dict[str, Any]:
    """In the child: two steps that record and warm, then `steps` timed ones."""
    start = time.perf_counter()
    open_device()
    asked, context = Asked(), process_mib()
    engine = CudaEngine(config, model)
    ready, built = time.perf_counter() - start, process_mib()
    set_random_weights(engine, model)
    batch, losses = random_batch(config, model), []

    def step(index: int) -> None:
        r = engine.train_step(batch, step=index, updates=index, learning_rate=1e-4)
        losses.append((r.loss, r.grad_norm))

    step(0)
    first = time.perf_counter() - start
    events = timed_graphs(engine)
    begin = time.perf_counter()
    for index in range(1, 1 + steps):
        step(index)
    seconds = (time.perf_counter() - begin) / steps
    gpu = {
        name: sum(itertools.starmap(elapsed_seconds, pairs)) / len(pairs)
        for name, pairs in events.items()
    }
    figures = {
        "tokens_per_second": round(batch.tokens.size / seconds),
        "seconds_per_step": round(seconds, 4),
        "gpu_seconds": {name: round(value, 4) for name, value in gpu.items()},
        "rate_by_accumulation": rates(config, gpu),
        "copies_alone_seconds": round(copies_alone(engine), 4),
        "plan_bytes": engine.plan.total,
        "plan_host_bytes": engine.plan.host_total,
        "asked_bytes": asked.device,
        "tensor_map_bytes": tensor_map_bytes(),
        "pinned_bytes": asked.pinned,
        "ring_bytes": sum(slot.memory.nbytes for slot in engine.seats[0].ring.slots),
        "pinning_seconds": round(engine.host.seconds, 1),
        "context_mib": round(context, 1),
        "built_mib": round(built, 1),
        "seconds_to_engine": round(ready, 1),
        "seconds_to_first_step": round(first, 1),
        "losses": losses,
    }
    engine.close()
    return figures


def tensor_map_bytes() -> int:
    """What descriptors of Hopper's tensor copies take, in the reserve beside our allocation."""
    return tensor_map.MAP_BYTES * tensor_map.MAPS_PER_DEVICE * len(tensor_map._slots)


def rates(config: Config, gpu: dict[str, float]) -> dict[int, int]:
    """tokens/s by grad_accumulation, put together from the measured graphs."""
    first, update = gpu["first micro-step"], gpu["optimizer step"]
    other = gpu.get("micro-step", first)
    tokens = config.batch.micro_batch * config.batch.seq_len
    return {a: round(a * tokens / (first + (a - 1) * other + update)) for a in (1, 2, 4, 8, 16)}


class Silent:
    """Stands for operations and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def copies_alone(engine: CudaEngine, runs: int = 2) -> float:
    """Seconds of a micro-step's copies (not the first one's of an accumulation) with no work beside
    them. Destroys the gradients."""
    rank = engine.ranks[0]
    if not engine.config.memory.offload:
        return 0.0
    ops, rank.model.ops = rank.model.ops, cast(Any, Silent())
    seconds = []
    try:
        for _ in range(1 + runs):
            start, end = create_event(timing=True), create_event(timing=True)
            record_event(start, engine.stream)
            run_micro_step(engine.ranks, False, True, False)
            record_event(end, engine.stream)
            seconds.append(elapsed_seconds(start, end))
    finally:
        rank.model.ops = ops
    synchronize_stream(engine.stream)
    return min(seconds[1:])


def hidden(moved: dict[str, Any], resident: dict[str, Any]) -> dict[str, Any]:
    """How much of the copies a run hides, from it and the same run with everything resident."""
    name = "micro-step" if "micro-step" in moved["gpu_seconds"] else "first micro-step"
    with_, without = (r["gpu_seconds"][name] for r in (moved, resident))
    alone = moved["copies_alone_seconds"]
    return {
        "run": moved["run"],
        "micro_step_seconds": (with_, without),
        "copies_alone_seconds": alone,
        "hidden_share": round(1 - (with_ - without) / alone, 3) if alone else None,
        "update_seconds": tuple(r["gpu_seconds"]["optimizer step"] for r in (moved, resident)),
        "tokens_per_second": (moved["tokens_per_second"], resident["tokens_per_second"]),
        "speed_kept": {
            a: round(moved["rate_by_accumulation"][a] / resident["rate_by_accumulation"][a], 3)
            for a in moved["rate_by_accumulation"]
        },
        "losses_equal": moved["losses"] == resident["losses"],
    }
