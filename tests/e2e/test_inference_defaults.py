"""`eval` and `generate` without options: the run's own windows, on the device that is there."""

import shutil
from pathlib import Path

import pytest

from llmq_nb.config_file import parse_config
from llmq_nb.model.families import preset
from llmq_nb.train.setup import inference_kind
from tests.e2e.runs import Cli, make_run, numbers, write_model


@pytest.fixture(scope="module")
def run(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with windows of 16 that evaluates on its whole validation store."""
    folder = make_run(tmp_path_factory.mktemp("run"), {"eval": {"steps": 0}})
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    return folder


def test_eval_takes_the_windows_of_the_run(run: Path, cli: Cli) -> None:
    """A model that saw 16 tokens in training is not measured on 1024."""
    step, loss = numbers(run / "out")["evals"][-1][:2]
    assert step == 12
    shown = [
        cli("eval", "out", "--data", "validation.zarr", *length, cwd=run).out
        for length in ((), ("--seq-len", "16"), ("--seq-len", "64"))
    ]
    assert shown[0] == shown[1] != shown[2]
    assert abs(float(shown[0].split()[1].strip(",")) - loss) < 1e-5


def test_eval_of_a_folder_stays_within_its_positions(run: Path, cli: Cli) -> None:
    """The default of 1024 is more than these 128."""
    argv = ("eval", "out/export", "--data", "validation.zarr")
    shown = [cli(*argv, *length, cwd=run) for length in ((), ("--seq-len", "128"))]
    assert shown[0].code == 0, shown[0].err
    assert shown[0].out == shown[1].out


def test_a_sliding_window_limits_the_positions(run: Path, cli: Cli, tmp_path: Path) -> None:
    """Within the window such a model is an ordinary one; beyond it is refused."""
    folder = Path(shutil.copytree(run / "out/export", tmp_path / "window"))
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    write_model(folder, **window)
    argv = ("--data", str(run / "validation.zarr"))
    shown = [
        cli("eval", str(place), *argv, *length, cwd=run)
        for place, length in ((folder, ()), (run / "out/export", ("--seq-len", "16")))
    ]
    assert shown[0].code == 0, shown[0].err
    assert shown[0].out == shown[1].out
    wide = cli("eval", str(folder), *argv, "--seq-len", "17", cwd=run)
    assert wide.code == 2 and "sliding window of 16" in wide.error
    made = cli("generate", str(folder), "--prompt", "the cat", "--tokens", "5", cwd=run)
    assert made.code == 0, made.err
    assert cli("export", str(folder), str(tmp_path / "new"), cwd=run).code == 0


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_a_checkpoint_of_a_gpu_opens_without_one(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmq_nb.train.setup.choose_device.__defaults__", (lambda: None,))
    text = f'[run]\ndevice = "{device}"\n[model]\npath = "quickstart"\n[data]\ntrain = "t.zarr"\n'
    assert inference_kind(parse_config(text, where="c"), preset("quickstart")) == "cpu"


def test_skipped_files_are_counted(cli: Cli, tmp_path: Path) -> None:
    folder = make_run(tmp_path, {"data": {"sources": ["*.txt"]}, "schedule": {"steps": 1}})
    (folder / "latin.txt").write_bytes("für immer".encode("latin-1"))
    (folder / "more.txt").write_text("the cat sat on a mat " * 20)
    for number in range(40):  # so that some fall into each part
        (folder / f"{number}.txt").write_text("the cat sat on a mat " * 5)
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert result.out.count("data: 1 files skipped (not UTF-8)\n") == 1


def test_bench_refuses_a_place_it_cannot_write(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for place, words in (("no/x.json", "does not exist"), ("folder", "is a folder")):
        result = cli("bench", "data", "--json", place, cwd=tmp_path)
        assert result.code == 2 and words in result.error and "--json" in result.error
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
