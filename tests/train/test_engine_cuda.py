"""The cuda engine against the cpu engine (and through it the float64 oracle), and its own bits.

Needs a GPU. FP32 differs from the cpu engine by summation order only; in BF16 both round at the
same points but sum in another order, so values differ by an ulp and the differences grow with
depth: gradients are compared in relative L2.
"""

import dataclasses
import itertools
from typing import Literal

import numpy as np
import pytest

from llmq_nb.config import (
    BatchConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelSection,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from llmq_nb.core.device import open_device
from llmq_nb.data.loader import Position, StepBatch
from llmq_nb.model.config import ModelConfig
from llmq_nb.train.engine import CpuEngine
from llmq_nb.train.initial import set_weights

pytestmark = pytest.mark.gpu

QWEN2 = ModelConfig(
    family="qwen2", C=256, F=384, L=2, H=4, G=2, D=64, V=1003, tied=True, qkv_bias=True
)
QWEN3 = ModelConfig(
    family="qwen3", C=128, F=256, L=2, H=3, G=1, D=128, V=520, tied=False, qk_norm=True
)
RECOMPUTE = ("norm", "swiglu", "ffn", "qkv", "attention", "block")


def config_of(
    dtype: Literal["bf16", "fp32"] = "bf16",
    *,
    B=2,
    T=160,
    accumulation=2,
    recompute=(),
    graphs=True,
    chunks=1,
):
    states = "bf16" if dtype == "bf16" else "fp32"
    return Config(
        run=RunConfig(cuda_graphs=graphs),
        model=ModelSection(path="test"),
        data=DataConfig(train="test"),
        batch=BatchConfig(micro_batch=B, seq_len=T, grad_accumulation=accumulation),
        precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerConfig(learning_rate=1e-2, master=states, m=states, v=states),
        memory=MemoryConfig(recompute=recompute, head_chunks=chunks),
    )


def batch_of(config: Config, model: ModelConfig, seed=0) -> StepBatch:
    """Random tokens in documents of random lengths, a third of the targets masked."""
    b, rng = config.batch, np.random.default_rng(seed)
    shape = (b.grad_accumulation, 1, b.micro_batch, b.seq_len)
    tokens = rng.integers(0, model.V, shape, np.int32)
    targets = rng.integers(0, model.V, shape, np.int32)
    targets[rng.random(shape) < 0.3] = -100
    begins = rng.random(shape) < 0.03
    begins[..., 0] = True
    starts = np.maximum.accumulate(np.where(begins, np.arange(b.seq_len), 0), axis=-1)
    supervised = int((targets != -100).sum())
    return StepBatch(tokens, targets, starts.astype(np.int32), supervised, Position())


def initial(model: ModelConfig, seed=1):
    """(parameter, array) with norms away from 1 and biases away from 0."""
    engine = CpuEngine(config_of("fp32", B=1, T=16), model)
    rng = np.random.default_rng(seed)
    for state in engine.states:
        p = state.parameter
        array = np.zeros(p.shape, np.float32)
        rows = p.views[-1].stop
        size = (rows, *p.shape[1:])
        scale = 1 / np.sqrt(p.shape[-1]) if p.kind in ("matrix", "embedding") else 0.1
        array[:rows] = rng.standard_normal(size) * scale + (p.kind == "norm")
        yield p, array


def cuda_engine(config: Config, model: ModelConfig, tuning=None):
    from llmq_nb.train.engine_cuda import CudaEngine

    engine = CudaEngine(config, model, tuning=tuning)
    set_weights(engine, initial(model))
    return engine


def relative(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


@pytest.mark.parametrize("model", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 2e-5), ("bf16", 3e-2)])
def test_loss_and_gradients_are_the_cpu_engines(model, dtype, bound):
    config = config_of(dtype)
    batch = batch_of(config, model)
    cpu, gpu = CpuEngine(config, model), cuda_engine(config, model)
    set_weights(cpu, initial(model))
    facts = {"step": 0, "updates": 0, "learning_rate": 1e-2}
    a, b = cpu.train_step(batch, **facts), gpu.train_step(batch, **facts)
    assert b.loss == pytest.approx(a.loss, rel=1e-6 if dtype == "fp32" else 2e-3)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=bound)
    assert b.lse_max == pytest.approx(a.lse_max, rel=1e-2 if dtype == "bf16" else 1e-5)
    for x, y in zip(cpu.states, gpu.states, strict=True):
        error = relative(gpu.read(y.gradient), cpu.read(x.gradient))
        assert error <= bound, (x.parameter.name, error)
    gpu.close()


def run_bits(config: Config, model: ModelConfig, steps=3, tuning=None):
    """Losses, norms and final weights of a few steps, as bytes."""
    engine = cuda_engine(config, model, tuning)
    out = []
    for step in range(steps):
        batch = batch_of(config, model, seed=step)
        r = engine.train_step(batch, step=step, updates=step, learning_rate=1e-2)
        out.append((r.loss, r.grad_norm, r.lse_max))
    weights = [engine.read(s.weight).tobytes() for s in engine.states]
    tuning = engine.tuning
    engine.close()
    return out, weights, tuning


@pytest.mark.parametrize("model", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_bits_do_not_depend_on_graphs_recomputation_or_the_run(model):
    base = config_of()
    losses, weights, tuning = run_bits(base, model)
    assert losses[-1][0] < losses[0][0] + 1  # it trains, or at least does not blow up
    again = run_bits(base, model, tuning=tuning)
    assert again[:2] == (losses, weights)
    eager = run_bits(config_of(graphs=False), model, tuning=tuning)
    assert eager[:2] == (losses, weights)
    for count in (1, 2, 6):
        for subset in itertools.combinations(RECOMPUTE, count):
            other = run_bits(config_of(recompute=subset), model, tuning=tuning)
            assert other[:2] == (losses, weights), subset


def with_fused_products(tuning: dict[str, int]) -> dict[str, int]:
    """The same choices, but SwiGLU inside its product wherever the GPU has that kernel."""
    fused = [name for name in tuning if name.endswith("+swiglu")]
    assert bool(fused) == (open_device(0).cc == (9, 0)), "nothing was timed, or where no kernel is"
    return tuning | dict.fromkeys(fused, 1)


def test_bits_do_not_depend_on_recomputing_a_fused_product():
    base = config_of()
    tuning = with_fused_products(run_bits(base, QWEN2, steps=1)[2])
    losses, weights, used = run_bits(base, QWEN2, tuning=tuning)
    assert used == tuning
    for graphs, subset in ((False, ()), (True, ("swiglu",)), (True, ("ffn",)), (True, RECOMPUTE)):
        other = run_bits(config_of(recompute=subset, graphs=graphs), QWEN2, tuning=tuning)
        assert other[:2] == (losses, weights), (graphs, subset)


def test_a_graph_replayed_in_any_order_gives_what_it_gave():
    """Evaluation, first, middle, last, evaluation, first: no graph leaves anything behind."""
    model, config = QWEN2, config_of(accumulation=4)
    engine = cuda_engine(config, model)
    batch = batch_of(config, model)
    one = batch.tokens[0, 0], batch.targets[0, 0], batch.segment_start[0, 0]
    before = engine.evaluate(*one)
    first = engine.train_step(batch, step=0, updates=0, learning_rate=0.0)
    assert engine.evaluate(*one) == before  # a learning rate of 0 changes nothing
    second = engine.train_step(batch, step=0, updates=0, learning_rate=0.0)
    assert (second.loss, second.grad_norm) == (first.loss, first.grad_norm)
    engine.close()


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_named():
    model, config = QWEN2, config_of()
    engine = cuda_engine(config, model)
    bad = next(s for s in engine.states if s.parameter.field == "down")
    engine.write(bad.weight, np.full(bad.weight.shape, np.inf, np.float32))
    before = [engine.read(s.master).tobytes() for s in engine.states]
    r = engine.train_step(batch_of(config, model), step=0, updates=0, learning_rate=1.0)
    assert not r.finite and r.non_finite_tensor is not None
    assert [engine.read(s.master).tobytes() for s in engine.states] == before
    engine.close()


def test_training_lowers_the_loss_of_one_batch():
    model = QWEN2
    config = dataclasses.replace(config_of(), optimizer=OptimizerConfig(learning_rate=3e-3))
    engine = cuda_engine(config, model)
    batch = batch_of(config, model)
    losses = [
        engine.train_step(batch, step=i, updates=i, learning_rate=3e-3).loss for i in range(20)
    ]
    assert losses[-1] < losses[0] - 1.0
    engine.close()
