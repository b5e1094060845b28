"""A gradient that is not finite changes nothing, is named, and ends the run or is passed over."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq_nb import Trainer, load_config
from llmq_nb.train.engine import CpuEngine
from tests.e2e.runs import Cli, hashes, make_run, numbers, read_log, write_config

POISON = """
import numpy as np
import llmq_nb.train.engine as engine
optimizer_step, steps = engine.optimizer_step, []
def poisoned(ranks):
    steps.append(1)
    if len(steps) == 5:
        for state in ranks[0].states:
            if state.parameter.name.endswith(%r):
                state.gradient.data.reshape(-1)[3] = %s
    optimizer_step(ranks)
engine.optimizer_step = poisoned
"""
VALUES = ["np.nan", "np.inf", "-np.inf"]


@pytest.fixture(scope="module")
def whole(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("whole"))
    assert cli("train", "config.toml", cwd=folder).code == 0
    return folder


@pytest.mark.parametrize("value", VALUES)
def test_stop(value: str, whole: Path, cli: Cli, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    result = cli(
        "train", "config.toml", cwd=folder, before=POISON % ("1.mlp.down_proj.weight", value)
    )
    assert result.code == 1, (result.out, result.err)
    assert "step 5" in result.error and "1.mlp.down_proj.weight" in result.error
    assert "out/checkpoints/step_00000004" in result.error
    assert "log.non_finite" in result.error
    assert (folder / "out/checkpoints/step_00000004/manifest.json").is_file()
    last = [r for r in read_log(folder / "out") if r["log"] == "step"][-1]
    assert (
        last["step"] == 5
        and last["skipped"]
        and last["non_finite_tensor"].endswith("1.mlp.down_proj.weight")
    )
    # nothing of it stays: run again without the fault, it is the run that never had it
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert numbers(folder / "out") == numbers(whole / "out")
    last_checkpoint = "out/checkpoints/step_00000012"
    assert hashes(folder / last_checkpoint) == hashes(whole / last_checkpoint)


def test_stop_at_the_first_step(cli: Cli, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    first = (POISON % ("1.mlp.down_proj.weight", "np.nan")).replace("== 5", "== 1")
    result = cli("train", "config.toml", cwd=folder, before=first)
    assert result.code == 1
    assert "step 1" in result.error and "1.mlp.down_proj.weight" in result.error
    assert list((folder / "out/checkpoints").iterdir()) == []


@pytest.mark.parametrize("value", VALUES)
def test_skip(value: str, whole: Path, cli: Cli, tmp_path: Path) -> None:
    folder = make_run(tmp_path, {"log": {"non_finite": "skip"}})
    result = cli(
        "train", "config.toml", cwd=folder, before=POISON % ("0.self_attn.qkv.bias", value)
    )
    assert result.code == 0, result.err
    assert "step 5: no update, the gradient of" in result.out
    ours, theirs = numbers(folder / "out")["steps"], numbers(whole / "out")["steps"]
    assert len(ours) == 12 and ours[:4] == theirs[:4]
    assert [s[6] for s in ours] == [False] * 4 + [True] + [False] * 7
    assert ours[4][1] == theirs[4][1], "the loss of the forward pass is right"


def arrays(trainer: Trainer) -> dict[str, np.ndarray[Any, Any]]:
    return {
        f"{part}/{s.parameter.name}": trainer.engine.read(getattr(s, part)).copy()
        for s in trainer.engine.states
        for part in ("weight", "master", "m", "v")
    }


def same(a: dict[str, np.ndarray[Any, Any]], b: dict[str, np.ndarray[Any, Any]]) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_bit_changes(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_run(tmp_path, {"precision": {"dtype": dtype}}))
    import llmq_nb.train.engine as engine

    real = engine.optimizer_step
    with Trainer(load_config("config.toml"), announce=lambda _: None) as trainer:
        trainer.step()
        before = arrays(trainer)

        def poisoned(ranks: Any) -> None:
            ranks[0].states[-1].gradient.data.reshape(-1)[0] = np.nan
            real(ranks)

        monkeypatch.setattr(engine, "optimizer_step", poisoned)
        metrics = trainer.step()
        assert metrics.skipped
        assert metrics.non_finite_tensor == trainer.engine.states[-1].parameter.name
        assert same(before, arrays(trainer))
        monkeypatch.setattr(engine, "optimizer_step", real)
        assert not trainer.step().skipped
        assert not same(before, arrays(trainer)), "this comparison can fail"


def test_a_step_without_a_supervised_token(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle of the text is masked: the steps there change nothing and say so."""
    folder = make_run(tmp_path)
    ids = np.random.default_rng(0).integers(0, 256, 1600).astype("<i4")
    mask = np.ones(1600, bool)
    mask[400:1200] = False
    header = b"BIN.TOK\n" + np.array([2, 4, 1600, 259, 1], "<i4").tobytes()
    bits = np.packbits(mask, bitorder="little").tobytes()
    (folder / "t.bin").write_bytes(header.ljust(1024, b"\0") + ids.tobytes() + bits)
    data = {"sources": ["t.bin"], "train": "masked.zarr", "validation": None}
    write_config(folder, {"data": data, "batch": {"micro_batch": 1}, "schedule": {"steps": 40}})
    monkeypatch.chdir(folder)
    updates = 0
    with Trainer(load_config("config.toml"), announce=lambda _: None) as trainer:
        for _ in range(40):
            before = arrays(trainer)
            metrics = trainer.step()
            assert metrics.skipped == (metrics.supervised == 0)
            assert same(before, arrays(trainer)) == metrics.skipped or metrics.learning_rate == 0
            assert np.isnan(metrics.loss) == metrics.skipped
            updates += not metrics.skipped
            assert trainer.progress.updates == updates
    assert 5 < updates < 35
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert result.out.count("no update, no supervised token") == 40 - updates
    nothing = [r for r in read_log(folder / "out") if r["log"] == "step" and r["supervised"] == 0]
    assert len(nothing) == 40 - updates
    assert all(r["loss"] is None and r["loss_text"] == "nan" and r["skipped"] for r in nothing)


def test_the_fault_is_reachable() -> None:
    """POISON replaces the function that the engine really calls."""
    assert "optimizer_step" in CpuEngine.train_step.__code__.co_names
