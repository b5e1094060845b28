"""Bits that must not change: recomputation, threads, and running twice.

Every run has its scratch filled with NaN before each micro-step, in the arena's shared memory; the
yardstick keeps everything, in memory of its own. So the buffers' lifetimes are tested with it.
"""

import hashlib
import itertools
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from llmq_nb.config import Recompute
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.engine_cpu import CpuOps, rows
from llmq_nb.model.parameters import model_parameters
from llmq_nb.plan.buffers import make_plan
from llmq_nb.train.step import optimizer_step
from llmq_nb.train.wiring import allocate, make_rank
from tests.model.harness import (
    bits,
    gradients,
    make_config,
    random_batch,
    random_weights,
    run_micro_steps,
    set_weights,
    small_model,
)

CHOICES = get_args(Recompute)
SUBSETS = [s for n in range(7) for s in itertools.combinations(CHOICES, n)]
MODELS = {
    "qk_norm": small_model(family="qwen3", L=2, qk_norm=True, tied=True),
    "bias": small_model(family="qwen2", L=2, qkv_bias=True, H=2, G=1),
}
SEQUENCES, T = 4, 17  # N = 68 or 34: no multiple of 16, nor of the chunks


@cache
def weights(model_name):
    model = MODELS[model_name]
    return random_weights(model, model_parameters(model), 1)


@cache
def whole_batch(V):
    return random_batch(np.random.default_rng(1), SEQUENCES, T, V)


def step(model_name, recompute, precision, accumulation, head_chunks, *, arena=True):
    """Bits of loss, norm and gradients: all that an update reads."""
    model = MODELS[model_name]
    micro_batch = SEQUENCES // accumulation
    config = make_config(
        micro_batch=micro_batch,
        seq_len=T,
        precision=precision,
        recompute=recompute,
        head_chunks=head_chunks,
    )
    plan = make_plan(config, model)
    if arena:
        tensors = allocate(plan)
    else:
        tensors = {
            b.name: Tensor(b.name, b.shape, b.dtype, np.zeros(b.shape, b.dtype.numpy))
            for b in plan.buffers
        }
    ops = CpuOps(model, config.optimizer, seq_len=T, seed=1)
    rank = make_rank(config, model, tensors, ops)
    set_weights(rank, weights(model_name))

    def poison(_):
        for b in plan.buffers:
            if arena and b.lifetime is not None:
                tensors[b.name].data.reshape(-1).view(np.uint8)[:] = 0xFF  # NaN in every format

    batch = whole_batch(model.V).split(micro_batch)
    loss = run_micro_steps(rank, batch, before=poison)
    grads = b"".join(bits(g) for g in gradients(rank).values())
    ops.global_norm(rank.norms, rank.norm_total, [s.gradient for s in rank.states])
    norm = rank.norm_total.data
    assert np.isfinite(loss) and norm[2] == 1
    return loss, bits(norm), hashlib.sha256(grads).digest()


@cache
def kept(model_name, precision, accumulation, head_chunks):
    return step(model_name, (), precision, accumulation, head_chunks, arena=False)


class OneThread:
    """In place of the pool: these operations are so small that handing them over takes longer."""

    map = staticmethod(map)


@pytest.fixture
def one_thread(monkeypatch):
    rows.pool()  # which holds BLAS to one thread
    monkeypatch.setattr(rows, "pool", OneThread)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("head_chunks", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model_name", MODELS)
def test_recomputation_changes_no_bit(model_name, precision, accumulation, head_chunks):
    """All 64 subsets of one model here; of the other each setting has the 16 it did not have."""
    case = (precision, accumulation, head_chunks)
    own = ["fp32", "bf16", "e4m3"].index(precision) + 3 * (accumulation - 1) + 2 * head_chunks
    subsets = SUBSETS if model_name == "qk_norm" else SUBSETS[own % 4 :: 4]
    want = kept(model_name, *case)
    assert [s for s in subsets if step(model_name, s, *case) != want] == []


def test_the_bits_that_are_compared_depend_on_what_is_run():
    """The comparison above could fail: other precision, chunks or accumulation give other bits."""
    runs = [kept("bias", p, a, c) for p in ("bf16", "e4m3") for a in (1, 2) for c in (1, 3)]
    assert len({r[2] for r in runs}) == len(runs)


SCRIPT = """
import os, sys
import hashlib
import numpy as np
count = int(sys.argv[1])
if count == 1:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
else:
    os.sched_getaffinity = lambda pid: set(range(count))  # so many threads, on what there is
from llmq_nb.model.engine_cpu import rows
from tests.model.test_recompute import many_slices
print(many_slices(), rows.pool()._max_workers)
"""


def many_slices() -> str:
    """Digest of a step in which every operation has several slices of rows."""
    model = small_model(C=128, F=272, V=523, L=1, qk_norm=True)
    config = make_config(micro_batch=3, seq_len=200, precision="bf16", head_chunks=2)
    ops = CpuOps(model, config.optimizer, seq_len=200, seed=1)
    rank = make_rank(config, model, allocate(make_plan(config, model)), ops)
    set_weights(rank, random_weights(model, [s.parameter for s in rank.states], 2))
    ops.scalars.learning_rate = 1e-3
    batch = random_batch(np.random.default_rng(2), 3, 200, model.V)
    loss = run_micro_steps(rank, batch)
    digest = hashlib.sha256(np.float64(loss).tobytes())
    for g in gradients(rank).values():
        digest.update(bits(g))
    optimizer_step([rank])
    for s in rank.states:
        digest.update(bits(s.weight.data) + bits(s.m.data) + bits(s.v.data))
    return digest.hexdigest()


def test_the_number_of_threads_changes_no_bit():
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    want = many_slices()
    for threads in (1, 3):
        command = [sys.executable, "-c", SCRIPT, str(threads)]
        done = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [want, str(threads)]


def test_two_runs_are_equal():
    assert many_slices() == many_slices()
