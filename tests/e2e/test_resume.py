"""Going on: at the end, for more steps, with another split of the batch, from a named folder."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Cli, hashes, listing, make_run, numbers, read_log, write_config

FP32 = {"precision": {"dtype": "fp32"}, "schedule": {"kind": "wsd", "steps": 8}}


@pytest.fixture(scope="module")
def half(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with a constant rate, in fp32; copied for each test."""
    folder = make_run(tmp_path_factory.mktemp("half"), FP32)
    assert cli("train", "config.toml", cwd=folder).code == 0
    return folder


@pytest.fixture(scope="module")
def whole(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with 12 steps: its first 8 are those of `half`."""
    folder = make_run(tmp_path_factory.mktemp("whole"), FP32, {"schedule": {"steps": 12}})
    assert cli("train", "config.toml", cwd=folder).code == 0
    return folder


def copied(folder: Path, tmp_path: Path, *changes: dict[str, dict[str, Any]]) -> Path:
    new = Path(shutil.copytree(folder, tmp_path / "run"))
    write_config(new, FP32, *changes)
    return new


def test_a_finished_run_says_so(half: Path, cli: Cli, tmp_path: Path) -> None:
    folder = copied(half, tmp_path)
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert "already finished: 8 of 8 steps are done" in result.out.splitlines()
    assert numbers(folder / "out") == numbers(half / "out")
    for part in ("checkpoints", "export"):
        assert hashes(folder / "out" / part) == hashes(half / "out" / part)
    assert listing(folder) == listing(half)


def test_more_steps(half: Path, whole: Path, cli: Cli, tmp_path: Path) -> None:
    """A constant rate does not depend on the number of steps, so the longer run has the bits."""
    folder = copied(half, tmp_path, {"schedule": {"steps": 12}})
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert numbers(folder / "out")["steps"] == numbers(whole / "out")["steps"]
    assert hashes(folder / "out/export") == hashes(whole / "out/export")


def test_another_split_of_the_batch(half: Path, whole: Path, cli: Cli, tmp_path: Path) -> None:
    """fp32, the same windows: the loss of a step differs by the order of the sums alone."""
    folder = copied(
        half,
        tmp_path,
        {"schedule": {"steps": 12}, "batch": {"micro_batch": 1, "grad_accumulation": 2}},
    )
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    ours, theirs = numbers(folder / "out")["steps"], numbers(whole / "out")["steps"]
    assert [s[0] for s in ours] == list(range(1, 13))
    assert [s[4] for s in ours] == [s[4] for s in theirs], "supervised tokens"
    assert [s[1] for s in ours] == pytest.approx([s[1] for s in theirs], rel=1e-5)
    assert ours != theirs


@pytest.mark.parametrize("place", ["half/out", "half/out/checkpoints/step_00000006"])
def test_from_a_folder(place: str, half: Path, whole: Path, cli: Cli, tmp_path: Path) -> None:
    """Into a new folder, which has the steps from there on; the old one stays as it is."""
    shutil.copytree(half, tmp_path / "half")
    before = hashes(tmp_path / "half")
    folder = copied(half, tmp_path, {"schedule": {"steps": 12}})
    shutil.rmtree(folder / "out")
    result = cli("train", "config.toml", "--resume", f"../{place}", cwd=folder)
    assert result.code == 0, result.err
    first = 6 if "step" in place else 8
    assert numbers(folder / "out")["steps"] == numbers(whole / "out")["steps"][first:]
    assert hashes(tmp_path / "half") == before


def test_none_begins_anew(half: Path, cli: Cli, tmp_path: Path) -> None:
    folder = copied(half, tmp_path, {"run": {"out_dir": "other"}})
    result = cli("train", "config.toml", "--resume", "none", cwd=folder)
    assert result.code == 0, result.err
    assert numbers(folder / "other") == numbers(half / "out")


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_newest_checkpoint_is_passed_over(
    damage: str, half: Path, cli: Cli, tmp_path: Path
) -> None:
    folder = copied(half, tmp_path)
    newest = folder / "out/checkpoints/step_00000008/m/model-00001.safetensors"
    data = newest.read_bytes()
    changed = data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]  # one bit of one moment
    newest.write_bytes(data[:-1] if damage == "cut" else changed)
    named = cli("train", "config.toml", "--resume", str(newest.parents[1]), cwd=folder)
    assert named.code == 2 and "m/model-00001.safetensors has" in named.error
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert "resumed: step 6" in result.out
    assert numbers(folder / "out") == numbers(half / "out")
    assert hashes(folder / "out/export") == hashes(half / "out/export")
    records = [r for r in read_log(folder / "out") if r["log"] in ("step", "eval")]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]


def test_two_runs_in_one_folder(half: Path, cli: Cli, tmp_path: Path) -> None:
    folder = copied(half, tmp_path, {"schedule": {"steps": 12}})
    before = hashes(folder)
    handle = os.open(folder / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        result = cli("train", "config.toml", cwd=folder)
    finally:
        os.close(handle)
    assert result.code == 2
    assert "another process is training in out: wait for it" in result.error
    assert hashes(folder) == before
    # the first one ends after a real run has taken the folder
    second = """
import os, subprocess, sys
from llmq_nb.train.trainer import Trainer
step = Trainer.step
def beside(self):
    if self.progress.step == 9:
        command = [sys.executable, "-m", "llmq_nb", "train", "config.toml"]
        print("second:", subprocess.run(command, capture_output=True, text=True).stderr)
    return step(self)
Trainer.step = beside
"""
    result = cli("train", "config.toml", cwd=folder, before=second)
    assert result.code == 0, result.err
    assert "second: llmq-nb: another process is training in out" in result.out


def test_a_dry_run_checks_and_writes_no_step(half: Path, cli: Cli, tmp_path: Path) -> None:
    folder = copied(half, tmp_path, {"run": {"out_dir": "other"}})
    result = cli("train", "config.toml", "--dry-run", cwd=folder)
    assert result.code == 0, result.err
    assert "# 8 steps, 0 of them done" in result.out
    assert 'dtype = "fp32"' in result.out
    assert not (folder / "other").exists()
