"""`memory.policy = "auto"` in a run: what is chosen stands in the resolved config, changes nothing
but how the same step is computed, and is kept by a resumed run."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmq_nb.config import Config
from llmq_nb.config_file import load_config, to_toml
from llmq_nb.core import device as device_module
from llmq_nb.core.errors import UserError
from llmq_nb.model.families import preset
from llmq_nb.plan.buffers import make_plan
from llmq_nb.plan.cost import step_seconds
from llmq_nb.plan.fit import settings
from llmq_nb.plan.limits import RESERVE, WSL_PINNED
from llmq_nb.plan.rates import H200
from llmq_nb.plan.sizes import run_plan
from llmq_nb.train import memory_policy
from llmq_nb.train.memory_policy import resolve_memory
from llmq_nb.train.trainer import Trainer
from tests.e2e.runs import make_run
from tests.model.harness import make_config, small_model

MODEL = small_model(L=4, C=64, F=176, V=500)


def auto(**changes) -> Config:
    config = make_config(micro_batch=4, seq_len=256, precision="bf16", **changes)
    return dataclasses.replace(
        config, memory=dataclasses.replace(config.memory, policy="auto", recompute=("block",))
    )


def resolve(config, available, monkeypatch, checkpoint=None):
    said: list[str] = []
    monkeypatch.setattr(memory_policy, "available_bytes", lambda: available)
    found = resolve_memory(config, MODEL, "cpu", checkpoint, said.append, batch_bytes=1000)
    return found, said


def test_manual_is_left_alone(monkeypatch):
    config = make_config(micro_batch=4, seq_len=256, precision="bf16", recompute=("ffn",))
    found, said = resolve(config, 1, monkeypatch)
    assert found is config and said == []


def test_choice_is_the_fastest_for_the_memory_that_is_free(monkeypatch):
    """Brute force over every setting, at room for all, for some and for one."""
    config = auto()
    every = [s.applied(config) for s in settings(config, offload=False)]
    sizes = sorted(make_plan(c, MODEL).total for c in every)
    for limit in (sizes[-1], sizes[len(sizes) // 3], sizes[0]):
        found, said = resolve(config, limit + 1000, monkeypatch)
        fitting = [c for c in every if make_plan(c, MODEL).total <= limit]
        best = min(step_seconds(c, MODEL, H200) for c in fitting)
        assert found in fitting and found.memory.policy == "manual"
        assert step_seconds(found, MODEL, H200) == pytest.approx(best, rel=1e-9)
        assert len(said) == 1 and said[0].startswith("memory: auto chose ")
    with pytest.raises(UserError, match=r"no setting fits: the least takes .* in memory\.policy"):
        resolve(config, sizes[0] + 999, monkeypatch)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 4 steps of 2 x 3 sequences, to be made on the cpu."""
    changes = {
        "run": {"device": "cpu"},
        "batch": {"grad_accumulation": 3},
        "memory": {"policy": "auto"},
        "schedule": {"steps": 4},
    }
    folder = make_run(tmp_path, changes)
    monkeypatch.chdir(folder)
    return folder


def test_a_resumed_run_keeps_the_choice(run, monkeypatch):
    monkeypatch.setattr(memory_policy, "available_bytes", lambda: 1 << 40)
    with Trainer(load_config("config.toml")) as trainer:
        first = trainer.config
        trainer.step()
        trainer.save()
    b = first.batch
    assert first.memory.policy == "manual" and b.micro_batch * b.grad_accumulation == 6
    assert (b.micro_batch, first.memory.recompute) == (6, ())
    monkeypatch.setattr(memory_policy, "available_bytes", lambda: 0)  # nothing would fit any more
    said: list[str] = []
    with Trainer(load_config("config.toml"), announce=said.append) as trainer:
        assert trainer.config == first and trainer.progress.step == 1
    assert "memory: as the checkpoint's run chose" in said
    other = load_config("config.toml", ["batch.grad_accumulation=5"])
    with pytest.raises(UserError, match="no setting fits"):  # another batch: chosen anew
        Trainer(other)


def test_the_resolved_config_gives_the_same_bits(run, monkeypatch):
    """The run again from what it saved, policy = "manual" by then."""
    monkeypatch.setattr(memory_policy, "available_bytes", lambda: 1 << 40)

    def losses(config: Config) -> list[float]:
        with Trainer(config, resume="none") as trainer:
            return [trainer.step().loss for _ in range(3)]

    config = load_config("config.toml")
    with Trainer(config) as trainer:
        resolved = trainer.config
    assert losses(config) == losses(resolved)


def test_dry_run_shows_and_train_saves_the_choice(run, cli_in_process):
    code, out = cli_in_process("train", "config.toml", "--dry-run")
    assert code == 0 and re.search(r"^memory: auto chose batch\.micro_batch=6", out, re.MULTILINE)
    assert 'policy = "manual"' in out and "micro_batch = 6" in out
    assert not (run / "out").exists()
    code, _ = cli_in_process("train", "config.toml")
    assert code == 0
    saved = load_config(run / "out/config.toml")
    assert saved.memory.policy == "manual" and saved.batch.micro_batch == 6
    assert saved.batch.grad_accumulation == 1
    assert saved.eval.steps == 1  # 2 micro-batches of 2 were 4 sequences: one of 6 now


@pytest.fixture
def cli_in_process(capsys: pytest.CaptureFixture[str]):
    from llmq_nb.cli import group

    def call(*argv: str) -> tuple[int, str]:
        code = group.main(argv, standalone_mode=False)
        return code or 0, capsys.readouterr().out

    return call


def test_on_a_gpu_offload_is_chosen_within_both_limits_and_saved(monkeypatch, tmp_path):
    """A stand-in for the GPU: its free memory, what may be pinned, a link measured here."""
    model = preset("qwen2.5-0.5b")
    config = make_config(micro_batch=8, seq_len=1024, precision="e4m3", m="bf16", v="bf16")
    memory = dataclasses.replace(config.memory, policy="auto")
    optimizer = dataclasses.replace(config.optimizer, master="bf16")
    config = dataclasses.replace(config, memory=memory, optimizer=optimizer)
    link = dataclasses.replace(H200.host_link, measured=True)
    rates = dataclasses.replace(H200, host_link=link)
    limit, host = 3 << 30, 3 << 30
    monkeypatch.setattr(memory_policy, "_on_gpu", lambda c, batch: (c, limit, host, rates))
    said: list[str] = []
    found = resolve_memory(config, model, "cuda", None, said.append, batch_bytes=0)
    plan = run_plan(found, model, "cuda")
    assert found.memory.offload and found.memory.policy == "manual"
    assert plan.total <= limit and 0 < plan.host_total <= host
    assert re.search(r"memory\.offload=\[.*pinned, from rates measured on this machine\)", said[0])
    (tmp_path / "config.toml").write_text(to_toml(found))
    assert load_config(tmp_path / "config.toml").memory == found.memory
    monkeypatch.setattr(memory_policy, "_on_gpu", lambda c, batch: (c, 1 << 30, 0, rates))
    with pytest.raises(UserError, match="no setting fits"):
        resolve_memory(config, model, "cuda", None, said.append, batch_bytes=0)


def test_what_a_gpu_process_may_take(monkeypatch):
    """Free device memory less the reserve; the host without what is not ours, nothing where it is
    shared, little under WSL2."""
    gpu = SimpleNamespace(name="NVIDIA H200", cc=(9, 0), integrated=False)
    gpu.free_bytes = lambda: 8 << 30
    monkeypatch.setattr(device_module, "open_device", lambda ordinal: gpu)
    monkeypatch.setattr(memory_policy, "pinnable_bytes", lambda: 10 << 30)
    monkeypatch.setattr(memory_policy, "under_wsl", lambda: False)
    config = auto()

    def room() -> tuple[int, int | None]:
        _, limit, host, _ = memory_policy._on_gpu(config, 1000)
        return limit, host

    assert room() == ((8 << 30) - RESERVE, (9 << 30) - 1000)
    monkeypatch.setattr(memory_policy, "under_wsl", lambda: True)
    assert room()[1] == WSL_PINNED
    gpu.integrated = True
    assert room()[1] == 0
