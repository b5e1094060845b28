"""Whole runs on a GPU: resuming, recomputing and launching eagerly give the same bits."""

import json
from pathlib import Path

import pytest

from llmq_nb.config_file import parse_config
from llmq_nb.train.run import run
from llmq_nb.train.trainer import Trainer

pytestmark = pytest.mark.gpu
QUICKSTART = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"


def config_of(folder: Path, name: str, *overrides: str):
    text = QUICKSTART.read_text(encoding="utf-8")
    data = [f'data.{k}="{folder / k}.zarr"' for k in ("train", "validation")]
    common = ("schedule.steps=6", "schedule.warmup_steps=2", "checkpoint.every=3")
    out = f'run.out_dir="{folder / name}"'
    settings = (f'run.name="{name}"', out, 'run.device="cuda"', *data, *common, *overrides)
    return parse_config(text, where="quickstart", overrides=settings)


def losses(folder: Path) -> list[tuple[int, float, float]]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], r["loss"], r["grad_norm"]) for r in records if r["log"] == "step"]


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path):
    whole = config_of(tmp_path, "whole")
    assert run(whole) == 0
    part = config_of(tmp_path, "part")
    with Trainer(part) as trainer:
        first = [trainer.step() for _ in range(3)]
        trainer.make_out_dir()
        trainer.save()
    assert run(part) == 0
    expected = losses(tmp_path / "whole")
    assert [(m.step, m.loss, m.grad_norm) for m in first] == expected[:3]
    assert losses(tmp_path / "part") == expected[3:]
    names = ("model.safetensors", "config.json", "tokenizer.json")
    for name in names:
        exports = [tmp_path / run_name / "export" / name for run_name in ("whole", "part")]
        assert exports[0].read_bytes() == exports[1].read_bytes()


def test_recomputation_and_eager_launches_leave_the_log_as_it_is(tmp_path):
    assert run(config_of(tmp_path, "plain")) == 0
    other = config_of(tmp_path, "other", "memory.recompute=['block']", "run.cuda_graphs=false")
    assert run(other) == 0
    assert losses(tmp_path / "other") == losses(tmp_path / "plain")
