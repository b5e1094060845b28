"""The breakdown beside its budget: by hand, and as `bench step --breakdown` prints it."""

import json

import pytest
from click.testing import CliRunner

from llmq_nb.cli.bench_command import command
from llmq_nb.model.families import preset
from llmq_nb.plan.budget import budget_ms, compare
from llmq_nb.plan.cost import micro_step_work, optimizer_work, total
from llmq_nb.plan.rates import H200
from llmq_nb.train import bench_step
from llmq_nb.train.bench_step import Setting


def test_ratios_and_what_is_over_by_hand():
    """reduce_loss is 20 times over, by less than a thousandth of the step: not named."""
    measured = {
        "adamw": 12.9,
        "attention": 7.0,
        "reduce_loss": 0.02,
        "new": 1.0,
    }
    rows = compare(measured, {"attention": 5.0, "adamw": 10.0, "reduce_loss": 0.001, "rope": 2.0})
    found = [(r.operation, r.ms, r.budget_ms, r.over) for r in rows]
    assert found == [
        ("adamw", 12.9, 10.0, False),
        ("attention", 7.0, 5.0, True),
        ("new", 1.0, None, False),
        ("reduce_loss", 0.02, 0.001, False),
        ("rope", 0.0, 2.0, False),
    ]
    assert [r.ratio for r in rows] == [1.29, 1.4, None, pytest.approx(20), 0.0]


@pytest.mark.parametrize("matmul", ["bf16", "e4m3"])
def test_budget_is_a_micro_step_and_an_update(matmul):
    model = preset("qwen2.5-0.5b")
    setting = Setting(model="qwen2.5-0.5b", micro_batch=32, grad_accumulation=4, matmul=matmul)
    config = setting.config()
    works = micro_step_work(config, model, H200) + optimizer_work(config, model, H200)
    assert sum(budget_ms(config, model, H200).values()) == pytest.approx(1e3 * total(works))


def test_bench_step_prints_and_writes_the_breakdown(monkeypatch, tmp_path):
    """measure is replaced: the GPU's part gives the times, all else is the real command."""
    seen = []

    def measure(setting, *, breakdown):
        seen.append((setting, breakdown))
        config, model = setting.config(), preset(setting.model)
        budget = budget_ms(config, model, H200)
        times = {name: 1.1 * ms for name, ms in budget.items()} | {"attention": 8.0, "odd": 0.5}
        return {
            "model": setting.model,
            "matmul": setting.matmul,
            "micro_batch": setting.micro_batch,
            "grad_accumulation": setting.grad_accumulation,
            "tokens_per_second": 1000,
            "mfu": 0.5,
            "seconds_per_step": 1.0,
            "gpu_idle_share": 0.001,
            "device_gib": 2.0,
            "first_step_seconds": 3.0,
            "breakdown": [bench_step._rounded(row) for row in compare(times, budget)],
        }

    monkeypatch.setattr(bench_step, "measure", measure)
    file = tmp_path / "figures.json"
    argv = ["step", "--breakdown", "--precision", "e4m3", "--micro-batch", "32"]
    result = CliRunner().invoke(command, [*argv, "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    ((setting, breakdown),) = seen
    assert breakdown and setting.matmul == "e4m3" and setting.micro_batch == 32
    lines = result.output.splitlines()
    row = next(line for line in lines if "attention " in line and "backward" not in line)
    assert "8.000" in row and "4.3" in row and "1.8" in row  # 4.37 ms by step_budget.py
    assert any("odd" in line and line.count(" - ") == 2 for line in lines)
    assert lines[-1].startswith("over 1.3 times the budget: attention (1.8")
    (written,) = json.loads(file.read_text())
    by_name = {r["operation"]: r for r in written["breakdown"]}
    assert by_name["odd"]["budget_ms"] is None and by_name["attention"]["over"] is True
    assert by_name["linear_swiglu"]["ratio"] == 1.1 and by_name["linear_swiglu"]["over"] is False
