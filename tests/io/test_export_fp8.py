"""FP8 exports: codes against the rounding of tests/oracles, the folder against transformers.

The record of transformers 5.24 (tests/fixtures/fp8_export, make_fp8_export.py beside it) belongs to
these very bytes: their sha256 is in it. The model that the codes describe is built here from the
file by the safetensors library.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from llmq_nb.config import PrecisionConfig
from llmq_nb.core.dtype import DType
from llmq_nb.core.errors import UserError
from llmq_nb.io.export import export_model
from llmq_nb.io.export_fp8 import find_absmax
from llmq_nb.io.weights import check_weights
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu.linear import keep_codes
from llmq_nb.model.fp8 import BY_WEIGHT
from llmq_nb.train.inference import Inference, open_model
from tests import oracles
from tests.e2e.conftest import cli
from tests.e2e.runs import Cli
from tests.io.folders import make_config
from tests.model.harness import FIXTURES, tensor

__all__ = ["cli"]
RECORDS = FIXTURES.parent / "fp8_export"
CASES = sorted(path.stem for path in RECORDS.iterdir())
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "up", "up_proj": "up"}


def export(case: str, out: Path, bf16_layers: tuple[int, ...] = ()) -> Path:
    opened = open_model(FIXTURES / case)
    fp8 = find_absmax(opened.model, opened.read, bf16_layers)
    return export_model(out, opened.model, opened.read, fp8=fp8)


def stored(folder: Path) -> dict[str, tuple[str, Any]]:
    """name -> (dtype, values as float64) by the safetensors library."""
    formats = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
    out = {}
    for name, entry in safetensors.deserialize((folder / "model.safetensors").read_bytes()):
        values = np.frombuffer(entry["data"], formats[entry["dtype"]])
        out[name] = (entry["dtype"], values.reshape(entry["shape"]).astype(np.float64))
    return out


@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales(case: str, tmp_path: Path) -> None:
    """By float64: the scale of a fused tensor is its absmax / 448, a code the nearest one."""
    found = stored(export(case, tmp_path / "out"))
    original = safetensors.numpy.load_file(FIXTURES / case / "model.safetensors")
    rounded = {n: a.astype(ml_dtypes.bfloat16).astype(np.float64) for n, a in original.items()}
    largest: dict[tuple[str, str], float] = {}

    def group(name: str) -> tuple[str, str]:
        layer, module = name.split(".")[2], name.split(".")[-2]
        return layer, FUSED.get(module, module)

    for name, values in rounded.items():
        if name.endswith("_proj.weight"):
            key = group(name)
            largest[key] = max(largest.get(key, 0.0), float(np.abs(values).max()))
    for name, values in rounded.items():
        dtype, got = found.pop(name)
        if not name.endswith("_proj.weight"):
            assert dtype == "BF16" and np.array_equal(got, values)
            continue
        scale_type, scale = found.pop(name + "_scale_inv")
        assert dtype == "F8_E4M3" and scale_type == "F32" and scale.shape == ()
        assert scale == np.float32(np.float32(largest[group(name)]) / np.float32(448.0))
        inverse = np.float32(448.0) / np.float32(largest[group(name)])
        scaled = values.astype(np.float32) * inverse
        want = oracles.decode(oracles.encode(np.clip(scaled, -448, 448), "e4m3"), "e4m3")
        assert np.array_equal(got, want)
    assert not found


@pytest.mark.parametrize("case", CASES)
def test_transformers_gives_the_logits_of_the_codes(case: str, tmp_path: Path) -> None:
    """FP32: 2e-5 of the largest logit (float32 sums in another order). BF16: 0.05, a dozen ulps."""
    out = export(case, tmp_path / "out")
    record = safetensors.numpy.load_file(RECORDS / f"{case}.safetensors")
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).digest()
    assert digest == record["sha256"].tobytes()
    found = stored(out)
    weights = {
        name: values * found[name + "_scale_inv"][1] if name + "_scale_inv" in found else values
        for name, (_, values) in found.items()
        if not name.endswith("_scale_inv")
    }
    config = json.loads((out / "config.json").read_text())
    tokens = record["tokens"]
    want = oracles.model_logits(config, weights, tokens, np.zeros_like(tokens))
    size = np.abs(want).max()
    assert np.abs(record["logits"] - want).max() < 2e-5 * size
    opened = open_model(out)
    assert opened.precision.precision.dtype == "bf16"
    for dtype in ("fp32", "bf16"):
        base = dataclasses.replace(opened.precision, precision=PrecisionConfig(dtype=dtype))
        arrays = open_model(out).arrays  # they are read once
        inference = Inference(opened.model, micro_batch=1, seq_len=16, base=base, arrays=arrays)
        ours = inference.logits(tokens[0])
        assert np.abs(ours - record["bf16"][0, -1]).max() < 0.05 * size


def test_an_export_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """codes * scale in float32, rounded to BF16."""
    out = export("qwen2_untied", tmp_path / "out")
    found = stored(out)
    for parameter, array in open_model(out).arrays:
        assert array.dtype == ml_dtypes.bfloat16
        for view in parameter.views:
            values = found[view.hf_name][1].astype(np.float32)
            if view.hf_name + "_scale_inv" in found:
                values *= np.float32(found[view.hf_name + "_scale_inv"][1])
            want = oracles.bf16(values)
            assert np.array_equal(array[view.start : view.stop].astype(np.float64), want)


def test_codes_are_those_of_a_training_step(tmp_path: Path) -> None:
    """What the cpu engine keeps for FP8 products, view by view."""
    case = "qwen2_untied"
    out, opened = export(case, tmp_path / "out"), open_model(FIXTURES / case)
    codes = {}
    with safe_open(out / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    for name, entry in safetensors.deserialize((out / "model.safetensors").read_bytes()):
        codes[name] = bytes(entry["data"])
    checked = 0
    for parameter, array in opened.arrays:
        if parameter.field in BY_WEIGHT and parameter.layer is not None:
            weight = tensor(array, DType.BF16, DType.E4M3)
            assert weight.fp8 is not None
            weight.fp8.kept = True
            weight.fp8.codes = tensor(np.zeros(array.shape), DType.E4M3)
            keep_codes(weight)
            for view in parameter.views:
                rows = weight.fp8.codes.data[view.start : view.stop]
                assert codes[view.hf_name] == rows.tobytes()
                checked += 1
    assert checked == 14  # 7 matrices in 2 layers


def test_layers_kept_in_bf16(tmp_path: Path) -> None:
    out = export("smollm2", tmp_path / "out", bf16_layers=(-1,))
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    layers = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    names = {name for name, (dtype, _) in stored(out).items() if dtype == "F8_E4M3"}
    last = f"model.layers.{layers - 1}."
    assert names and not any(name.startswith(last) for name in names)
    kept = quantization["modules_to_not_convert"]
    assert kept[0] == "lm_head" and all(name.startswith(last) for name in kept[1:])
    assert len(kept) == 1 + 7
    assert quantization["weight_block_size"] is None and quantization["quant_method"] == "fp8"


def config_and_get() -> tuple[ModelConfig, Any]:
    rng = np.random.default_rng(1)
    return make_config("qwen3"), lambda p: rng.standard_normal(p.shape, np.float32)


def test_shards_have_codes_and_scales(tmp_path: Path) -> None:
    """Random access: each shard asks for its own parameters, and the index has every tensor."""
    opened = open_model(FIXTURES / "qwen3_group7")
    fp8 = find_absmax(opened.model, opened.read)
    whole = export_model(tmp_path / "a", opened.model, opened.read, fp8=fp8)
    parts = export_model(tmp_path / "b", opened.model, opened.read, fp8=fp8, max_shard_size=8_000)
    index = json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(stored(whole))
    files = sorted(parts.glob("model-*.safetensors"))
    assert len(files) > 3
    both = {
        name: bytes(entry["data"])
        for file in files
        for name, entry in safetensors.deserialize(file.read_bytes())
    }
    for name, entry in safetensors.deserialize((whole / "model.safetensors").read_bytes()):
        assert both[name] == bytes(entry["data"])
    check_weights(parts, opened.model)


def test_refusals(tmp_path: Path) -> None:
    config, get = config_and_get()
    with pytest.raises(UserError, match="FP8 weights beside FP32"):
        fp8 = {"model.layers.0.mlp.down_proj.weight": np.float32(1)}
        export_model(tmp_path / "out", config, get, dtype=DType.FP32, fp8=fp8)
    assert list(tmp_path.iterdir()) == []


def test_the_command(cli: Cli, tmp_path: Path) -> None:
    source = str(FIXTURES / "smollm2")
    result = cli("export", source, "out", "--quantize", "e4m3", cwd=tmp_path)
    assert result.code == 0 and result.out.endswith("exported " + str(tmp_path / "out") + "\n")
    same = export("smollm2", tmp_path / "same")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (same / name).read_bytes()
    result = cli("export", source, "new", "--quantize", "e4m3", "--dtype", "fp32", cwd=tmp_path)
    assert result.code == 2 and "FP8 weights beside FP32" in result.error
    assert not (tmp_path / "new").exists()
    (tmp_path / "out/mine.txt").write_text("mine")
    result = cli("export", source, "out", "--quantize", "e4m3", cwd=tmp_path)
    assert result.code == 2 and "mine.txt" in result.error
