"""Runs with m and v on the disk: the bits of one in memory, through checkpoints; a failing disk."""

import errno
import os
from pathlib import Path

import pytest

from llmq_nb.config_file import load_config
from llmq_nb.core.errors import MachineError
from llmq_nb.offload.disk import OnDisk
from llmq_nb.plan import places
from llmq_nb.train.checkpoint import latest_checkpoint
from llmq_nb.train.run import run
from llmq_nb.train.trainer import Trainer
from tests.e2e.runs import make_run

SETS = {"checkpoint": {"every": 3}, "optimizer": {"m": "e4m3"}, "eval": {"every": 0}}


@pytest.fixture(autouse=True)
def slices_of_a_tiny_model(monkeypatch):
    monkeypatch.setattr(places, "SLICE", 1024)
    monkeypatch.setattr(places, "STREAMED", 100)


def train(folder: Path, disk: tuple[str, ...], steps: int, resume: str = "auto"):
    """Steps from the newest checkpoint on, and one afterwards; losses, and all states as bits."""
    make_run(folder, SETS, {"memory": {"disk": list(disk)}})
    os.chdir(folder)
    with Trainer(load_config("config.toml"), resume=resume, announce=lambda line: None) as trainer:
        trainer.make_out_dir()
        losses = [trainer.step().loss for _ in range(steps)]
        trainer.save()
        on_disk = [isinstance(s.v.data, OnDisk) for s in trainer.engine.states]
        assert any(on_disk) == bool(disk) and not all(on_disk)
        state = [
            trainer.engine.read(t).tobytes()
            for s in trainer.engine.states
            for t in (s.master, s.m, s.m_scale, s.v)
            if t is not None
        ]
    return losses, state


def test_a_checkpoint_is_the_same_wherever_the_states_live(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = train(tmp_path / "plain", (), 6)
    first, _ = train(tmp_path / "disk", ("m", "v"), 3)
    assert os.listdir(tmp_path / "disk" / "out") == ["checkpoints"]  # no file of the states
    checkpoint = str(tmp_path / "disk" / "out")
    for name, disk in (("disk", ("m", "v")), ("memory", ()), ("one", ("v",))):
        losses, state = train(tmp_path / name, disk, 3, "auto" if name == "disk" else checkpoint)
        assert (first + losses, state) == whole, name
        checkpoint = str(tmp_path / "disk" / "out" / "checkpoints" / "step_00000003")


def test_a_disk_that_fails_in_an_update_leaves_the_checkpoints_as_they_were(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", SETS, {"memory": {"disk": ["m", "v"]}})
    monkeypatch.chdir(folder)
    step, write = Trainer.step, os.pwritev

    def failing(self: Trainer):
        if self.progress.step == 4:
            calls = iter(range(1000))

            def after_some(*args):
                if next(calls) < 5:
                    return write(*args)
                raise OSError(errno.EIO, "worn out")

            monkeypatch.setattr(os, "pwritev", after_some)
        return step(self)

    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(MachineError, match="writing optimizer states .* worn out; they are lost"):
        run(load_config("config.toml"))
    monkeypatch.undo()
    newest = latest_checkpoint(folder / "out" / "checkpoints", verify=True)
    assert newest is not None and newest.name == "step_00000003"
