"""replay and the policies on a GPU: launched one by one, a step has the bits of its graphs."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq_nb.config_file import parse_config
from llmq_nb.data.loader import StepBatch
from llmq_nb.report.jsonl import read_log
from llmq_nb.train import spikes
from llmq_nb.train.engine import StepResult
from llmq_nb.train.replay import replay
from llmq_nb.train.run import run

pytestmark = pytest.mark.gpu
QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


def config_of(folder: Path, name: str, *overrides: str) -> Any:
    data = [f'data.{k}="{folder / k}.zarr"' for k in ("train", "validation")]
    data += ['data.sources=["${stdlib}/json/*.py", "${stdlib}/email/*.py"]', "eval.every=0"]
    common = (
        "schedule.steps=12",
        "schedule.warmup_steps=2",
        "checkpoint.every=4",
        "checkpoint.keep=0",
    )
    out = f'run.out_dir="{folder / name}"'
    settings = (f'run.name="{name}"', out, 'run.device="cuda"', *data, *common, *overrides)
    return parse_config(QUICKSTART.read_text(), where="quickstart", overrides=settings)


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("matmul", ["bf16", "e4m3"])
def test_a_step_again(matmul: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmq_nb.model.engine_cuda.ops import CudaOps

    changes = ("batch.grad_accumulation=2", f"precision.matmul={matmul}")
    config = config_of(tmp_path, "run", *changes)
    assert run(config) == 0
    found = replay(tmp_path / "run", 7, silent)
    assert found.begin == 4 and found.bad is None and found.same_bits is True
    import llmq_nb.train.replay as module

    real, watch, calls = CudaOps.linear_swiglu, module.watch, [0]

    def linear_swiglu(self: Any, y: Any, *inputs: Any) -> None:
        real(self, y, *inputs)
        calls[0] += 1
        if calls[0] == 6:  # layer 1 of the second micro-step: the model has four
            row = self.read(y.rows(3, 4))
            row[0, 5] = np.inf
            self.write(y.rows(3, 4), row)

    def patched(trainer: Any) -> Any:
        monkeypatch.setattr(CudaOps, "linear_swiglu", linear_swiglu)
        return watch(trainer)

    monkeypatch.setattr(module, "watch", patched)
    bad = replay(tmp_path / "run", 7, silent).bad
    assert bad is not None and bad.operation == "linear_swiglu"
    assert (bad.layer, bad.micro_step, bad.element, bad.count) == (1, 1, (3, 5), 1)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_spike(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of step 10 is given as 10 higher; the run goes back to step 8 and on to its end."""
    from llmq_nb.train.engine_cuda import CudaEngine

    monkeypatch.setattr(spikes, "LEAST", 4)
    config = config_of(tmp_path, "run", f"log.spike={policy}")
    real = CudaEngine.train_step

    def train_step(self: Any, batch: StepBatch, **values: Any) -> StepResult:
        found = real(self, batch, **values)
        bad = batch.position.window == 4 * 10 and batch.position.epoch == 0
        return dataclasses.replace(found, loss=found.loss + 10 * bad)

    monkeypatch.setattr(CudaEngine, "train_step", train_step)
    assert run(config) == 0
    records = read_log(tmp_path / "run/log.jsonl", every_attempt=True)
    steps = [r["step"] for r in records if r["log"] == "step"]
    assert steps == [*range(1, 11), *range(9, 13)]
    attempts = {n: [r for r in records if r["log"] == "step" and r["step"] == n] for n in (9, 10)}
    same = [(r["loss"], r["grad_norm"]) for r in attempts[9]]
    assert (same[0] == same[1]) == (policy == "skip")
    assert [r["skipped"] for r in attempts[10]] == [False, policy == "skip"]
