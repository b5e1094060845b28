"""The command that the README opens with, for 30 steps: it learns, and leaves what it promises."""

from pathlib import Path

from llmq_nb.config_file import load_config
from tests.e2e.runs import ROOT, Cli, numbers, read_log

QUICKSTART = ROOT / "configs/quickstart.toml"


def test_the_config_is_the_one_of_the_readme() -> None:
    config = load_config(QUICKSTART)
    assert config.run.device == "auto"
    assert config.data.sources == ("${stdlib}/**/*.py",) and config.data.tokenizer == "bytes"
    assert "llmq-nb train configs/quickstart.toml" in (ROOT / "README.md").read_text()


def test_thirty_steps(cli: Cli, tmp_path: Path) -> None:
    """30 steps of the full model, on a part of the standard library, with smaller steps."""
    shorter = ["schedule.steps=30", "schedule.warmup_steps=5", "eval.every=10", "eval.steps=2"]
    shorter += ["batch.micro_batch=4", "batch.seq_len=64", 'data.sources=["${stdlib}/json/*.py"]']
    sets = [word for override in shorter for word in ("--set", override)]
    result = cli("train", str(QUICKSTART), *sets, cwd=tmp_path)
    assert result.code == 0, result.err
    out = tmp_path / "runs/quickstart"
    steps, evals = numbers(out)["steps"], numbers(out)["evals"]
    assert len(steps) == 30 and [e[0] for e in evals] == [10, 20, 30]
    # ln 259 = 5.56, less what a tied table gains on a byte repeated, of which code has many
    assert 4.8 < steps[0][1] < 5.8
    last = sum(s[1] for s in steps[-5:]) / 5
    assert steps[0][1] - last > 1.5
    assert evals[0][1] > evals[-1][1]
    kinds = [r["log"] for r in read_log(out)]
    assert kinds[:2] == ["cmd", "config"] and "checkpoint" in kinds
    assert (out / "checkpoints/step_00000030/manifest.json").is_file()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "export/model.safetensors").stat().st_size > 2_000_000
    lines = result.out.splitlines()
    prompt = load_config(QUICKSTART).log.sample
    assert prompt is not None
    assert any(line.startswith("sample, from '") for line in lines)
    sample = result.out.split("sample, from ")[1].partition("\n")[2].partition("\ncheckpoint: ")[0]
    assert sample.startswith(prompt) and len(sample) > len(prompt) + 50
    assert any(line.startswith("step 30/30  loss ") and "tokens/s" in line for line in lines)
    assert any(line.endswith("/runs/quickstart/export") for line in lines)
