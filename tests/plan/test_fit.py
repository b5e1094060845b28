"""The choice of `auto` against brute force over every setting, and the memory it relies on."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmq_nb.config import EvalConfig, MemoryConfig
from llmq_nb.model.families import preset
from llmq_nb.model.recompute import dropped_activations
from llmq_nb.plan import fit
from llmq_nb.plan.cost import step_seconds
from llmq_nb.plan.fit import (
    GAPS,
    Setting,
    chunk_counts,
    offload_sets,
    recompute_subsets,
    settings,
)
from llmq_nb.plan.link import symmetric
from llmq_nb.plan.rates import H200, predicted, rates_of
from llmq_nb.plan.search import Search
from llmq_nb.plan.sizes import Sizes, run_plan
from tests.model.harness import make_config, small_model

CARDS = {"H200": H200, "4090": predicted("GeForce RTX 4090"), "3060": predicted("GeForce RTX 3060")}
TRANSFERS = ("auto", "copy", "zero_copy")
quick = hypothesis_settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def runs(draw, precisions=("fp32", "bf16", "e4m3")):
    """(config, model): small, with every kind of layer, odd lengths, states and formats."""
    family = draw(st.sampled_from(["qwen2", "qwen3", "llama"]))
    heads, shared = draw(st.sampled_from([(1, 1), (4, 2), (6, 3)]))
    model = small_model(
        family=family,
        qk_norm=family == "qwen3",
        qkv_bias=family == "qwen2",
        C=16 * draw(st.integers(1, 8)),
        F=16 * draw(st.integers(1, 16)),
        L=draw(st.integers(1, 6)),
        H=heads,
        G=shared,
        D=draw(st.sampled_from([16, 64])),
        V=draw(st.integers(10, 3000)),
        tied=draw(st.booleans()),
    )
    config = make_config(
        micro_batch=draw(st.integers(1, 6)),
        seq_len=draw(st.integers(1, 700)),
        precision=draw(st.sampled_from(precisions)),
        m=draw(st.sampled_from(["fp32", "bf16", "e4m3"])),
    )
    accumulation = draw(st.integers(1, 4))
    batch = dataclasses.replace(config.batch, grad_accumulation=accumulation)
    return dataclasses.replace(config, batch=batch), model


def total(config, model):
    return run_plan(config, model, "cuda").total


@quick
@given(run=runs(), card=st.sampled_from(list(CARDS)), share=st.floats(0.0, 1.2))
def test_choice_is_the_fastest_of_all_that_fit(run, card, share):
    """Brute force: every setting planned and timed through the public functions alone. Without
    offload, whose brute force is below."""
    config, model = run
    every = [s.applied(config) for s in settings(config, offload=False)]
    sizes = [total(c, model) for c in every]
    limit = int(min(sizes) + share * (max(sizes) - min(sizes)))
    times = [step_seconds(c, model, CARDS[card]) for c in every]
    fitting = [t for t, size in zip(times, sizes, strict=True) if size <= limit]
    search = Search(config, model, CARDS[card])
    search.offload = False
    choice = search.choose(limit)
    assert choice is not None
    chosen = choice.setting.applied(config)
    assert choice.total == total(chosen, model) <= limit
    assert choice.seconds == pytest.approx(min(fitting), rel=1e-9)
    assert choice.seconds == pytest.approx(step_seconds(chosen, model, CARDS[card]), rel=1e-12)
    fewest: dict[Setting, float] = {}  # of each setting of the other levers, chunks rising
    for s, size, t in zip(settings(config, offload=False), sizes, times, strict=True):
        if size <= limit:
            fewest.setdefault(dataclasses.replace(s, head_chunks=1), t)
    ranked = [c.seconds for c in search.ranked(limit, None, 7)]
    assert ranked == pytest.approx(sorted(fewest.values())[:7], rel=1e-9)


@quick
@given(run=runs())
def test_nothing_is_chosen_below_the_smallest(run):
    config, model = run
    search = Search(config, model, H200)
    search.offload = False
    least = search.smallest()
    every = settings(config, offload=False)
    assert least.total == min(total(s.applied(config), model) for s in every)
    assert search.choose(least.total - 1) is None
    found = search.choose(least.total)
    assert found is not None and found.total == least.total


few = hypothesis_settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@few
@given(
    run=runs(precisions=("bf16", "e4m3")),
    card=st.sampled_from(list(CARDS)),
    subsets=st.lists(st.sampled_from(recompute_subsets()), min_size=1, max_size=2, unique=True),
    share=st.floats(0.0, 1.0),
    host_share=st.none() | st.floats(0.0, 1.0),
)
def test_choice_with_offload_is_the_fastest_of_all_that_fit(
    run, card, subsets, share, host_share, monkeypatch
):
    """Brute force over micro-batches, codes, chunks and offload, with one or two sets of
    recomputation; both limits somewhere between the smallest and the largest."""
    config, model = run
    monkeypatch.setattr(fit, "recompute_subsets", lambda: subsets)
    every = [s.applied(config) for s in settings(config)]
    plans = [run_plan(c, model, "cuda") for c in every]
    times = [step_seconds(c, model, CARDS[card]) for c in every]
    sizes, pinned = [p.total for p in plans], [p.host_total for p in plans]
    limit = int(min(sizes) + share * (max(sizes) - min(sizes)))
    host = None if host_share is None else int(host_share * max(pinned))
    fitting = [
        (t, size)
        for t, size, pins in zip(times, sizes, pinned, strict=True)
        if size <= limit and (host is None or pins <= host)
    ]
    search = Search(config, model, CARDS[card])
    choice, least = search.choose(limit, host), search.smallest(host)
    assert (choice is None) == (not fitting)
    possible = [s for s, p in zip(sizes, pinned, strict=True) if host is None or p <= host]
    assert least.total == min(possible) and (host is None or least.host_total <= host)
    if choice is None:
        return
    chosen = choice.setting.applied(config)
    assert choice.total == total(chosen, model) <= limit
    assert choice.host_total == run_plan(chosen, model, "cuda").host_total
    assert host is None or choice.host_total <= host
    assert choice.seconds == pytest.approx(min(t for t, _ in fitting), rel=1e-9)
    assert choice.seconds == pytest.approx(step_seconds(chosen, model, CARDS[card]), rel=1e-12)


@quick
@given(run=runs(), kind=st.sampled_from(["cpu", "cuda"]), data=st.data())
def test_sizes_are_those_of_the_plan(run, kind, data):
    """Of ten random settings, asked of one `Sizes`: to the byte."""
    config, model = run
    disk = data.draw(st.sampled_from([(), ("v",), ("m", "v")]))
    config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, disk=disk))
    sizes = Sizes(model, kind)
    every = list(settings(config, offload=kind == "cuda"))
    for index in data.draw(st.lists(st.integers(0, len(every) - 1), min_size=10, max_size=10)):
        other = dataclasses.replace(every[index], transfer=data.draw(st.sampled_from(TRANSFERS)))
        changed = other.applied(config)
        plan, found = run_plan(changed, model, kind), sizes.of(changed)
        assert (found.total, found.host_total) == (plan.total, plan.host_total)
        assert found.scratch == plan.group_bytes()["scratch"]


def test_the_faster_transfer_is_taken():
    """Copies where kernels are slow on host memory; what the config asks for stays."""
    config, model = make_config(micro_batch=1, seq_len=64, precision="bf16"), preset("qwen2.5-0.5b")
    slow = dataclasses.replace(symmetric(50.0), read=10.0, write=10.0, update=5.0)
    for link, expected in ((symmetric(50.0), "auto"), (slow, "copy")):
        search = Search(config, model, dataclasses.replace(H200, host_link=link))
        assert search.smallest().setting.transfer == expected
    asked = dataclasses.replace(config, memory=MemoryConfig(transfer="zero_copy"))
    rates = dataclasses.replace(H200, host_link=slow)
    assert Search(asked, model, rates).smallest().setting.transfer == "zero_copy"


def test_nothing_is_offloaded_where_memory_is_shared():
    config, model = make_config(micro_batch=1, seq_len=64, precision="bf16"), preset("qwen2.5-0.5b")
    assert Search(config, model, rates_of("GB10")).smallest().setting.offload == ()


@quick
@given(run=runs(precisions=("fp32", "bf16")), data=st.data())
def test_more_recomputation_never_takes_more_than_the_gaps_of_the_arena(run, data):
    """Not in FP8, where what is computed again is kept in no codes: with few layers that is more.
    The search does not rely on this one."""
    config, model = run
    subsets = recompute_subsets()
    some = data.draw(st.sampled_from(subsets))
    more = data.draw(
        st.sampled_from([s for s in subsets if dropped_activations(s) >= dropped_activations(some)])
    )
    base = Setting(config.batch.micro_batch, 1, some, data.draw(st.integers(1, 8)))
    no_larger(base, dataclasses.replace(base, recompute=more), config, model)


@quick
@given(run=runs(), subset=st.sampled_from(recompute_subsets()), data=st.data())
def test_more_chunks_and_smaller_micro_batches_never_take_more_than_the_gaps(run, subset, data):
    config, model = run
    base = Setting(data.draw(st.integers(1, 8)), 1, subset, data.draw(st.integers(1, 8)))
    more = base.head_chunks + data.draw(st.integers(0, 8))
    no_larger(base, dataclasses.replace(base, head_chunks=more), config, model)
    smaller = data.draw(st.integers(1, base.micro_batch))
    no_larger(base, dataclasses.replace(base, micro_batch=smaller), config, model)


def no_larger(base, other, config, model):
    """What lives for the whole run never grows, and the arena by less than `GAPS` of itself."""
    plans = [run_plan(s.applied(config), model, "cuda") for s in (base, other)]
    scratch = [plan.group_bytes()["scratch"] for plan in plans]
    lasting = [plan.total - n for plan, n in zip(plans, scratch, strict=True)]
    if base.recompute == other.recompute:
        assert lasting[1] <= lasting[0]
    assert plans[1].total <= plans[0].total + GAPS * scratch[1]


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-0.6b", "qwen2.5-7b"])
@pytest.mark.parametrize("micro_batch", [1, 8])
def test_more_recomputation_takes_less_in_real_models(name, micro_batch):
    """BF16, every pair of subsets of which one drops more: strictly less, chunks or not."""
    config, model = (
        make_config(micro_batch=micro_batch, seq_len=1024, precision="bf16"),
        preset(name),
    )
    for chunks in (1, 4):
        sizes = {
            dropped_activations(s): total(Setting(micro_batch, 1, s, chunks).applied(config), model)
            for s in recompute_subsets()
        }
        for some, size in sizes.items():
            assert all(other < size for more, other in sizes.items() if more > some)


def test_settings_are_every_combination():
    """6 sequences: 4 sizes; 19 sets of dropped activations; 1024 tokens: chunks up to 4 a sequence;
    FP8 keeps its codes or not."""
    config = make_config(micro_batch=3, seq_len=1024, precision="bf16")
    config = dataclasses.replace(
        config, batch=dataclasses.replace(config.batch, grad_accumulation=2)
    )
    found = list(settings(config, offload=False))
    assert len(found) == len(set(found)) == 19 * (3 + 4 + 4 + 5)
    assert {(s.micro_batch, s.grad_accumulation) for s in found} == {(1, 6), (2, 3), (3, 2), (6, 1)}
    assert chunk_counts(config, 1) == [1, 2, 4] and chunk_counts(config, 6) == [1, 2, 4, 8, 16]
    fp8 = make_config(micro_batch=1, seq_len=256, precision="e4m3")
    assert len(list(settings(fp8, offload=False))) == 19 * 2
    # six sets of states, each with residual or not, kept codes or not
    assert len(list(settings(fp8))) == 19 * (6 * 4 + 6 * 2)
    assert len(set(offload_sets(True))) == 24
    # without m, two of the six are another one; without both, three
    assert len(set(offload_sets(True, ("m",)))) == len(offload_sets(True, ("m",))) == 20
    assert len(set(offload_sets(True, ("m", "v")))) == len(offload_sets(True, ("m", "v"))) == 16


def test_on_several_machines_no_product_reads_what_is_on_another_one():
    """Weights that are the master copy, and kept codes, stay on the GPU; all else may go."""
    fp8 = make_config(micro_batch=1, seq_len=256, precision="e4m3", master="fp32")
    parallel = dataclasses.replace(fp8.parallel, machines=2)
    apart = {s.offload for s in settings(dataclasses.replace(fp8, parallel=parallel))}
    every = {s.offload for s in settings(fp8)}
    assert apart == {moved for moved in every if "quants" not in moved} < every
    bf16 = make_config(micro_batch=1, seq_len=256, precision="bf16", master="bf16")
    apart = {s.offload for s in settings(dataclasses.replace(bf16, parallel=parallel))}
    assert apart == {s.offload for s in settings(bf16) if "master" not in s.offload}
    assert ("m", "v") in apart


def test_applied_keeps_the_batch_the_evaluation_and_all_else():
    config = dataclasses.replace(
        make_config(micro_batch=8, seq_len=64, precision="bf16"), eval=EvalConfig(steps=5)
    )
    config = dataclasses.replace(config, memory=dataclasses.replace(config.memory, policy="auto"))
    new = Setting(3, 2, ("ffn",), 4, False, ("m", "v"), "copy").applied(config)
    assert new.memory == dataclasses.replace(
        config.memory,
        policy="manual",
        recompute=("ffn",),
        head_chunks=4,
        keep_quants=False,
        offload=("m", "v"),
        transfer="copy",
    )
    assert (new.batch.micro_batch, new.batch.grad_accumulation, new.batch.seq_len) == (3, 2, 64)
    assert new.eval.steps == 14  # 40 sequences in whole micro-batches of 3
    same = ("model", "data", "run", "precision", "optimizer", "schedule", "parallel", "checkpoint")
    assert all(getattr(new, section) == getattr(config, section) for section in same)
    assert Setting(2, 4).applied(dataclasses.replace(config, eval=EvalConfig(steps=0))).eval == (
        EvalConfig(steps=0)
    )
