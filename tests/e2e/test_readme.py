"""What the README shows runs as it stands there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmq_nb.cli import COMMANDS
from llmq_nb.config_file import load_config, parse_config, to_toml
from tests.e2e.runs import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def block(language: str) -> str:
    """The first code block of a language: of a config, the whole one."""
    return blocks(language)[0]


def test_the_table_has_every_command() -> None:
    rows = re.findall(r"^\| `llmq-nb (\w+)", README, re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)


def test_its_config_is_one() -> None:
    config = parse_config(block("toml"), where="README.md")
    assert config.data.sources == ("texts/**/*.txt",) and config.batch.seq_len == 512
    for part in blocks("toml")[1:]:  # parts of a config go with it
        parse_config(block("toml") + part, where="README.md")


@pytest.mark.parametrize("name", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_its_links_lead_somewhere(name: str) -> None:
    assert (ROOT / name).is_file()


def test_its_python_runs(tmp_path: Path) -> None:
    """From a folder with a smaller quickstart."""
    smaller = ['data.sources=["${stdlib}/json/*.py"]', "batch.seq_len=64", "eval.steps=2"]
    config = load_config(ROOT / "configs/quickstart.toml", [*smaller, "run.device=cpu"])
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.toml").write_text(to_toml(config))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{block('python')}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    *_, first, second, third = done.stdout.splitlines()
    assert all(4 < float(loss) < 7 for loss in [*first.split(), second.split()[0]])
    assert second.endswith("(512, 192)")
    saved, exported = map(Path, third.split())
    assert saved == Path("runs/from-python/checkpoints/step_00000001")
    assert (tmp_path / saved / "manifest.json").is_file()
    assert (tmp_path / exported / "model.safetensors").is_file()


def test_its_plan_is_what_the_command_prints(tmp_path: Path) -> None:
    """The config is the README's own."""
    (tmp_path / "my-model.toml").write_text(block("toml"))
    command, *shown = block("text").splitlines()
    assert command.startswith("$ llmq-nb plan my-model.toml ")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import llmq_nb.cli as c; c.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *shlex.split(command)[2:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown
