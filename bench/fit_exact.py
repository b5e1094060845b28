"""Twelve configs, planned against measured, each in a child of its own; and 500 steps whose memory
must stay flat.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, get_args

from bench.fit_runs import measured
from bench.fit_watch import Asked, in_child, process_mib, status_mib
from llmq_nb.config import (
    BatchConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    LogConfig,
    MemoryConfig,
    ModelSection,
    Offload,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)
from llmq_nb.core.device import check, driver, open_device
from llmq_nb.core.dtype import DType
from llmq_nb.io.config_json import model_config_json
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.families import preset
from llmq_nb.train.trainer import Trainer

ALL: tuple[Offload, ...] = get_args(Offload)
SMALL = ModelConfig(
    family="qwen3", C=512, F=1536, L=8, H=8, G=4, D=64, V=8192, tied=False, qk_norm=True
)
"""40 million parameters, none of them Qwen2.5's shape."""
DRIFT = 8 << 20
"""Most bytes that memory may grow by."""
SETTLED, STEPS = 50, 500
"""Steps after which allocators have what they keep, and all steps."""


def case(
    micro_batch: int,
    *,
    seq_len: int = 1024,
    accumulation: int = 1,
    matmul: Any = None,
    gradient: Any = None,
    states: tuple[Any, Any, Any] = ("bf16", "bf16", "bf16"),
    accumulate: Any = None,
    **memory: Any,
) -> Config:
    """states: master, m, v. accumulate: format of the gradients."""
    master, m, v = states
    return Config(
        run=RunConfig(device="cuda", name="fit"),
        model=ModelSection(path="-"),
        data=DataConfig(train="random tokens"),
        batch=BatchConfig(micro_batch=micro_batch, seq_len=seq_len, grad_accumulation=accumulation),
        precision=PrecisionConfig(
            matmul=matmul, gradient=gradient or "e4m3", gradient_accumulation=accumulate
        ),
        optimizer=OptimizerConfig(master=master, m=m, v=v),
        memory=MemoryConfig(**memory),
    )


FP32 = ("fp32", "fp32", "fp32")
CASES: dict[str, tuple[str, Config]] = {
    "bf16": ("qwen2.5-0.5b", case(4)),
    "bf16, fp32 states": ("qwen2.5-0.5b", case(2, states=FP32, head_chunks=4)),
    "bf16, block recomputed": ("qwen2.5-0.5b", case(16, recompute=("block",), head_chunks=8)),
    "e4m3": ("qwen2.5-0.5b", case(4, matmul="e4m3", accumulation=2)),
    "e4m3, e5m2 gradients, no quants": (
        "qwen2.5-0.5b",
        case(4, matmul="e4m3", gradient="e5m2", keep_quants=False, states=("bf16", "e4m3", "bf16")),
    ),
    "bf16, m and v on the host": ("qwen2.5-0.5b", case(8, offload=("m", "v"), head_chunks=2)),
    "all on the host, 3 GiB": (
        "qwen2.5-0.5b",
        case(4, matmul="e4m3", offload=ALL, recompute=("block",), device_limit="3GiB",
             head_chunks=16, accumulation=2),
    ),
    "all on the host, copies, fp32 gradients": (
        "qwen2.5-0.5b",
        case(4, matmul="e4m3", offload=ALL, transfer="copy", accumulate="fp32",
             states=("fp32", "e4m3", "bf16"), accumulation=2),
    ),
    "qwen3 shape, 7.5 GiB": (
        "small", case(32, seq_len=2048, recompute=("ffn", "norm"), device_limit="7.5GiB",
                      head_chunks=4),
    ),
    "qwen3 shape, residual and gradients": (
        "small", case(16, matmul="e4m3", offload=("residual", "gradients"), accumulation=2),
    ),
    "1.5b, e4m3": ("qwen2.5-1.5b", case(8, matmul="e4m3", head_chunks=4)),
    "1.5b, states and residual on the host, 7.5 GiB": (
        "qwen2.5-1.5b",
        case(8, offload=("m", "v", "master", "gradients", "residual"), recompute=("block",),
             device_limit="7.5GiB", head_chunks=8, accumulation=2, states=("bf16", "e4m3", "bf16")),
    ),
}  # fmt: skip


def model_of(name: str) -> ModelConfig:
    return SMALL if name == "small" else preset(name)


def run_cases(seconds: float) -> None:
    """A line a config, and one that counts; ends early when time is up."""
    start, rows = time.perf_counter(), []
    for name, (model, config) in CASES.items():
        if time.perf_counter() - start > seconds:
            break
        try:
            row = measured(f"{model}, {name}", config, model_of(model), 1)
        except RuntimeError as error:
            print(json.dumps({"run": f"{model}, {name}", "failed": str(error)}), flush=True)
            continue
        row.pop("losses")
        rows.append(row)
        print(json.dumps(row), flush=True)
    over = [row["process_minus_plan_mib"] for row in rows]
    summary = {
        "configs": len(rows),
        "of": len(CASES),
        "allocations_exact": sum(row["allocation_exact"] for row in rows),
        "process_in_margin": sum(row["process_in_margin"] for row in rows),
        "pinned_in_margin": sum(row["pinned_in_margin"] for row in rows),
        "process_minus_plan_mib": (min(over, default=0), max(over, default=0)),
    }
    print(json.dumps(summary), flush=True)


def run_flat(work: Path) -> None:
    """500 steps of a trainer with everything on the host, evaluations in between."""
    figures, taken = in_child(flat, work)
    print(json.dumps({**figures, "largest_mib": round(taken.device_mib, 1)}), flush=True)


def flat(work: Path) -> dict[str, Any]:
    """In the child: device memory by the driver and by NVML, RSS, and what was asked for."""
    config = flat_config(work)
    open_device()
    asked = Asked()
    with Trainer(config, resume="start", announce=lambda line: None) as trainer:
        losses, points, start = [], {}, time.perf_counter()
        for step in range(1, STEPS + 1):
            losses.append(trainer.step().loss)
            if step % 100 == 0 or step == SETTLED:
                trainer.evaluate()
            if step in (SETTLED, 200, 350, STEPS):
                points[step] = _now(asked)
        seconds = time.perf_counter() - start
        plan = trainer.engine.plan  # pyright: ignore
    drift = {key: points[STEPS][key] - points[SETTLED][key] for key in points[STEPS]}
    return {
        "run": f"{STEPS} steps, all offloaded",
        "steps_per_second": round(STEPS / seconds, 1),
        "plan_bytes": (plan.total, plan.host_total),
        "at": {step: found for step, found in points.items()},
        "drift_bytes": drift,
        "flat": all(abs(value) < DRIFT for value in drift.values()),
        "losses": (losses[0], losses[-1]),
    }


def flat_config(work: Path) -> Config:
    """A model folder and a little text; the config of the run."""
    folder = work / "model"
    folder.mkdir(parents=True, exist_ok=True)
    described = json.dumps(model_config_json(SMALL, DType.BF16))
    (folder / "config.json").write_text(described, encoding="utf-8")
    config = case(
        4, seq_len=256, accumulation=2, matmul="e4m3", offload=ALL, transfer="copy",
        recompute=("norm", "swiglu"), states=("bf16", "e4m3", "bf16"), head_chunks=2,
    )  # fmt: skip
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, out_dir=str(work / "run")),
        model=ModelSection(path=str(folder), init="random"),
        data=DataConfig(
            train=str(work / "train.zarr"),
            validation=str(work / "validation.zarr"),
            sources=("${stdlib}/json/*.py",),  # 17 steps an epoch: its end is met often
            tokenizer="bytes",
        ),
        schedule=ScheduleConfig(steps=STEPS, warmup_steps=10),
        checkpoint=CheckpointConfig(every=0),
        eval=EvalConfig(every=0, steps=4),
        log=LogConfig(health_every=20),
    )


def _now(asked: Asked) -> dict[str, int]:
    """Bytes in use now."""
    free, _ = check(driver().cuMemGetInfo(), "cuMemGetInfo")
    return {
        "device_used": int(-free),
        "process": int(process_mib() * 2**20),
        "rss": int(status_mib("self", "VmRSS") * 2**20),
        "device_asked": asked.device,
        "pinned": asked.pinned,
    }
