"""The float64 oracles against transformers' recorded results and central differences.

The oracles judge everything else, so they are judged here by what shares no code with them:
transformers and torch (recorded in tests/fixtures) and differences of their own forwards.
"""

import ast
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import oracles

FIXTURES = Path(__file__).parent / "fixtures"
CASES = [
    "llama3_rope",
    "llama_tied",
    "llama_untied",
    "mistral",
    "qwen2_tied",
    "qwen2_untied",
    "qwen3_group7",
    "qwen3_tied",
    "smollm2",
]
GROUPS = {1, 2, 3, 7}  # query heads a key/value head, all of which the cases must hold

# The oracle's own error is below 1e-13, so these bound the float32 error of the recorded numbers.
# u = 2^-24. Largest source: the rotation angles, position * frequency, each factor rounded once:
# up to 23 * 2 u = 2.7e-6 radians at T = 24, which turns q and k and so moves scores, dq and dk by
# that fraction of |q| |k|. Beside it about 60 roundings on the way forward and back through two
# layers, random in sign: sqrt(60) u = 5e-7, and sums over up to 112 columns of the same size.
# q and k turned, roundings and sums: 2 * 2.7e-6 + 2 * 5e-7 = 6.4e-6 (measured: at most 1.6e-6).
GRADIENT_BOUND = 1e-5
# Roundings and sums, 1e-6 together, times |logits| <= 5 (measured: at most 2.3e-6).
LOGIT_BOUND = 5e-6
# A mean of at least 24 such errors, random in sign: 5e-6 / sqrt(24) = 1e-6 absolute, and the losses
# are near 5 (measured: at most 3.2e-8 relative).
LOSS_BOUND = 1e-6

Arrays = dict[str, np.ndarray]


def load(case: str, config: str = "config.json") -> tuple[dict[str, Any], Arrays, Arrays]:
    """(config, weights, expected) of a recorded case."""
    folder = FIXTURES / "transformers" / case
    weights = load_file(folder / "model.safetensors")
    return (
        json.loads((folder / config).read_text()),
        weights,
        load_file(folder / "expected.safetensors"),
    )


def batch(expected: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return expected["tokens"], expected["targets"], expected["segment_start"]


def relative_l2(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_oracles_import_nothing_of_ours():
    for file in (Path(__file__).parent / "oracles").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            assert not any(module.split(".")[0] == "llmq_nb" for module in modules), file.name


def test_every_recorded_case_is_listed_and_every_group_size_is_among_them():
    folders = sorted(p.name for p in (FIXTURES / "transformers").iterdir() if p.is_dir())
    assert folders == CASES
    configs = [load(case)[0] for case in CASES]
    groups = {c["num_attention_heads"] // c["num_key_value_heads"] for c in configs}
    assert groups == GROUPS
    assert {c["tie_word_embeddings"] for c in configs} == {True, False}
    assert {c["model_type"] for c in configs} == {"qwen2", "qwen3", "llama", "mistral"}


@pytest.mark.parametrize("case", CASES)
def test_model_agrees_with_transformers(case):
    config, weights, expected = load(case)
    loss, gradients = oracles.model_loss_and_gradients(config, weights, *batch(expected))
    assert loss == pytest.approx(float(expected["loss"]), rel=LOSS_BOUND, abs=0)
    wanted = {k.removeprefix("grad."): v for k, v in expected.items() if k.startswith("grad.")}
    assert gradients.keys() == wanted.keys() == weights.keys()
    errors = {name: relative_l2(gradients[name], wanted[name]) for name in wanted}
    assert {n: e for n, e in errors.items() if not e <= GRADIENT_BOUND} == {}


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(case):
    config, weights, expected = load(case)
    logits = oracles.model_logits(config, weights, expected["tokens"], expected["segment_start"])
    rows = logits.reshape(-1, config["vocab_size"])[expected["logit_rows"]]
    assert np.abs(rows - expected["logits"]).max() <= LOGIT_BOUND


@pytest.mark.parametrize("case", ["llama3_rope", "qwen2_untied"])
def test_both_rope_spellings_are_one_model(case):
    config, weights, expected = load(case)
    old, _, _ = load(case, "config_rope_theta.json")
    assert "rope_parameters" not in old and "rope_theta" in old
    assert oracles.model_loss(old, weights, *batch(expected)) == oracles.model_loss(
        config, weights, *batch(expected)
    )


def without(weights: Arrays, *parts: str) -> Arrays:
    return {n: w for n, w in weights.items() if not any(part in n for part in parts)}


@pytest.mark.parametrize(
    ("case", "spoil"),
    [
        ("llama_untied", lambda c, w, t, y, s: (c, w, t, y, 0 * s)),
        ("llama3_rope", lambda c, w, t, y, s: (c | {"rope_parameters": {}}, w, t, y, s)),
        ("qwen2_tied", lambda c, w, t, y, s: (c | {"rope_parameters": {}}, w, t, y, s)),
        ("qwen2_untied", lambda c, w, t, y, s: (c, without(w, "bias"), t, y, s)),
        ("qwen3_group7", lambda c, w, t, y, s: (c, without(w, "q_norm", "k_norm"), t, y, s)),
        ("mistral", lambda c, w, t, y, s: (c, w, t, np.where(y < 0, t, y), s)),
    ],
    ids=["documents", "llama3_scaling", "theta", "qkv_bias", "qk_norm", "target_mask"],
)
def test_recorded_cases_notice_a_missing_feature(case, spoil):
    """Or agreement would prove nothing: dropping the feature moves the loss 1000 bounds away."""
    config, weights, expected = load(case)
    spoilt = oracles.model_loss(*spoil(config, weights, *batch(expected)))
    assert abs(spoilt / float(expected["loss"]) - 1.0) > 1000 * LOSS_BOUND


# Fourth-order differences along unit vectors: truncation h^4 / 30 f''''' = 3e-14 times a fifth
# derivative, rounding 1e-16 f / h = 1e-13 f; both are of order 100 or less times the gradient here.
H_STEP = 1e-3
DIFFERENCE_BOUND = 1e-9


def assert_gradient(loss: Callable[[np.ndarray], float], x: np.ndarray, dx: np.ndarray) -> None:
    """dx is the gradient of loss at x: directional derivatives along three random directions."""
    rng = np.random.default_rng(7)
    assert dx.shape == x.shape
    for _ in range(3):
        direction = rng.standard_normal(x.shape)
        direction /= np.linalg.norm(direction)
        step = H_STEP * direction
        near = loss(x + step) - loss(x - step)
        far = loss(x + 2 * step) - loss(x - 2 * step)
        slope = (8.0 * near - far) / (12.0 * H_STEP)
        assert abs(slope - np.sum(dx * direction)) <= DIFFERENCE_BOUND * np.linalg.norm(dx)


def assert_backward(
    forward: Callable[..., Any], backward: Callable[..., Any], *inputs: np.ndarray
) -> None:
    """backward(*douts) gives the gradient of sum(dout * out) for every input of forward."""
    rng = np.random.default_rng(5)

    def outputs(*args: np.ndarray) -> tuple[np.ndarray, ...]:
        out = forward(*args)
        return out if isinstance(out, tuple) else (out,)

    douts = [rng.standard_normal(out.shape) for out in outputs(*inputs)]
    gradients = backward(*douts)
    for i, gradient in enumerate(gradients if isinstance(gradients, tuple) else (gradients,)):

        def loss(x: np.ndarray, i: int = i) -> float:
            outs = outputs(*inputs[:i], x, *inputs[i + 1 :])
            return float(sum(np.sum(d * o) for d, o in zip(douts, outs, strict=True)))

        assert_gradient(loss, inputs[i], gradient)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_embedding_backward(rng):
    tokens, table = rng.integers(0, 5, (2, 9)), rng.standard_normal((6, 4))  # repeats; 5 is unused
    assert_backward(
        lambda w: oracles.embedding(tokens, w),
        lambda dx: oracles.embedding_backward(dx, tokens, 6),
        table,
    )


def test_rmsnorm_backward(rng):
    x, weight = rng.standard_normal((2, 3, 8)), rng.standard_normal(8)
    assert_backward(
        lambda x, w: oracles.rmsnorm(x, w, eps=0.1)[0],
        lambda dy: oracles.rmsnorm_backward(dy, x, weight, eps=0.1),
        x,
        weight,
    )


def test_residual_rmsnorm_backward(rng):
    residual, x, weight = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 3, 8)), np.ones(8)

    def backward(dtotal, dy):
        dx, dweight = oracles.residual_rmsnorm_backward(dy, dtotal, residual + x, weight, eps=0.1)
        return dx, dx, dweight

    assert_backward(
        lambda r, x, w: oracles.residual_rmsnorm(r, x, w, eps=0.1)[:2],
        backward,
        residual,
        x,
        weight,
    )


def test_qk_norm_backward(rng):
    q, k = rng.standard_normal((2, 3, 4, 8)), rng.standard_normal((2, 3, 2, 8))
    q_weight, k_weight = rng.standard_normal(8), rng.standard_normal(8)
    assert_backward(
        lambda *args: oracles.qk_norm(*args, eps=0.1)[:2],
        lambda dq, dk: oracles.qk_norm_backward(dq, dk, q, k, q_weight, k_weight, eps=0.1),
        q,
        k,
        q_weight,
        k_weight,
    )


def test_linear_backward(rng):
    x, weight, bias = rng.standard_normal((2, 3, 5)), rng.standard_normal((7, 5)), np.ones(7)
    assert_backward(
        oracles.linear, lambda dy: oracles.linear_backward(dy, x, weight), x, weight, bias
    )


def test_swiglu_backward(rng):
    gate, up = 3 * rng.standard_normal((4, 6)), rng.standard_normal((4, 6))
    assert_backward(oracles.swiglu, lambda dy: oracles.swiglu_backward(dy, gate, up), gate, up)


def test_swiglu_of_large_gates_does_not_overflow():
    with np.errstate(all="raise", under="ignore"):
        got = oracles.swiglu(np.array([-1e4, 1e4]), np.ones(2))
    assert got.tolist() == [0.0, 1e4]


def test_rope_backward(rng):
    x, positions = rng.standard_normal((2, 5, 3, 8)), rng.integers(0, 100, (2, 5))
    frequencies = oracles.rope_frequencies(8, 100.0)
    assert_backward(
        lambda x: oracles.rope(x, positions, frequencies),
        lambda dy: oracles.rope_backward(dy, positions, frequencies),
        x,
    )


def test_attention_backward(rng):
    q, k, v = (rng.standard_normal((2, 6, heads, 4)) for heads in (6, 2, 2))
    starts = np.array([[0, 0, 2, 3, 3, 3], [0] * 6])
    assert_backward(
        lambda q, k, v: oracles.attention(q, k, v, starts)[0],
        lambda dout: oracles.attention_backward(dout, q, k, v, starts),
        q,
        k,
        v,
    )


def test_attention_and_lse_by_scalar_loops(rng):
    """Each output is sum_s exp(score - lse) v_s over exactly the keys of its document up to t."""
    B, T, H, G, D = 2, 6, 6, 2, 4
    q, k, v = (rng.standard_normal((B, T, heads, D)) for heads in (H, G, G))
    starts = np.array([[0, 0, 2, 3, 3, 3], [0] * 6])
    out, lse = oracles.attention(q, k, v, starts)
    for b, t, h in np.ndindex(B, T, H):
        keys = range(starts[b, t], t + 1)
        scores = [math.fsum(q[b, t, h] * k[b, s, h // 3]) / math.sqrt(D) for s in keys]
        want_lse = math.log(math.fsum(map(math.exp, scores)))
        want = sum(
            math.exp(x - want_lse) * v[b, s, h // 3] for x, s in zip(scores, keys, strict=True)
        )
        assert lse[b, h, t] == pytest.approx(want_lse, rel=1e-13, abs=1e-13)
        np.testing.assert_allclose(out[b, t, h], want, rtol=1e-12, atol=1e-13)


def test_split_and_join_qkv_are_inverse_and_ordered(rng):
    qkv = np.arange(2 * 3 * 8 * 4).reshape(2, 3, 32)
    q, k, v = oracles.split_qkv(qkv, H=4, G=2, D=4)
    assert q[0, 0].ravel().tolist() == list(range(16))
    assert k[0, 0].ravel().tolist() == list(range(16, 24))
    assert np.array_equal(oracles.join_qkv(q, k, v), qkv)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("supervised", [None, 7], ids=["own_count", "count_of_step"])
def test_cross_entropy_backward(rng, z_loss, supervised):
    logits, targets = 2 * rng.standard_normal((5, 9)), np.array([3, -100, 8, 0, -100])
    options: dict[str, Any] = {"z_loss": z_loss, "supervised": supervised}
    dlogits = oracles.cross_entropy_backward(logits, targets, **options)
    assert_gradient(lambda x: oracles.cross_entropy(x, targets, **options), logits, dlogits)


def test_cross_entropy_of_equal_logits_is_log_of_the_vocabulary():
    targets = np.array([1, -100, 0])
    ln8 = math.log(8)
    assert oracles.cross_entropy(np.zeros((3, 8)), targets) == pytest.approx(ln8, rel=1e-15)
    with_z = oracles.cross_entropy(np.zeros((3, 8)), targets, z_loss=0.5)
    assert with_z == pytest.approx(ln8 + 0.5 * ln8**2, rel=1e-15)
    of_six = oracles.cross_entropy(np.zeros((3, 8)), targets, supervised=6)
    assert of_six == pytest.approx(ln8 / 3, rel=1e-15)


def test_cross_entropy_without_supervised_target_is_zero(rng):
    logits, targets = rng.standard_normal((2, 4)), np.array([-100, -100])
    assert oracles.cross_entropy(logits, targets, z_loss=1.0) == 0.0
    assert not oracles.cross_entropy_backward(logits, targets, z_loss=1.0).any()


@pytest.mark.parametrize("case", ["qwen2_tied", "qwen3_group7", "llama3_rope"])
def test_model_gradients_with_z_loss_by_central_differences(case):
    """z-loss is not in transformers' loss; the rest is checked again to 1e-9 instead of 1e-5."""
    config, weights, expected = load(case)
    weights = {name: w.astype(np.float64) for name, w in weights.items()}
    inputs = batch(expected)
    _, gradients = oracles.model_loss_and_gradients(config, weights, *inputs, z_loss=0.1)
    for name in weights:

        def loss(w: np.ndarray, name: str = name) -> float:
            return oracles.model_loss(config, weights | {name: w}, *inputs, z_loss=0.1)

        assert_gradient(loss, weights[name], gradients[name])


def test_adamw_agrees_with_torch():
    """Same formula, float64 on both sides: a few roundings of u = 1.1e-16 over four steps."""
    recorded = load_file(FIXTURES / "adamw.safetensors")
    names = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay")
    options = dict(zip(names, recorded["options"].tolist(), strict=True))
    state = recorded["weight"][0], recorded["m"][0], recorded["v"][0]
    for step, gradient in enumerate(recorded["gradient"], start=1):
        state = oracles.adamw(*state, gradient, step=step, **options)
        for got, name in zip(state, ("weight", "m", "v"), strict=True):
            np.testing.assert_allclose(got, recorded[name][step], rtol=1e-14, atol=1e-15)


def test_global_norm_and_clip():
    assert oracles.global_norm([np.array([3.0, 0.0]), np.array([[4.0], [12.0]])]) == 13.0
    assert oracles.global_norm({"a": np.array([3.0]), "b": np.array([-4.0])}) == 5.0
    assert oracles.clip_factor(10.0, 2.5) == 0.25
    assert oracles.clip_factor(2.5, 2.5) == oracles.clip_factor(0.0, 1.0) == 1.0
