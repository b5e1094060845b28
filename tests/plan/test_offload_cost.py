"""Time of a step with offload: against what an H200 measured, and against hand computation."""

import dataclasses
from typing import Any, get_args

import pytest

from llmq_nb.config import MemoryConfig, Offload
from llmq_nb.model.families import preset
from llmq_nb.plan.cost import (
    by_part,
    micro_step_work,
    optimizer_work,
    tokens_per_second,
    total,
)
from llmq_nb.plan.link import Link, symmetric
from llmq_nb.plan.offload_cost import COPIED, exposed_seconds
from llmq_nb.plan.rates import H200
from tests.model.harness import make_config, small_model
from tests.plan.test_cost import run_config

ALL = get_args(Offload)
# bench/README.md, 2026-12-01: model, accumulation, chunks, offload, transfer, tokens/s, and seconds
# of a micro-step and the optimizer step. The link's rates are calibrated from the second line and
# COPIED from the third; the 7B line is a check of both.
MEASURED = [
    ("qwen2.5-1.5b", 4, 16, (), "auto", 63_830, 0.2545, None),
    ("qwen2.5-1.5b", 4, 16, ALL, "zero_copy", 46_998, 0.2628, 0.3571),
    ("qwen2.5-1.5b", 4, 16, ALL, "copy", 45_706, 0.2627, 0.3953),
    ("qwen2.5-7b", 2, 32, ALL, "zero_copy", 9_278, 0.913, 1.72),
]


def run(model: str, accumulation: int, **memory: Any):
    config = run_config(model, 16, accumulation, "e4m3")
    precision = dataclasses.replace(config.precision, fast_accumulation=False)
    memory = {"recompute": ("block",), **memory}
    return dataclasses.replace(config, precision=precision, memory=MemoryConfig(**memory))


@pytest.mark.parametrize(
    ("name", "accumulation", "chunks", "offload", "transfer", "rate", "micro", "update"), MEASURED
)
def test_predictions_are_within_4_percent_of_what_was_measured(
    name, accumulation, chunks, offload, transfer, rate, micro, update
):
    config = run(name, accumulation, head_chunks=chunks, offload=offload, transfer=transfer)
    model = preset(name)
    assert tokens_per_second(config, model, H200) == pytest.approx(rate, rel=0.04)
    assert total(micro_step_work(config, model, H200)) == pytest.approx(micro, rel=0.04)
    if update is not None:
        assert total(optimizer_work(config, model, H200)) == pytest.approx(update, rel=0.04)


def test_both_directions_share_the_link():
    """100 GB one way and 30 the other: 30 at the rates of both, the rest alone."""
    link = Link(50, 40, 25, 20, 10, 8, 5)
    assert link.copies(100e9, 0) == pytest.approx(2.0) and link.copies(0, 100e9) == 2.5
    assert link.copies(100e9, 30e9) == pytest.approx(1.5 + (100 - 1.5 * 25) / 50)
    assert link.copies(25e9, 100e9) == pytest.approx(1.0 + (100 - 20) / 40)
    assert link.kernels(5e9, 45e9) == pytest.approx(1.0 + 40 / 8)
    assert link.kernels(0, 0) == 0


FAST = dataclasses.replace(H200, bandwidth=1e9)  # what is on the device costs its floors alone


def test_update_by_hand():
    """1.5B: parameters 1.5437 G, of them 1.3099 G in matrices of blocks; BF16; 50 and 45 GB/s."""
    model, n, blocks = preset("qwen2.5-1.5b"), 1.543714304e9, 28 * 46_792_704.0

    def link_seconds(*offload: Offload, transfer: Any = "zero_copy", **memory: Any) -> float:
        config = run("qwen2.5-1.5b", 4, offload=offload, transfer=transfer, **memory)
        return by_part(optimizer_work(config, model, FAST)).get("host link", 0.0)

    def near(seconds: float):  # launches on the device have a floor, 3 us each
        return pytest.approx(seconds, rel=0.02)

    assert link_seconds() == link_seconds("residual") == 0
    assert link_seconds("m") == near(2 * n / 45e9)
    assert link_seconds("m", "v") == near(4 * n / 45e9)
    # read by the norm and by AdamW, alone
    assert link_seconds("gradients") == near(2 * 2 * blocks / 50e9)
    # read and written; once more for the codes, which stay on the device
    master = 2 * blocks / 45e9
    assert link_seconds("master") == near(master + 2 * blocks / 50e9)
    assert link_seconds("master", keep_quants=False) == near(master)
    # quants: written; with the masters beside the reading, half of whose bytes they are
    assert link_seconds("quants") == near(blocks / 50e9)
    both = blocks / 45e9 + blocks / 50e9
    assert link_seconds("master", "quants") == near(master + both)
    assert link_seconds("m", transfer="copy") == near(2 * n / 45e9 / COPIED)


def test_copies_that_the_work_hides_cost_their_ends_alone():
    """A block of 4 GB/s-seconds: weights and residual hide behind long work, not behind short."""
    model = small_model(family="llama", C=64, F=128, L=4, H=4, G=2, D=16)
    config = make_config(micro_batch=2, seq_len=64, precision="bf16", master="bf16")
    memory = MemoryConfig(offload=("master", "gradients", "residual"))
    batch = dataclasses.replace(config.batch, grad_accumulation=4)
    config = dataclasses.replace(config, memory=memory, batch=batch)
    link = symmetric(1.0)  # 1 GB/s, 0.9 each way
    W = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128)
    G = W + 2 * 2 * 64  # two norms; no bias
    R = 2 * 2 * 64 * 64
    ends = (W + G) * 1e-9
    assert exposed_seconds(config, model, link, 1.0, 1.0) == pytest.approx(ends)
    forward = R / 0.9e9 + (W - R) / 1e9
    first = G / 0.9e9 + (W + R - G) / 1e9  # in: weights, residual; out: gradients
    later = G / 0.9e9 + (W + R) / 1e9
    assert 2 * G < W + R + G  # so the chain of the gradients is not what is waited for
    want = ends + 4 * (forward + first / 4 + 3 * later / 4)
    assert exposed_seconds(config, model, link, 0.0, 0.0) == pytest.approx(want)
    # work of half a block's copies hides half of them
    half = exposed_seconds(config, model, link, forward / 2, 0.0)
    assert half == pytest.approx(want - 4 * forward / 2)


def test_gradients_alone_share_two_buffers_by_turns():
    """A buffer is filled, added to and emptied while the other one is: every second block's. The
    first micro-step fetches nothing."""
    config = run("qwen2.5-1.5b", 2, offload=("gradients",))
    model = preset("qwen2.5-1.5b")
    G = 2 * (46_792_704 + 2 * 1536 + 2048)
    unit, link = G / 50e9, H200.host_link
    # no work: both ways at once at 45, half of (in + out) alone is less; the first: out alone
    want = unit + 28 * (unit / 0.9 + unit) / 2
    assert exposed_seconds(config, model, link, 1.0, 0.0) == pytest.approx(want)
    # half of (in + work + out) is 1.25, of which the work is 0.5
    want = unit + 28 * (0.75 * unit + 0.5 * unit) / 2
    assert exposed_seconds(config, model, link, 1.0, unit / 2) == pytest.approx(want)
