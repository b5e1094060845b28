"""FP8 health of the cuda engine against counts of the operands that went through its products.

Needs a GPU. The operands are read back where an eager step multiplies them, and quantised by the
oracle; the recorded graphs must then tell the same, and leave every bit of the run alone.
"""

import dataclasses

import numpy as np
import pytest

from tests import oracles
from tests.oracles.rounding import largest
from tests.train.test_engine_cuda import QWEN2, QWEN3, batch_of, cuda_engine
from tests.train.test_engine_fp8 import fp8_config

pytestmark = pytest.mark.gpu

PRODUCTS = ("qkv", "out", "gate_up", "down")
FACTS = {"step": 0, "updates": 0, "learning_rate": 1e-2}


def operands_of_a_step(monkeypatch, engine, batch):
    """(health, operands by (name, layer)) of an eager step's last micro-step."""
    from llmq_nb.model.engine_cuda.fp8 import Fp8Products

    model = engine.ranks[0].model
    weights = {
        id(getattr(model.weights.get(layer), name)): (name, layer)
        for layer in range(model.config.L)
        for name in PRODUCTS
    }
    seen = {}
    forward, backward = Fp8Products.forward_operands, Fp8Products.weight_gradient

    def forward_operands(self, x, weight):
        name, layer = weights[id(weight)]
        seen[f"{name}.input", layer] = engine.read(x)
        return forward(self, x, weight)

    def weight_gradient(self, dweight, dy, x, weight, *, accumulate):
        name, layer = weights[id(weight)]
        seen[f"{name}.gradient", layer] = engine.read(dy)
        backward(self, dweight, dy, x, weight, accumulate=accumulate)

    with monkeypatch.context() as patch:
        patch.setattr(Fp8Products, "forward_operands", forward_operands)
        patch.setattr(Fp8Products, "weight_gradient", weight_gradient)
        health = engine.train_step(batch, health=True, **FACTS).health
    for layer in range(model.config.L):
        unit = model.weights.get(layer)
        for name in PRODUCTS:
            seen[f"{name}.weight", layer] = engine.read(getattr(unit, name))
    return health, seen


@pytest.mark.parametrize("units", ["hardware", "emulate"])
@pytest.mark.parametrize("quants", [True, False])
@pytest.mark.parametrize("recompute", [(), ("norm", "swiglu"), ("block",)])
@pytest.mark.parametrize(
    ("model", "gradient", "layers"), [(QWEN2, "e4m3", ()), (QWEN3, "e5m2", (0,))]
)
def test_counts_are_those_of_the_operands(
    monkeypatch, units, quants, recompute, model, gradient, layers
):
    config = fp8_config(
        gradient, units, layers, quants, recompute=recompute, accumulation=2, graphs=False
    )
    batch = batch_of(config, model)
    engine = cuda_engine(config, model)
    health, seen = operands_of_a_step(monkeypatch, engine, batch)
    engine.close()
    assert len(health) == (model.L - len(layers)) * 12
    for t in health:
        x = seen[t.name, t.layer]
        values = np.abs(oracles.decode(oracles.quantize(x, t.format)[0], t.format))
        assert t.absmax == np.abs(x.astype(np.float64)).max(), t
        assert t.underflowed == np.mean((values == 0) & (x != 0)), t
        assert t.saturated == np.mean(values == largest(t.format)), t

    graphs = cuda_engine(fp8_config(gradient, units, layers, quants, recompute=recompute), model)
    assert graphs.train_step(batch, health=True, **FACTS).health == health
    graphs.close()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_report_changes_no_bit(accumulation):
    """Reports in the middle of a run: counted and plain graphs take turns."""
    config = fp8_config(accumulation=accumulation)
    found = []
    for every in (2, 0):
        engine = cuda_engine(config, QWEN2)
        steps = []
        for i in range(5):
            facts = {"step": i, "updates": i, "learning_rate": 3e-3}
            batch = batch_of(config, QWEN2, seed=i)
            got = engine.train_step(batch, health=bool(every) and i % every == 0, **facts)
            assert bool(got.health) == (bool(every) and i % every == 0)
            steps.append(dataclasses.replace(got, health=()))
        found.append((steps, [engine.read(s.master) for s in engine.states]))
        engine.close()
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
