"""Fine-tuning on conversations, by bench/chat_demo.py with a tiny model whose tokens are bytes.

What is counted and compared there is counted here by other means: supervised tokens are the bytes
of the answers and the token that ends each, and a packed sample's oracle is the float64 model.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.chat_demo import conversations, logits_of, main, opened
from llmq_nb.core.dtype import DType
from llmq_nb.data.byte_tokenizer import byte_tokenizer_files
from llmq_nb.data.packing import Packing
from llmq_nb.data.store import TokenStore
from llmq_nb.io.export import export_model
from llmq_nb.io.hf_config import read_model_config
from llmq_nb.model.parameters import Parameter
from tests import oracles
from tests.e2e.runs import write_model

SEQ_LEN = 384


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("chat")
    shape = write_model(folder / "shape", max_position_embeddings=SEQ_LEN)
    rng = np.random.default_rng(1)

    def get(p: Parameter) -> np.ndarray[Any, Any]:
        if len(p.shape) == 1:
            return np.ones(p.shape, np.float32)
        return (rng.standard_normal(p.shape) * p.shape[1] ** -0.5).astype(np.float32)

    export_model(
        folder / "model",
        read_model_config(shape),
        get,
        dtype=DType.FP32,
        tokenizer=byte_tokenizer_files(),
    )
    argv = ["--conversations", "60", "--steps", "30", "--seq-len", str(SEQ_LEN), "--rate", "1e-2"]
    return folder, main([str(folder / "model"), str(folder / "out"), *argv])


def test_as_many_tokens_are_trained_as_the_assistant_says(
    demo: tuple[Path, dict[str, Any]],
) -> None:
    """Before packing, in the stores, and over all windows."""
    folder, facts = demo
    lines = (folder / "out/chat.jsonl").read_text(encoding="utf-8").splitlines()
    said = [json.loads(line)["messages"][1] for line in lines]
    assert len(said) == 60 and all(m["role"] == "assistant" for m in said)
    count = sum(len(m["content"].encode("utf-8")) + 1 for m in said)
    assert facts["supervised"] == {"conversations": count, "stores": count, "windows": count}


def test_a_packed_sample_is_what_it_is_alone(demo: tuple[Path, dict[str, Any]]) -> None:
    """FP32, 2e-5 of the largest logit; of every document of a window, against the float64 model."""
    folder, facts = demo
    assert facts["packed"]["rows"] > 100
    assert facts["packed"]["difference"] < 2e-5 * facts["packed"]["largest_logit"]
    export = folder / "out/run/export"
    weights = load_file(export / "model.safetensors")
    config = json.loads((export / "config.json").read_text())
    windows = Packing(TokenStore(folder / "out/train.zarr"), SEQ_LEN, "pack").read(0)
    tokens, starts = windows.tokens[:1], windows.segment_start[:1]
    got = logits_of(opened(export, SEQ_LEN), tokens, starts, 0, SEQ_LEN)
    begins = sorted(set(starts[0].tolist()))
    assert len(begins) >= 3
    for begin, end in zip(begins, [*begins[1:], SEQ_LEN], strict=True):
        alone = tokens[:, begin:end]
        want = oracles.model_logits(config, weights, alone, np.zeros_like(alone))[0]
        assert np.abs(got[begin:end] - want).max() < 2e-5 * np.abs(want).max()


def test_it_learned(demo: tuple[Path, dict[str, Any]]) -> None:
    """Fresh weights know nothing: log 272 is 5.6. And the export is the run."""
    folder, facts = demo
    assert facts["loss"]["before"] > 5 and facts["loss"]["after"] < 4.2
    inferences = [opened(folder / "out" / name, 32) for name in ("run", "run/export")]
    text = np.arange(65, 85, dtype=np.int32)
    logits = [inference.logits(text) for inference in inferences]
    np.testing.assert_array_equal(logits[0], logits[1])


def test_conversations_are_always_the_same() -> None:
    first, again = list(conversations(40)), list(conversations(40))
    assert first == again and len({talk[0]["content"] for talk in first}) == 40
    assert all([m["role"] for m in talk] == ["user", "assistant"] for talk in first)
