"""The sharded steps with copies as late and as early as they may be: the same bits, no race."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.comm.harness import STORAGE, TIED, batch, config_of, engine_of, plain, run
from tests.comm.late_link import LateRanks, early, late, mixed, on_queue
from tests.model.harness import small_model

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("bf16", 2, dict(weights=True)),
    ("bf16, fp32 master", 3, dict(weights=True, gradients=True)),
    ("e4m3, kept quants", 2, dict(gradients=True)),
    ("e4m3, kept quants", 3, dict(weights=True, gradients=True, offload=("master", "m"))),
    ("e4m3, no quants", 3, dict(weights=True)),
    ("e4m3, bf16 ends", 2, dict(weights=True, gradients=True, recompute=("block",))),
]


@pytest.mark.parametrize("when", [late, early, mixed(1)], ids=["late", "early", "mixed"])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_copy_is_ordered(when: Callable[[], Any], case: int):
    storage, ranks, options = CASES[case]
    links = LateRanks(when)
    found = run(config_of(storage, ranks, **options), links=links, prepare=on_queue)
    links.calm()
    assert found == plain(storage, ranks, options.get("gradients", False), 2)


def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch):
    """Backward that does not wait for the copies of its staging buffer writes over them."""
    from llmq_nb.comm.gradients import GradientReduction

    monkeypatch.setattr(GradientReduction, "ready", lambda *_: None)
    config = config_of("bf16", 2, gradients=True)
    links = LateRanks(late)
    engine = engine_of(config, TIED, links)
    for rank in engine.ranks:
        on_queue(rank.ops)
    with pytest.raises(AssertionError):
        engine.train_step(batch(config, TIED, 0), step=0, updates=0, learning_rate=1e-2)


LEVERS = ("m", "v", "master", "quants", "residual", "gradients")
RECOMPUTE = ("norm", "swiglu", "ffn", "qkv", "attention", "block")


@pytest.mark.parametrize("seed", range(24))
def test_random_settings_keep_every_bit(seed: int):
    """Any model, states, ranks, sharding, offload and recomputation, in any order of the copies."""
    rng = random.Random(seed)
    family = rng.choice(["qwen2", "qwen3", "llama"])
    G = rng.choice([1, 2])
    shape: dict[str, Any] = {"family": family, "G": G, "H": G * rng.choice([1, 2, 3])}
    shape |= {"L": rng.choice([1, 2, 3, 5]), "tied": rng.random() < 0.5}
    shape |= {"qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    model = small_model(**shape)
    storage, ranks, gradients = rng.choice(list(STORAGE)), rng.choice([2, 3, 4, 7]), seed % 2 == 0
    base: dict[str, Any] = dict(gradients=gradients, accumulation=rng.choice([1, 2, 5]))
    moved = [x for x in LEVERS if rng.random() < 0.4 and (x != "gradients" or gradients)]
    levers: dict[str, Any] = dict(offload=moved, transfer=rng.choice(["copy", "zero_copy"]))
    levers |= dict(recompute=[x for x in RECOMPUTE if rng.random() < 0.3], weights=seed % 3 > 0)
    links = LateRanks(rng.choice([late, early, mixed(seed)]))
    found = run(config_of(storage, ranks, **base, **levers), model, links=links, prepare=on_queue)
    assert found == run(config_of(storage, ranks, **base), model)
