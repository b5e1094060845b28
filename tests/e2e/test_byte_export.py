"""A model trained on bytes, exported: a folder that needs no --tokenizer, here and elsewhere."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.runs import Cli, hashes, make_run

FILES = ["tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def folder(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("bytes"), {"schedule": {"steps": 3}})
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    return folder


def test_the_export_has_the_byte_tokenizer(cli: Cli, folder: Path) -> None:
    rust = Tokenizer.from_file(str(folder / "out/export/tokenizer.json"))
    assert rust.encode("für").ids == list("für".encode())
    result = cli("export", "out", "again", cwd=folder)
    assert result.code == 0, result.err
    again, first = hashes(folder / "again"), hashes(folder / "out/export")
    assert {name: again[name] for name in FILES} == {name: first[name] for name in FILES}


def test_generate_and_eval_need_no_tokenizer(cli: Cli, folder: Path) -> None:
    """The export says what the checkpoint says: the stores of the run go with it."""
    losses = []
    for model in ("out/export", "out"):
        shape = ("--seq-len", "16", "--micro-batch", "2", "--steps", "2")
        result = cli("eval", model, "--data", "train.zarr", *shape, "--json", cwd=folder)
        assert result.code == 0, result.err
        losses.append(json.loads(result.out)["loss"])
        options = ("--tokens", "4", "--temperature", "0")
        result = cli("generate", model, "--prompt", "the cat", *options, cwd=folder)
        assert result.code == 0 and result.out.startswith("the cat"), result.err
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # the export's weights are BF16


def test_an_export_is_trained_further_with_its_tokenizer(cli: Cli, folder: Path) -> None:
    further = [f"--set={key}" for key in ("model.path=out/export", "run.out_dir=further")]
    result = cli("train", "config.toml", *further, cwd=folder)
    assert result.code == 0, result.err
    assert "data: found" in result.out
    names = [*FILES, "config.json"]
    first, second = hashes(folder / "out/export"), hashes(folder / "further/export")
    assert {n: first[n] for n in names} == {n: second[n] for n in names}
