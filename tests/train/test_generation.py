"""Generation with cached keys and values against the same model without a cache.

Oracle: `Inference.logits`, a forward pass over the whole text for each token, the ordinary
attention. In FP32 both sum the same products in other orders: the logits of these models (|x| about
5) differ by at most 1e-4, and no two likeliest logits of the texts here are that near.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmq_nb.config import PrecisionConfig
from llmq_nb.core.dtype import DType
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import Parameter, model_parameters
from llmq_nb.train.eager import Kind
from llmq_nb.train.generation import Generator, Sampling, sample
from llmq_nb.train.inference import Inference, open_model
from tests.model.harness import CASES, FIXTURES, small_model

GREEDY = Sampling(temperature=0.0)
LENGTHS = (1, 5, 9, 17)
FP32, BF16 = PrecisionConfig(dtype="fp32"), PrecisionConfig(dtype="bf16")


def texts(V: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, V, n).tolist() for n in LENGTHS]


def rows_of(generator: Generator, prompts: list[list[int]], count: int, *a: Any, **k: Any):
    out: list[list[int]] = [[] for _ in prompts]
    for row, token in generator.generate(prompts, count, *a, **k):
        out[row].append(token)
    return out


def uncached(inference: Inference, text: list[int], count: int) -> tuple[list[int], list[Any]]:
    """Greedy tokens one forward pass each, and their logits."""
    text, logits = list(text), []
    for _ in range(count):
        logits.append(inference.logits(np.array(text, np.int32)))
        text.append(int(logits[-1].argmax()))
    return text[-count:], logits


def random_arrays(
    model: ModelConfig, dtype: DType = DType.FP32
) -> Iterator[tuple[Parameter, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(4)
    for p in model_parameters(model):
        deviation = 1.0 if len(p.shape) < 2 else p.shape[1] ** -0.5
        yield p, (deviation * rng.standard_normal(p.shape)).astype(dtype.numpy)


def config(precision: PrecisionConfig):
    base = open_model(FIXTURES / CASES[0]).precision
    return dataclasses.replace(base, precision=precision)


@pytest.mark.parametrize("case", CASES)
def test_rows_of_any_lengths_give_what_they_give_alone_and_without_a_cache(case: str) -> None:
    """Prompts in pieces of 5 tokens; a row more than there are prompts."""
    opened = open_model(FIXTURES / case)
    model, arrays = opened.model, list(opened.arrays)
    prompts = texts(model.V)
    settings: dict[str, Any] = {"base": opened.precision, "length": 30}
    batch = Generator(model, rows=5, prompt=6, arrays=iter(arrays), **settings)
    assert batch.piece == 5
    together = rows_of(batch, prompts, 12, GREEDY, stop_ids=())
    plain = Inference(model, micro_batch=1, seq_len=30, base=opened.precision, arrays=iter(arrays))
    for prompt, row in zip(prompts, together, strict=True):
        assert row == uncached(plain, prompt, 12)[0]
        alone = Generator(model, rows=1, prompt=len(prompt), arrays=iter(arrays), **settings)
        assert rows_of(alone, [prompt], 12, GREEDY, stop_ids=()) == [row]


@pytest.mark.parametrize(("precision", "limit"), [(FP32, 1e-4), (BF16, 2.0**-5)])
def test_logits_are_those_without_a_cache(
    precision: PrecisionConfig, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16: a rounding that falls the other way is 2^-8 of a value, and a few of them add up."""
    check_logits("cpu", precision, limit, monkeypatch)


def check_logits(
    kind: Kind, precision: PrecisionConfig, limit: float, monkeypatch: pytest.MonkeyPatch, **shape
) -> None:
    model = small_model(**shape)
    dtype = DType(precision.dtype)
    settings: dict[str, Any] = {"base": config(precision), "kind": kind}
    seen: list[Any] = []
    with Generator(
        model, rows=4, length=40, prompt=9, arrays=random_arrays(model, dtype), **settings
    ) as generator:
        logits = generator._logits
        monkeypatch.setattr(generator, "_logits", lambda *a: seen.append(logits(*a)) or seen[-1])
        prompts = texts(model.V)
        made = rows_of(generator, prompts, 8, Sampling(seed=3), stop_ids=())
    plain = Inference(
        model, micro_batch=1, seq_len=40, arrays=random_arrays(model, dtype), **settings
    )
    assert len(seen) == 8
    for row, prompt in enumerate(prompts):
        for index in range(8):
            text = np.array([*prompt, *made[row][:index]], np.int32)
            want = plain.logits(text)
            assert np.abs(seen[index][row] - want).max() <= limit * np.abs(want).max()
    plain.eager.close()


@pytest.fixture(scope="module")
def small() -> Generator:
    model = small_model()
    arrays = random_arrays(model)
    return Generator(model, rows=3, length=16, prompt=16, base=config(FP32), arrays=arrays)


def test_a_full_row_goes_on_from_its_last_half(small: Generator) -> None:
    """16 tokens fit: the 17th finds 8 in sight; other rows are not touched by its new start."""
    long, short = texts(small.model.V)[2], [3]
    made = rows_of(small, [long, short], 14, GREEDY, stop_ids=())
    text = [*long, *made[0]]
    again = rows_of(small, [text[9:17]], 6, GREEDY, stop_ids=())
    assert made[0][:8] == rows_of(small, [long], 8, GREEDY, stop_ids=())[0]
    assert made[0][8:] == again[0]
    assert made[1] == rows_of(small, [short], 14, GREEDY, stop_ids=())[0]


def test_a_prompt_beyond_the_length_is_seen_through_its_last_tokens(small: Generator) -> None:
    prompt = np.random.default_rng(1).integers(3, small.model.V, 40).tolist()
    cut = rows_of(small, [prompt[-16:]], 1, GREEDY, stop_ids=())
    assert rows_of(small, [prompt], 1, GREEDY, stop_ids=()) == cut


def test_a_row_ends_at_its_stop(small: Generator) -> None:
    prompts = texts(small.model.V)[:2]
    free = rows_of(small, prompts, 8, GREEDY, stop_ids=())
    end = free[0][3]
    ended = rows_of(small, prompts, 8, GREEDY, stop_ids={end})
    assert ended[0] == free[0][: free[0].index(end)]
    assert ended[1] == (free[1][: free[1].index(end)] if end in free[1] else free[1])
    short = rows_of(small, prompts, 8, GREEDY, stop_ids=(), stops=lambda row, new: len(new) > row)
    assert [len(row) for row in short] == [1, 2]


def test_samples_are_the_seeds(small: Generator) -> None:
    """Alone or in a batch; another seed and another copy of a prompt give others."""
    a, b = texts(small.model.V)[1:3]
    hot = [Sampling(temperature=2.0, seed=seed) for seed in (1, 2)]
    first = rows_of(small, [a, b, a], 6, hot[0], stop_ids=())
    assert first[:2] == [rows_of(small, [x], 6, hot[0], stop_ids=())[0] for x in (a, b)]
    assert first[2] != first[0]
    assert rows_of(small, [a], 6, hot[1], stop_ids=())[0] != first[0]


def test_sampling_follows_the_softmax() -> None:
    """4,000 draws of six tokens: each count within 4.5 deviations of its binomial."""
    logits = np.array([1.0, 0.0, 2.0, -1.0, 0.5, -3.0], np.float32)
    n = 4000
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.7)):
        p = np.exp(logits.astype(np.float64) / temperature)
        p /= p.sum()
        order = np.argsort(-p)
        kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]
        q = np.zeros(6)
        q[kept] = p[kept] / p[kept].sum()
        drawn = [sample(logits, Sampling(temperature, top_p, 7), i) for i in range(n)]
        counts = np.bincount(drawn, minlength=6)
        assert (np.abs(counts - n * q) <= 4.5 * np.sqrt(n * q * (1 - q))).all()
    assert sample(logits, Sampling(temperature=0.0), 0) == 2


SHAPES = [
    {"C": 128, "F": 192, "H": 4, "G": 2, "D": 64},
    {"C": 128, "F": 64, "H": 2, "G": 1, "D": 128},
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=["D64", "D128"])
@pytest.mark.parametrize(("precision", "limit"), [(FP32, 1e-4), (BF16, 2.0**-5)])
def test_logits_on_the_gpu(
    shape: dict[str, int],
    precision: PrecisionConfig,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llmq_nb.core.device import open_device

    open_device(0).make_current()
    check_logits("cuda", precision, limit, monkeypatch, **shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=["D64", "D128"])
def test_the_gpu_gives_the_tokens_of_the_cpu(shape: dict[str, int]) -> None:
    """FP32, 20 greedy tokens of four rows: the first is launched, the others are replayed."""
    from llmq_nb.core.device import open_device

    open_device(0).make_current()
    model = small_model(**shape)
    made = []
    for kind in ("cpu", "cuda"):
        with Generator(
            model, rows=4, length=24, prompt=9, base=config(FP32), arrays=random_arrays(model),
            kind=kind,
        ) as generator:  # fmt: skip
            made.append(rows_of(generator, texts(model.V), 20, GREEDY, stop_ids=()))
    assert made[0] == made[1]


def test_a_part_of_the_vocabulary_gives_what_all_of_it_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with equal logits across the border, and where the part does not hold top_p."""
    rng = np.random.default_rng(5)
    flat = np.zeros(500, np.float32)
    steps = np.repeat(np.linspace(3, 0, 10, dtype=np.float32), 50)
    cases = [rng.standard_normal(500).astype(np.float32) * 3, flat, rng.permutation(steps)]
    drawn = []
    for head in (500, 7):
        monkeypatch.setattr("llmq_nb.train.generation.HEAD", head)
        samplings = [Sampling(top_p=top_p, seed=1) for top_p in (0.2, 0.7, 0.999)]
        drawn.append([sample(x, s, i) for x in cases for s in samplings for i in range(50)])
    assert drawn[0] == drawn[1]
