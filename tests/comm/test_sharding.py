"""Several ranks of the cpu engine: the mathematics of one, and the same bits however sharded."""

from typing import Any

import numpy as np
import pytest

from llmq_nb.train.sharding import parts_of
from tests.comm.harness import STORAGE, TIED, batch, config_of, engine_of, plain, run
from tests.model.harness import small_model

LEVERS: list[dict[str, Any]] = [
    {"offload": ("m", "v", "master")},
    {"offload": ("m", "v", "master"), "transfer": "copy"},
    {"offload": ("quants",)},
    {"offload": ("residual", "master"), "recompute": ("block",)},
]


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_weight_sharding_keeps_every_bit(storage: str, ranks: int, accumulation: int):
    for gradients in (False, True):
        options: Any = dict(weights=True, gradients=gradients, accumulation=accumulation)
        got = run(config_of(storage, ranks, **options))
        assert got == plain(storage, ranks, gradients, accumulation)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradient_sharding_keeps_every_bit_without_accumulation(storage: str, ranks: int):
    assert plain(storage, ranks, True, 1) == plain(storage, ranks, False, 1)


@pytest.mark.parametrize("storage", ["bf16", "bf16, fp32 master", "e4m3, kept quants"])
@pytest.mark.parametrize("lever", LEVERS, ids=lambda x: "-".join((*x["offload"], *list(x)[1:])))
@pytest.mark.parametrize("gradients", [False, True])
def test_offload_keeps_every_bit(storage: str, lever: dict[str, Any], gradients: bool):
    for ranks, weights in ((2, False), (3, True)):
        config = config_of(storage, ranks, weights=weights, gradients=gradients, **lever)
        assert run(config) == plain(storage, ranks, gradients, 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_offloaded_gradient_shards_keep_every_bit(ranks: int):
    config = config_of("bf16", ranks, gradients=True, offload=("gradients",))
    assert run(config) == plain("bf16", ranks, True, 2)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_split_the_work_of_one(ranks: int, gradients: bool):
    """The same windows on one rank and on several: in FP32 the loss differs by 1e-5 at most."""
    for tied in (False, True):
        model = TIED if tied else small_model(family="qwen2", L=4, qkv_bias=True, H=2, G=1)
        one, many = (
            run(
                config_of(
                    "fp32", n, weights=n > 2, gradients=gradients, accumulation=12 // n // b,
                    micro_batch=b,
                ),
                model,
            )[0]
            for n, b in ((1, 2), (ranks, 1))
        )  # fmt: skip
        np.testing.assert_allclose([x[0] for x in many[:2]], [x[0] for x in one[:2]], rtol=1e-5)
        # the sums of 12 windows' gradients are ordered otherwise: 2^-24 each, some hundred terms
        np.testing.assert_allclose([x[1] for x in many[:2]], [x[1] for x in one[:2]], rtol=1e-5)


def test_gradients_are_the_sum_of_the_ranks_own():
    """Against the same micro-batches one after the other on one rank, gradients in float32."""
    config = config_of("fp32", 3, gradients=True, accumulation=2)
    several = engine_of(config, TIED)
    several.train_step(batch(config, TIED, 3), step=0, updates=0, learning_rate=0.0)
    config = config_of("fp32", 1, accumulation=6)
    one = engine_of(config, TIED)
    one.train_step(batch(config, TIED, 3), step=0, updates=0, learning_rate=0.0)
    for a, b in zip(several.states, one.states, strict=True):
        found, expected = several.read(a.gradient), one.read(b.gradient)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 1e-6, a.parameter.name


def test_reading_and_writing_tensors_that_lie_on_several_ranks():
    config = config_of("bf16, fp32 master", 3, weights=True)
    engine = engine_of(config, TIED)
    rng = np.random.default_rng(0)
    for state in engine.states:
        for tensor in (state.m, state.v, state.weight):
            array = rng.standard_normal(tensor.shape).astype(tensor.dtype.numpy)
            engine.write(tensor, array)
            assert engine.read(tensor).tobytes() == array.tobytes()
            assert tensor.nbytes == array.nbytes
    total = sum(s.m.size for s in engine.states)
    held = sum(t.size for r in engine.ranks for t in (s.m for s in r.states))
    assert held == total, "a part of a moment lies on two ranks, or on none"


def test_a_replicated_weight_is_the_same_on_every_rank():
    config = config_of("bf16", 3)
    engine = engine_of(config, TIED)
    engine.train_step(batch(config, TIED, 0), step=0, updates=0, learning_rate=1e-2)
    for state in engine.states:
        parts = parts_of(state.weight, range(3))
        copies = [engine.rank_ops[p.rank].read(p.tensor).tobytes() for p in parts]
        assert len(copies) == 3 and len(set(copies)) == 1, state.parameter.name


def test_the_seed_gives_the_same_weights_on_any_number_of_ranks():
    from llmq_nb.train.engine import CpuEngine
    from llmq_nb.train.initial import set_random_weights

    found = []
    for ranks, weights in ((1, False), (3, False), (4, True)):
        engine = CpuEngine(config_of("bf16", ranks, weights=weights), TIED)
        set_random_weights(engine, TIED)
        found.append([engine.read(s.weight).tobytes() for s in engine.states])
    assert found[0] == found[1] == found[2]


def test_a_step_that_is_not_finite_writes_nothing_on_any_rank():
    config = config_of("bf16", 3, weights=True, gradients=True)
    engine = engine_of(config, TIED)
    last = engine.states[-2]
    array = engine.read(last.weight)
    array[..., -1] = np.nan
    engine.write(last.weight, array)
    before = [engine.read(t).tobytes() for s in engine.states for t in (s.master, s.m, s.v)]
    found = engine.train_step(batch(config, TIED, 0), step=0, updates=0, learning_rate=1e-2)
    assert not found.finite and found.non_finite_tensor is not None
    after = [engine.read(t).tobytes() for s in engine.states for t in (s.master, s.m, s.v)]
    assert after == before
