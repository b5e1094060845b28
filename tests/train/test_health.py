"""FP8 health of the cpu engine against counts of the operands that went through its products.

The operands are copied where the products get them; their codes are the oracle's (tests/oracles),
which searches the list of a format's values.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from llmq_nb.model.engine_cpu import CpuOps, linear
from llmq_nb.model.parameters import model_parameters
from llmq_nb.train.engine import CpuEngine
from llmq_nb.train.health import is_due
from llmq_nb.train.initial import set_weights
from tests import oracles
from tests.e2e.runs import Cli, make_run, read_log
from tests.model.harness import make_config, random_batch, random_weights, small_model
from tests.oracles.rounding import largest
from tests.train.test_engine_steps import step_batch

T = 16
MODEL = small_model(qkv_bias=True)
PRODUCTS = ("qkv", "out", "gate_up", "down")
FACTS = {"step": 0, "updates": 0, "learning_rate": 1e-2}


def make_engine(layers=(), **options) -> CpuEngine:
    config = make_config(micro_batch=2, seq_len=T, precision="e4m3", **options)
    precision = dataclasses.replace(config.precision, bf16_layers=layers)
    engine = CpuEngine(dataclasses.replace(config, precision=precision), MODEL)
    weights = random_weights(MODEL, model_parameters(MODEL), 3)
    for p, value in weights:
        if (p.layer, p.field) == (1, "down"):
            value[0, 0] = 512.0  # beside it small ones underflow
    set_weights(engine, iter(weights))
    return engine


def make_batch(micro_batches: int = 1):
    batch = random_batch(np.random.default_rng(4), 2 * micro_batches, T, MODEL.V)
    return step_batch(batch.split(2))


def spied(monkeypatch: pytest.MonkeyPatch, engine: CpuEngine) -> dict[tuple[str, int], np.ndarray]:
    """Operands of the last micro-step by (name, layer); weights after the update are read later."""
    seen: dict[tuple[str, int], np.ndarray] = {}
    weights = {
        id(getattr(engine.ranks[0].model.weights.get(layer), name)): (name, layer)
        for layer in range(MODEL.L)
        for name in PRODUCTS
    }
    forward, backward = CpuOps.linear, CpuOps.linear_backward

    def linear_(self, y, x, weight, bias=None):
        if id(weight) in weights:
            name, layer = weights[id(weight)]
            seen[f"{name}.input", layer] = np.array(x.data)
        forward(self, y, x, weight, bias)

    def linear_backward_(self, dx, dweight, dbias, dy, x, weight, *, accumulate):
        if id(weight) in weights:
            name, layer = weights[id(weight)]
            seen[f"{name}.gradient", layer] = np.array(dy.data)
        backward(self, dx, dweight, dbias, dy, x, weight, accumulate=accumulate)

    monkeypatch.setattr(CpuOps, "linear", linear_)
    monkeypatch.setattr(CpuOps, "linear_backward", linear_backward_)
    return seen


@pytest.mark.parametrize("recompute", [(), ("norm", "swiglu"), ("block",)])
@pytest.mark.parametrize(("gradient", "layers"), [("e4m3", ()), ("e5m2", (0,))])
def test_counts_are_those_of_the_operands(monkeypatch, recompute, gradient, layers):
    engine = make_engine(layers, recompute=recompute, gradient=gradient)
    seen = spied(monkeypatch, engine)
    for step in range(2):  # nothing is left of the first report in the second
        got = engine.train_step(make_batch(2), health=True, **(FACTS | {"step": step}))
        for layer in range(MODEL.L):
            weights = engine.ranks[0].model.weights.get(layer)
            for name in PRODUCTS:
                seen[f"{name}.weight", layer] = getattr(weights, name).data
        assert [(t.name, t.layer) for t in got.health] == [
            (f"{name}.{operand}", layer)
            for layer in range(MODEL.L)
            if layer not in layers
            for name in PRODUCTS
            for operand in ("input", "weight", "gradient")
        ]
        for t in got.health:
            x = seen[t.name, t.layer]
            assert t.format == (gradient if t.name.endswith("gradient") else "e4m3")
            values = np.abs(oracles.decode(oracles.quantize(x, t.format)[0], t.format))
            assert t.absmax == np.abs(x.astype(np.float64)).max()
            assert t.underflowed == np.mean((values == 0) & (x != 0)), t
            assert t.saturated == np.mean(values == largest(t.format)), t
        share = {(t.name, t.layer): t.underflowed for t in got.health}
        assert 0 < share["down.weight", 1] < 0.1
        assert all(t.saturated > 0 for t in got.health)


def test_a_report_changes_no_bit():
    batch = make_batch(2)
    engines = [make_engine(), make_engine()]
    for step in range(3):
        facts = FACTS | {"step": step, "updates": step}
        a, b = (e.train_step(batch, health=i == 0, **facts) for i, e in enumerate(engines))
        assert a.health and not b.health
        assert dataclasses.replace(a, health=()) == b
    for a, b in zip(engines[0].states, engines[1].states, strict=True):
        np.testing.assert_array_equal(a.master.data, b.master.data)


def test_nothing_is_counted_unless_it_is_asked_for(monkeypatch):
    def refuse(_tensor):
        raise AssertionError("counted")

    monkeypatch.setattr(linear, "count_health", refuse)
    make_engine().train_step(make_batch(), **FACTS)


def test_without_fp8_products_there_is_nothing_to_tell():
    engine = CpuEngine(make_config(micro_batch=2, seq_len=T, precision="bf16"), MODEL)
    assert engine.train_step(make_batch(), health=True, **FACTS).health == ()


def test_due_at_multiples_and_at_the_end():
    config = make_config(micro_batch=2, seq_len=T)
    due = {}
    for every in (0, 3):
        log = dataclasses.replace(config.log, health_every=every)
        with_log = dataclasses.replace(config, log=log)
        due[every] = [step for step in range(1, 9) if is_due(with_log, step, 8)]
    assert due == {0: [], 3: [3, 6, 8]}


def test_a_run_logs_shows_and_draws_it(cli: Cli, tmp_path: Path) -> None:
    fp8 = {"precision": {"matmul": "e4m3"}, "log": {"health_every": 5}}
    folder = make_run(tmp_path / "fp8", fp8)
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    records = [r for r in read_log(folder / "out") if r["log"] == "health"]
    assert [r["step"] for r in records] == [5, 10, 12]
    steps = {r["step"]: r for r in read_log(folder / "out") if r["log"] == "step"}
    for record in records:
        assert record["lse_max"] == steps[record["step"]]["lse_max"]
        assert len(record["tensors"]) == 2 * 4 * 3
        worst = max(record["tensors"], key=lambda t: t["underflowed"])
        place = f"{worst['name']}, layer {worst['layer']}, e4m3"
        line = (
            f"step {record['step']}: FP8 underflowed at most {worst['underflowed']:.2%} ({place})"
        )
        assert [text for text in result.out.splitlines() if text.startswith(line)], result.out
    html = cli("plot", "out", "--out", "curves.html", cwd=folder)
    assert html.code == 0
    assert "FP8 underflow" in (folder / "curves.html").read_text()


def test_a_resumed_run_reports_the_same(cli: Cli, tmp_path: Path) -> None:
    """What a crash had logged after its checkpoint is logged once, with the same values."""
    fp8 = {"precision": {"matmul": "e4m3"}, "log": {"health_every": 2}}
    found = []
    for name, kill in (("whole", ""), ("killed", KILL)):
        folder = make_run(tmp_path / name, fp8)
        first = cli("train", "config.toml", cwd=folder, before=kill)
        if kill:
            assert first.code != 0
            assert cli("train", "config.toml", cwd=folder).code == 0
        records = [r for r in read_log(folder / "out") if r["log"] == "health"]
        found.append([{k: v for k, v in r.items() if k != "time"} for r in records])
    assert json.dumps(found[0]) == json.dumps(found[1])
    assert [r["step"] for r in found[0]] == [2, 4, 6, 8, 10, 12]


KILL = """
import os
import llmq_nb.train.trainer as trainer
step = trainer.Trainer.step
def dying(self):
    if self.progress.step == 8:  # the newest checkpoint is of step 6
        os._exit(9)
    return step(self)
trainer.Trainer.step = dying
"""


def test_a_run_in_bf16_reports_the_largest_lse_alone(cli: Cli, tmp_path: Path) -> None:
    folder = make_run(tmp_path, {"log": {"health_every": 6}})
    result = cli("train", "config.toml", cwd=folder)
    records = [r for r in read_log(folder / "out") if r["log"] == "health"]
    assert [(r["step"], r["tensors"]) for r in records] == [(6, []), (12, [])]
    assert all(r["lse_max"] > 0 for r in records)
    assert "FP8" not in result.out
