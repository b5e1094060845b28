"""What offload must not change: losses, norms, weights and states, bit for bit.

Every run fills free staging buffers and, before each step, all scratch with NaN.
"""

import itertools

import numpy as np
import pytest

from llmq_nb.config import Recompute
from llmq_nb.model.engine_cpu import rows
from llmq_nb.offload.transfer import ImmediateTransfer
from llmq_nb.plan import places
from tests.offload.harness import LEVERS, STORAGE, LatestTransfer, config_of, resident, run

TRANSFERS = {"earliest": ImmediateTransfer, "latest": LatestTransfer}
RECOMPUTE: list[tuple[Recompute, ...]] = [(), ("block",), ("norm", "swiglu"), ("qkv", "ffn")]


class OneThread:
    """In place of the pool: handing over such small operations takes longer than they do."""

    map = staticmethod(map)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """One thread, and states so small that they are copied in several slices each."""
    rows.pool()
    monkeypatch.setattr(rows, "pool", OneThread)
    monkeypatch.setattr(places, "SLICE", 1024)
    monkeypatch.setattr("llmq_nb.train.host_stores.STREAMED", 100)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("time", TRANSFERS)
def test_each_lever_alone_and_all_together(storage, time):
    want = resident(storage, 2)
    for lever in (*((x,) for x in LEVERS), LEVERS):
        for transfer in ("zero_copy", "copy"):
            config = config_of(storage, offload=lever, transfer=transfer)
            assert run(config, TRANSFERS[time]) == want, (lever, transfer)


@pytest.mark.parametrize("accumulation", [1, 5])
@pytest.mark.parametrize("storage", STORAGE)
def test_all_levers_with_other_accumulations(storage, accumulation):
    want = resident(storage, accumulation)
    for time, transfer in itertools.product(TRANSFERS, ("zero_copy", "copy")):
        config = config_of(storage, accumulation=accumulation, offload=LEVERS, transfer=transfer)
        assert run(config, TRANSFERS[time]) == want, (time, transfer)


def test_random_subsets_with_recomputation():
    """Twenty subsets, each with its own recomputation, storage, accumulation and mode."""
    rng = np.random.default_rng(7)
    for index in range(20):
        subset = [lever for lever in LEVERS if rng.random() < 0.5]
        storage, recompute = list(STORAGE)[index % 5], RECOMPUTE[index % 4]
        accumulation, transfer = (1, 2, 5)[index % 3], ("zero_copy", "copy")[index // 2 % 2]
        config = config_of(
            storage,
            accumulation=accumulation,
            offload=subset,
            recompute=recompute,
            transfer=transfer,
        )
        found = run(config, list(TRANSFERS.values())[index % 2])
        assert found == resident(storage, accumulation), (subset, storage, recompute, transfer)


def test_the_bits_that_are_compared_tell_runs_apart():
    found = [resident(storage, accumulation) for storage in STORAGE for accumulation in (1, 2)]
    different = {str(losses) for losses, _ in found}
    assert len(different) == len(found)
