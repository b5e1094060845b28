"""stop, skip and rollback, by injection on the cpu engine.

The oracles are trainers that are led by hand: the same steps, without any policy. Weights and
moments are compared bit for bit.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq_nb import Trainer, load_config
from llmq_nb.core.errors import MachineError
from llmq_nb.data.loader import StepBatch
from llmq_nb.report.jsonl import read_log
from llmq_nb.train import setup
from llmq_nb.train.engine import CpuEngine, StepResult
from llmq_nb.train.run import run
from tests.e2e.runs import hashes, make_run

STEPS, EVERY, BAD = 32, 8, 28
"""The bad step comes four steps after a checkpoint."""
Bad = Callable[[StepBatch, int], bool]


def ready(folder: Path, monkeypatch: pytest.MonkeyPatch, **log: Any) -> Any:
    changes = {
        "schedule": {"steps": STEPS},
        "checkpoint": {"every": EVERY, "keep": 0},
        "eval": {"every": 0},
        "log": log,
    }
    monkeypatch.chdir(make_run(folder, changes))
    return load_config("config.toml")


def batch_of_step(step: int) -> Bad:
    """The data that step `step` has in a run that never went back (2 windows a step)."""
    return lambda batch, _: (batch.position.epoch, batch.position.window) == (0, 2 * step)


def inject_spike(monkeypatch: pytest.MonkeyPatch, bad: Bad) -> list[int]:
    """Bad data: the loss is 10 higher and the update ruins the weights. Returns their steps."""
    real, hits = CpuEngine.train_step, []

    def train_step(self: CpuEngine, batch: StepBatch, **values: Any) -> StepResult:
        found = real(self, batch, **values)
        if not bad(batch, values["step"]):
            return found
        hits.append(values["step"] + 1)
        for state in self.states:
            state.master.data[:] = 3 * state.master.data + 1
            state.weight.data[:] = state.master.data
            state.m.data[:] = 7
        return dataclasses.replace(found, loss=found.loss + 10)

    monkeypatch.setattr(CpuEngine, "train_step", train_step)
    return hits


def inject_nan(monkeypatch: pytest.MonkeyPatch, bad: Bad) -> None:
    """The gradient of the first parameter is not a number when the bad data come."""
    import llmq_nb.train.engine as engine

    real_step, real_update, flag = CpuEngine.train_step, engine.optimizer_step, [False]

    def train_step(self: CpuEngine, batch: StepBatch, **values: Any) -> StepResult:
        flag[0] = bad(batch, values["step"])
        return real_step(self, batch, **values)

    def optimizer_step(ranks: Any) -> None:
        if flag[0]:
            ranks[0].states[0].gradient.data.reshape(-1)[0] = np.nan
        real_update(ranks)

    monkeypatch.setattr(CpuEngine, "train_step", train_step)
    monkeypatch.setattr(engine, "optimizer_step", optimizer_step)


def by_hand(config: Any, resume: str, position: Any = None, left_out: tuple[Any, ...] = ()) -> Any:
    """The parts of the last state from a checkpoint (or the start) on, led to `position`."""
    with Trainer(config, resume=resume, announce=lambda _: None) as trainer:
        if position is not None:
            trainer.loader.close()
            trainer.loader = setup.open_loader(config, trainer.data.train, position)
            trainer._waiting = None
            trainer.progress.position = position
        trainer.progress.left_out = left_out
        while not trainer.finished:
            trainer.step()
        return parts(trainer)


def parts(trainer: Trainer) -> dict[str, bytes]:
    return {
        f"{part}/{s.parameter.name}": trainer.engine.read(getattr(s, part)).tobytes()
        for s in trainer.engine.states
        for part in ("master", "m", "v", "weight")
    }


def last_parts(config: Any) -> dict[str, bytes]:
    with Trainer(config, announce=lambda _: None) as trainer:
        assert trainer.progress.step == STEPS
        return parts(trainer)


def plain(config: Any) -> Any:
    """The same run without policies."""
    log = dataclasses.replace(config.log, spike="off", non_finite="stop")
    return dataclasses.replace(config, log=log)


@pytest.mark.parametrize("resume", [False, True])
def test_spike_rollback(resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the checkpoint's weights, with the data after the bad step's; also after a crash."""
    config = ready(tmp_path, monkeypatch, spike="rollback")
    hits = inject_spike(monkeypatch, batch_of_step(BAD))
    if resume:
        crash_at(monkeypatch, 26, call=2)
        with pytest.raises(RuntimeError, match="crash"):
            run(config)
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        hits += inject_spike(monkeypatch, batch_of_step(BAD))
    assert run(config) == 0
    assert BAD in hits
    ours = last_parts(config)
    after_bad = dataclasses.replace(position_at(config, 24), window=2 * BAD)
    assert ours == by_hand(plain(config), "out/checkpoints/step_00000024", after_bad)
    steps = [r for r in read_log(Path("out/log.jsonl")) if r["log"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert not any(r["skipped"] or r["spike"] for r in steps)
    lines = [r["message"] for r in read_log(Path("out/log.jsonl")) if r["log"] == "info"]
    assert any(line.startswith(f"step {BAD}: the loss jumped") for line in lines)


def position_at(config: Any, step: int) -> Any:
    path = f"out/checkpoints/step_{step:08}"
    with Trainer(config, resume=path, announce=lambda _: None) as trainer:
        assert trainer.progress.step == step
        return trainer.progress.position


def crash_at(monkeypatch: pytest.MonkeyPatch, step: int, call: int) -> None:
    """The machine goes down when `step` begins for the `call`-th time."""
    real, calls = CpuEngine.train_step, []

    def train_step(self: CpuEngine, batch: StepBatch, **values: Any) -> StepResult:
        if values["step"] + 1 == step:
            calls.append(step)
            if len(calls) == call:
                raise RuntimeError("crash")
        return real(self, batch, **values)

    monkeypatch.setattr(CpuEngine, "train_step", train_step)


@pytest.mark.parametrize("resume", [False, True])
def test_spike_skip(resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a run that makes the bad step without its update and never went back."""
    config = ready(tmp_path, monkeypatch, spike="skip")
    inject_spike(monkeypatch, batch_of_step(BAD))
    if resume:
        crash_at(monkeypatch, 30, call=1)
        with pytest.raises(RuntimeError, match="crash"):
            run(config)
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        inject_spike(monkeypatch, batch_of_step(BAD))
    assert run(config) == 0
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    oracle = dataclasses.replace(
        plain(config),
        run=dataclasses.replace(config.run, out_dir="oracle"),
        log=dataclasses.replace(config.log, spike="off", non_finite="skip"),
    )
    inject_nan(monkeypatch, batch_of_step(BAD))
    with Trainer(oracle, announce=lambda _: None) as trainer:
        made = [trainer.step() for _ in range(STEPS)]
        assert [m.step for m in made if m.skipped] == [BAD]
        assert last_parts(config) == parts(trainer)
    steps = [r for r in read_log(Path("out/log.jsonl")) if r["log"] == "step"]
    assert [r["step"] for r in steps if r["skipped"]] == [BAD]
    assert steps[BAD - 1]["spike"]
    assert steps[BAD - 1]["loss"] == pytest.approx(made[BAD - 1].loss + 10)
    for ours, theirs in zip(steps, made, strict=True):
        if ours["step"] != BAD:
            assert (ours["loss"], ours["grad_norm"]) == (theirs.loss, theirs.grad_norm)


def test_spike_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ruined weights are saved nowhere."""
    config = ready(tmp_path, monkeypatch, spike="stop")
    inject_spike(monkeypatch, batch_of_step(BAD))
    with pytest.raises(MachineError, match=f"step {BAD}: the loss jumped .*step_00000024.*spike"):
        run(config)
    names = sorted(p.name for p in Path("out/checkpoints").iterdir())
    assert names == [f"step_{n:08}" for n in (8, 16, 24)]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run(config) == 0
    healthy = ready(tmp_path / "healthy", monkeypatch, spike="stop")
    assert run(healthy) == 0
    last = f"out/checkpoints/step_{STEPS:08}"
    ours, theirs = (hashes(f / last) for f in (tmp_path, tmp_path / "healthy"))
    assert ours == theirs


def test_off_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ready(tmp_path, monkeypatch)
    hits = inject_spike(monkeypatch, batch_of_step(BAD))
    assert run(config) == 0 and hits == [BAD]
    steps = [r for r in read_log(Path("out/log.jsonl")) if r["log"] == "step"]
    assert not any(r["spike"] or r["skipped"] for r in steps)


def test_non_finite_rollback_before_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back to the start: the initial weights, moments of zero, data from the sixth step's on."""
    config = ready(tmp_path, monkeypatch, non_finite="rollback")
    inject_nan(monkeypatch, batch_of_step(5))
    assert run(config) == 0
    ours = last_parts(config)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    position = dataclasses.replace(position_at(config, 8), epoch=0, window=10)
    assert ours == by_hand(plain(config), "start", position)


def test_non_finite_rollback_with_an_e4m3_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ready(tmp_path, monkeypatch, non_finite="rollback")
    optimizer = dataclasses.replace(config.optimizer, m="e4m3", v="bf16", master="bf16")
    config = dataclasses.replace(config, optimizer=optimizer)
    inject_nan(monkeypatch, batch_of_step(3))
    assert run(config) == 0
    ours = last_parts(config)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    position = dataclasses.replace(position_at(config, 8), epoch=0, window=6)
    assert ours == by_hand(plain(config), "start", position)


@pytest.mark.parametrize("kind", ["spike", "non_finite"])
def test_going_back_ends(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that no data cure: after log.rollbacks times the run stops, nothing bad is saved."""
    config = ready(tmp_path, monkeypatch, **{kind: "rollback"}, rollbacks=2)
    inject = inject_spike if kind == "spike" else inject_nan
    calls: list[int] = []

    def always(_: StepBatch, step: int) -> bool:
        calls.extend([step] * (step + 1 == BAD))
        return step + 1 == BAD

    inject(monkeypatch, always)
    with pytest.raises(MachineError, match="2 times already .log.rollbacks.*step_00000024"):
        run(config)
    assert len(calls) == 3
    names = sorted(p.name for p in Path("out/checkpoints").iterdir())
    assert names == [f"step_{n:08}" for n in (8, 16, 24)]


def test_the_run_goes_back_to_the_checkpoint_it_was_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another folder, and newer than what its own folder has."""
    config = ready(tmp_path, monkeypatch, spike="rollback")
    first = dataclasses.replace(config, run=dataclasses.replace(config.run, out_dir="first"))
    assert run(first) == 0
    source = "first/checkpoints/step_00000024"
    inject_spike(monkeypatch, batch_of_step(BAD))
    assert run(config, resume=source) == 0
    ours = last_parts(config)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with Trainer(first, resume=source, announce=lambda _: None) as trainer:
        position = dataclasses.replace(trainer.progress.position, window=2 * BAD)
    assert ours == by_hand(plain(first), source, position)


def test_only_updates_tell_what_losses_are_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a step that was left out nor a spike is what later losses are compared with."""
    config = ready(tmp_path, monkeypatch, non_finite="skip", spike="skip")
    inject_nan(monkeypatch, batch_of_step(4))
    inject_spike(monkeypatch, batch_of_step(25))
    with Trainer(config, announce=lambda _: None) as trainer:
        made = [trainer.step() for _ in range(25)]
        assert [m.step for m in made if m.skipped] == [4]
        assert [m.step for m in made if m.spike] == [25]
        wanted = [m.loss for m in made if m.step not in (4, 25)]
        assert list(trainer.progress.recent) == wanted
