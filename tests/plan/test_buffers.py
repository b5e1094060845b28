"""The plan: bytes that add up, one buffer where one is enough, and lifetimes that are true.

Lifetimes are checked against what the operations really read and write: a recorder between the
model and the engine notes each operation's tensors, and no two contents that are needed at one
moment may have lifetimes that do not meet.
"""

import itertools
import math
from typing import get_args

import numpy as np
import pytest

from llmq_nb.config import Recompute
from llmq_nb.core.arena import Slot, aligned
from llmq_nb.core.dtype import DType
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.engine_cpu import CpuOps
from llmq_nb.plan.buffers import INFERENCE, make_plan
from llmq_nb.plan.workspace import workspace_buffers
from llmq_nb.train.step import evaluation_step
from llmq_nb.train.wiring import allocate, make_rank
from tests.model.harness import (
    load_micro_batch,
    make_config,
    random_batch,
    run_micro_steps,
    small_model,
)

CHOICES = get_args(Recompute)
SUBSETS = [s for n in range(7) for s in itertools.combinations(CHOICES, n)]
MODELS = {
    "plain": small_model(L=2),
    "qk_norm": small_model(family="qwen3", L=3, qk_norm=True, tied=True),
    "bias": small_model(family="qwen2", L=1, qkv_bias=True),
}
# operation: (arguments that are outputs only, that are read and written)
WRITES = {
    "embedding": ((0,), ()),
    "embedding_backward": ((0,), ()),
    "rmsnorm": ((0, 1), ()),
    "residual_rmsnorm": ((0, 1, 2), ()),
    "rmsnorm_backward": ((0, 1), ()),
    "qk_norm": ((0, 1), ()),
    "qk_norm_backward": ((0, 1, 2), ()),
    "rope": ((), (0,)),
    "rope_backward": ((), (0,)),
    "attention": ((0, 1), ()),
    "attention_backward": ((0,), ()),
    "linear": ((0,), ()),
    "linear_backward": ((0, 1, 2), ()),
    "linear_swiglu": ((0, 1), ()),
    "linear_swiglu_again": ((0, 1), ()),
    "swiglu_again": ((0,), ()),
    "linear_swiglu_backward": ((0, 1, 2), ()),
    "cross_entropy": ((1, 2), (0,)),
    "reduce_loss": ((0,), ()),
}


class Recorder:
    """Ops that note the buffers of each operation: (reads, whole writes, partial writes)."""

    def __init__(self, ops, buffers):
        self._ops, self._sizes = ops, {b.name: math.prod(b.shape) for b in buffers}
        self.events = []

    def __getattr__(self, name):
        method = getattr(self._ops, name)
        if name not in WRITES:
            assert not callable(method) or name in ("set_scalars", "clear_absmax"), name
            return method

        def call(*args, **scalars):
            if name == "linear_swiglu_backward":  # the weight gradient, and then what is one kernel
                dgate_up, dact, dweight, dy, act, weight, gate_up = args
                note("linear_backward", (None, dweight, None, dy, act))
                note(name, (dgate_up, dact, None, dy, None, weight, gate_up))
            else:
                note(name, args)
            return method(*args, **scalars)

        def note(name, args):
            outputs, both = WRITES[name]
            reads, whole, part = set(), set(), set()
            for i, t in enumerate(args):
                if not isinstance(t, Tensor):
                    continue
                if name == "linear_backward" and i == 4 and t.fp8 is not None and t.fp8.kept:
                    continue  # its codes are read
                if i in outputs:
                    (whole if t.size == self._sizes[t.name] else part).add(t.name)
                else:
                    reads.add(t.name)
                    if i in both:
                        part.add(t.name)
            self.events.append((reads, whole - reads, part | (whole & reads)))

        return call


def needed(events, name):
    """Intervals (first, last event) in which the content of a buffer matters."""
    spans, start, last = [], None, None
    for i, (reads, whole, part) in enumerate(events):
        if name in whole or (name in part and start is None):
            if start is not None:
                spans.append((start, last))
            start = last = i
        elif name in reads or name in part:
            assert start is not None, f"{name} is read before it is written"
            last = i
    return spans if start is None else [*spans, (start, last)]


def record(model, recompute, head_chunks, groups=None, precision="fp32"):
    config = make_config(
        micro_batch=2, seq_len=17, recompute=recompute, head_chunks=head_chunks, precision=precision
    )
    plan = make_plan(config, model) if groups is None else make_plan(config, model, groups)
    recorder = Recorder(CpuOps(model, config.optimizer, seq_len=17, seed=1), plan.buffers)
    rank = make_rank(config, model, allocate(plan), recorder)  # type: ignore[arg-type]
    batch = random_batch(np.random.default_rng(1), 2, 17, model.V)
    if groups is None:
        run_micro_steps(rank, batch)
    else:
        load_micro_batch(rank, batch, 0)
        evaluation_step([rank])
    return plan, recorder.events


def check(plan, events):
    scratch = [b for b in plan.buffers if b.lifetime is not None]
    spans = {b.name: needed(events, b.name) for b in scratch}
    place = dict(zip((b.name for b in plan.buffers), plan.offsets, strict=True))
    for a, b in itertools.combinations(scratch, 2):
        together = any(x[0] <= y[1] and y[0] <= x[1] for x in spans[a.name] for y in spans[b.name])
        if together:
            assert Slot(a.nbytes, a.lifetime).meets(Slot(b.nbytes, b.lifetime)), (a.name, b.name)
            first, second = sorted((a, b), key=lambda c: place[c.name])
            assert place[first.name] + first.nbytes <= place[second.name], (a.name, b.name)
    return spans


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize(("head_chunks", "precision"), [(1, "fp32"), (3, "fp32"), (3, "e4m3")])
def test_lifetimes_hold_what_the_operations_need(model_name, head_chunks, precision):
    """Every subset of recompute; and every scratch buffer is used."""
    subsets = SUBSETS if head_chunks == 1 else SUBSETS[::7]
    for subset in subsets:
        plan, events = record(MODELS[model_name], subset, head_chunks, precision=precision)
        spans = check(plan, events)
        assert all(spans.values()), [name for name, s in spans.items() if not s]


# product: fields of the block that its kernel may write while it reads its input's codes
WRITTEN = {"qkv": ("qkv",), "out": ("attn_out",), "gate_up": ("gate_up", "act"), "down": ("down",)}


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
@pytest.mark.parametrize("quants", [True, False])
def test_codes_of_an_input_stay_until_its_product_is_written(subset, quants):
    """The cuda engine's own scratch, which the recorder does not see."""
    config = make_config(micro_batch=2, seq_len=64, precision="e4m3", recompute=subset)
    model = MODELS["bias"]
    plan = make_plan(config, model, extra=workspace_buffers(config, model, quants=quants))
    places = list(zip(plan.buffers, plan.offsets, strict=True))
    for product, fields in WRITTEN.items():
        names = {f"block/{f}{layer}" for f in fields for layer in ("", ".0")}
        read = [p for p in places if p[0].name in (f"fp8/x.{product}", "fp8/weight")]
        written = [p for p in places if p[0].name in names]
        assert read and len(written) == len(fields)
        for (a, first), (b, second) in itertools.product(read, written):
            assert first + a.nbytes <= second or second + b.nbytes <= first, (a.name, b.name)


@pytest.mark.parametrize("model_name", MODELS)
def test_lifetimes_hold_in_an_evaluation(model_name):
    plan, events = record(MODELS[model_name], CHOICES, 2, INFERENCE)
    assert not {b.group for b in plan.buffers} & {"gradients", "master", "m", "v"}
    check(plan, events)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("subset", SUBSETS[::5], ids="+".join)
def test_bytes_add_up_to_the_allocation(precision, subset):
    config = make_config(
        micro_batch=2, seq_len=17, precision=precision, recompute=subset, m="e4m3", v="bf16"
    )
    plan = make_plan(config, MODELS["qk_norm"])
    groups = plan.group_bytes()
    assert sum(groups.values()) == plan.total
    for group, total in groups.items():
        own = [b for b in plan.buffers if b.group == group]
        if group == "scratch":
            assert (
                max(aligned(b.nbytes) for b in own) <= total <= sum(aligned(b.nbytes) for b in own)
            )
        else:
            assert total == sum(aligned(b.nbytes) for b in own)
    base = sorted((o, b.nbytes) for b, o in zip(plan.buffers, plan.offsets, strict=True))
    assert base[-1][0] + base[-1][1] <= plan.total
    tensors = allocate(plan)
    assert {t.nbytes for t in tensors.values()} == {b.nbytes for b in plan.buffers}


# what each choice gives up, from DESIGN's list: field names of the block's activations
GIVEN_UP = {
    "norm": {"attn_in", "mlp_in"},
    "swiglu": {"act"},
    "ffn": {"gate_up", "act"},
    "qkv": {"qkv", "heads"},
    "attention": {"qkv", "heads", "lse", "attn"},
    "block": {"attn_rstd", "attn_in", "qkv", "qk_rstd", "heads", "lse", "attn", "residual_mid",
              "mlp_rstd", "mlp_in", "gate_up", "act"},
}  # fmt: skip


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
@pytest.mark.parametrize("model_name", ["plain", "qk_norm"])
def test_what_recompute_drops_has_one_buffer_for_all_layers(subset, model_name):
    model = MODELS[model_name]
    plan = make_plan(make_config(micro_batch=2, seq_len=17, recompute=subset), model)
    names = {b.name.removeprefix("block/") for b in plan.buffers if b.name.startswith("block/")}
    fields = {name.partition(".")[0] for name in names}
    assert ("heads" in fields) == ("qk_rstd" in fields) == model.qk_norm
    dropped = set().union(*(GIVEN_UP[s] for s in subset)) & fields | {"attn_out", "down"}
    kept = {f"{f}.{layer}" for f in fields - dropped for layer in range(model.L)}
    assert names == dropped | kept


def test_e4m3_moments_count_their_scales():
    """One byte a value and one float32 for each 128, the last group short."""
    model = MODELS["bias"]
    plan = make_plan(make_config(micro_batch=1, seq_len=16, m="e4m3"), model)
    of = {b.name: b for b in plan.buffers}
    moments = [b for b in plan.buffers if b.name.startswith("m/")]
    assert moments
    for b in moments:
        size = math.prod(b.shape)
        scale = of[b.name.replace("m/", "m_scale/", 1)]
        assert b.nbytes == size and b.group == scale.group == "m"
        assert scale.nbytes == 4 * math.ceil(size / 128) and scale.dtype is DType.FP32
    assert plan.group_bytes()["m"] == sum(
        aligned(b.nbytes) for n, b in of.items() if n.startswith(("m/", "m_scale/"))
    )


def test_recompute_and_chunks_save_what_they_say():
    """More levers never take more memory, and each takes less where its buffers count."""
    model = small_model(L=6, C=64, F=176, V=1000)

    def total(*recompute, chunks=1):
        config = make_config(
            micro_batch=8, seq_len=128, recompute=recompute, head_chunks=chunks, precision="bf16"
        )
        return make_plan(config, model).total

    none = total()
    assert all(total(choice) < none for choice in CHOICES)
    assert total(*CHOICES) <= total("block") < total("ffn", "attention", "norm") < total("ffn")
    assert total("ffn") < total("swiglu") and total("attention") < total("qkv")
    assert total(chunks=8) < total(chunks=2) < none
