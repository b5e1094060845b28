"""The choice of `memory.policy = "auto"` against measured settings: for each model and limit, the
twelve that the plan ranks highest, the first of which is the choice, and twelve random feasible
ones.

    step = first micro-step + (accumulation - 1) * other micro-step + update

from the GPU times of the recorded graphs, each replayed up to five times after its first run;
updates are timed once for all settings that share one. One process a model; pinned memory is taken
once. What one limit has measured counts for the others. A line a setting, and one that judges each
limit; an earlier file of lines (`done`) is not measured again.
"""

import dataclasses
import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.fit_watch import in_child
from llmq_nb.config import (
    BatchConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelSection,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from llmq_nb.core.device import create_event, elapsed_seconds, open_device, record_event
from llmq_nb.core.errors import UserError
from llmq_nb.core.host import pinnable_bytes
from llmq_nb.core.sizes import parse_bytes
from llmq_nb.kernels import products
from llmq_nb.model.families import preset
from llmq_nb.offload.pinned import Registered
from llmq_nb.plan.buffers import Plan
from llmq_nb.plan.fit import Setting, levers
from llmq_nb.plan.limits import LIMIT_RESERVE, PYTHON
from llmq_nb.plan.measured import with_measured_link
from llmq_nb.plan.rates import rates_of
from llmq_nb.plan.search import Search
from llmq_nb.train import cuda_seat, engine_cuda
from llmq_nb.train.bench_step import random_batch
from llmq_nb.train.engine import step_scalars
from llmq_nb.train.initial import set_random_weights
from llmq_nb.train.step import optimizer_step

HIGHEST, RANDOM, SEED = 12, 12, 3
SEQUENCES, SEQ_LEN = 32, 1024
"""Of an optimizer step."""
LONG = 0.1
"""Seconds of a graph from which one replay is enough."""
Updates = dict[tuple[Any, ...], float]
Done = dict[str, dict[str, Any]]


class Pool:
    """Pinned chunks that outlive an engine: stands for `HostMemory`."""

    chunks: list[Registered] = []

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.starts, self.used, self.seconds = [start for start, _ in spans], [], 0.0
        begin, left = time.perf_counter(), list(Pool.chunks)
        for start, end in spans:
            fitting = [c for c in left if c.nbytes >= end - start]
            if not fitting:
                fitting = [Registered(max(end - start, 1 << 30))]
                Pool.chunks.append(fitting[0])
                left.append(fitting[0])
            best = min(fitting, key=lambda c: c.nbytes)
            left.remove(best)
            self.used.append(best)
        self.seconds = time.perf_counter() - begin

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.used)

    def address(self, offset: int) -> int:
        index = max(i for i, start in enumerate(self.starts) if start <= offset)
        return self.used[index].address + offset - self.starts[index]

    def close(self) -> None:
        """Keep it for the next one."""


def base(model: str, limit: str) -> Config:
    """FP8, BF16 states; the levers are the search's."""
    return Config(
        run=RunConfig(device="cuda"),
        model=ModelSection(path=model),
        data=DataConfig(train="random tokens"),
        batch=BatchConfig(micro_batch=1, grad_accumulation=SEQUENCES, seq_len=SEQ_LEN),
        precision=PrecisionConfig(matmul="e4m3"),
        optimizer=OptimizerConfig(master="bf16", m="bf16", v="bf16"),
        memory=MemoryConfig(device_limit=limit),
    )


Candidate = tuple[str, Setting]
"""("highest" or "random", setting)."""


def candidates(search: Search, limit: int, host: int | None, seed: int) -> list[Candidate]:
    """The choice first, then both kinds by turns, so that an early end is fair."""
    highest = [c.setting for c in search.ranked(limit, host, HIGHEST)]
    every, others = list(levers(search.config, search.offload)), []
    random.Random(seed).shuffle(every)
    for lever in every:
        if len(others) == RANDOM:
            break
        found = search.with_fewest_chunks(lever, limit, host)
        if found is not None and found not in highest:
            others.append(found)
    pairs = itertools.zip_longest(highest, others)
    named = [(("highest", a), ("random", b)) for a, b in pairs]
    return [item for pair in named for item in pair if item[1] is not None]


def key_of(model: str, setting: Setting) -> str:
    """Of the measured time, whatever the limit."""
    return json.dumps([model, dataclasses.asdict(setting)])


def run(models: Sequence[str], limits: Sequence[str], seconds: float, done: Path | None) -> None:
    """Each model in a child, until its share of the time is up."""
    start = time.perf_counter()
    known = read_done(done)
    for index, model in enumerate(models):
        left = seconds - (time.perf_counter() - start)
        share = left / (len(models) - index)
        if share <= 5:
            break
        try:
            in_child(run_model, model, list(limits), share, known)
        except RuntimeError as error:
            print(json.dumps({"model": model, "failed": str(error)}), flush=True)


def read_done(file: Path | None) -> Done:
    """The settings that an earlier run measured."""
    if file is None or not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]
    return {line["key"]: line for line in lines if "key" in line}


def run_model(model: str, limits: list[str], seconds: float, known: Done) -> None:
    """In the child."""
    end = time.perf_counter() + seconds
    device = open_device()
    rates = with_measured_link(rates_of(device.name), device.name)
    available = pinnable_bytes()
    host = None if available is None else available - 2 * PYTHON
    cuda_seat.host_memory = lambda plan, config: Pool(_chunks(plan))  # pyright: ignore
    products.LARGE = math.inf  # so many settings: short runs must choose the products
    updates: Updates = {}
    for index, text in enumerate(limits):
        config = base(model, text)
        limit = parse_bytes(text, where="--limit") - LIMIT_RESERVE
        search = Search(config, preset(model), rates)
        named = candidates(search, limit, host, seed=SEED)
        if not named:
            print(json.dumps({"model": model, "limit": text, "fits": 0}), flush=True)
            continue
        until = time.perf_counter() + (end - time.perf_counter()) / (len(limits) - index)
        rows = []
        for kind, setting in named:
            key = key_of(model, setting)
            if key not in known:
                if time.perf_counter() > until:
                    continue
                known[key] = line = time_setting(model, setting, search, updates)
                print(json.dumps({"key": key, **line}), flush=True)
            if "failed" not in known[key]:
                rows.append((kind, setting, known[key]))
        print(json.dumps(judge(model, text, named, rows)), flush=True)


def _chunks(plan: Plan) -> list[tuple[int, int]]:
    return plan.host_chunks(1 << 30)


def time_setting(model: str, setting: Setting, search: Search, updates: Updates) -> dict[str, Any]:
    """Seconds of an optimizer step, measured and predicted."""
    start, shape = time.perf_counter(), preset(model)
    config = setting.applied(search.config)
    try:
        engine = engine_cuda.CudaEngine(config, shape)
    except UserError as error:
        return {"failed": str(error)}
    ready = time.perf_counter() - start
    set_random_weights(engine, shape)
    work = {"first micro-step": lambda: engine_cuda.run_micro_step(engine.ranks, True, True, False)}
    if setting.grad_accumulation > 1:
        work["micro-step"] = lambda: engine_cuda.run_micro_step(engine.ranks, False, True, False)
    alike = setting.keep_quants, setting.offload, setting.transfer
    if alike not in updates:  # the other levers do not change it
        work[engine_cuda.UPDATE] = lambda: optimizer_step(engine.ranks)
    gpu = graph_seconds(engine, work)
    updates.setdefault(alike, gpu.get(engine_cuda.UPDATE, 0.0))
    figures = {
        "predicted": round(search.seconds(setting), 4),
        "gpu": {name: round(value, 4) for name, value in gpu.items()},
        "pinned_gib": round(engine.plan.host_total / 2**30, 2),
        "device_gib": round(engine.plan.total / 2**30, 2),
    }
    engine.close()
    first = gpu["first micro-step"]
    others = (setting.grad_accumulation - 1) * gpu.get("micro-step", 0.0)
    return {
        "seconds": round(first + others + updates[alike], 4),
        **figures,
        "ready_seconds": round(ready, 1),
        "wall_seconds": round(time.perf_counter() - start, 1),
    }


def graph_seconds(engine: Any, work: dict[str, Any]) -> dict[str, float]:
    """The least GPU time of each recorded graph on a batch of random tokens, after one run."""
    one = dataclasses.replace(engine.config.batch, grad_accumulation=1)
    config = dataclasses.replace(engine.config, batch=one)
    batch = random_batch(config, engine.model)
    scalars = step_scalars(config, batch, 0, 0, 0, 1e-4)
    arrays = (batch.tokens[0, 0], batch.targets[0, 0], batch.segment_start[0, 0])
    engine._refresh_weights()
    engine.seats[0].ring.send(*arrays, batch.token_order(0, 0), scalars)
    found = {}
    for name, run in work.items():  # an update comes last: trained weights make products faster
        engine._run(name, run)
        found[name] = seconds = graph_time(engine, name)
        for _ in range(min(4, int(LONG / seconds))):
            found[name] = min(found[name], graph_time(engine, name))
    return found


def graph_time(engine: Any, name: str) -> float:
    """Of one replay [s]."""
    start, end = create_event(timing=True), create_event(timing=True)
    record_event(start, engine.stream)
    engine._graphs[name].launch(engine.stream)
    record_event(end, engine.stream)
    return elapsed_seconds(start, end)


def judge(
    model: str,
    limit: str,
    named: list[Candidate],
    rows: list[tuple[str, Setting, dict[str, Any]]],
) -> dict[str, Any]:
    """The choice beside the best of what was measured."""
    chosen = next((row for kind, s, row in rows if s == named[0][1]), None)
    out = {"model": model, "limit": limit, "candidates": len(named), "measured": len(rows)}
    if chosen is None:
        return out
    best = min(rows, key=lambda item: item[2]["seconds"])
    errors = [row["predicted"] / row["seconds"] - 1 for _, _, row in rows]
    return {
        **out,
        "choice": dataclasses.asdict(named[0][1]),
        "choice_seconds": chosen["seconds"],
        "tokens_per_second": round(SEQUENCES * SEQ_LEN / chosen["seconds"]),
        "best": dataclasses.asdict(best[1]),
        "best_kind": best[0],
        "best_seconds": best[2]["seconds"],
        "choice_over_best": round(chosen["seconds"] / best[2]["seconds"], 4),
        "within_5_percent": chosen["seconds"] <= 1.05 * best[2]["seconds"],
        "prediction_error": (round(min(errors), 3), round(max(errors), 3)),
    }
