"""Offload in the plan: what moves to the host leaves the device, to the byte; staging is scratch.

The expected bytes come from the parameters' shapes and the list in DESIGN, not from the plan.
"""

import dataclasses
import itertools
import math
from typing import Any

import pytest

from llmq_nb.core.arena import aligned
from llmq_nb.core.dtype import DType
from llmq_nb.model.parameters import model_parameters
from llmq_nb.plan.buffers import make_plan
from llmq_nb.plan.workspace import fp8_buffers
from tests.model.harness import make_config, small_model

LEVERS = ("m", "v", "master", "quants", "gradients", "residual")
MODEL = small_model(family="qwen2", L=5, C=64, F=176, V=301, qkv_bias=True)
MATRICES = ("qkv", "out", "gate_up", "down")
B, T = 2, 17


def plan_of(
    offload=(), precision="bf16", transfer: Any = "zero_copy", quants: Any = True, **options: Any
):
    config = make_config(
        micro_batch=B, seq_len=T, precision=precision, recompute=("block",), **options
    )
    memory = dataclasses.replace(
        config.memory, offload=tuple(offload), transfer=transfer, keep_quants=quants
    )
    config = dataclasses.replace(config, memory=memory)
    return make_plan(config, MODEL, extra=fp8_buffers(config, MODEL, quants=quants))


def padded(shapes, itemsize):
    return sum(aligned(math.prod(shape) * itemsize) for shape in shapes)


SHAPES = [p.shape for p in model_parameters(MODEL)]
BLOCKS = [p.shape for p in model_parameters(MODEL) if p.layer is not None]
WEIGHTS = [p.shape for p in model_parameters(MODEL) if p.field in MATRICES]
SCALES = [(-(-math.prod(s) // 128),) for s in SHAPES]
BF16: dict[str, Any] = dict(master="bf16", m="e4m3", v="bf16")
# lever: (group, bytes on the host, bytes of the group that stay on the device)
MOVED: dict[str, tuple[Any, int, int]] = {
    "m": ("m", padded(SHAPES, 1) + padded(SCALES, 4), 0),
    "v": ("v", padded(SHAPES, 2), 0),
    "master": ("weights", padded(WEIGHTS, 2), padded(SHAPES, 2) - padded(WEIGHTS, 2)),
    "quants": ("quants", padded(WEIGHTS, 1), 0),
    "gradients": ("gradients", padded(BLOCKS, 2), padded(SHAPES, 2) - padded(BLOCKS, 2)),
    # the last two layers' stay in the staging buffers
    "residual": ("activations", (MODEL.L - 2) * aligned(B * T * MODEL.C * 2), 0),
}


@pytest.mark.parametrize("lever", LEVERS)
def test_what_a_lever_moves(lever):
    """The group's bytes; other groups stay as they were."""
    none, plan = plan_of(precision="e4m3", **BF16), plan_of([lever], "e4m3", **BF16)
    group, host, device = MOVED[lever]
    assert none.host_total == 0 and none.group_bytes("host") == {}
    assert plan.host_total == host and plan.group_bytes("host") == {group: host}
    before, after = none.group_bytes(), plan.group_bytes()
    assert after.get(group, 0) == device
    others = (before.keys() | after.keys()) - {group, "scratch"}
    assert all(after.get(g) == before.get(g) for g in others)
    assert sum(after.values()) == plan.total


def test_fp32_masters_move_and_the_weights_stay():
    plan = plan_of(["master"], master="fp32")
    assert plan.group_bytes("host") == {"master": padded(SHAPES, 4)}
    assert plan.group_bytes()["weights"] == padded(SHAPES, 2)
    assert "master" not in plan.group_bytes()


@pytest.mark.parametrize("quants", [True, False])
def test_every_subset_adds_up(quants):
    """On the host a lever's bytes do not depend on the others."""
    host = {lever: MOVED[lever][1] for lever in LEVERS}
    if not quants:
        host["quants"] = 0
    for n in range(7):
        for subset in itertools.combinations(LEVERS, n):
            plan = plan_of(subset, "e4m3", quants=quants, **BF16)
            assert plan.host_total == sum(host[lever] for lever in subset), subset
            assert sum(plan.group_bytes().values()) == plan.total


def test_staging_is_two_blocks():
    """Weights, codes, gradients and residuals: two buffers of one layer's bytes each."""
    layer = {p.field: p.shape for p in model_parameters(MODEL) if p.layer == 0}
    matrices = [layer[f] for f in MATRICES]

    def staged(name, **options):
        plan = plan_of(**options)
        return [b.nbytes for b in plan.buffers if b.name.startswith(f"stage/{name}.")]

    assert staged("weights", offload=["master"], **BF16) == [padded(matrices, 2)] * 2
    assert staged("weights", offload=["master"], precision="e4m3", **BF16) == []  # codes are enough
    options = dict(offload=["master"], precision="e4m3", quants=False, **BF16)
    assert staged("weights", **options) == [padded(matrices, 2)] * 2
    assert staged("quants", offload=["quants"], precision="e4m3") == [padded(matrices, 1)] * 2
    want = [padded(layer.values(), 4)] * 2
    assert staged("gradients", offload=["gradients"], accumulation="fp32") == want
    assert staged("residual", offload=["residual"]) == [B * T * MODEL.C * 2] * 2
    assert staged("m", offload=["m"], **BF16) == []  # zero-copy
    assert staged("m", offload=["m"], transfer="copy", **BF16) == [max(map(math.prod, SHAPES))] * 2


def test_a_block_lies_together_on_the_host():
    """So that one copy moves it: the tensors of a layer and group follow one another."""
    plan = plan_of(LEVERS, "e4m3", quants=False, **BF16)
    place = {b.name: o for b, o in zip(plan.buffers, plan.offsets, strict=True)}
    for group, fields in (("weights", MATRICES), ("gradients", None)):
        for layer in range(MODEL.L):
            end = None
            for p in model_parameters(MODEL):
                if p.layer != layer or (fields and p.field not in fields):
                    continue
                start = place[f"{group}/{p.name}"]
                assert end is None or start == end, p.name
                end = start + aligned(math.prod(p.shape) * 2)


@pytest.mark.parametrize("limit", [1, 5000, 60000, 1 << 30])
def test_chunks_hold_whole_buffers_and_all_of_them(limit):
    plan = plan_of(LEVERS, "e4m3", **BF16)
    chunks = plan.host_chunks(limit)
    assert chunks[0][0] == 0 and chunks[-1][1] == plan.host_total
    assert all(a[1] == b[0] for a, b in itertools.pairwise(chunks))
    for b, offset in zip(plan.buffers, plan.offsets, strict=True):
        if b.place == "host":
            inside = [c for c in chunks if c[0] <= offset and offset + b.nbytes <= c[1]]
            assert len(inside) == 1, b.name
    for start, end in chunks:
        own = [o for b, o in zip(plan.buffers, plan.offsets, strict=True)
               if b.place == "host" and start <= o < end]  # fmt: skip
        assert end - start <= limit or len(own) == 1
    assert plan_of().host_chunks() == []


def test_offload_saves_device_memory_where_it_says():
    """With many layers each lever saves more than its staging takes."""
    model = dataclasses.replace(MODEL, L=24)

    def total(*offload):
        config = make_config(
            micro_batch=B, seq_len=128, precision="e4m3", recompute=("block",), **BF16
        )
        memory = dataclasses.replace(config.memory, offload=offload)
        config = dataclasses.replace(config, memory=memory)
        return make_plan(config, model, extra=fp8_buffers(config, model, quants=True)).total

    none = total()
    assert all(total(lever) < none for lever in LEVERS)
    assert all(total(*LEVERS) < total(*s) for s in itertools.combinations(LEVERS, 5))


def test_dtypes_of_staging_follow_what_is_staged():
    plan = plan_of(LEVERS, "e4m3", transfer="copy", **BF16)
    of = {b.name: b.dtype for b in plan.buffers}
    assert of["stage/m.0"] is DType.E4M3 and of["stage/m_scale.1"] is DType.FP32
    assert of["stage/master.0"] is DType.BF16 and of["stage/quants.0"] is DType.E4M3
