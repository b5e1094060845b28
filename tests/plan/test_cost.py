"""The time model against recorded figures, against hand computation, and against what the model
really launches: with rates without bound every operation takes its floor, so time counts launches.
"""

import collections
import itertools
from typing import get_args

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
    Recompute,
)
from llmq_nb.model.engine_cpu import CpuOps
from llmq_nb.model.families import preset
from llmq_nb.plan.buffers import make_plan
from llmq_nb.plan.cost import (
    FLOOR,
    GAP,
    LAUNCH,
    PRODUCT_FLOOR,
    Part,
    by_operation,
    by_part,
    micro_step_work,
    optimizer_work,
    step_seconds,
    tokens_per_second,
    total,
)
from llmq_nb.plan.link import symmetric
from llmq_nb.plan.mfu import PEAKS
from llmq_nb.plan.rates import CARDS, H200, Rates, at, rates_of
from llmq_nb.train.bench_step import label
from llmq_nb.train.step import optimizer_step
from llmq_nb.train.wiring import allocate, make_rank
from tests.model.harness import make_config, random_batch, run_micro_steps, small_model

CHOICES = get_args(Recompute)
SUBSETS = [s for n in range(7) for s in itertools.combinations(CHOICES, n)]
ENDLESS = ((1, 1e9),)
COUNTING = Rates("none", ENDLESS, ENDLESS, ENDLESS, {64: (ENDLESS, ENDLESS)}, 1e15, symmetric(1.0))


def run_config(model: str, micro_batch: int, accumulation: int, matmul: str) -> Config:
    """A run with BF16 states, as the recorded ones were."""
    return Config(
        model=ModelSection(path=model),
        data=DataConfig(train="none"),
        batch=BatchConfig(micro_batch=micro_batch, grad_accumulation=accumulation),
        precision=PrecisionConfig(
            matmul="e4m3" if matmul == "e4m3" else None, fast_accumulation=True
        ),
        optimizer=OptimizerConfig(master="bf16", m="bf16", v="bf16"),
    )


# What `step_budget.py SIZE PRECISION MICRO_BATCH 1024` printed on 2026-11-30: ms of a micro-step.
BUDGETS = [
    ("qwen2.5-0.5b", "bf16", 32, 207.16),
    ("qwen2.5-0.5b", "e4m3", 32, 171.93),
    ("qwen2.5-1.5b", "bf16", 32, 542.03),
    ("qwen2.5-1.5b", "e4m3", 32, 401.35),
    ("qwen2.5-3b", "bf16", 16, 519.39),
    ("qwen2.5-3b", "e4m3", 16, 365.02),
    ("qwen2.5-7b", "bf16", 4, 278.32),
    ("qwen2.5-7b", "e4m3", 4, 180.29),
]


@pytest.mark.parametrize(("name", "matmul", "micro_batch", "recorded"), BUDGETS)
def test_total_is_the_recorded_budget_within_a_percent(name, matmul, micro_batch, recorded):
    works = micro_step_work(run_config(name, micro_batch, 1, matmul), preset(name), H200)
    assert 1e3 * total(works) == pytest.approx(recorded, rel=0.01)


def test_parts_are_the_recorded_budget_of_1_5b_in_e4m3():
    """The lines of `step_budget.py 1.5B e4m3 32`, where they are parts here."""
    model = preset("qwen2.5-1.5b")
    parts = by_part(micro_step_work(run_config("qwen2.5-1.5b", 32, 1, "e4m3"), model, H200))
    lines: dict[Part, float] = {
        "products": 69.81 + 139.62 + 0.96,
        "attention": 7.70 + 28.86,
        "norms": 5.77 + 5.77,
        "RoPE": 3.36,
        "SwiGLU": 12.62 + 21.03,
        "LM head": 66.31,
        "classifier": 5.09,
        "embedding": 0.10,
        "quantise": 12.74 + 21.63,
    }
    assert set(parts) == set(lines)
    for part, milliseconds in lines.items():
        # norms: one more forward and backward, of 56; quantise: attn is read twice, not once
        assert 1e3 * parts[part] == pytest.approx(milliseconds, rel=0.04, abs=0.02), part


# tokens/s that LLMQ publishes (524,288 tokens a step, seq_len 1024): "H100", 4090 and 5060 Ti.
PUBLISHED = [
    ("H100", "qwen2.5-0.5b", "e4m3", 164_000),
    ("H100", "qwen2.5-0.5b", "bf16", 149_000),
    ("H100", "qwen2.5-1.5b", "e4m3", 73_000),
    ("H100", "qwen2.5-1.5b", "bf16", 59_000),
    ("H100", "qwen2.5-3b", "e4m3", 40_000),
    ("H100", "qwen2.5-3b", "bf16", 31_000),
    ("H100", "qwen2.5-7b", "e4m3", 19_000),
    ("H100", "qwen2.5-7b", "bf16", 14_000),
    ("GeForce RTX 4090", "qwen2.5-0.5b", "e4m3", 48_000),
    ("GeForce RTX 4090", "qwen2.5-0.5b", "bf16", 40_000),
    ("GeForce RTX 4090", "qwen2.5-7b", "e4m3", 4_300),
    ("GeForce RTX 4090", "qwen2.5-7b", "bf16", 2_800),
    ("GeForce RTX 5060 Ti", "qwen2.5-7b", "e4m3", 1_456),
    ("GeForce RTX 5060 Ti", "qwen2.5-7b", "bf16", 889),
]


@pytest.mark.parametrize(("card", "name", "matmul", "published"), PUBLISHED)
def test_predictions_are_within_a_fifth_of_what_another_trainer_reaches(
    card, name, matmul, published
):
    """Another program on these cards, some of it with offload: a bound on the model's error."""
    rate = tokens_per_second(run_config(name, 16, 32, matmul), preset(name), rates_of(card))
    assert rate == pytest.approx(published, rel=0.2)


class Counter:
    """Ops that count their calls by the names that `bench step --breakdown` gives them."""

    def __init__(self, ops):
        self._ops, self.calls = ops, collections.Counter()

    def __getattr__(self, name):
        method = getattr(self._ops, name)
        if not callable(method) or name in ("set_scalars", "read", "write", "fill_normal"):
            return method

        def call(*args, **scalars):
            if name.startswith("clear"):  # nothing to clear in BF16
                return method(*args, **scalars)
            self.calls[label(name, args)] += 1
            return method(*args, **scalars)

        return call


def counted(config: Config, model) -> dict[str, int]:
    """Calls of a micro-step and an optimizer step of the real model."""
    plan = make_plan(config, model)
    ops = CpuOps(model, config.optimizer, seq_len=config.batch.seq_len, seed=1)
    rank = make_rank(config, model, allocate(plan), ops)
    counter = Counter(ops)
    rank.model.ops = counter  # pyright: ignore[reportAttributeAccessIssue]
    B, T = config.batch.micro_batch, config.batch.seq_len
    run_micro_steps(rank, random_batch(np.random.default_rng(1), B, T, model.V))
    optimizer_step([rank])
    return dict(counter.calls)


def predicted_calls(config: Config, model) -> dict[str, float]:
    """The same from the time model, each operation at its floor."""
    works = micro_step_work(config, model, COUNTING) + optimizer_work(config, model, COUNTING)
    out = {}
    for name, seconds in by_operation(works).items():
        each = FLOOR + GAP
        if name.startswith(("linear_backward", "linear_swiglu_backward")):
            each = 2 * (PRODUCT_FLOOR + GAP)
            if name == "linear_swiglu_backward":
                each += FLOOR + GAP
            if name == "linear_backward qkv" and model.qkv_bias:
                each += FLOOR + GAP
        elif name.startswith("linear"):
            each = PRODUCT_FLOOR + GAP
            if name.startswith("linear_swiglu"):
                each += FLOOR + GAP
        out[name] = seconds / each
    return out


@pytest.mark.parametrize(
    "model",
    [
        small_model(L=2, tied=True),
        small_model(family="qwen3", L=3, qk_norm=True),
        small_model(family="qwen2", L=1, qkv_bias=True),
    ],
    ids=["tied", "qk_norm", "bias"],
)
def test_operations_are_those_that_the_model_launches(model):
    """Names and numbers, for every subset of recompute; some with chunks of the head."""
    for i, subset in enumerate(SUBSETS):
        chunks = 1 + i % 2  # 2 x 32 rows: two chunks of 32
        config = make_config(micro_batch=2, seq_len=32, recompute=subset, head_chunks=chunks)
        assert predicted_calls(config, model) == pytest.approx(counted(config, model)), subset


def test_by_hand():
    """C 64, F 128, one layer of 4/2 heads of 16, V 256, 2 x 128 tokens, BF16: N = 256 rows.

    Rates that make floors vanish: 1 TFLOP/s, FP8 2, head 4, attention 1 and 0.5, 1 GB/s.
    """
    model = small_model(C=64, F=128, L=1, H=4, G=2, D=16, V=256, qkv_bias=False, tied=False)
    rates = Rates(
        "hand",
        ((1, 1.0),),
        ((1, 2.0),),
        ((1, 4.0),),
        {16: (((1, 1e-3),), ((1, 5e-4),))},
        bandwidth=1.0,
        host_link=symmetric(1.0),
    )
    config = make_config(micro_batch=2, seq_len=128, precision="bf16", recompute=("ffn",))
    found = by_operation(micro_step_work(config, model, rates))
    MB = 1e-9  # seconds a byte
    expected = {
        # every product is bound by its bytes: x (256 K), weight (M K), y (256 M), two bytes each
        "linear qkv": 2 * (256 * 64 + 128 * 64 + 256 * 128) * MB,
        "linear_swiglu_backward": (2 * (256 * 128 + 64 * 128 + 256 * 64) + 256 * 128 * 5) * 2 * MB,
        "linear lm_head": 2 * (256 * 64 + 256 * 64 + 256 * 256) * MB,
        "linear_swiglu": 2 * (256 * 64 + 256 * 64 + 256 * 256 + 256 * 128 * 3) * MB,
        "linear_swiglu_again": 2 * (256 * 64 + 256 * 64 + 256 * 256 + 256 * 128 * 3) * MB,  # ffn
        "rope": 256 * 6 * 16 * 2 * 2 * MB,
        "residual_rmsnorm": 2 * 256 * 64 * 4 * 2 * MB,  # mid of the block, and the final one
        "rmsnorm_backward": (2 * 4 + 3) * 256 * 64 * 2 * MB,
        "cross_entropy": 256 * 256 * 2 * 2 * MB,
        "attention": 2 * 2 * 4 * 128 * 128 * 16 / 1e9,  # 2 B H T^2 D at 1 GFLOP/s
        "attention_backward": 2.5 * 2 * 2 * 4 * 128 * 128 * 16 / 5e8,
    }
    for name, seconds in expected.items():
        assert found[name] == pytest.approx(seconds, rel=1e-12, abs=4 * GAP), name


def test_optimizer_step_moves_each_state_once():
    """FP32 master, FP32 m, BF16 v: read and written; gradient read; BF16 weights written."""
    model = preset("qwen2.5-0.5b")
    base = run_config("qwen2.5-0.5b", 4, 1, "bf16")
    config = Config(
        model=base.model, data=base.data, optimizer=OptimizerConfig(master="fp32", v="bf16")
    )
    works = by_operation(optimizer_work(config, model, H200))
    values = 494_032_768  # parameters of Qwen2.5-0.5B, whose vocabulary is a multiple of 16
    bandwidth = 0.92 * 4250e9
    seconds, launches = values * (2 + 8 + 8 + 4 + 2) / bandwidth, 24 * 12 + 2
    assert seconds < works["adamw"] < seconds + launches * (FLOOR + GAP)
    assert works["global_norm"] == pytest.approx(values * 2 / bandwidth, rel=0.01)


def test_a_step_is_its_micro_steps_and_one_update():
    model = preset("qwen2.5-0.5b")
    one, four = (run_config("qwen2.5-0.5b", 8, n, "bf16") for n in (1, 4))
    micro = total(micro_step_work(one, model, H200, LAUNCH))
    update = total(optimizer_work(one, model, H200))
    assert step_seconds(four, model, H200) == pytest.approx(4 * micro + update)
    assert tokens_per_second(four, model, H200) == pytest.approx(
        4 * 8 * 1024 / (4 * micro + update)
    )


def test_fp8_layers_emulation_and_promotion():
    """A layer that stays in BF16 costs BF16's time; emulated FP8 the same and the quantising."""
    model = preset("qwen2.5-1.5b")

    def products(**precision):
        config = Config(
            model=ModelSection(path="none"),
            data=DataConfig(train="none"),
            batch=BatchConfig(micro_batch=32),
            precision=PrecisionConfig(**precision),
            memory=MemoryConfig(),
        )
        return by_part(micro_step_work(config, model, H200))

    bf16, fp8 = products(), products(matmul="e4m3", fast_accumulation=True)
    half = products(matmul="e4m3", fast_accumulation=True, bf16_layers=(*range(12), -1, -2))
    assert half["products"] == pytest.approx((bf16["products"] + fp8["products"]) / 2)
    clear = FLOOR + GAP  # once a micro-step, however many layers
    assert half["quantise"] - clear == pytest.approx((fp8["quantise"] - clear) / 2)
    emulated = products(matmul="e4m3", fp8_units="emulate")
    assert emulated["products"] == pytest.approx(bf16["products"])
    # six operands of a product's three multiplications are decoded, 3 bytes a value
    C, F, Q, N, L = 1536, 8960, 2048, 32 * 1024, 28
    widths = [(Q, C), (C, C), (2 * F, C), (C, F)]
    values = sum(2 * (N * K + N * M + M * K) for M, K in widths)
    decoding = L * (3 * values / (0.92 * 4250e9) + 4 * 6 * GAP)
    assert emulated["quantise"] - fp8["quantise"] == pytest.approx(decoding, rel=0.01)
    promoted = products(matmul="e4m3")
    assert fp8["products"] < promoted["products"] < bf16["products"]


def test_every_card_has_rates_below_its_peak():
    assert list(CARDS) == list(PEAKS)
    for name, peak in PEAKS.items():
        rates = rates_of(name)
        assert rates.card == name and rates.measured == (name == "H200")
        assert all(rate < peak.bf16 for _, rate in rates.bf16 + rates.head)
        assert (rates.fp8 is None) == (peak.fp8 is None)
        assert all(rate < (peak.fp8 or 0) for _, rate in rates.fp8 or ())
        assert rates.bandwidth < CARDS[name].bandwidth
        for forward, backward in rates.attention.values():
            assert at(backward, 1024) < at(forward, 1024) < peak.bf16


def test_a_curve_is_straight_between_its_points_and_level_outside():
    curve = ((10, 1.0), (20, 3.0), (40, 2.0))
    points = [at(curve, size) for size in (5, 10, 15, 20, 30, 40, 50)]
    assert points == [1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 2.0]


def test_codes_that_are_not_kept_are_written_again():
    """By hand, 7B, 1 x 1024: weights once in forward and once in backward, 3 bytes a value."""
    model, N, C, F, Q, L = preset("qwen2.5-7b"), 1024, 3584, 18944, 4608, 28

    def quantising(**memory):
        config = Config(
            model=ModelSection(path="none"),
            data=DataConfig(train="none"),
            batch=BatchConfig(micro_batch=1),
            precision=PrecisionConfig(matmul="e4m3"),
            memory=MemoryConfig(**memory),
        )
        return by_part(micro_step_work(config, model, H200))["quantise"]

    bandwidth = 0.92 * 4250e9
    kept = quantising()
    written = quantising(keep_quants=False)
    weights = L * (Q * C + C * C + 3 * C * F)
    assert written - kept == pytest.approx(weights * 2 * 3 / bandwidth + L * 2 * 4 * GAP)
    # recompute = ffn: act (dropped) and mlp_in (read again) are not kept: 3 + 3 instead of 4
    ffn = quantising(recompute=("ffn",))
    more = L * (N * (C + F) * (3 + 3 - 4) / bandwidth + 2 * GAP)
    assert ffn - kept == pytest.approx(more)
