"""Whole optimizer steps of CpuEngine against the float64 model and AdamW oracles, and its state."""

import json
import math
from typing import Any

import numpy as np
import pytest

from llmq_nb.core.rng import Purpose
from llmq_nb.data.loader import Position, StepBatch
from llmq_nb.io.hf_config import read_model_config
from llmq_nb.io.weights import load_weights
from llmq_nb.model.parameters import model_parameters, tensor_ids
from llmq_nb.train.engine import CpuEngine, result
from llmq_nb.train.initial import copy_to_weights, set_random_weights, set_weights
from tests import oracles
from tests.model.harness import (
    FIXTURES,
    Batch,
    bits,
    make_config,
    random_batch,
    random_weights,
    relative_l2,
    small_model,
)
from tests.oracles.philox import philox4x32

RATE, T = 2e-2, 19


def step_batch(batch: Batch) -> StepBatch:
    arrays = (a[:, None] for a in (batch.tokens, batch.targets, batch.segment_start))
    return StepBatch(*arrays, supervised=batch.supervised, position=Position())


def engine_of(model, micro_batch, seed=1, **options):
    engine = CpuEngine(make_config(micro_batch=micro_batch, seq_len=T, **options), model)
    set_weights(engine, iter(random_weights(model, model_parameters(model), seed)))
    return engine


@pytest.mark.parametrize("case", ["qwen2_tied", "qwen3_group7", "llama_untied"])
@pytest.mark.parametrize("clip", [math.inf, 0.5])
def test_three_steps_of_training_agree_with_float64(case, clip):
    """Model, mean over the step, norm, clipping and AdamW together.

    epsilon is 1e-3, so that the update is smooth in the gradient: an error of 1e-5 of it (bound of
    tests/model/test_transformer.py) moves a weight by at most RATE * 1e-5 * few a step.
    """
    config = json.loads((FIXTURES / case / "config.json").read_text())
    model = read_model_config(FIXTURES / case)
    options: dict[str, Any] = dict(max_grad_norm=clip, epsilon=1e-3, weight_decay=0.1, z_loss=1e-3)
    engine = CpuEngine(make_config(micro_batch=2, seq_len=T, **options), model)
    set_weights(engine, load_weights(FIXTURES / case, model))
    weights = {n: w for s in engine.states for n, w in named(s, s.weight)}
    start = dict(weights)
    m, v = ({n: np.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    rng = np.random.default_rng(1)
    for step in range(3):
        batch = random_batch(rng, 4, T, model.V).split(2)
        got = engine.train_step(step_batch(batch), step=step, updates=step, learning_rate=RATE)
        flat = (a.reshape(-1, T) for a in (batch.tokens, batch.targets, batch.segment_start))
        loss, grads = oracles.model_loss_and_gradients(config, weights, *flat, z_loss=1e-3)
        norm = oracles.global_norm(grads)
        assert got.loss == pytest.approx(loss, rel=1e-5)
        assert got.grad_norm == pytest.approx(norm, rel=1e-5)
        assert got.finite and got.non_finite_tensor is None
        # the counter of the update's random bits: that of its last micro-step
        assert engine.ops.scalars.update == 2 * step + 1
        for n, g in grads.items():
            decay = 0.1 if weights[n].ndim == 2 else 0.0  # none on norms and biases
            weights[n], m[n], v[n] = oracles.adamw(
                weights[n],
                m[n],
                v[n],
                g * oracles.clip_factor(norm, clip),
                step=step + 1,
                learning_rate=RATE,
                beta1=0.9,
                beta2=0.95,
                epsilon=1e-3,
                weight_decay=decay,
            )
    for s in engine.states:
        for n, w in named(s, s.weight):
            moved = weights[n] - start[n]
            assert relative_l2(w - start[n], moved) <= 1e-4, n
        for n, value in named(s, s.m):
            assert relative_l2(value, m[n]) <= 1e-4, n


def named(state, tensor):
    for view in state.parameter.views:
        yield view.hf_name, tensor.data[view.start : view.stop].astype(np.float64)


@pytest.mark.parametrize("m", ["fp32", "e4m3"])
def test_a_gradient_that_is_not_finite_is_named_and_writes_nothing(m):
    model = small_model(qkv_bias=True)
    engine = engine_of(model, 2, m=m)
    batch = step_batch(random_batch(np.random.default_rng(2), 2, T, model.V))
    engine.train_step(batch, step=0, updates=0, learning_rate=RATE)
    down = next(s for s in engine.states if s.parameter.name.endswith("1.mlp.down_proj.weight"))
    kept = down.weight.data[3, 5]
    down.weight.data[3, 5] = np.nan
    before = [bits(t.data) for s in engine.states for t in tensors_of(s)]
    with np.errstate(invalid="ignore"):
        got = engine.train_step(batch, step=1, updates=1, learning_rate=RATE)
    assert not got.finite and math.isnan(got.loss) and not math.isfinite(got.grad_norm)
    assert [bits(t.data) for s in engine.states for t in tensors_of(s)] == before
    assert got.non_finite_tensor == engine.states[0].parameter.name  # all are, this one is first
    down.weight.data[3, 5] = kept
    assert engine.train_step(batch, step=2, updates=1, learning_rate=RATE).finite


def tensors_of(state):
    found = (state.master, state.weight, state.m, state.m_scale, state.v)
    return [t for t in found if t is not None]


def test_the_first_bad_tensor_is_the_only_bad_one():
    """An infinite gradient in one layer's tensor alone is named by that tensor."""
    model = small_model(qkv_bias=True)
    engine = engine_of(model, 2)
    rank = engine.ranks[0]
    for s in engine.states:
        s.gradient.data[...] = 1
    bad = engine.states[5]
    bad.gradient.data.reshape(-1)[-1] = np.inf
    rank.ops.global_norm(rank.norms, rank.norm_total, [s.gradient for s in engine.states])
    assert result(engine.ranks).non_finite_tensor == bad.parameter.name


STORAGE = {
    "fp32": {},
    "bf16": dict(precision="bf16", master="bf16", m="bf16", v="bf16"),
    "e4m3": dict(precision="e4m3", master="fp32", m="e4m3", v="bf16"),
    "bf16_master_of_fp32": dict(precision="fp32", master="bf16"),
}


@pytest.mark.parametrize("storage", STORAGE)
def test_a_run_that_goes_on_from_its_stored_state_has_the_same_bits(storage):
    """master, m, v, m_scale are the whole state: weights come from the master."""
    model = small_model(tied=True)
    batches = [
        step_batch(random_batch(np.random.default_rng(i), 4, T, model.V).split(2)) for i in range(4)
    ]
    runs = []
    for interrupted in (False, True):
        engine, losses = engine_of(model, 2, **STORAGE[storage]), []
        for step, batch in enumerate(batches):
            if interrupted and step == 2:
                old, engine = engine, engine_of(model, 2, seed=9, **STORAGE[storage])
                for a, b in zip(old.states, engine.states, strict=True):
                    for part in ("master", "m", "v", "m_scale"):
                        if getattr(a, part) is not None:
                            engine.write(getattr(b, part), old.read(getattr(a, part)))
                    copy_to_weights(engine, b)
            got = engine.train_step(batch, step=step, updates=step, learning_rate=RATE)
            losses.append((got.loss, got.grad_norm))
        runs.append((losses, [bits(t.data) for s in engine.states for t in tensors_of(s)]))
    assert runs[0] == runs[1]
    assert len({loss for loss, _ in runs[0][0]}) == 4


@pytest.mark.parametrize("storage", STORAGE)
def test_padded_rows_stay_zero_through_training(storage):
    model = small_model(V=37)
    engine = engine_of(model, 2, **STORAGE[storage])
    for step in range(3):
        batch = step_batch(random_batch(np.random.default_rng(step), 2, T, 37))
        engine.train_step(batch, step=step, updates=step, learning_rate=RATE)
    for s in engine.states:
        if s.parameter.kind == "embedding":
            for t in (s.master, s.weight, s.m, s.v):
                assert not t.data[37:].astype(np.float32).any()
                assert t.data[:37].astype(np.float32).any()


def test_initial_weights_are_normal_and_depend_on_the_seed_and_the_tensor_alone():
    model = small_model(C=64, F=96, L=2, V=101, qkv_bias=True, init_std=0.05)
    engine = CpuEngine(make_config(micro_batch=1, seq_len=T, precision="bf16"), model)
    set_random_weights(engine, model)
    ids = tensor_ids([s.parameter for s in engine.states])
    for s in engine.states:
        p, value = s.parameter, s.master.data
        assert s.tensor_id == ids[p.name]
        if p.kind in ("norm", "bias"):
            assert (value == (p.kind == "norm")).all()
            continue
        rows = p.views[-1].stop
        std = 0.05 / math.sqrt(2 * model.L) if p.field in ("out", "down") else 0.05
        n = rows * p.shape[1]
        x = value[:rows].astype(np.float64)
        assert abs(x.mean()) <= 5 * std / math.sqrt(n)
        assert abs(x.std() / std - 1) <= 5 / math.sqrt(2 * n)
        assert not value[rows:].any()
        u, turn = philox4x32((0, 0, ids[p.name], 0), (42, int(Purpose.INIT)))[:2]
        first = math.sqrt(-2 * math.log((u + 1) / 2**32)) * math.cos(2 * math.pi * turn / 2**32)
        assert x[0, 0] == pytest.approx(std * first, rel=1e-6)
        assert np.array_equal(s.weight.data, value.astype(s.weight.dtype.numpy))
    flat = [s.master.data.ravel()[:64] for s in engine.states if s.parameter.kind == "matrix"]
    assert len({bits(f) for f in flat}) == len(flat)


def test_tensor_ids_are_ranks_of_sorted_names():
    parameters = model_parameters(small_model(L=12))
    ids = tensor_ids(parameters)
    assert sorted(ids, key=lambda name: ids[name]) == sorted(p.name for p in parameters)
    assert sorted(ids.values()) == list(range(len(parameters)))


def test_the_loss_falls():
    """Memorising one batch: from ln V to under a fifth of it, in each storage."""
    model = small_model(tied=True)
    batch = step_batch(random_batch(np.random.default_rng(3), 4, T, model.V).split(2))
    for storage in STORAGE.values():
        engine = engine_of(model, 2, **storage)
        losses = [
            engine.train_step(batch, step=i, updates=i, learning_rate=1e-2).loss for i in range(40)
        ]
        assert losses[-1] < 0.2 * losses[0], storage
