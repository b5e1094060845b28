"""Exports read back by the safetensors library, and nothing lost when one fails."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.io.export import MARKER_NAME, export_model
from llmq_nb.io.hf_config import read_model_config
from llmq_nb.io.weights import load_weights
from llmq_nb.model.config import Llama3Rope, ModelConfig
from llmq_nb.model.parameters import Parameter
from tests.io.folders import (
    BF16,
    FAMILIES,
    Tensors,
    leftovers,
    library_load,
    make_config,
    random_tensors,
    save_folder,
)

Get = Callable[[Parameter], np.ndarray[Any, Any]]


def loaded(tmp_path: Path, tensors: Tensors, config: ModelConfig) -> Get:
    """`get` of a model that was loaded from a folder of the library's."""
    arrays = {p.name: a for p, a in load_weights(save_folder(tmp_path / "in", tensors), config)}
    return lambda p: arrays[p.name]


def random_get(config: ModelConfig, seed: int = 1) -> Get:
    rng = np.random.default_rng(seed)
    return lambda p: rng.standard_normal(p.shape, np.float32)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_export_load_is_bitwise(tmp_path: Path, family: str, tied: bool, dtype: DType) -> None:
    tensors = random_tensors(family, tied, dtype.numpy)
    rope = Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=512
    )
    config = make_config(
        family,
        tied,
        rope_scaling=rope if family == "llama" else None,
        rope_theta=5e5,
        bos_ids=(1,),
        eos_ids=(2, 3),
    )
    get = loaded(tmp_path, tensors, config)
    out = export_model(tmp_path / "a" / "out", config, get, dtype=dtype, max_shard_size=4000)
    names = {DType.BF16: "BF16", DType.FP32: "F32"}
    assert library_load(out) == {
        n: (names[dtype], list(t.shape), t.tobytes()) for n, t in tensors.items()
    }
    assert read_model_config(out) == config
    for p, array in load_weights(out, read_model_config(out)):
        assert array.tobytes() == get(p).tobytes()
    assert not leftovers(tmp_path)


def test_float32_weights_are_rounded_to_nearest(tmp_path: Path) -> None:
    tensors = random_tensors("llama", False, np.float32)
    out = export_model(
        tmp_path / "out", make_config("llama"), loaded(tmp_path, tensors, make_config("llama"))
    )
    stored = library_load(out)
    for name, t in tensors.items():
        # independent rounding: add half an ulp of BF16, ties to even, and cut
        bits = t.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert stored[name] == ("BF16", list(t.shape), rounded.astype(np.uint16).tobytes())


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    config = make_config("qwen3")
    out = export_model(tmp_path / "out", config, random_get(config), max_shard_size=10_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("model-*.safetensors"))
    sizes = {path.name: 0 for path in files}
    for name, (_, _, raw) in library_load(out).items():
        sizes[index["weight_map"][name]] += len(raw)
    assert len(files) > 3 and max(sizes.values()) <= 10_000
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert not (out / "model.safetensors").exists()


def test_each_parameter_is_asked_for_once_in_forward_order(tmp_path: Path) -> None:
    config = make_config("qwen2")
    asked: list[str] = []

    def get(p: Parameter) -> np.ndarray:
        asked.append(p.name)
        return np.zeros(p.shape, np.float32)

    export_model(tmp_path / "out", config, get, max_shard_size=1)
    assert len(asked) == len(set(asked)) == 2 + 2 * 7 + 1
    assert (asked[0], asked[-1]) == ("model.embed_tokens.weight", "lm_head.weight")


def test_tokenizer_and_generation_files_travel(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    texts = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "merges.txt": "a b"}
    for name, text in texts.items():
        (source / name).write_text(text)
    (source / "README.md").write_text("not a tokenizer file")
    (source / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [2, 9]}')
    config = make_config("qwen2", True, bos_ids=(1,), eos_ids=(2,))
    out = export_model(tmp_path / "out", config, random_get(config), tokenizer=source)
    assert {n: (out / n).read_text() for n in texts} == texts
    assert not (out / "README.md").exists()
    assert json.loads((out / "generation_config.json").read_text()) == {
        **{"temperature": 0.5, "eos_token_id": [2, 9], "bos_token_id": 1}
    }
    given = export_model(
        tmp_path / "given",
        config,
        random_get(config),
        tokenizer=source / "tokenizer.json",
        generation={"top_p": 0.9},
    )
    assert (given / "merges.txt").exists()
    assert json.loads((given / "generation_config.json").read_text()) == {
        **{"top_p": 0.9, "eos_token_id": 2, "bos_token_id": 1}
    }


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dtype": DType.E4M3}, "export as e4m3"),
        ({"max_shard_size": 0}, "max_shard_size 0"),
        ({"tokenizer": "empty"}, "no tokenizer files in .*empty"),
        ({"tokenizer": "broken"}, "no JSON object .*generation_config.json"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").touch()
    (tmp_path / "broken" / "generation_config.json").write_text("[1]")
    if "tokenizer" in kwargs:
        kwargs = {"tokenizer": tmp_path / kwargs["tokenizer"]}
    config = make_config("llama")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        export_model(tmp_path / "new" / "out", config, random_get(config), **kwargs)
    assert sorted(tmp_path.rglob("*")) == before


def test_foreign_files_are_never_overwritten(tmp_path: Path) -> None:
    out, config = tmp_path / "out", make_config("llama")
    out.mkdir()
    (out / "thesis.txt").write_text("ten years")
    with pytest.raises(UserError, match="'thesis.txt' is in .* no export wrote it"):
        export_model(out, config, random_get(config))
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "thesis.txt"]
    with pytest.raises(UserError, match="thesis.txt is a file"):
        export_model(out / "thesis.txt", config, random_get(config))
    with pytest.raises(UserError, match="cannot write to .*thesis.txt"):
        export_model(out / "thesis.txt" / "below", config, random_get(config))


def test_an_export_of_ours_is_replaced_unless_something_was_added(tmp_path: Path) -> None:
    config = make_config("llama")
    out = export_model(tmp_path / "out", config, random_get(config, 1), max_shard_size=10_000)
    first = library_load(out)
    export_model(out, config, random_get(config, 2))
    assert library_load(out) != first and not list(out.glob("*.index.json"))
    assert not leftovers(tmp_path)
    (out / "notes.md").touch()
    with pytest.raises(UserError, match="'notes.md'"):
        export_model(out, config, random_get(config, 3))


def test_an_empty_folder_and_a_link_to_it_are_used(tmp_path: Path) -> None:
    config = make_config("llama")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    export_model(tmp_path / "link", config, random_get(config))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.safetensors").is_file()


def test_too_little_disk_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config("llama")
    weights = sum(t.nbytes for t in random_tensors("llama", False, BF16).values())
    disk = shutil._ntuple_diskusage(10**9, 10**9, weights)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    with pytest.raises(UserError, match=r"too little disk: .* for the export, .* are free"):
        export_model(tmp_path / "out", config, random_get(config))
    assert list(tmp_path.iterdir()) == []
    disk = shutil._ntuple_diskusage(10**9, 10**9, weights + 2**23)  # type: ignore[attr-defined]
    export_model(tmp_path / "out", config, random_get(config))


def failing(config: ModelConfig, error: BaseException) -> Get:
    """Gives half the model, then fails."""
    get = random_get(config, 5)

    def half(p: Parameter) -> np.ndarray:
        if p.layer == 1:
            raise error
        return get(p)

    return half


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), MachineError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["full disk", "interrupt"],
)
def test_a_failed_export_leaves_what_was_there(
    tmp_path: Path, error: BaseException, seen: type[BaseException]
) -> None:
    config = make_config("llama")
    with pytest.raises(seen):
        export_model(tmp_path / "out", config, failing(config, error), max_shard_size=1)
    assert list(tmp_path.iterdir()) == []
    out = export_model(tmp_path / "out", config, random_get(config))
    before = library_load(out)
    with pytest.raises(seen, match="disk is full" if seen is MachineError else None):
        export_model(out, config, failing(config, error), max_shard_size=1)
    assert library_load(out) == before and not leftovers(tmp_path)


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    """The state that SIGKILL leaves there: the old export under its interim name, a full staging
    folder, no `out`."""
    config = make_config("llama")
    out = export_model(tmp_path / "out", config, random_get(config))
    before = library_load(out)
    out.rename(tmp_path / ".out.llmq_nb_old")
    (tmp_path / ".out.llmq_nb_staging").mkdir()
    (tmp_path / ".out.llmq_nb_staging" / "half").touch()
    with pytest.raises(KeyboardInterrupt):
        export_model(out, config, failing(config, KeyboardInterrupt()))
    assert library_load(out) == before and not leftovers(tmp_path)


def test_a_wrong_shape_from_get_is_a_bug_not_a_file(tmp_path: Path) -> None:
    config = make_config("llama")
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \(37, 32\), not \(48, 32\)"):
        export_model(tmp_path / "out", config, lambda p: np.zeros((37, 32), np.float32))
    assert list(tmp_path.iterdir()) == []


def test_the_marker_lists_every_file(tmp_path: Path) -> None:
    config = make_config("mistral")
    out = export_model(tmp_path / "out", config, random_get(config), max_shard_size=20_000)
    listed = json.loads((out / MARKER_NAME).read_text())["files"]
    assert sorted([*listed, MARKER_NAME]) == sorted(p.name for p in out.iterdir())
