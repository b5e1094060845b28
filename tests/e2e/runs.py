"""Tiny runs for the end-to-end tests: a model of 20 k parameters, a text of seeded random words."""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 272,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "initializer_range": 0.1,
}
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "dogs", "ran", "für", "immer"]
BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "tiny", "out_dir": "out"},
    "model": {"path": "model"},
    "data": {"sources": ["text.txt"], "train": "train.zarr", "validation": "validation.zarr"},
    "batch": {"micro_batch": 2, "seq_len": 16},
    "schedule": {"steps": 12},
    "eval": {"every": 4, "steps": 2},
    "checkpoint": {"every": 3},
}


@dataclass(frozen=True)
class Result:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr."""
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        assert self.err.startswith("llmq-nb: "), self.err
        assert "Traceback" not in self.err
        return self.err.strip()


class Cli:
    """`cli("train", "config.toml", cwd=folder)`: the command line in a process of its own."""

    def __init__(self, extra_env: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, str(ROOT / "tests/e2e/fork_server.py")]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
        # several runs share two cores here; the bits do not depend on it
        env |= {"OPENBLAS_NUM_THREADS": "1", **(extra_env or {})}
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self._texts = tempfile.TemporaryDirectory()

    def __call__(
        self, *argv: str, cwd: Path, before: str = "", env: Mapping[str, str] | None = None
    ) -> Result:
        assert self._server.stdin is not None and self._server.stdout is not None
        out, err = (Path(self._texts.name) / name for name in ("out", "err"))
        job = {"argv": argv, "cwd": str(cwd), "out": str(out), "err": str(err)}
        self._server.stdin.write(json.dumps({**job, "before": before, "env": env or {}}) + "\n")
        self._server.stdin.flush()
        code = json.loads(self._server.stdout.readline())["code"]
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
        return Result(code, *texts)

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self._texts.cleanup()


def merged(*changes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """BASE with changes by section; a value None takes a key out."""
    tables = {section: dict(keys) for section, keys in BASE.items()}
    for change in changes:
        for section, keys in change.items():
            tables.setdefault(section, {}).update(keys)
    return {
        section: {key: value for key, value in keys.items() if value is not None}
        for section, keys in tables.items()
    }


def make_run(folder: Path, *changes: Mapping[str, Mapping[str, Any]], words: int = 1500) -> Path:
    """A folder with config.toml, model/config.json and text.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, *changes)
    write_model(folder / "model")
    choice = random.Random(7)
    text = " ".join(
        choice.choice(WORDS) + choice.choice([" ", "", ",", ".\n"]) for _ in range(words)
    )
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return folder


def write_config(folder: Path, *changes: Mapping[str, Mapping[str, Any]]) -> Path:
    lines = []
    for section, keys in merged(*changes).items():
        lines.append(f"[{section}]")
        # JSON's scalars and lists are TOML's
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path = folder / "config.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {k: v for k, v in {**MODEL, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Every line of log.jsonl; each must be strict JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    lines = (folder / "log.jsonl").read_bytes().split(b"\n")
    assert lines[-1] == b"", "the last line is torn"
    return [json.loads(line, parse_constant=refuse) for line in lines[:-1]]


def numbers(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What a run computed, by kind of record, as JSON has it (Python writes floats exactly)."""
    records = read_log(folder)
    steps = ("step", "loss", "grad_norm", "learning_rate", "supervised", "lse_max", "skipped")
    evals = ("step", "loss", "tokens")
    return {
        "steps": [tuple(r[k] for k in steps) for r in records if r["log"] == "step"],
        "evals": [tuple(r[k] for k in evals) for r in records if r["log"] == "eval"],
    }


def listing(folder: Path) -> list[str]:
    """Every path below the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file below the folder."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in listing(folder)
        if (folder / name).is_file()
    }
