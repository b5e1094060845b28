"""m and v on the disk beside the same states in pinned memory: seconds of an update, GB/s of the
file.

The file is of the folder that the run's would be in (`--work`). The first update reads a file that
was never written, which costs nothing: the later ones count.
"""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

from bench.bench_offload import timed_graphs
from bench.fit_runs import held, load, tensor_map_bytes
from bench.fit_watch import Asked, in_child
from llmq_nb.config import Config
from llmq_nb.core.device import elapsed_seconds, open_device
from llmq_nb.model.config import ModelConfig
from llmq_nb.offload.disk import ScratchFile
from llmq_nb.train.bench_step import random_batch
from llmq_nb.train.engine_cuda import UPDATE, CudaEngine
from llmq_nb.train.initial import set_random_weights


def run(name: str, work: Path, accumulation: int, steps: int) -> list[dict[str, Any]]:
    """A config of configs/ with m and v in pinned memory, then on the disk; its losses must be
    equal."""
    config, model = load(name, accumulation)
    moved = tuple(s for s in config.memory.offload if s not in ("m", "v"))
    limits = dataclasses.replace(config.memory, host_limit=None)
    pinned = dataclasses.replace(limits, offload=("m", "v", *moved))
    disk = dataclasses.replace(limits, offload=moved, disk=("m", "v"))
    rows = []
    for kind, memory in (("pinned", pinned), ("disk", disk)):
        changed = dataclasses.replace(
            config, memory=memory, run=dataclasses.replace(config.run, out_dir=str(work))
        )
        figures, taken = in_child(measure, changed, model, steps)
        rows.append(
            {"run": f"{name}, m and v: {kind}", **figures, **held(figures, taken.device_mib)}
        )
    rows.append(
        {
            "run": f"{name}, m and v on the disk beside pinned",
            "update_seconds": [row["update_seconds"] for row in rows],
            "tokens_per_second": [row["tokens_per_second"] for row in rows],
            "losses_equal": rows[0]["losses"] == rows[1]["losses"],
        }
    )
    return rows


def measure(config: Config, model: ModelConfig, steps: int) -> dict[str, Any]:
    """In the child: a step that warms and fills the file, then `steps` timed ones."""
    open_device()
    asked, said = Asked(), list[str]()
    spent = {"read": [0.0, 0], "write": [0.0, 0]}
    _time(spent)
    engine = CudaEngine(config, model)
    if engine.disk is not None and not engine.disk.direct:
        said.append("no direct I/O")
    set_random_weights(engine, model)
    batch, losses = random_batch(config, model), []

    def step(index: int) -> None:
        r = engine.train_step(batch, step=index, updates=index, learning_rate=1e-4)
        losses.append((r.loss, r.grad_norm))

    step(0)
    for counts in spent.values():
        counts[:] = [0.0, 0]
    events, start = timed_graphs(engine), time.perf_counter()
    for index in range(1, 1 + steps):
        step(index)
    seconds = (time.perf_counter() - start) / steps
    pairs = events[UPDATE]
    figures = {
        "tokens_per_second": round(batch.tokens.size / seconds),
        "seconds_per_step": round(seconds, 3),
        "update_seconds": round(sum(itertools.starmap(elapsed_seconds, pairs)) / len(pairs), 3),
        "file_gib": round(engine.plan.disk_total / 2**30, 3),
        "gb_per_s": {k: round(n / s / 1e9, 2) for k, (s, n) in spent.items() if s},
        "said": said,
        "plan_bytes": engine.plan.total,
        "plan_host_bytes": engine.plan.host_total,
        "asked_bytes": asked.device,
        "tensor_map_bytes": tensor_map_bytes(),
        "pinned_bytes": asked.pinned,
        "ring_bytes": sum(slot.memory.nbytes for slot in engine.seats[0].ring.slots),
        "losses": losses,
    }
    engine.close()
    return figures


def _time(spent: dict[str, list[Any]]) -> None:
    """Counts seconds and bytes of the file's reads and writes, each in a thread of its own."""
    for name in spent:
        call = getattr(ScratchFile, name)

        def timed(
            self: ScratchFile, address: int, nbytes: int, offset: int, call=call, name=name
        ) -> None:
            start = time.perf_counter()
            call(self, address, nbytes, offset)
            spent[name][0] += time.perf_counter() - start
            spent[name][1] += nbytes

        setattr(ScratchFile, name, timed)
