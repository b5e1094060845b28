"""Training with buffers on the host beside the same run without: speed, memory, equal losses.

    python -m bench.bench_offload --model qwen2.5-1.5b --offload all --transfer copy

One JSON line: tokens/s of whole steps, GPU time of a micro-step and of the optimizer step, the
plan's bytes on the device and the host, what nvidia-smi says of this process, and the losses, whose
digits must be those of `--offload none`.
"""

import argparse
import dataclasses
import itertools
import json
import subprocess
import time
from collections import defaultdict
from typing import Any, get_args

from llmq_nb.config import Config, Offload
from llmq_nb.core.device import create_event, elapsed_seconds, record_event
from llmq_nb.model.families import preset
from llmq_nb.train.bench_step import Setting, random_batch
from llmq_nb.train.engine_cuda import CudaEngine
from llmq_nb.train.initial import set_random_weights


def config_of(args: argparse.Namespace) -> Config:
    """Block recomputation and BF16 states; the levers from the command line."""
    setting = Setting(
        model=args.model, micro_batch=args.micro_batch, grad_accumulation=args.accumulation,
        matmul=args.matmul, head_chunks=args.head_chunks, recompute=("block",),
    )  # fmt: skip
    config = setting.config()
    levers = {"all": get_args(Offload), "none": ()}.get(args.offload)
    levers = tuple(args.offload.split(",")) if levers is None else levers
    memory = dataclasses.replace(
        config.memory, offload=levers, transfer=args.transfer, device_limit=args.device_limit,
        keep_quants=not args.no_quants,
    )  # fmt: skip
    optimizer = dataclasses.replace(config.optimizer, m=args.m)
    return dataclasses.replace(config, memory=memory, optimizer=optimizer)


def timed_graphs(engine: CudaEngine) -> dict[str, list[tuple[Any, Any]]]:
    """Wraps the engine's graph launches in timing events, by the graph's name."""
    events: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    run = engine._run

    def timed(name: str, work: Any) -> None:
        start, end = create_event(timing=True), create_event(timing=True)
        record_event(start, engine.stream)
        run(name, work)
        record_event(end, engine.stream)
        events[name].append((start, end))

    engine._run = timed
    return events


def process_mib() -> list[int]:
    """Device memory of the processes that nvidia-smi shows (in a container: those it may see)."""
    query = ["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    out = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return [int(line) for line in out.split() if line.isdigit()]


def device_mib() -> list[int]:
    """Device memory in use, by everybody."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    out = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return [int(line) for line in out.split() if line.isdigit()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--matmul", default="e4m3")
    parser.add_argument("--head-chunks", type=int, default=16)
    parser.add_argument("--offload", default="all")
    parser.add_argument("--transfer", default="auto")
    parser.add_argument("--m", default="bf16")
    parser.add_argument("--no-quants", action="store_true")
    parser.add_argument("--device-limit")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    config, model = config_of(args), preset(args.model)
    before = device_mib()
    start = time.perf_counter()
    engine = CudaEngine(config, model)
    ready = time.perf_counter() - start
    set_random_weights(engine, model)
    batch, losses = random_batch(config, model), []

    def step(index: int) -> None:
        r = engine.train_step(batch, step=index, updates=index, learning_rate=1e-4)
        losses.append((r.loss, r.grad_norm))

    step(0)
    first = time.perf_counter() - start
    step(1)
    events = timed_graphs(engine)
    start = time.perf_counter()
    for index in range(2, 2 + args.steps):
        step(index)
    seconds = (time.perf_counter() - start) / args.steps
    graphs = {
        name: round(sum(itertools.starmap(elapsed_seconds, pairs)) / len(pairs), 4)
        for name, pairs in events.items()
    }
    figures = {
        **vars(args),
        "tokens_per_second": round(batch.tokens.size / seconds),
        "seconds_per_step": round(seconds, 4),
        "gpu_seconds": graphs,
        "plan_device_gib": round(engine.plan.total / 2**30, 3),
        "plan_host_gib": round(engine.plan.host_total / 2**30, 3),
        "pinned_gib": round(engine.host.nbytes / 2**30, 3),
        "pinning_seconds": round(engine.host.seconds, 1),
        "process_mib": process_mib(),
        "device_mib": [before, device_mib()],
        "seconds_to_engine": round(ready, 1),
        "seconds_to_first_step": round(first, 1),
        "losses": losses,
    }
    print(json.dumps(figures), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
