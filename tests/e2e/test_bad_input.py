"""Whatever a person gets wrong: exit code 2, one line that names what, where and the mend, and the
run's folder and everything beside it as it was.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.e2e.runs import WORDS, Cli, hashes, listing, make_run, write_config, write_model
from tests.io.folders import library_save

Make = Callable[[Path], Any]


@pytest.fixture(scope="module")
def base(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, its export in shards, a store of another tokenizer; copied for each test."""
    folder = make_run(tmp_path_factory.mktemp("base"), {"schedule": {"steps": 3}})
    assert cli("train", "config.toml", cwd=folder).code == 0
    shards = ("export", "out", "sharded", "--max-shard-size", "20KB", "--dtype", "fp32")
    assert cli(*shards, cwd=folder).code == 0
    no_tokenizer = shutil.ignore_patterns("tokenizer*.json")
    shutil.copytree(folder / "out/export", folder / "whole", ignore=no_tokenizer)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*WORDS, "<eos>"])}, "the"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<eos>"])
    words.save(str(folder / "words.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((folder / "words.json").read_bytes())
    (folder / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n')
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "a" * 99, "answer": "b"}))
    shutil.copytree(folder / "whole", folder / "words-model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, folder / "words-model" / name)
    made = cli("tokenize", "text.txt", "--out", "words.zarr", "--tokenizer", ".", cwd=folder)
    assert made.code == 0, made.err
    shutil.move(folder / "out", folder / "done")
    return folder


def refused(cli: Cli, folder: Path, *argv: str, before: str = "") -> str:
    """The error line of a command that must leave everything as it was."""
    files = hashes(folder), listing(folder)
    result = cli(*argv, cwd=folder, before=before)
    assert result.code == 2, (result.code, result.out, result.err)
    assert (hashes(folder), listing(folder)) == files
    return result.error


STORES = {"data": {"sources": [], "train": "train.zarr", "validation": None}}
CONFIGS: dict[str, tuple[dict[str, dict[str, Any]], list[str]]] = {
    "section": ({"modle": {"path": "m"}}, ["modle", "config.toml", "did you mean 'model'"]),
    "key": ({"optimizer": {"lerning_rate": 1}}, ["[optimizer]", "'learning_rate'"]),
    "elsewhere": ({"model": {"seq_len": 8}}, ["seq_len", "[model]", "[batch] seq_len"]),
    "type": ({"batch": {"seq_len": "long"}}, ["long", "[batch] seq_len", "a whole number"]),
    "choice": ({"precision": {"dtype": "fp16"}}, ["fp16", "[precision] dtype", "'bf16'"]),
    "range": ({"optimizer": {"beta1": 1.0}}, ["1.0", "optimizer.beta1", "[0, 1)"]),
    "missing": ({"model": {"path": None}}, ["'path' is missing", "set model.path"]),
    "both": ({"schedule": {"epochs": 1.0}}, ["steps and epochs", "only one"]),
    "warm-up": ({"schedule": {"warmup_steps": 90}}, ["warmup_steps = 90", "12 steps"]),
    "preset": ({"model": {"path": "qwen2.5-0.5"}}, ["qwen2.5-0.5", "did you mean 'qwen2.5-0.5b'"]),
    "folder": ({"model": {"path": "none/here"}}, ["none/here", "model.path", "folder"]),
    "positions": ({"batch": {"seq_len": 129}}, ["129", "batch.seq_len", "128 positions"]),
    "memory": ({"batch": {"micro_batch": 10**8}}, ["out of memory", "TiB", "batch.micro_batch"]),
    "batch": ({"batch": {"grad_accumulation": 10**9}}, ["out of memory", "grad_accumulation"]),
    "one store": ({"data": {"validation": "./train.zarr"}}, ["data.train", "data.validation"]),
    "layer": ({"precision": {"bf16_layers": [2]}}, ["layer 2", "bf16_layers", "2 layers"]),
    "weights": ({"model": {"path": "quickstart", "init": "pretrained"}}, ["quickstart", "weights"]),
    "source": ({"data": {"sources": ["no.txt"]}}, ["no such file", "no.txt"]),
    "glob": ({"data": {"sources": ["*.parkuet"]}}, ["no file matches", "*.parkuet"]),
    "variable": ({"data": {"sources": ["${home}/a"]}}, ["${home}", "${stdlib}"]),
    "store": ({"data": {"sources": [], "train": "no.zarr"}}, ["no.zarr", "tokenize"]),
    "no store": ({"data": {"sources": [], "train": "model"}}, ["not a token store", "model"]),
    "tokenizer": ({"data": {"tokenizer": "no/t.json"}}, ["no/t.json"]),
    "other tokenizer": (
        {"data": {"sources": [], "train": "words.zarr"}},
        ["words.zarr", "made with tokenizer", "bytes", "tokenize"],
    ),
    "long": (
        {**STORES, "batch": {"seq_len": 128}, "data": {**STORES["data"], "train": "short.zarr"}},
        ["short.zarr", "seq_len"],
    ),
    "long validation": (
        {"data": {"sources": [], "validation": "short.zarr"}, "batch": {"seq_len": 128}},
        ["short.zarr", "seq_len"],
    ),
    "device": ({"run": {"device": "cuda"}}, ["run.device", "auto or cpu"]),
    "ranks": ({"parallel": {"devices": []}}, ["parallel.devices", "device numbers"]),
    "policy": (
        {"memory": {"policy": "auto"}, "batch": {"grad_accumulation": 10**9}},
        ["memory.policy", "no setting fits", "the least takes"],
    ),
    "offload": ({"memory": {"offload": ["m"]}}, ["memory.offload", "leave it out"]),
    "tracker": ({"log": {"trackers": ["trackio"]}}, ["trackio", "log.trackers", "pip install"]),
    "sample": ({"log": {"sample": ""}}, ["log.sample", "prompt"]),
    "out is a file": ({"run": {"out_dir": "text.txt"}}, ["text.txt", "run.out_dir"]),
    "out below a file": ({"run": {"out_dir": "text.txt/a/b"}}, ["text.txt", "run.out_dir"]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name: str, cli: Cli, base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "run"))
    (folder / "short.txt").write_text("a few words")
    made = ("tokenize", "short.txt", "--out", "short.zarr", "--tokenizer", "bytes")
    assert cli(*made, cwd=folder).code == 0
    changes, words = CONFIGS[name]
    write_config(folder, changes)
    line = refused(cli, folder, "train", "config.toml")
    assert all(word in line for word in words), line


SETS = {
    "optimizer.lr": ["--set optimizer.lr", "section.key=value"],
    "optimizer.lr=1": ["--set optimizer.lr=1", "unknown key 'lr'", "did you mean 'learning_rate'"],
    "optimiser.beta1=0": ["--set optimiser.beta1=0", "did you mean 'optimizer'"],
    "batch.seq_len=long": ["--set batch.seq_len=long", "a whole number"],
    "batch.seq_len=-1": ["-1", "batch.seq_len", "at least 1"],
    "run.device=gpu": ["--set run.device=gpu", "'cuda'"],
    "data.sources=text.txt": ["--set data.sources=text.txt", "a list of strings"],
    "schedule.steps=1.5": ["--set schedule.steps=1.5", "a whole number"],
}


@pytest.mark.parametrize("override", SETS)
def test_set(override: str, cli: Cli, base: Path) -> None:
    line = refused(cli, base, "train", "config.toml", "--set", override)
    assert all(word in line for word in SETS[override]), line


JSONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "window": ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, ["slid"]),
    "experts": ({"num_experts": 8}, ["num_experts"]),
    "mixture": (
        {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"},
        ["Qwen2MoeForCausalLM"],
    ),
    "rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn"]),
    "activation": ({"hidden_act": "gelu"}, ["gelu", "silu"]),
    "lacking": ({"hidden_size": None}, ["hidden_size"]),
    "mistyped": ({"num_hidden_layers": "two"}, ["num_hidden_layers", "two"]),
    "unaligned": ({"intermediate_size": 50}, ["50", "multiple of 16"]),
}


@pytest.mark.parametrize("name", JSONS)
def test_config_json(name: str, cli: Cli, base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "run"))
    changes, words = JSONS[name]
    write_model(folder / "model", **changes)
    line = refused(cli, folder, "train", "config.toml")
    assert all(word in line for word in [*words, "config.json"]), line


NORM = "model.norm.weight"


def _missing(t: dict) -> None:
    del t[NORM]


def _unexpected(t: dict) -> None:
    t["model.layers.7.extra.weight"] = t[NORM]


def _misshaped(t: dict) -> None:
    t[NORM] = np.ones(33, np.float32)


WEIGHTS = {
    "missing": (_missing, [NORM]),
    "unexpected": (_unexpected, ["model.layers.7.extra.weight"]),
    "misshaped": (_misshaped, [NORM, "33", "32"]),
}


@pytest.mark.parametrize("command", ["train", "eval", "export"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_tensors(name: str, command: str, cli: Cli, base: Path, tmp_path: Path) -> None:
    from llmq_nb.io.safetensors_io import SafetensorsFile

    folder = Path(shutil.copytree(base, tmp_path / "run"))
    change, words = WEIGHTS[name]
    file = folder / "whole/model.safetensors"
    tensors = {key: np.array(value) for key, value in SafetensorsFile(file).views().items()}
    change(tensors)
    library_save(file, tensors)
    write_config(folder, {"model": {"path": "whole"}})
    argv = {
        "train": ("train", "config.toml"),
        "eval": ("eval", "whole", "--data", "validation.zarr", "--seq-len", "16"),
        "export": ("export", "whole", "new"),
    }[command]
    line = refused(cli, folder, *argv)
    assert all(word in line for word in [*words, "whole"]), line


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_shard(damage: str, cli: Cli, base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "run"))
    shard = sorted((folder / "sharded").glob("model-*.safetensors"))[1]
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    write_config(folder, {"model": {"path": "sharded"}})
    assert shard.name in refused(cli, folder, "train", "config.toml")


def _token_in_bin(folder: Path) -> None:
    """An LLMQ token file, version 1, with one id too large."""
    ids = np.full(4000, 65, "<i4")
    ids[1234] = 5000
    header = b"BIN.TOK\n" + np.array([1, 4, len(ids)], "<i4").tobytes()
    (folder / "t.bin").write_bytes(header.ljust(1024, b"\0") + ids.tobytes())
    write_config(folder, {"data": {"sources": ["t.bin"], "train": "new.zarr", "validation": None}})


def _token_in_store(folder: Path) -> None:
    tokens = zarr.open_group(folder / "train.zarr", mode="r+")["tokens"]
    assert isinstance(tokens, zarr.Array)
    tokens[77] = 300
    write_config(folder, STORES)


def _unclosed(folder: Path) -> None:
    path = folder / "train.zarr/zarr.json"
    record = json.loads(path.read_text())
    record["attributes"]["closed"] = False
    path.write_text(json.dumps(record))
    write_config(folder, STORES)


def _missing_chunk(folder: Path) -> None:
    (folder / "train.zarr/tokens/c/0").unlink()
    write_config(folder, STORES)


def _masked(folder: Path) -> None:
    """An LLMQ token file, version 2, whose mask supervises nothing."""
    header = b"BIN.TOK\n" + np.array([2, 4, 4000, 259, 1], "<i4").tobytes()
    ids = np.full(4000, 65, "<i4").tobytes()
    (folder / "t.bin").write_bytes(header.ljust(1024, b"\0") + ids + bytes(500))
    write_config(folder, {"data": {"sources": ["t.bin"], "train": "new.zarr", "validation": None}})


DATA: dict[str, tuple[Make, list[str]]] = {
    "token in a bin": (_token_in_bin, ["5000", "position 1234", "t.bin", "vocabulary of 259"]),
    "token in a store": (_token_in_store, ["300", "position 77", "train.zarr", "259"]),
    "unclosed": (_unclosed, ["unclosed", "train.zarr", "tokenize again"]),
    "missing chunk": (_missing_chunk, ["train.zarr/tokens/c/0", "tokenize again"]),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name: str, cli: Cli, base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "run"))
    make, words = DATA[name]
    make(folder)
    line = refused(cli, folder, "train", "config.toml")
    assert all(word in line for word in words), line


def test_all_masked(cli: Cli, base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "run"))
    _masked(folder)
    for _ in range(2):  # the store itself is right, and found the second time
        result = cli("train", "config.toml", cwd=folder)
        assert result.code == 2
        assert "new.zarr" in result.error and "supervised" in result.error
        assert not (folder / "out").exists()


DISK = """
import collections, shutil
usage = collections.namedtuple("usage", "total used free")
shutil.disk_usage = lambda path: usage(10**9, 10**9 - 70_000, 70_000)
"""


def test_too_little_disk(cli: Cli, base: Path) -> None:
    line = refused(cli, base, "train", "config.toml", before=DISK)
    assert "too little disk" in line and "out/checkpoints" in line and "run.out_dir" in line


def test_checkpoints(cli: Cli, base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "run"))
    shutil.move(folder / "done", folder / "out")
    for argv, words in {
        ("--resume", "none"): ["has checkpoints", "out/checkpoints", "run.name"],
        ("--resume", "model"): ["no complete checkpoint", "model", "manifest.json is missing"],
        ("--set", "batch.seq_len=32"): ["batch.seq_len", "16", "32"],
        ("--set", "data.seed=5"): ["data.seed", "1234", "5"],
        ("--set", "optimizer.m=bf16"): ["m is stored as float32", "optimizer.m"],
    }.items():
        line = refused(cli, folder, "train", "config.toml", "--set", "schedule.steps=9", *argv)
        assert all(word in line for word in words), line
    write_model(folder / "model", intermediate_size=64)
    line = refused(cli, folder, "train", "config.toml")
    assert "another model" in line and "48" in line and "64" in line and "run.name" in line
    # from elsewhere, no folder is made for a run that cannot begin
    write_config(folder, {"run": {"out_dir": "new"}})
    assert "another model" in refused(cli, folder, "train", "config.toml", "--resume", "out")


COMMANDS: dict[tuple[str, ...], list[str]] = {
    (): ["command", "--help"],
    ("trian", "config.toml"): ["trian", "--help"],
    ("train",): ["CONFIG"],
    ("train", "config.toml", "--sed", "a.b=1"): ["--sed", "--set"],
    ("train", "no.toml"): ["no such file", "no.toml"],
    ("train", "model"): ["model"],
    ("train", "text.txt"): ["not valid TOML", "text.txt"],
    ("eval", "nothing", "--data", "validation.zarr"): ["no model", "nothing", "run's folder"],
    ("eval", "done", "--data", "no.zarr"): ["no.zarr", "tokenize"],
    ("eval", "done", "--data", "words.zarr", "--seq-len", "16"): ["words.zarr", "tokenizer"],
    ("eval", "done", "--data", "validation.zarr", "--seq-len", "999"): ["999", "128 positions"],
    ("eval", "done", "--data", "validation.zarr", "--seq-len", "x"): ["--seq-len", "x"],
    ("eval", "done"): ["--data", "--task"],
    ("eval", "done", "--task", "no.jsonl"): ["cannot read", "no.jsonl"],
    ("eval", "done", "--task", "bad.jsonl"): ['no "answer"', "bad.jsonl:2"],
    ("eval", "done", "--task", "long.jsonl", "--data", "validation.zarr"): [
        "long.jsonl:1",
        "128 positions",
    ],
    ("eval", "whole", "--task", "bad.jsonl"): ["whole", "no tokenizer", "--tokenizer"],
    ("eval", "done", "--task", "bad.jsonl", "--regex", "["): ["--regex", "["],
    ("eval", "done", "--data", "validation.zarr", "--details", "a.jsonl"): ["--details", "--task"],
    ("eval", "done", "--task", "bad.jsonl", "--details", "no/a.jsonl"): ["--details", "no/a.jsonl"],
    ("generate", "nothing", "--prompt", "a"): ["no model", "nothing"],
    ("generate", "done"): ["--prompt", "--prompts"],
    ("generate", "done", "--prompt", "a", "--prompts", "text.txt"): ["--prompt", "--prompts"],
    ("generate", "done", "--prompts", "no.txt"): ["cannot read", "no.txt"],
    ("generate", "done", "--prompts", "bad.jsonl"): ["unknown key 'answer'", "bad.jsonl:1"],
    ("generate", "done", "--prompt", "a", "--system", "b"): ["--system", "--chat"],
    ("generate", "words-model", "--prompt", "the", "--chat"): ["no chat template", "jinja"],
    ("generate", "whole", "--prompt", "a"): ["whole", "no tokenizer", "--tokenizer"],
    ("generate", "done", "--prompt", ""): ["empty prompt", "--prompt"],
    ("generate", "done", "--prompt", "a", "--top-p", "0"): ["--top-p", "0"],
    ("generate", "done", "--prompt", "a", "--tokenizer", "no.json"): ["no.json"],
    ("export", "nothing", "new"): ["no model", "nothing"],
    ("export", "done", "model"): ["model"],
    ("export", "done", "text.txt"): ["text.txt"],
    ("export", "done", "new", "--max-shard-size", "5XB"): ["--max-shard-size", "5XB"],
    ("plot", "model", "--out", "a.png"): ["no such run: model", "log.jsonl"],
    ("plot", "done", "--out", "a.gif"): ["a.gif", ".png"],
    ("plot", "done", "--out", "text.txt/a.png"): ["text.txt"],
    ("tokenize", "*.no", "--out", "new.zarr", "--tokenizer", "bytes"): ["no file matches", "*.no"],
    ("tokenize", "text.txt", "--out", "model", "--tokenizer", "bytes"): ["model"],
    ("tokenize", "text.txt", "--out", "new.zarr", "--tokenizer", "no"): ["no"],
    ("tokenize", "text.txt", "--out", "train.zarr", "--tokenizer", "."): ["train.zarr"],
    ("bench", "nothing"): ["nothing", "data"],
}


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_command(argv: tuple[str, ...], cli: Cli, base: Path) -> None:
    line = refused(cli, base, *argv)
    assert all(word in line for word in COMMANDS[argv]), line
