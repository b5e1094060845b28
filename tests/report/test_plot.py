"""plot_runs: what is drawn (read back from the figure's lines), the picture, bad input."""

import math
import re
import struct

import numpy as np
import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.report.jsonl import JsonlLog
from llmq_nb.report.metrics import EvalMetrics, HealthMetrics, StepMetrics, TensorHealth
from llmq_nb.report.plot import draw, plot_runs
from llmq_nb.report.runs import load_run


def make_run(folder, *, steps=(1, 2, 3), loss=lambda s: 4.0 / s, every=2, tokens=100):
    with JsonlLog(folder / "log.jsonl") as log:
        log.cmd(["llmq-nb"])
        for step in steps:
            log.step(
                StepMetrics(
                    step=step, loss=loss(step), grad_norm=step + 0.5, learning_rate=step * 1e-3,
                    tokens=tokens, supervised=tokens, lse_max=1.0, seconds=2.0,
                    tokens_per_second=50.0 * step,
                )
            )  # fmt: skip
            if step % every == 0:
                log.evaluation(
                    EvalMetrics(step=step, loss=loss(step) + 0.25, tokens=7, seconds=1.0)
                )
    return folder


def lines(panel) -> dict[str, tuple[list[float], list[float]]]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in panel.get_lines()
    }


def test_panels_show_the_logged_values(tmp_path):
    run = load_run(make_run(tmp_path / "a", steps=(1, 2, 3, 4)), "a")
    loss, rate, norm, speed = draw([run]).axes
    assert lines(loss) == {
        "a": ([1, 2, 3, 4], [4.0, 2.0, 4.0 / 3, 1.0]),
        "a, validation": ([2, 4], [2.25, 1.25]),
    }
    assert lines(rate) == {"a": ([1, 2, 3, 4], [1e-3, 2e-3, 3e-3, 4e-3])}
    assert lines(norm) == {"a": ([1, 2, 3, 4], [1.5, 2.5, 3.5, 4.5])}
    assert lines(speed) == {"a": ([1, 2, 3, 4], [50.0, 100.0, 150.0, 200.0])}
    titles = [panel.get_title() for panel in (loss, rate, norm, speed)]
    assert [re.split(" ", t)[0] for t in titles] == ["Loss", "Learning", "Gradient", "Speed"]


def test_health_adds_two_panels_of_the_worst_tensor(tmp_path):
    for name, steps in (("fp8", (1, 2, 3, 4)), ("bf16", (1, 2))):
        make_run(tmp_path / name, steps=steps)
    with JsonlLog(tmp_path / "fp8" / "log.jsonl", resumed_step=4) as log:
        for step in (2, 4):
            tensors = tuple(
                TensorHealth(
                    name="qkv.input", layer=layer, format="e4m3", absmax=1.0,
                    underflowed=0.01 * step * (layer + 1), saturated=0.25 / (layer + step),
                )
                for layer in range(2)
            )  # fmt: skip
            log.health(HealthMetrics(step=step, lse_max=1.0, tensors=tensors))
    with JsonlLog(tmp_path / "bf16" / "log.jsonl", resumed_step=4) as log:
        log.health(HealthMetrics(step=2, lse_max=1.0, tensors=()))
    runs = [load_run(tmp_path / name, name) for name in ("fp8", "bf16")]
    axes = draw(runs).axes
    panels = {panel.get_title().split(",")[0]: lines(panel) for panel in axes}
    assert len(axes) == 6
    assert panels["FP8 underflow"]["fp8"] == ([2, 4], pytest.approx([4.0, 8.0]))
    assert panels["FP8 saturation"]["fp8"] == ([2, 4], pytest.approx([12.5, 6.25]))
    assert panels["FP8 underflow"]["bf16"] == ([], [])
    assert len(draw(runs[1:]).axes) == 4


def test_over_tokens_counts_the_steps_that_were_not_logged(tmp_path):
    """log.every = 5 and 100 tokens a step: record n stands for 500 tokens."""
    run = load_run(make_run(tmp_path / "a", steps=(5, 10, 15)), "a")
    loss = draw([run], over="tokens").axes[0]
    assert lines(loss)["a"][0] == [500, 1000, 1500]
    assert lines(loss)["a, validation"][0] == [1000]
    assert run.summary["tokens"] == "1,500"
    assert run.summary["training time"] == "30 s"


def test_runs_are_drawn_over_each_other_in_their_own_colours(tmp_path):
    runs = [load_run(make_run(tmp_path / n), n) for n in "ab"]
    panels = draw(runs).axes
    assert set(lines(panels[0])) == {"a", "a, validation", "b", "b, validation"}
    assert len({line.get_color() for line in panels[1].get_lines()}) == 2


def test_long_curves_are_smoothed_without_moving(tmp_path):
    """A straight line has itself as its moving mean, at both ends too."""
    run = load_run(make_run(tmp_path / "a", steps=range(1, 301), loss=lambda s: s / 4), "a")
    loss = [line for line in draw([run]).axes[0].get_lines() if line.get_label() == "a"]
    np.testing.assert_allclose(np.asarray(loss[0].get_ydata()), np.arange(1, 301) / 4, rtol=1e-12)


def test_smoothing_is_the_mean_of_a_centred_window_without_nan(tmp_path):
    noise = np.random.default_rng(5).normal(size=301)
    noise[100] = math.nan
    run = load_run(make_run(tmp_path / "a", steps=range(1, 301), loss=lambda s: noise[s]), "a")
    line = next(x for x in draw([run]).axes[0].get_lines() if x.get_label() == "a")
    got = np.asarray(line.get_ydata())
    for index in (0, 1, 50, 99, 150, 299):
        half = min(6, index, 299 - index)  # 300 // 50
        window = noise[1 + index - half : 2 + index + half]
        np.testing.assert_allclose(got[index], np.nanmean(window), rtol=1e-12)


def test_loss_that_is_not_finite_leaves_a_gap(tmp_path):
    run = load_run(make_run(tmp_path / "a", loss=lambda s: math.nan if s == 2 else 1.0), "a")
    y = lines(draw([run]).axes[0])["a"][1]
    assert y[0] == y[2] == 1.0 and math.isnan(y[1])
    assert run.summary["loss (mean of the last 10)"] == "1.0000"
    assert run.summary["validation loss"] == "none"


def test_summary(tmp_path):
    losses = {1: 9.0, 2: 1.0, 3: 3.0, 4: 2.0}
    run = load_run(make_run(tmp_path / "a", steps=(1, 2, 3, 4), loss=losses.get), "a")
    assert run.summary == {
        "run": "a",
        "steps": "4",
        "tokens": "400",
        "loss (mean of the last 10)": "3.7500",
        "validation loss": "2.2500",
        "best validation loss": "1.2500 (step 2)",
        "tokens/s (median)": "125",
        "training time": "8 s",
    }


def test_png_is_1200_by_800(tmp_path):
    out = tmp_path / "new" / "x.png"
    plot_runs([make_run(tmp_path / "a")], out)
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1200, 800)


def test_a_run_may_be_given_by_its_log_and_while_it_writes(tmp_path):
    run = make_run(tmp_path / "a")
    with (run / "log.jsonl").open("a") as file:
        file.write('{"log": "step", "ste')
    assert list(load_run(run / "log.jsonl", "a").steps["step"]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("runs", "out", "says"),
    [
        (["none"], "x.png", "no such run: .*none"),
        (["empty"], "x.png", "no such run: .*empty"),
        (["started"], "x.png", "nothing to plot: no step is logged in .*log.jsonl"),
        (["good", "none"], "x.png", "no such run"),
        ([], "x.png", "no run to plot"),
        (["good"], "x.pdf", "cannot draw .*takes a .png or .html"),
        (["good"], "file/x.png", "cannot write"),
        (["good"], "file/x.html", "cannot write"),
    ],
)
def test_bad_input_writes_nothing(tmp_path, runs, out, says):
    make_run(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "started", steps=())
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=says):
        plot_runs([tmp_path / r for r in runs], tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == before
