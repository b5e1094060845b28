"""`from llmq_nb import Trainer, load_config`: against the float64 oracle, and against the commands.

Tolerances: fp32 loss 2e-5 relative, each gradient 1e-3 relative L2 (issue 2); losses of the same
weights on the same engine, however reached, 1e-6 relative.
"""

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq_nb import Trainer, load_config
from llmq_nb.config_file import parse_config
from tests import oracles
from tests.e2e.runs import MODEL, Cli, make_run, numbers, read_log, write_model
from tests.io.folders import library_load

FP32 = {"precision": {"dtype": "fp32"}, "eval": {"steps": 0}}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2 tied": {},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
    },
    "llama stretched": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 261,  # padded rows
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


def silent(text: str) -> None:
    """Takes the facts of the start."""


def stored(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The float32 tensors of an export, through the safetensors library."""
    return {
        name: np.frombuffer(data, np.float32).reshape(shape)
        for name, (_, shape, data) in library_load(folder).items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run(tmp_path, FP32))
    write_model(tmp_path / "model", **FAMILIES[family])
    config = {k: v for k, v in {**MODEL, **FAMILIES[family]}.items() if v is not None}
    rng = np.random.default_rng(5)
    with Trainer(load_config("config.toml"), announce=silent) as trainer:
        for _ in range(3):
            trainer.step()
        weights = stored(trainer.export("weights"))
        for B, T in ((1, 1), (3, 7), (2, 40)):  # 40: longer than the run's windows
            tokens = rng.integers(0, 259, (B, T))
            targets = rng.integers(0, 259, (B, T))
            mask = rng.random((B, T)) < 0.7
            mask[0, 0] = True
            starts = np.zeros((B, T), int)
            labels = np.where(mask, targets, -100)
            expected, theirs = oracles.model_loss_and_gradients(
                config, weights, tokens, labels, starts
            )
            loss, ours = trainer.loss_and_gradients(tokens, targets, mask)
            assert loss == pytest.approx(expected, rel=2e-5)
            assert ours.keys() == theirs.keys()
            # where the true gradient is 0 (a softmax over one token) float32 leaves its rounding
            floor = 1e-6 * max(np.linalg.norm(g) for g in theirs.values())
            for name, gradient in theirs.items():
                error = np.linalg.norm(ours[name].astype(np.float64) - gradient)
                assert error <= 1e-3 * np.linalg.norm(gradient) + floor, name
            assert trainer.loss_and_gradients(tokens, labels)[0] == loss


def test_gradients_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run(tmp_path))
    tokens = np.arange(20).reshape(2, 10)
    losses = []
    for asked in (False, True):
        with Trainer(load_config("config.toml"), announce=silent) as trainer:
            for _ in range(4):
                losses.append(trainer.step().loss)
                if asked:
                    first = trainer.loss_and_gradients(tokens, tokens)
                    again = trainer.loss_and_gradients(tokens, tokens)
                    assert first[0] == again[0]
                    assert all(np.array_equal(first[1][n], again[1][n]) for n in first[1])
    assert losses[:4] == losses[4:]


@pytest.mark.parametrize(
    "tokens, targets, mask, words",
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), None, "both must be"),
        (np.full((1, 2), 272), np.zeros((1, 2)), None, "token ids must be"),
        (np.zeros((1, 2)), np.full((1, 2), 272), None, "targets must be"),
        (np.zeros((1, 2)), np.full((1, 2), -1), None, "targets must be"),
        (np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 2)), "no supervised"),
    ],
)
def test_wrong_batches(
    tokens: Any, targets: Any, mask: Any, words: str, api: tuple[Trainer, Path]
) -> None:
    with pytest.raises(ValueError, match=words):
        api[0].loss_and_gradients(tokens, targets, mask)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer after 12 steps of fp32, its checkpoint and its export; and its folder."""
    folder = make_run(tmp_path_factory.mktemp("api"), FP32, {"optimizer": {"learning_rate": 0.02}})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with Trainer(load_config("config.toml"), announce=silent) as trainer:
            while not trainer.finished:
                trainer.step()
            trainer.save()
            trainer.export("export")
            yield trainer, folder


def test_a_second_trainer_from_the_export(api: tuple[Trainer, Path]) -> None:
    trainer, folder = api
    text = (folder / "config.toml").read_text()
    config = parse_config(text, where="x", overrides=["model.path=export", "run.out_dir=second"])
    tokens = np.random.default_rng(1).integers(0, 259, (2, 16))
    with Trainer(config, announce=silent) as second:
        assert second.source.pretrained
        ours, theirs = second.evaluate(), trainer.evaluate()
        assert ours is not None and theirs is not None
        assert ours.loss == theirs.loss and ours.tokens == theirs.tokens
        a, b = (t.loss_and_gradients(tokens, tokens) for t in (trainer, second))
        assert a[0] == b[0]
        assert all(np.array_equal(a[1][name], b[1][name]) for name in a[1])


def test_evaluation_is_the_oracles(api: tuple[Trainer, Path]) -> None:
    """The mean over every target of the validation text, cut into windows by hand."""
    trainer, folder = api
    assert trainer.data.validation is not None
    ids = trainer.data.validation.read(0, len(trainer.data.validation)).astype(int)
    weights = stored(folder / "export")
    total = count = 0.0
    for begin in range(0, len(ids) - 1, 16):
        window = ids[begin : begin + 17]
        x, y = window[None, :-1], window[None, 1:]
        loss = oracles.model_loss(MODEL, weights, x, y, np.zeros_like(x))
        total, count = total + loss * y.size, count + y.size
    metrics = trainer.evaluate()
    assert metrics is not None and metrics.tokens == count
    assert metrics.loss == pytest.approx(total / count, rel=2e-5)


@pytest.mark.parametrize("place", ["out", "out/checkpoints/step_00000012", "export"])
def test_eval_command(place: str, api: tuple[Trainer, Path], cli: Cli) -> None:
    trainer, folder = api
    argv = ("eval", place, "--data", "validation.zarr", "--seq-len", "16", "--micro-batch", "2")
    result = cli(*argv, "--json", cwd=folder)
    assert result.code == 0, result.err
    said, metrics = json.loads(result.out), trainer.evaluate()
    assert metrics is not None and said["tokens"] == metrics.tokens
    assert said["loss"] == pytest.approx(metrics.loss, rel=1e-6)
    assert said["perplexity"] == pytest.approx(np.exp(metrics.loss), rel=1e-6)
    plain = cli(*argv, cwd=folder)
    assert f"loss {metrics.loss:.5f}"[:-1] in plain.out


def test_greedy_generation_is_an_argmax_loop(api: tuple[Trainer, Path], cli: Cli) -> None:
    _, folder = api
    weights, prompt = stored(folder / "export"), "the cat "
    ids = list(prompt.encode())
    for _ in range(24):
        x = np.array([ids])
        logits = oracles.model_logits(MODEL, weights, x, np.zeros_like(x))[0, -1]
        best, second = np.sort(logits)[[-1, -2]]
        assert best - second > 1e-3, "a near tie shows nothing: choose another seed"
        ids.append(int(logits.argmax()))
    expected = bytes(i for i in ids if i < 256).decode("utf-8", "replace")
    argv = ("--prompt", prompt, "--tokens", "24", "--temperature", "0")
    for place in ("out", "export"):
        tokenizer = ("--tokenizer", "bytes") if place == "export" else ()
        result = cli("generate", place, *argv, *tokenizer, cwd=folder)
        assert result.code == 0, result.err
        assert result.out == expected + "\n"


def test_sampling_depends_on_the_seed_alone(api: tuple[Trainer, Path], cli: Cli) -> None:
    _, folder = api
    argv = ("generate", "out", "--prompt", "the", "--tokens", "40", "--temperature", "1")
    texts = [cli(*argv, "--seed", seed, cwd=folder).out for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd"])
def test_schedules_reach_the_floor(kind: str, cli: Cli, tmp_path: Path) -> None:
    schedule = {"kind": kind, "warmup_steps": 3, "cooldown_steps": 4, "final_fraction": 0.25}
    folder = make_run(tmp_path, {"schedule": schedule, "optimizer": {"learning_rate": 0.004}})
    assert cli("train", "config.toml", cwd=folder).code == 0
    rates = [s[3] for s in numbers(folder / "out")["steps"]]
    assert rates[0] == 0.0 and max(rates) == rates[3] == 0.004
    assert rates[-1] == 0.001
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_epochs_count_the_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run(tmp_path, {"schedule": {"steps": None, "epochs": 0.5}}, words=200))
    with Trainer(load_config("config.toml"), announce=silent) as trainer:
        windows = -(-(len(trainer.data.train) - 1) // 16)
        assert trainer.total_steps == windows // 2 // 2
        before = trainer.progress
        while not trainer.finished:
            trainer.step()
        assert trainer.progress.position.window == trainer.total_steps * 2
        assert before.position.window == 0


class FakeWriter:
    """Stands in for wandb's and trackio's module and run at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> "FakeWriter":
        self.calls.append(("init", settings))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, values)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmq_nb.train.run import run

    fake, module = FakeWriter(), types.ModuleType(name)
    module.__dict__.update(init=fake.init)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(make_run(tmp_path, {"log": {"trackers": [name]}}))
    config = load_config("config.toml")
    assert run(config) == 0
    kinds = [kind for kind, _ in fake.calls]
    assert kinds[0] == "init" and kinds[-1] == "finish"
    settings = fake.calls[0][1]
    alone = dataclasses.replace(config.parallel, devices=(0,))  # as the run settled it
    settled = dataclasses.replace(config, parallel=alone)
    assert settings["name"] == "tiny" and settings["config"] == dataclasses.asdict(settled)
    if name == "wandb":
        assert settings["mode"] == "offline"
    logged = [call for kind, call in fake.calls if kind == "log"]
    losses = [(step, v["loss"]) for step, v in logged if "loss" in v]
    validation = [(step, v["validation_loss"]) for step, v in logged if "validation_loss" in v]
    records = read_log(tmp_path / "out")
    assert losses == [(r["step"], r["loss"]) for r in records if r["log"] == "step"]
    assert validation == [(r["step"], r["loss"]) for r in records if r["log"] == "eval"]
