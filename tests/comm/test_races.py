"""The sharded steps with copies as late and as early as they may be: the same bits, no race."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.comm.harness import TIED, batch, config_of, engine_of, plain, run
from tests.comm.late_link import LateRanks, early, late, mixed, on_queue

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
