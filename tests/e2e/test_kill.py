"""A run that is killed, interrupted or stopped anywhere ends with the bits of one that was not.

The oracle is the uninterrupted run: every step's numbers in log.jsonl, every file of the last
checkpoint and of the export. 24 kills -9 in four chains (each resumed run is killed again), at
seeded moments: a file operation of the start, one inside a checkpoint's writing, an evaluation,
any time at all, a file operation of the export.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, Cli, hashes, listing, make_run, numbers, read_log

RECIPES = {
    "defaults": {},
    "fp8": {
        "precision": {"matmul": "e4m3"},
        "optimizer": {"master": "bf16", "m": "e4m3", "v": "bf16"},
        "batch": {"grad_accumulation": 2},
    },
    "fp32": {"precision": {"dtype": "fp32"}, "memory": {"recompute": ["block"], "head_chunks": 2}},
    # 200 windows an epoch: the 30 windows of this run cross no border, those of 12 x 40 do
    "epochs": {"batch": {"micro_batch": 20, "grad_accumulation": 2}, "data": {"packing": "pack"}},
}
AT_TIME = """
import os, signal, threading, time
def end(seconds=%r):
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=end, daemon=True).start()
"""
AT_FILE = """
import os, signal, sys
seen = 0
def watch(event, arguments, text=%r, number=%r):
    global seen
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
        path = os.path.realpath(os.fsdecode(arguments[0])) if isinstance(
            arguments[0], (str, bytes, os.PathLike)) else ""
        if path.startswith(os.getcwd() + os.sep) and text in path:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
"""
IN_EVALUATION = """
import os, signal
from llmq_nb.train.engine import CpuEngine
evaluate, calls = CpuEngine.evaluate, []
def killed(*arguments):
    calls.append(1)
    if len(calls) == %d:
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(*arguments)
CpuEngine.evaluate = killed
"""
AFTER_STEP = """
import os
from llmq_nb.train.trainer import Trainer
step = Trainer.step
def stopped(self):
    metrics = step(self)
    if metrics.step == %d:
        for number in %r:
            os.kill(os.getpid(), number)
    return metrics
Trainer.step = stopped
"""


def outcome(folder: Path) -> tuple:
    out = folder / "out"
    return numbers(out), hashes(out / "checkpoints/step_00000012"), hashes(out / "export")


@pytest.fixture(scope="module")
def whole(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """By recipe: outcome, listing and seconds of the uninterrupted run."""
    runs = {}
    for name, recipe in RECIPES.items():
        folder = make_run(tmp_path_factory.mktemp(name), recipe)
        begin = time.monotonic()
        result = cli("train", "config.toml", cwd=folder)
        assert result.code == 0, result.err
        runs[name] = outcome(folder), listing(folder), time.monotonic() - begin
        assert [s[0] for s in runs[name][0][0]["steps"]] == list(range(1, 13))
        assert [e[0] for e in runs[name][0][0]["evals"]] == [4, 8, 12]
    return runs


def moments(choice: random.Random, seconds: float) -> list[str]:
    """Five ways to be killed, in the order in which a run comes to them."""
    return [
        AT_FILE % ("", choice.randrange(1, 190)),
        AT_FILE % (".config.toml", 2),  # between the write and its new name
        AT_FILE % (f".staging-{3 * choice.randrange(1, 3)}", choice.randrange(1, 24)),
        IN_EVALUATION % choice.randrange(1, 3),
        AT_TIME % (choice.uniform(0.05, 0.5) * seconds),
        AT_FILE % ("export", choice.randrange(1, 20)),
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_killed_anywhere(name: str, whole: dict, cli: Cli, tmp_path: Path) -> None:
    expected, files, seconds = whole[name]
    choice = random.Random(f"kill {name}")
    folder = make_run(tmp_path, RECIPES[name])
    killed = 0
    for before in moments(choice, seconds):
        result = cli("train", "config.toml", "--resume", "auto", cwd=folder, before=before)
        assert result.code in (0, -signal.SIGKILL), result.err
        killed += result.code != 0
        if (folder / "out/log.jsonl").exists():
            text = (folder / "out/log.jsonl").read_bytes()
            assert text.endswith(b"\n") or not text, "a line is one write"
            read_log(folder / "out")
    result = cli("train", "config.toml", "--resume", "auto", cwd=folder)
    assert result.code == 0, result.err
    assert outcome(folder) == expected
    assert listing(folder) == files, "leftovers"
    assert killed >= 5  # the one at any time may find the run finished


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_with_a_checkpoint(
    number: signal.Signals, whole: dict, cli: Cli, tmp_path: Path
) -> None:
    folder = make_run(tmp_path)
    # step 4 is evaluated: the signal cuts that short, and the resumed run makes up for it
    result = cli("train", "config.toml", cwd=folder, before=AFTER_STEP % (4, [int(number)]))
    assert result.code == 128 + number and result.err == ""
    assert "out/checkpoints/step_00000004" in result.out.splitlines()[-1]
    assert numbers(folder / "out")["evals"] == []
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert "resumed: step 4" in result.out
    assert outcome(folder) == whole["defaults"][0]


def test_a_second_interrupt_leaves_at_once(whole: dict, cli: Cli, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    twice = [int(signal.SIGINT)] * 2
    result = cli("train", "config.toml", cwd=folder, before=AFTER_STEP % (5, twice))
    assert result.code == 128 + signal.SIGINT
    assert listing(folder / "out/checkpoints")[0] == "step_00000003"
    assert not (folder / "out/checkpoints/step_00000005").exists()
    assert cli("train", "config.toml", cwd=folder).code == 0
    assert outcome(folder) == whole["defaults"][0]


def test_a_signal_before_the_first_step(cli: Cli, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    early = """
import os, llmq_nb.train.setup as setup
opened = setup.open_data
def stopped(*arguments):
    os.kill(os.getpid(), 15)
    return opened(*arguments)
setup.open_data = stopped
"""
    result = cli("train", "config.toml", cwd=folder, before=early)
    assert result.code == 128 + 15
    assert result.out.splitlines()[-1] == "stopped by signal 15; no step was made"
    assert listing(folder / "out/checkpoints") == []


def test_the_real_command_line_and_a_real_signal(tmp_path: Path) -> None:
    folder = make_run(tmp_path, {"schedule": {"steps": 10**7}, "log": {"every": 1000}})
    command = [sys.executable, "-m", "llmq_nb", "train", "config.toml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    run = subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=env)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step 1/"):
            break
    run.terminate()
    rest, error = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM and error == ""
    place = rest.splitlines()[-1].partition("checkpoint: ")[2]
    assert (folder / place / "manifest.json").is_file()
