"""`eval` and `generate` through the command line, from a checkpoint and from its export."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Cli, make_run

CHOICES = {"prompt": "the cat", "choices": [" sat", "\u0416\u0416"], "answer": 0}


@pytest.fixture(scope="module")
def run(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("run"), {"schedule": {"steps": 60}})
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    return folder


def output(cli: Cli, folder: Path, *argv: str) -> str:
    result = cli(*argv, cwd=folder)
    assert result.code == 0 and result.err == "", result.err
    return result.out


def test_the_loss_by_position_adds_up(run: Path, cli: Cli) -> None:
    argv = ("eval", "out", "--data", "validation.zarr")
    found = json.loads(output(cli, run, *argv, "--json"))
    buckets = found["positions"]
    assert [(b["from"], b["to"]) for b in buckets] == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 16)]
    assert sum(b["tokens"] for b in buckets) == found["tokens"]
    mean = sum(b["tokens"] * b["loss"] for b in buckets) / found["tokens"]
    assert math.isclose(mean, found["loss"], rel_tol=1e-12)
    assert math.isclose(found["perplexity"], math.exp(found["loss"]))
    first, _, *table = output(cli, run, *argv).splitlines()
    assert first.startswith(f"loss {found['loss']:.6f}, ")
    rows = [line.split() for line in table]
    assert [row[-3:] for row in rows] == [
        [f"{b['loss']:.4f}", f"{b['tokens']:,}", "tokens"] for b in buckets
    ]
    assert rows[1][:3] == ["2", "to", "3"]


def write_task(folder: Path, *questions: dict[str, Any]) -> str:
    (folder / "task.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    return "task.jsonl"


def test_tasks(run: Path, cli: Cli) -> None:
    """The exact answers are what `generate` says; the model knows no Cyrillic."""
    argv = ("--temperature", "0", "--tokens", "8", "--json")
    said = [
        json.loads(line)["text"]
        for line in output(
            cli, run, "generate", "out", "--prompt", "the c", "--prompt", "a", *argv
        ).splitlines()
    ]
    wrong = {"prompt": "a", "answer": "no " + said[1]}
    questions = [CHOICES, {"prompt": "the c", "answer": said[0], "id": "x"}, wrong]
    questions.append({**CHOICES, "answer": 1})
    task = write_task(run, *questions)
    seen = []
    for model in ("out", "out/export"):
        argv = ("eval", model, "--task", task, "--answer-tokens", "8", "--details", "d.jsonl")
        found = json.loads(output(cli, run, *argv, "--json"))
        assert found["tasks"][0]["task"] == task
        choice, exact = (found["tasks"][0][k] for k in ("multiple_choice", "exact_match"))
        assert choice["questions"] == exact["questions"] == 2
        assert choice["accuracy"] == choice["accuracy_by_byte"] == exact["accuracy"] == 0.5
        assert math.isclose(exact["error"], 0.5 / math.sqrt(2))
        lines = [json.loads(line) for line in (run / "d.jsonl").read_text().splitlines()]
        assert [line["right"] for line in lines] == [True, False, True, False]
        assert [line["where"][-1] for line in lines] == ["1", "4", "2", "3"]
        assert lines[2]["id"] == "x" and [line["text"] for line in lines[2:]] == said
        assert lines[0]["log_probabilities"][0] > lines[0]["log_probabilities"][1]
        seen.append(lines)
    assert [line["text"] for line in seen[0][2:]] == [line["text"] for line in seen[1][2:]]
    shown = output(cli, run, "eval", "out", "--task", task, "--answer-tokens", "8")
    assert "multiple choice, 2 questions: 50.0% ± 35.4% right, 50.0%" in shown
    assert "exact match, 2 questions: 50.0% ± 35.4% right" in shown


def test_a_batch_says_what_each_prompt_says_alone(run: Path, cli: Cli) -> None:
    (run / "p.txt").write_text("the cat\na\n\nwhile dogs ran on\n")
    argv = ("--tokens", "9", "--seed", "5")
    whole = output(cli, run, "generate", "out", "--prompts", "p.txt", *argv)
    parts = whole.split("── ")[1:]
    assert [part.partition("\n")[0] for part in parts] == ["1", "2", "3"]
    for prompt, part in zip(("the cat", "a", "while dogs ran on"), parts, strict=True):
        alone = output(cli, run, "generate", "out", "--prompt", prompt, *argv)
        assert part.partition("\n")[2] == alone and alone.startswith(prompt)
    one_by_one = output(cli, run, "generate", "out", "--prompts", "p.txt", *argv, "--batch", "1")
    assert one_by_one == whole


def test_chats(run: Path, cli: Cli) -> None:
    """Only what the assistant says is shown; a line with messages is what --chat makes."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "the cat"}]
    (run / "p.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    argv = ("--tokens", "6", "--temperature", "0", "--json")
    asked = ("--prompt", "the cat", "--chat", "--system", "s")
    one = json.loads(output(cli, run, "generate", "out", *asked, *argv))
    two = json.loads(output(cli, run, "generate", "out", "--prompts", "p.jsonl", *argv))
    assert two["messages"] == messages and one["prompt"] == "the cat"
    assert one["text"] == two["text"] and one["tokens"] == two["tokens"]
    shown = output(cli, run, "generate", "out", *asked, *argv[:-1])
    assert shown == one["text"] + "\n"
