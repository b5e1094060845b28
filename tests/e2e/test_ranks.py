"""Whole runs on several ranks: the same data, checkpoints that any number of ranks goes on from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq_nb.config_file import load_config
from llmq_nb.train.setup import total_steps
from tests.e2e.runs import Cli, hashes, make_run, numbers, read_log, write_config

FP32: dict[str, Any] = {
    "precision": {"dtype": "fp32"},
    "optimizer": {"epsilon": 1e-6},
    "schedule": {"kind": "wsd", "steps": 12},
}


def ranks(count: int, **parallel: bool) -> dict[str, dict[str, Any]]:
    """12 windows a step on so many ranks."""
    return {
        "batch": {"micro_batch": 2, "grad_accumulation": 6 // count},
        "parallel": {"devices": [0] * count, **parallel},
    }


SPLITS = {
    "one": ranks(1),
    "two": ranks(2),
    "two, gradients": ranks(2, shard_gradients=True),
    "three, both": ranks(3, shard_weights=True, shard_gradients=True),
}


@pytest.fixture(scope="module")
def one(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("one"), FP32, SPLITS["one"])
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    return folder


def close(a: Path, b: Path) -> None:
    """Losses, norms and evaluations; each update repeats a difference of the one before."""
    for x, y in zip(read_log(a / "out"), read_log(b / "out"), strict=True):
        assert x["log"] == y["log"]
        for key in ("loss", "grad_norm", "val_loss", "tokens", "supervised"):
            if key in x:
                np.testing.assert_allclose(y[key], x[key], rtol=1e-4, err_msg=f"{x}")


@pytest.mark.parametrize("split", ["two", "two, gradients", "three, both"])
def test_any_number_of_ranks_trains_the_same_model(one: Path, cli: Cli, tmp_path: Path, split: str):
    folder = make_run(tmp_path, FP32, SPLITS[split])
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    close(one, folder)


def test_going_on_with_other_numbers_of_ranks(one: Path, cli: Cli, tmp_path: Path):
    """Four steps on each of three splits: a window lost or seen twice would change a loss."""
    folder = make_run(tmp_path, FP32)
    for steps, split in ((4, "one"), (8, "three, both"), (12, "two, gradients")):
        write_config(folder, FP32, SPLITS[split], {"schedule": {"steps": steps}})
        result = cli("train", "config.toml", cwd=folder)
        assert result.code == 0, result.err
    found = [x["loss"] for x in read_log(folder / "out") if x["log"] == "step"]
    expected = [x["loss"] for x in read_log(one / "out") if x["log"] == "step"]
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "e4m3"])
def test_an_interrupted_run_has_the_bits_of_a_whole_one(cli: Cli, tmp_path: Path, precision: str):
    options: dict[str, Any] = {
        "precision": {"matmul": precision},
        "optimizer": {"master": "bf16", "m": "e4m3", "v": "bf16"},
        "schedule": {"kind": "wsd", "steps": 6},
    }
    split = SPLITS["three, both"]
    whole = make_run(tmp_path / "whole", options, split)
    assert cli("train", "config.toml", cwd=whole).code == 0
    part = make_run(tmp_path / "part", options, split, {"schedule": {"kind": "wsd", "steps": 3}})
    assert cli("train", "config.toml", cwd=part).code == 0
    write_config(part, options, split)
    assert cli("train", "config.toml", cwd=part).code == 0
    assert numbers(part / "out")["steps"] == numbers(whole / "out")["steps"]
    for name in ("checkpoints/step_00000006/master", "checkpoints/step_00000006/m", "export"):
        assert hashes(part / "out" / name) == hashes(whole / "out" / name), name


@pytest.mark.parametrize(("count", "machines"), [(1, 1), (3, 1), (2, 3)])
def test_an_epoch_is_every_window_once_on_any_number_of_ranks(
    tmp_path: Path, count: int, machines: int
):
    """120 windows: 60, 20 and 10 steps of two windows a rank."""
    schedule = {"schedule": {"steps": None, "epochs": 1.0}}
    parallel = {"parallel": {"devices": [0] * count, "machines": machines}}
    make_run(tmp_path, schedule, parallel)
    config = load_config(tmp_path / "config.toml")
    assert total_steps(config, 120) == 60 // (count * machines)


def test_generating_from_a_model_that_lies_in_shards(cli: Cli, tmp_path: Path):
    """`log.sample` at the end of a run needs a model that no rank has as a whole."""
    split = SPLITS["three, both"]
    folder = make_run(tmp_path, split, {"log": {"sample": "the cat"}, "schedule": {"steps": 2}})
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert "the cat" in result.out


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"reduce": "nccl"}, "reduce = 'nccl' in parallel.reduce: this version copies"),
        ({"gather": "nccl"}, "gather = 'nccl' in parallel.gather: this version copies"),
        ({"devices": []}, "parallel.devices"),
        ({"devices": [0, -1]}, "parallel.devices"),
        ({"peer_copies": "never"}, "[parallel] peer_copies"),
    ],
)
def test_bad_input(cli: Cli, tmp_path: Path, parallel: dict[str, Any], words: str):
    folder = make_run(tmp_path, {"parallel": parallel})
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 2 and words in result.error, result.error
