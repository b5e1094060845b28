"""SIGTERM in each phase of a run: exit code 143 within 10 s, and a complete checkpoint or none.

The oracle is the uninterrupted run: resumed, a stopped run ends with its bits. Compiling has a
stand-in here that would take a minute; tests/e2e/test_sigterm_cuda.py has the real one.
"""

import time
from pathlib import Path

import pytest

from llmq_nb.train.checkpoint import latest_checkpoint
from tests.e2e.runs import Cli, Result, listing, make_run, numbers
from tests.e2e.test_kill import outcome

# now(): SIGTERM to this process, and when it was sent
SEND = """
import os, signal, time
def now():
    if not os.path.exists("sent"):
        with open("sent", "w") as file:
            file.write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGTERM)
"""
COMPILE = (
    SEND
    + """
import llmq_nb.train.trainer as trainer
made = trainer.make_engine
def slow(*arguments):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        now()
        sum(range(100_000))
    return made(*arguments)
trainer.make_engine = slow
"""
)
TOKENIZE = (
    SEND
    + """
import llmq_nb.data.store_writer as writer
check = writer.StoreWriter._check_ids
def stopped(self, ids):
    now()
    return check(self, ids)
writer.StoreWriter._check_ids = stopped
"""
)
EVALUATION = (
    SEND
    + """
from llmq_nb.train.engine import CpuEngine
evaluate, calls = CpuEngine.evaluate, []
def stopped(*arguments):
    calls.append(1)
    if len(calls) == 3:  # the first of the second evaluation's two
        now()
    return evaluate(*arguments)
CpuEngine.evaluate = stopped
"""
)
UPDATE = (
    SEND
    + """
from llmq_nb.model.engine_cpu import CpuOps
adamw, calls = CpuOps.adamw, []
def stopped(self, *arguments, **keywords):
    calls.append(1)
    if len(calls) == 100:
        now()
    return adamw(self, *arguments, **keywords)
CpuOps.adamw = stopped
"""
)
SAVE = (
    SEND
    + """
import sys
seen = []
def watch(event, arguments):
    if event == "open" and ".staging-6" in str(arguments[0]):
        seen.append(1)
        if len(seen) == 4:
            now()
sys.addaudithook(watch)
"""
)
EXPORT = (
    SEND
    + """
import llmq_nb.io.export as export
write = export.write_sharded
def stopped(*arguments, **keywords):
    now()
    return write(*arguments, **keywords)
export.write_sharded = stopped
"""
)


def stopped(cli: Cli, folder: Path, before: str) -> Result:
    result = cli("train", "config.toml", cwd=folder, before=before)
    seconds = time.time() - float((folder / "sent").read_text())
    assert result.code == 143 and result.err == "", (result.code, result.err)
    assert seconds < 10
    return result


@pytest.fixture(scope="module")
def whole(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = make_run(tmp_path_factory.mktemp("whole"))
    assert cli("train", "config.toml", cwd=folder).code == 0
    return outcome(folder), listing(folder)


def assert_goes_on(cli: Cli, folder: Path, whole: tuple, start: str) -> None:
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert start in result.out
    (folder / "sent").unlink()
    assert (outcome(folder), listing(folder)) == whole


@pytest.mark.parametrize("phase", [COMPILE, TOKENIZE], ids=["compile", "tokenize"])
def test_before_the_first_step_nothing_is_written(
    phase: str, cli: Cli, tmp_path: Path, whole: tuple
) -> None:
    folder = make_run(tmp_path)
    last = stopped(cli, folder, phase).out.splitlines()[-1]
    assert last == "stopped by signal 15; no step was made"
    assert not (folder / "out").exists()
    assert_goes_on(cli, folder, whole, "step 1/12")


@pytest.mark.parametrize(
    ("phase", "step", "evaluated"),
    [(EVALUATION, 8, [4]), (UPDATE, None, None), (SAVE, 6, [4])],
    ids=["evaluation", "optimizer step", "save"],
)
def test_later_there_is_a_complete_checkpoint(
    phase: str,
    step: int | None,
    evaluated: list[int] | None,
    cli: Cli,
    tmp_path: Path,
    whole: tuple,
) -> None:
    """Of the very step in which the signal came; its hashes are compared."""
    folder = make_run(tmp_path)
    last = stopped(cli, folder, phase).out.splitlines()[-1]
    newest = latest_checkpoint(folder / "out/checkpoints", verify=True)
    assert (
        newest is not None
        and last == f"stopped by signal 15; checkpoint: {newest.relative_to(folder)}"
    )
    steps = [s[0] for s in numbers(folder / "out")["steps"]]
    assert newest.name == f"step_{steps[-1]:08d}" and steps == list(range(1, steps[-1] + 1))
    assert step is None or steps[-1] == step
    if evaluated is not None:
        assert [e[0] for e in numbers(folder / "out")["evals"]] == evaluated
    assert_goes_on(cli, folder, whole, f"resumed: step {steps[-1]}")


def test_after_the_last_step_the_checkpoint_is_there_and_no_half_export(
    cli: Cli, tmp_path: Path, whole: tuple
) -> None:
    folder = make_run(tmp_path)
    last = stopped(cli, folder, EXPORT).out.splitlines()[-1]
    assert last == "stopped by signal 15; checkpoint: out/checkpoints/step_00000012"
    assert latest_checkpoint(folder / "out/checkpoints", verify=True) is not None
    assert [name for name in listing(folder / "out") if "export" in name] == []
    assert_goes_on(cli, folder, whole, "resumed: step 12")
