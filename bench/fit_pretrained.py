"""`llmq-nb train` from a folder of safetensors of a preset's shape: it must load, step and fit.

The folder is written here: random values, sharded as a download is. The run is killed after its
last step, before it would write a checkpoint of tens of gigabytes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from bench.fit_watch import watch
from llmq_nb.core.dtype import DType
from llmq_nb.io.config_json import model_config_json
from llmq_nb.io.safetensors_io import SafetensorsWriter, TensorSpec, plan_shards, shard_names
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import model_parameters

BF16 = np.dtype(ml_dtypes.bfloat16)
SHARD_BYTES = 2_000_000_000
BLOCK = 1 << 24
"""Random values; tensors are windows of their repetition, each from another element on."""
ROOT = Path(__file__).resolve().parents[1]


def write_model(folder: Path, model: ModelConfig) -> int:
    """A folder as transformers saves one, not synced; bytes of its tensors."""
    folder.mkdir(parents=True)
    specs, norms = [], set()
    for p in model_parameters(model):
        for view in p.views:
            specs.append(TensorSpec(view.hf_name, BF16, (view.stop - view.start, *p.shape[1:])))
            if p.kind == "norm":
                norms.add(view.hf_name)
    values = random_values(max(spec.nbytes for spec in specs) // 2 + BLOCK, model.init_std)
    shards = plan_shards(specs, SHARD_BYTES)
    names = shard_names("model", len(shards))

    def write(item: tuple[str, list[TensorSpec]]) -> None:
        name, shard = item
        with (folder / name).open("wb") as file:
            writer = SafetensorsWriter(file)
            for spec in shard:
                start = hash_of(spec.name) % BLOCK
                array = values[start : start + spec.nbytes // 2].reshape(spec.shape)
                writer.add(spec.name, np.ones(spec.shape, BF16) if spec.name in norms else array)
            writer.finish()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, zip(names, shards, strict=True)))
    weight_map = {s.name: name for name, shard in zip(names, shards, strict=True) for s in shard}
    total = sum(spec.nbytes for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = json.dumps(model_config_json(model, DType.BF16))
    (folder / "config.json").write_text(config, encoding="utf-8")
    return total


def random_values(count: int, std: float) -> NDArray[Any]:
    """BF16 values of a normal distribution that repeat after BLOCK."""
    block = np.random.default_rng(5).standard_normal(BLOCK, np.float32) * np.float32(std)
    return np.resize(block.astype(BF16), count)


def hash_of(name: str) -> int:
    """The same number in every process."""
    return int.from_bytes(name.encode(), "little") % 1_000_003 * 997


def train_from(
    folder: Path, work: Path, config: str, sets: list[str], steps: int, limit: float
) -> dict[str, Any]:
    """Run `llmq-nb train` until it has logged `steps` steps, at most `limit` seconds."""
    work.mkdir(parents=True, exist_ok=True)
    out = roomy(work) / "fit-run"
    shutil.rmtree(out, ignore_errors=True)
    sets = [
        f"model.path={folder}", f"run.out_dir={out}", f"data.train={work}/train.zarr",
        f"data.validation={work}/validation.zarr", "schedule.warmup_steps=1", "schedule.steps=1000",
        "checkpoint.every=0", "eval.every=0", "log.device_every=0", *sets,
    ]  # fmt: skip
    argv = [sys.executable, "-m", "llmq_nb", "train", f"configs/{config}.toml"]
    argv += [word for s in sets for word in ("--set", s)]
    start, log = time.perf_counter(), out / "log.jsonl"
    with (work / "train.txt").open("w") as said_to:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=said_to, stderr=subprocess.STDOUT)

    def alive() -> bool:
        late = time.perf_counter() - start > limit
        if late or len(steps_of(log)) >= steps:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        return process.poll() is None

    taken = watch(process.pid, alive)
    said = (work / "train.txt").read_text(errors="replace").splitlines()
    found = steps_of(log)
    return {
        "run": f"{config} from safetensors",
        "steps": [
            {k: s.get(k) for k in ("step", "loss", "grad_norm", "seconds", "tokens_per_second")}
            for s in found
        ],
        "process_mib": round(taken.device_mib, 1),
        "rss_mib": round(taken.rss_mib),
        "seconds": round(taken.seconds, 1),
        "said": said[:4] + said[-4:],
        "ok": len(found) >= steps,
    }


def roomy(work: Path) -> Path:
    """The folder, or memory's where its disk is too small for the checkpoint that is never made."""
    places = (work, Path("/dev/shm"))
    return max((p for p in places if p.is_dir()), key=lambda p: shutil.disk_usage(p).free)


def steps_of(log: Path) -> list[dict[str, Any]]:
    """The step records that are whole."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").split("\n")[:-1]
    return [r for r in map(json.loads, lines) if r["log"] == "step"]


def run(config: str, model: ModelConfig, *, accumulation: int, steps: int, work: Path) -> None:
    """Prints the figures. The weights go into `work`, what the run writes beside them."""
    folder = work / "pretrained"
    shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    try:
        nbytes = write_model(folder / "model", model)
        written = time.perf_counter() - start
        sets = [f"batch.grad_accumulation={accumulation}", 'data.sources=["${stdlib}/*.py"]']
        sets += ["data.format=text", "data.tokenizer=bytes", "data.packing=stream"]
        figures = train_from(folder / "model", folder / "work", config, sets, steps, 120)
        figures |= {"model_bytes": nbytes, "seconds_to_write": round(written, 1)}
        print(json.dumps(figures), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
