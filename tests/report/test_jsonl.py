"""log.jsonl: every line strict JSON (parsed with NaN and infinity refused), resume, torn lines."""

import datetime
import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.report.jsonl import JsonlLog, read_log
from llmq_nb.report.metrics import EvalMetrics, HealthMetrics, StepMetrics, TensorHealth


def step_metrics(step: int, loss: float = 2.5, **changes) -> StepMetrics:
    values: dict[str, Any] = dict(
        step=step, loss=loss, grad_norm=1.0, learning_rate=1e-3, tokens=8, supervised=7,
        lse_max=9.0, seconds=0.5, tokens_per_second=16.0,
    )  # fmt: skip
    return StepMetrics(**(values | changes))


def health_metrics(step: int, absmax: float = 2.0) -> HealthMetrics:
    tensor = TensorHealth(
        name="qkv.input", layer=3, format="e4m3", absmax=absmax, underflowed=0.25, saturated=0.125
    )
    return HealthMetrics(step=step, lse_max=9.0, tensors=(tensor,))


def no_constant(text: str):
    raise AssertionError(f"{text} is no JSON")


def strict(path: Path) -> list[dict]:
    """Every line of the file by a parser that takes JSON and nothing else."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    lines = data.decode("ascii").split("\n")[:-1]
    return [json.loads(line, parse_constant=no_constant) for line in lines]


def test_records_of_every_kind(tmp_path):
    path = tmp_path / "run" / "log.jsonl"
    with JsonlLog(path) as log:
        log.cmd(["llmq-nb", "train", 'a "quoted" \\ name\n.toml'])
        log.config('[run]\nname = "x"\n')
        log.step(step_metrics(1))
        log.health(health_metrics(1, absmax=math.inf))
        log.evaluation(EvalMetrics(step=1, loss=2.25, tokens=100, seconds=0.125))
        log.checkpoint(1, Path("/runs/x/step_00000001"), 0.5)
        log.info("took the cpu", why="no driver")
    records = strict(path)
    times = [datetime.datetime.fromisoformat(r.pop("time")) for r in records]
    assert all(t.tzinfo is not None for t in times) and times == sorted(times)
    assert records == [
        {"log": "cmd", "argv": ["llmq-nb", "train", 'a "quoted" \\ name\n.toml']},
        {"log": "config", "toml": '[run]\nname = "x"\n'},
        {
            "log": "step", "step": 1, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3,
            "tokens": 8, "supervised": 7, "lse_max": 9.0, "seconds": 0.5,
            "tokens_per_second": 16.0, "skipped": False, "non_finite_tensor": None,
            "spike": False,
        },
        {
            "log": "health", "step": 1, "lse_max": 9.0,
            "tensors": [
                {
                    "name": "qkv.input", "layer": 3, "format": "e4m3", "absmax": None,
                    "absmax_text": "inf", "underflowed": 0.25, "saturated": 0.125,
                }
            ],
        },
        {"log": "eval", "step": 1, "loss": 2.25, "tokens": 100, "seconds": 0.125},
        {"log": "checkpoint", "step": 1, "path": "/runs/x/step_00000001", "seconds": 0.5},
        {"log": "info", "message": "took the cpu", "why": "no driver"},
    ]  # fmt: skip


def test_the_file_is_valid_after_every_write(tmp_path):
    with JsonlLog(tmp_path / "log.jsonl") as log:
        for step in range(1, 20):
            log.step(step_metrics(step))
            assert [r["step"] for r in strict(tmp_path / "log.jsonl")] == list(range(1, step + 1))


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (np.float32("nan"), "nan")],
)
def test_what_is_not_finite_is_null_with_its_text(tmp_path, value, text):
    with JsonlLog(tmp_path / "x") as log:
        log.step(step_metrics(1, loss=value))
        log.info("nested", values={"a": value, "b": [1.0, value]})
    step, info = strict(tmp_path / "x")
    assert step["loss"] is None and step["loss_text"] == text
    assert "grad_norm_text" not in step
    assert info["values"] == {"a": None, "a_text": text, "b": [1.0, None]}


def test_numpy_scalars_and_paths(tmp_path):
    values = {"a": np.int64(7), "b": np.float32(0.5), "c": np.bool_(True), "d": Path("/x")}
    with JsonlLog(tmp_path / "x") as log:
        log.info("m", **values)
    record = strict(tmp_path / "x")[0]
    assert {k: record[k] for k in "abcd"} == {"a": 7, "b": 0.5, "c": True, "d": "/x"}


@settings(max_examples=100, deadline=None)
@given(message=st.text(), number=st.floats(), count=st.integers())
def test_any_value_is_read_back(tmp_path_factory, message, number, count):
    path = tmp_path_factory.mktemp("log") / "x"
    with JsonlLog(path) as log:
        log.info(message, number=number, count=count)
    (record,) = strict(path)
    assert record["message"] == message and record["count"] == count
    if math.isfinite(number):
        assert record["number"] == number
    else:
        assert record["number"] is None and record["number_text"] == str(number)


def test_bytes_that_are_no_text_stay_readable(tmp_path):
    argument = os.fsdecode(b"caf\xe9.toml")
    with JsonlLog(tmp_path / "x") as log:
        log.cmd([argument])
    assert strict(tmp_path / "x")[0]["argv"] == ["caf?.toml"]


def test_one_write_a_line_to_the_end_of_the_file(tmp_path, monkeypatch):
    calls = []
    write = os.write
    monkeypatch.setattr("os.write", lambda file, data: calls.append(data) or write(file, data))
    with JsonlLog(tmp_path / "x") as log, JsonlLog(tmp_path / "x") as other:
        log.info("a" * 10_000)
        other.info("b")
        log.info("c")
    assert [c.count(b"\n") for c in calls] == [1, 1, 1]
    assert [r["message"][0] for r in strict(tmp_path / "x")] == ["a", "b", "c"]


def test_every_torn_end_is_removed_on_reopening(tmp_path):
    with JsonlLog(tmp_path / "x") as log:
        log.info("one")
        log.info("two é")
    data = (tmp_path / "x").read_bytes()
    first = data.index(b"\n") + 1
    for size in range(first, len(data)):
        (tmp_path / "x").write_bytes(data[:size])
        assert [r["message"] for r in read_log(tmp_path / "x")] == ["one"]
        with JsonlLog(tmp_path / "x") as log:
            log.info("three")
        assert [r["message"] for r in strict(tmp_path / "x")] == ["one", "three"]
    assert os.listdir(tmp_path) == ["x"]


def test_reopening_drops_the_records_after_the_resumed_step(tmp_path):
    path = tmp_path / "x"
    with JsonlLog(path) as log:
        log.cmd(["first"])
        for step in range(1, 6):
            log.step(step_metrics(step))
            log.evaluation(EvalMetrics(step=step, loss=1.0, tokens=1, seconds=1.0))
        log.checkpoint(3, Path("p"), 1.0)
        log.checkpoint(5, Path("p"), 1.0)
        log.info("no step")
        log.info("late", step=4)
    with JsonlLog(path, resumed_step=3) as log:
        log.cmd(["second"])
        log.step(step_metrics(4, loss=9.0))
    records = strict(path)
    assert [r["step"] for r in records if r["log"] == "step"] == [1, 2, 3, 4]
    assert [r["step"] for r in records if r["log"] == "eval"] == [1, 2, 3]
    assert [r["step"] for r in records if r["log"] == "checkpoint"] == [3]
    assert [r["message"] for r in records if r["log"] == "info"] == ["no step"]
    assert [r["argv"] for r in records if r["log"] == "cmd"] == [["first"], ["second"]]
    assert records[-1]["loss"] == 9.0


def test_reopening_without_anything_to_drop_does_not_rewrite(tmp_path):
    with JsonlLog(tmp_path / "x") as log:
        log.step(step_metrics(1))
    inode = (tmp_path / "x").stat().st_ino
    with JsonlLog(tmp_path / "x", resumed_step=1):
        pass
    assert (tmp_path / "x").stat().st_ino == inode


def test_read_log_takes_the_last_of_a_step_made_twice(tmp_path):
    path = tmp_path / "x"
    with JsonlLog(path) as log:
        for step, loss in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5)]:
            log.step(step_metrics(step, loss=loss))
        log.info("a")
        log.info("a")
    records = read_log(path)
    assert [(r.get("step"), r.get("loss")) for r in records] == [
        (1, 1.0), (3, 3.0), (2, 2.5), (None, None), (None, None)
    ]  # fmt: skip


@pytest.mark.parametrize("taken", [0, 5])
def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch, taken):
    write = os.write

    def full(file, data):
        if taken == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:taken])

    with JsonlLog(tmp_path / "x") as log:
        log.info("one")
        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            with pytest.raises(MachineError, match="cannot write .*No space left"):
                log.info("two")
        log.info("three")
    assert [r["message"] for r in strict(tmp_path / "x")] == ["one", "three"]


def test_places_that_cannot_be_written_or_read(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        JsonlLog(tmp_path / "file" / "log.jsonl")
    with pytest.raises(UserError, match="cannot write"):
        JsonlLog(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        read_log(tmp_path / "none")
    with pytest.raises(UserError, match="cannot read"):
        read_log(tmp_path)
