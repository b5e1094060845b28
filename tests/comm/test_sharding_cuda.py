"""Several ranks of the cuda engine on one GPU: the bits do not depend on how they share.

Needs a GPU. Graphs are demanded: a copy that is not joined at the end of a step, or an event from
outside it, makes the capture fail.
"""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from llmq_nb.config import Config, RunConfig
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import model_parameters
from llmq_nb.offload.transfer import ImmediateTransfer
from llmq_nb.train.engine import CpuEngine
from llmq_nb.train.initial import set_weights
from tests.comm import harness
from tests.comm.harness import batch, config_of
from tests.model.harness import random_weights

pytestmark = pytest.mark.gpu
MODEL = ModelConfig(
    family="qwen2", C=256, F=384, L=4, H=4, G=2, D=64, V=1003, tied=True, qkv_bias=True
)
UNTIED = dataclasses.replace(MODEL, L=3, tied=False)
STORAGE = list(harness.STORAGE)


def cuda_config(storage: str, ranks: int, *, graphs: Any = True, peers: Any = "auto", **options):
    config = config_of(storage, ranks, seq_len=96, **options)
    parallel = dataclasses.replace(config.parallel, peer_copies=peers)
    return dataclasses.replace(config, parallel=parallel, run=RunConfig(cuda_graphs=graphs))


def engine_of(config: Config, model: ModelConfig, tuning: dict[str, int] | None = None):
    from llmq_nb.train.engine_cuda import CudaEngine

    engine = CudaEngine(config, model, tuning=tuning)
    with_weights(engine, model)
    return engine


def with_weights(engine: Any, model: ModelConfig) -> None:
    set_weights(engine, iter(random_weights(model, model_parameters(model), 1)))


def run(config: Config, tuning: dict[str, int] | None = None, model: ModelConfig = MODEL):
    """What `work` finds, and the choices of products."""
    engine = engine_of(config, model, tuning)
    found, tuning = work(engine, config, model), engine.tuning
    engine.close()
    return found, tuning


def work(engine: Any, config: Config, model: ModelConfig) -> tuple[list[Any], list[bytes]]:
    """Losses, norms, an evaluation between the steps, and the whole state, as bits."""
    results, state = [], []
    for step in range(2):
        data = batch(config, model, step)
        r = engine.train_step(data, step=step, updates=step, learning_rate=1e-2)
        assert r.finite and all(s.idle for rank in engine.ranks for s in rank.host_stores)
        one = data.tokens[0, 0], data.targets[0, 0], data.segment_start[0, 0]
        results.append((r.loss, r.grad_norm, r.lse_max, engine.evaluate(*one)))
    for s in engine.states:
        found = (s.master, s.weight, s.m, s.m_scale, s.v, s.gradient)
        state += [engine.read(t).tobytes() for t in found if t is not None]
    return results, state


@cache
def plain(storage: str, ranks: int, gradients: bool, accumulation: int = 2):
    """The yardstick: weights not sharded, nothing offloaded."""
    return run(cuda_config(storage, ranks, gradients=gradients, accumulation=accumulation))


@pytest.mark.parametrize("storage", STORAGE)
def test_sharded_weights(storage):
    for ranks, gradients in ((2, False), (2, True), (3, True)):
        want, tuning = plain(storage, ranks, gradients)
        config = cuda_config(storage, ranks, weights=True, gradients=gradients)
        assert run(config, tuning)[0] == want, (ranks, gradients)


@pytest.mark.parametrize("storage", ["bf16", "e4m3, kept quants"])
def test_host_staged_copies_and_eager_launches(storage):
    for ranks, gradients in ((2, False), (3, True)):
        want, tuning = plain(storage, ranks, gradients)
        options: Any = dict(weights=True, gradients=gradients)
        assert run(cuda_config(storage, ranks, peers="off", **options), tuning)[0] == want
        assert run(cuda_config(storage, ranks, graphs=False, **options), tuning)[0] == want


@pytest.mark.parametrize("storage", ["bf16", "e4m3, no quants"])
def test_gradient_sharding_without_accumulation(storage):
    want, tuning = plain(storage, 2, False, 1)
    options: Any = dict(gradients=True, accumulation=1)
    assert run(cuda_config(storage, 2, **options), tuning)[0] == want


LEVERS: list[dict[str, Any]] = [
    {"offload": ("m", "v", "master")},
    {"offload": ("m", "v", "master", "gradients"), "transfer": "copy", "gradients": True},
    {"offload": ("quants", "residual"), "recompute": ("block",), "gradients": True},
    {
        "offload": ("m", "v", "master", "quants", "gradients", "residual"),
        "recompute": ("block",),
        "gradients": True,
        "weights": True,
    },
]


@pytest.mark.parametrize("storage", ["bf16", "bf16, fp32 master", "e4m3, kept quants"])
@pytest.mark.parametrize("lever", range(len(LEVERS)))
def test_offload(storage, lever):
    options = LEVERS[lever]
    for ranks, peers in ((2, "auto"), (3, "off")):
        want, tuning = plain(storage, ranks, options.get("gradients", False))
        assert run(cuda_config(storage, ranks, peers=peers, **options), tuning)[0] == want


@pytest.mark.parametrize("model", [MODEL, UNTIED], ids=["tied", "untied"])
def test_ranks_split_the_work_of_one(model):
    """FP32: the loss of the same windows to 1e-5, and against the cpu engine's ranks."""
    found = {}
    for ranks in (1, 2, 3, 4):
        config = cuda_config("fp32", ranks, accumulation=12 // ranks, gradients=ranks > 2)
        found[ranks] = run(config, model=model)[0][0]
    for ranks in (2, 3, 4):
        for step in range(2):
            np.testing.assert_allclose(found[ranks][step][0], found[1][step][0], rtol=1e-5)
            np.testing.assert_allclose(found[ranks][step][1], found[1][step][1], rtol=1e-5)
    config = cuda_config("fp32", 3, accumulation=4, gradients=True)
    engine = CpuEngine(config, model, ImmediateTransfer)
    set_weights(engine, iter(random_weights(model, model_parameters(model), 1)))
    for step in range(2):
        r = engine.train_step(
            batch(config, model, step), step=step, updates=step, learning_rate=1e-2
        )
        np.testing.assert_allclose(found[3][step][:2], (r.loss, r.grad_norm), rtol=1e-5)


def test_two_runs_have_the_same_bits():
    options: Any = dict(weights=True, gradients=True)
    want, tuning = plain("e4m3, kept quants", 3, True)
    for _ in range(3):
        assert run(cuda_config("e4m3, kept quants", 3, **options), tuning)[0] == want
