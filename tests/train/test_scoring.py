"""Scores of choices and losses by position against the float64 model of tests/oracles.

FP32: the losses of these fixtures agree with the oracle to 1e-5 (test_transformer.py has the bound
of a mean); a choice of 6 tokens sums six of them.
"""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmq_nb.core.errors import UserError
from llmq_nb.data.loader import EvalBatch
from llmq_nb.data.prompts import Prompt, PromptCoder
from llmq_nb.data.tasks import ExactMatch, MultipleChoice
from llmq_nb.data.tokenizer import ByteTokenizer, Ids
from llmq_nb.train.generation import Sampling
from llmq_nb.train.inference import open_model
from llmq_nb.train.scoring import (
    Encoded,
    Evaluator,
    accuracy,
    answer_questions,
    encode_questions,
    log_probabilities,
    loss_by_position,
    score_choices,
)
from tests import oracles
from tests.model.harness import FIXTURES, expected, small_model

CASE = "qwen2_untied"


def _unused(parameter: Any) -> Any:
    raise AssertionError(parameter)


def oracle_losses(tokens: Any, targets: Any, segment_start: Any) -> np.ndarray[Any, Any]:
    """Loss of every target (B, T), 0 where it is masked, in float64."""
    folder = FIXTURES / CASE
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    logits = oracles.model_logits(config, weights, tokens, segment_start)
    lse = np.log(np.exp(logits).sum(-1))
    at = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    return np.where(targets == -100, 0.0, lse - at)


def random_pairs(
    rng: np.random.Generator, V: int, sizes: list[tuple[int, int]]
) -> list[tuple[Ids, Ids]]:
    def ids(n: int) -> Ids:
        return rng.integers(0, V, n).astype(np.int32)

    return [(ids(before), ids(after)) for before, after in sizes]


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    return Evaluator(open_model(FIXTURES / CASE), "cpu")


def test_losses_by_position(evaluator: Evaluator) -> None:
    """Documents restart: a target counts by the tokens of its own document that it sees."""
    f = expected(CASE)
    arrays = [f[name] for name in ("tokens", "targets", "segment_start")]
    B, T = arrays[0].shape
    inference = evaluator.inference(B, T)
    supervised = int((arrays[1] != -100).sum())
    twice = [EvalBatch(arrays[0], arrays[1], arrays[2], supervised)] * 2
    loss, tokens, buckets = loss_by_position(inference, iter(twice))
    want = oracle_losses(*arrays)
    by_bucket: dict[int, list[float]] = {}
    for b in range(B):
        for t in range(T):
            if arrays[1][b, t] != -100:
                seen = t - int(arrays[2][b, t]) + 1
                by_bucket.setdefault(len(bin(seen)) - 3, []).append(want[b, t])
    assert tokens == 2 * supervised
    assert abs(loss - float(f["loss"])) < 1e-5
    assert [(b.first, b.tokens) for b in buckets] == [
        (2**k, 2 * len(v)) for k, v in sorted(by_bucket.items())
    ]
    for bucket, (_, values) in zip(buckets, sorted(by_bucket.items()), strict=True):
        assert abs(bucket.loss - np.mean(values)) < 1e-5
    assert buckets[0].last == 1 and buckets[1].last == 3 and buckets[-1].last == T


@pytest.mark.parametrize(("micro_batch", "seq_len"), [(1, 12), (2, 30), (3, 80)])
def test_log_probabilities(evaluator: Evaluator, micro_batch: int, seq_len: int) -> None:
    """Windows with one, two and all sequences; each must be what it is alone."""
    rng = np.random.default_rng(1)
    V = evaluator.model.V
    sizes = [(1, 1), (5, 6), (7, 6), (3, 1), (9, 2), (1, 6)]
    pairs = random_pairs(rng, V, sizes)
    inference = evaluator.inference(micro_batch, seq_len, exact=True)
    got = log_probabilities(inference, pairs)
    for (before, after), value in zip(pairs, got, strict=True):
        text = np.concatenate([before, after])[None]
        targets = text[:, 1:].copy()
        targets[:, : len(before) - 1] = -100
        want = -oracle_losses(text[:, :-1], targets, np.zeros_like(targets)).sum()
        assert abs(value - want) < 6e-5


def test_choices(evaluator: Evaluator) -> None:
    """Sums and sums by byte of the texts, each with its own winner."""
    prompt = Prompt("here", "ab")
    texts = ("c", "dddddd", "ü")
    question = MultipleChoice(None, prompt, texts, 1)
    ids = [np.array(x, np.int32) for x in ([9], [8] * 6, [5, 6])]
    encoded = Encoded(question, np.array([1, 2], np.int32), tuple(ids))
    (score,) = score_choices(evaluator, [encoded], micro_batch=2)
    inference = evaluator.inference(1, 16, exact=True)
    sums = [log_probabilities(inference, [(encoded.prompt, i)])[0] for i in ids]
    assert np.allclose(score.sums, sums, atol=1e-4)
    assert np.allclose(score.by_byte, [sums[0], sums[1] / 6, sums[2] / 2], atol=1e-4)
    assert score.chosen == int(np.argmax(sums))
    assert score.chosen_by_byte == int(np.argmax([sums[0], sums[1] / 6, sums[2] / 2]))


class Letters(ByteTokenizer):
    """Ids below the fixture's 112 as bytes; nothing is special."""

    vocab_size = 112
    eos_id = 111


def test_answers_are_greedy_and_end_at_their_stop(evaluator: Evaluator) -> None:
    coder = PromptCoder(Letters(), 112)
    prompts = ["a", "bcd", "efghi"]
    with evaluator.generator(1, 40, 5) as generator:
        texts = []
        for prompt in prompts:
            ids = coder.tokenizer.encode(prompt)
            made = generator.generate([ids], 12, Sampling(0.0), stop_ids={111, 2})
            texts.append(coder.tokenizer.decode([token for _, token in made]))
    stop = texts[1][2:4]
    questions = [
        ExactMatch(None, Prompt("p", prompt), ("x",), None, (stop,) if i == 1 else ())
        for i, prompt in enumerate(prompts)
    ]
    encoded = encode_questions(questions, coder, positions=64, answer_tokens=12)
    got = answer_questions(evaluator, encoded, coder, rows=2, answer_tokens=12)
    assert [got[0], got[2]] == [texts[0], texts[2]]
    assert questions[1].answer_in(got[1]) == texts[1].partition(stop)[0]
    assert len(got[1]) < len(texts[1]) or texts[1].endswith(stop)


def test_questions_that_are_too_long_are_named() -> None:
    coder = PromptCoder(ByteTokenizer(), 259)
    exact = ExactMatch(None, Prompt("f:3", "a" * 20), ("x",), None, ())
    choice = MultipleChoice(None, Prompt("f:4", "a" * 20), ("b", "c" * 9), 0)
    encode_questions([exact, choice], coder, positions=28, answer_tokens=8)
    with pytest.raises(UserError, match="a question of 28 tokens in f:3: the model has 27"):
        encode_questions([exact, choice], coder, positions=27, answer_tokens=8)
    with pytest.raises(UserError, match="a question of 28 tokens in f:4"):
        encode_questions([choice], coder, positions=27, answer_tokens=8)


def test_accuracy() -> None:
    share, error = accuracy([True, False, True, True])
    assert share == 0.75 and abs(error - np.sqrt(4 / 6 * 2 / 6 / 4)) < 1e-12
    assert accuracy([True] * 2) == (1.0, np.sqrt(3 / 4 * 1 / 4 / 2))
    assert np.isnan(accuracy([])).all()


def test_fp8_runs_are_scored_in_their_weights_format() -> None:
    """No slot is left on the weights: scores are those of the same model without FP8."""
    import dataclasses

    from llmq_nb.config import PrecisionConfig
    from llmq_nb.model.parameters import model_parameters
    from llmq_nb.train.inference import Opened

    model = small_model(V=112)
    rng = np.random.default_rng(2)
    arrays = [(p, 0.2 * rng.standard_normal(p.shape)) for p in model_parameters(model)]
    base = open_model(FIXTURES / CASE).precision
    pairs = [(np.array([3, 4], np.int32), np.array([5, 6], np.int32))]
    got, mean = [], []
    for matmul in (None, "e4m3"):
        precision = PrecisionConfig(dtype="bf16", matmul=matmul)
        opened = Opened(
            model, iter(arrays), _unused, None, dataclasses.replace(base, precision=precision)
        )
        with Evaluator(opened, "cpu") as evaluator:
            got.append(log_probabilities(evaluator.inference(1, 16, exact=True), pairs))
            mean.append(log_probabilities(evaluator.inference(1, 16), pairs))
            with evaluator.generator(1, 16, 2) as generator:
                got[-1] += list(generator.generate([[3, 4]], 5, Sampling(0.0), stop_ids=()))
    assert got[0] == got[1]
    assert mean[0] != mean[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scores_on_the_gpu(dtype: Any) -> None:
    """FP32: 1e-4 of the cpu engine; BF16: 2^-6 of a sum of up to 6 losses of about 5."""
    import dataclasses

    from llmq_nb.config import PrecisionConfig
    from llmq_nb.core.device import open_device
    from llmq_nb.core.dtype import DType
    from llmq_nb.model.parameters import model_parameters
    from llmq_nb.train.inference import Opened

    open_device(0).make_current()
    model = small_model(C=128, F=192, H=4, G=2, D=64, V=112)
    rng = np.random.default_rng(2)
    arrays = [
        (p, (0.09 * rng.standard_normal(p.shape)).astype(DType(dtype).numpy))
        for p in model_parameters(model)
    ]
    base = open_model(FIXTURES / CASE).precision
    base = dataclasses.replace(base, precision=PrecisionConfig(dtype=dtype))
    sizes = [(1, 1), (5, 6), (7, 6), (30, 1), (9, 2), (1, 6)]
    pairs = random_pairs(rng, 112, sizes)
    got = []
    for kind in ("cpu", "cuda"):
        with Evaluator(Opened(model, iter(arrays), _unused, None, base), kind) as evaluator:
            got.append(log_probabilities(evaluator.inference(2, 40, exact=True), pairs))
            with evaluator.generator(2, 40, 9) as generator:
                made = list(generator.generate([[1], [2] * 9], 8, Sampling(0.0), stop_ids=()))
                assert len(made) == 16
    limit = {"fp32": 1e-4, "bf16": 6 * 5 * 2.0**-6}[dtype]
    assert np.abs(np.subtract(*got)).max() < limit
