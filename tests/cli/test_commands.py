"""Every command does what its help says, with the exit codes of the design."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmq_nb.cli import COMMANDS
from tests.e2e.runs import ROOT, Cli, hashes, make_run, write_model
from tests.io.folders import library_load

ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
OPTIONS = {
    "train": ["--set", "--resume", "--dry-run"],
    "tokenize": ["--out", "--tokenizer", "--format"],
    "inspect": ["--samples", "--seed", "--tokenizer", "--json"],
    "export": ["--dtype", "--max-shard-size"],
    "generate": ["--prompt", "--temperature", "--top-p", "--seed"],
    "eval": ["--data", "--seq-len", "--json"],
    "plot": ["--out", "--over"],
    "replay": ["--step", "--json"],
    "report": ["--out", "--png", "--over"],
    "plan": ["--set", "--card", "--device-memory", "--host-memory", "--gpus", "--json"],
    "compile": ["--set", "--tune"],
    "bench": ["--json"],
    "doctor": [],
}


@pytest.fixture(scope="module")
def run(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 6 steps."""
    folder = make_run(tmp_path_factory.mktemp("run"), {"schedule": {"steps": 6}})
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    return folder


def test_help_names_every_command(cli: Cli, tmp_path: Path) -> None:
    result = cli("--help", cwd=tmp_path)
    assert result.code == 0 and result.err == ""
    assert set(OPTIONS) == set(COMMANDS)
    assert all(f"  {name} " in result.out for name in COMMANDS)


@pytest.mark.parametrize("name", OPTIONS)
def test_help_of_a_command(name: str, cli: Cli, tmp_path: Path) -> None:
    result = cli(name, "--help", cwd=tmp_path)
    assert result.code == 0 and result.err == ""
    assert all(option in result.out for option in OPTIONS[name])


def test_help_is_quick() -> None:
    """The real entry point; help waits for no heavy import."""
    code = (
        "import sys, llmq_nb.cli\nsys.argv = ['llmq-nb', '--help']\n"
        "try: llmq_nb.cli.main()\n"
        "finally: print(sorted({'numpy', 'zarr', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert done.returncode == 0 and done.stdout.endswith("[]\n"), done.stdout


def test_training_imports_neither_matplotlib_nor_transformers() -> None:
    code = (
        "import sys, llmq_nb.train.run\n"
        "print(sorted({'matplotlib', 'numba', 'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert done.stdout == "[]\n", done.stderr


def test_version(cli: Cli, tmp_path: Path) -> None:
    result = cli("--version", cwd=tmp_path)
    assert result.code == 0 and result.out.startswith("llmq-nb, version ")


def test_the_module_is_the_command(run: Path) -> None:
    command = [sys.executable, "-m", "llmq_nb", "eval", "out/export", "--seq-len", "16"]
    command += ["--data", "validation.zarr", "--json"]
    done = subprocess.run(command, cwd=run, capture_output=True, text=True, env=ENV)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert 3 < json.loads(done.stdout)["loss"] < 8


def test_a_reader_that_leaves_is_no_traceback(run: Path) -> None:
    """As in `llmq-nb generate ... | head -c 1`."""
    command = [sys.executable, "-m", "llmq_nb", "generate", "out", "--prompt", "a" * 50]
    pipe = subprocess.PIPE
    done = subprocess.Popen(command, cwd=run, stdout=pipe, stderr=pipe, env=ENV)
    assert done.stdout is not None and done.stderr is not None
    done.stdout.close()
    assert done.stderr.read() == b""
    done.stderr.close()
    assert done.wait() == 1


@pytest.mark.parametrize("over", ["steps", "tokens"])
def test_plot(over: str, run: Path, cli: Cli, tmp_path: Path) -> None:
    for name, begin in (("a.png", b"\x89PNG"), ("a.html", b"<!")):
        out = tmp_path / name
        result = cli("plot", "out", "out", "--out", str(out), "--over", over, cwd=run)
        assert result.code == 0, result.err
        assert out.read_bytes()[: len(begin)].lower() == begin.lower()
        assert result.out == f"wrote {out}\n"


def test_export_is_the_runs_own(run: Path, cli: Cli, tmp_path: Path) -> None:
    for place in ("out", "out/checkpoints/step_00000006"):
        target = tmp_path / place.replace("/", "-")
        result = cli("export", place, str(target), cwd=run)
        assert result.code == 0, result.err
        assert hashes(target) == hashes(run / "out/export")


def test_export_in_shards_and_in_fp32(run: Path, cli: Cli, tmp_path: Path) -> None:
    argv = ("--dtype", "fp32", "--max-shard-size", "20KB")
    assert cli("export", "out", str(tmp_path / "x"), *argv, cwd=run).code == 0
    shards = sorted((tmp_path / "x").glob("*.safetensors"))
    assert len(shards) > 3
    saved = library_load(run / "out/checkpoints/step_00000006/master")
    assert library_load(tmp_path / "x") == saved, "fp32 is the master copy, bit for bit"
    index = json.loads((tmp_path / "x/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(saved)


def test_tokenize_finds_what_it_made(run: Path, cli: Cli, tmp_path: Path) -> None:
    argv = ("tokenize", "text.txt", "--out", str(tmp_path / "t.zarr"), "--tokenizer", "bytes")
    first, second = (cli(*argv, cwd=run) for _ in range(2))
    assert first.code == second.code == 0, first.err
    count = len((run / "text.txt").read_bytes()) + 1  # and the end of text
    assert first.out == f"wrote {tmp_path}/t.zarr: 1 documents, {count:,} tokens\n"
    assert second.out == first.out.replace("wrote", "found")


def test_tokenize_trains(run: Path, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i} für alle " * 5}) + "\n" for i in range(40))
    )
    argv = ("tokenize", "lines.jsonl", "--out", "own.zarr", "--tokenizer", "bytes")
    assert cli(*argv, cwd=tmp_path).code == 0
    write_model(tmp_path / "model")
    (tmp_path / "c.toml").write_text(
        '[run]\nout_dir = "o"\n[model]\npath = "model"\n[data]\ntrain = "own.zarr"\n'
        "[batch]\nmicro_batch = 2\nseq_len = 16\n[schedule]\nsteps = 2\n"
    )
    result = cli("train", "c.toml", cwd=tmp_path)
    assert result.code == 0, result.err
    assert "validation" not in result.out


def test_doctor_without_a_driver(cli: Cli, tmp_path: Path) -> None:
    result = cli("doctor", cwd=tmp_path)
    assert result.code == 0 and result.err == ""
    cores = len(os.sched_getaffinity(0))
    assert f"cores {cores}, memory available" in result.out
    assert f"numpy            {np.__version__}" in result.out
    from llmq_nb.core.driver import find_driver

    if find_driver() is None:
        assert result.out.endswith("no NVIDIA GPU or driver: training runs on the cpu\n")


UNEXPECTED = """
import llmq_nb.train.inference as t
def broken(name):
    raise %s
t.load_tokenizer = broken
"""


@pytest.mark.parametrize(
    "error, line",
    [
        ("OSError(5, 'Input/output error', 'disk')", "llmq-nb: Input/output error: disk\n"),
        ("MemoryError('3 GiB')", "llmq-nb: not enough memory: 3 GiB\n"),
        ("__import__('llmq_nb.core.errors').core.errors.MachineError('a\\nb')", "llmq-nb: a b\n"),
    ],
)
def test_failures_of_the_machine(error: str, line: str, run: Path, cli: Cli) -> None:
    argv = ("generate", "out", "--prompt", "a")
    result = cli(*argv, cwd=run, before=UNEXPECTED % error)
    assert (result.code, result.err) == (1, line)


def test_a_fault_of_ours_keeps_its_traceback(run: Path, cli: Cli) -> None:
    argv = ("generate", "out", "--prompt", "a")
    result = cli(*argv, cwd=run, before=UNEXPECTED % "RuntimeError('odd')")
    assert result.code == 1 and "Traceback" in result.err and "odd" in result.err
    result = cli(*argv, cwd=run, before=UNEXPECTED % "KeyboardInterrupt()")
    assert (result.code, result.err) == (130, "\nllmq-nb: interrupted\n")
