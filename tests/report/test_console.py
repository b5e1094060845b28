"""Console: the text that a person sees, plain and on a terminal."""

import io
import re
from typing import Any

import pytest

from llmq_nb.report import console as module
from llmq_nb.report.console import Console, announce
from llmq_nb.report.metrics import EvalMetrics, HealthMetrics, StepMetrics, TensorHealth


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def step(n: int, **changes) -> StepMetrics:
    values: dict[str, Any] = dict(
        step=n, loss=2.5, grad_norm=0.75, learning_rate=1e-3, tokens=8, supervised=7, lse_max=9.0,
        seconds=2.0, tokens_per_second=12345.6,
    )  # fmt: skip
    return StepMetrics(**(values | changes))


def evaluation(n: int, loss: float) -> EvalMetrics:
    return EvalMetrics(step=n, loss=loss, tokens=20480, seconds=1.5)


def test_plain_line_has_every_figure():
    out = io.StringIO()
    with Console(10, file=out) as console:
        console.step(step(1))
        console.evaluation(evaluation(1, 2.25))
        console.step(step(2))
    assert out.getvalue().splitlines() == [
        "step 1/10  loss 2.5000  norm 0.75  lr 1.00e-03  12,346 tokens/s  ETA 0:00:18",
        "step 1: validation loss 2.2500 (20,480 tokens, 1.5 s)",
        "step 2/10  loss 2.5000  val loss 2.2500  norm 0.75  lr 1.00e-03  12,346 tokens/s"
        "  ETA 0:00:16",
    ]


def health(n: int, *tensors: tuple[str, int, float, float, float]) -> HealthMetrics:
    found = tuple(
        TensorHealth(
            name=name,
            layer=layer,
            format="e4m3",
            absmax=absmax,
            underflowed=underflowed,
            saturated=saturated,
        )
        for name, layer, absmax, underflowed, saturated in tensors
    )
    return HealthMetrics(step=n, lse_max=12.345678, tensors=found)


def test_health_is_one_line_with_the_worst_tensors():
    out = io.StringIO()
    tensors = [("qkv.input", 0, 1.0, 0.01, 0.0), ("down.gradient", 3, 1.0, 0.0625, 0.001)]
    with Console(10, file=out) as console:
        console.health(health(4, *tensors, ("out.weight", 1, 1.0, 0.0, 0.0005)))
        console.health(health(5, *tensors, ("out.input", 1, float("inf"), 0.0, 0.0)))
        console.health(health(6))
    assert out.getvalue().splitlines() == [
        "step 4: FP8 underflowed at most 6.25% (down.gradient, layer 3, e4m3), saturated 0.10%"
        " (down.gradient, layer 3, e4m3), largest lse 12.35",
        "step 5: FP8 absmax inf (out.input, layer 1, e4m3), largest lse 12.35",
    ]


def shown(out: io.StringIO) -> list[int]:
    return [int(n) for n in re.findall(r"^step (\d+)/", out.getvalue(), re.MULTILINE)]


def test_fast_steps_make_a_line_each_n_steps_and_first_and_last(monkeypatch):
    Clock(monkeypatch)
    out = io.StringIO()
    with Console(1003, file=out, every=250) as console:
        for n in range(1, 1004):
            console.step(step(n))
    assert shown(out) == [1, 251, 501, 751, 1001, 1003]


def test_a_run_makes_about_a_hundred_lines(monkeypatch):
    Clock(monkeypatch)
    out = io.StringIO()
    with Console(12345, file=out) as console:
        for n in range(1, 12346):
            console.step(step(n))
    assert len(shown(out)) in range(98, 103)


def test_slow_steps_make_a_line_after_five_seconds(monkeypatch):
    clock = Clock(monkeypatch)
    out = io.StringIO()
    with Console(1000, file=out, every=900) as console:
        for n in range(1, 12):
            clock.now += 1.5
            console.step(step(n))
    assert shown(out) == [1, 5, 9]  # four steps are 6 s, three only 4.5 s


def test_resumed_runs_show_their_first_step_and_the_rest_of_the_time(monkeypatch):
    Clock(monkeypatch)
    out = io.StringIO()
    with Console(1000, file=out, done_steps=500, every=400) as console:
        console.step(step(501, seconds=300.0))
        console.step(step(502))
    assert shown(out) == [501]
    assert out.getvalue().endswith("ETA 1 d 17:35:00\n")  # 499 * 300 s = 149700 s


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"non_finite_tensor": "a.weight"}, "the gradient of a.weight is not finite"),
        ({"supervised": 0}, "no supervised token"),
        ({}, "the gradient norm is not finite"),
    ],
)
def test_skipped_steps_are_said_with_their_reason(monkeypatch, changes, reason):
    Clock(monkeypatch)
    out = io.StringIO()
    with Console(1000, file=out, every=900) as console:
        console.step(step(1))
        console.step(step(2, skipped=True, **changes))
    assert out.getvalue().splitlines()[1:] == [f"step 2: no update, {reason}"]


def test_a_file_or_pipe_gets_plain_lines():
    assert Console(10, file=io.StringIO()).plain
    assert not Console(10, plain=False, file=io.StringIO()).plain


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_loss_speed_and_eta(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Console(10, file=out, done_steps=2) as console:
        assert not console.plain
        console.step(step(3))
        console.evaluation(evaluation(3, 2.25))
        console.line("wrote [bold]runs/x[/bold] :smile:")
        console.step(step(4, loss=1.5))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "3: validation loss 2.2500" in text
    assert "wrote [bold]runs/x[/bold] :smile:" in text  # no markup, no emoji
    last = [line for line in re.split(r"[\r\n]+", text) if "4/10" in line][-1]
    assert "loss 1.5000  val loss 2.2500  12,346 tokens/s" in last
    assert "ETA" in last
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")  # cursor is back


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_is_gone_does_not_end_the_training():
    with Console(10, file=Broken()) as console:
        console.step(step(1))
        console.line("x")


def test_announce_makes_one_line(capsys):
    announce("device cpu:\n  no driver")
    assert capsys.readouterr().out == "device cpu: no driver\n"
