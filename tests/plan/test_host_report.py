"""`plan` of a run with buffers on the host: where each byte lies, and the host in the verdict.

Expected bytes are counted from the parameters' shapes, limits from the numbers given.
"""

import dataclasses
import io
import math
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from llmq_nb.config import MemoryConfig
from llmq_nb.core import files
from llmq_nb.core.arena import aligned
from llmq_nb.core.sizes import format_bytes
from llmq_nb.model.families import preset
from llmq_nb.model.parameters import model_parameters
from llmq_nb.plan.limits import host_room
from llmq_nb.plan.rates import H200
from llmq_nb.plan.render import print_report, to_json
from llmq_nb.plan.report import Machine, Report, make_report, pageable_bytes, pinned_bytes
from llmq_nb.plan.search import Search
from llmq_nb.plan.sizes import run_plan
from tests.plan.test_cost import run_config

GIB = 1 << 30
LEVERS = ("m", "v", "master", "quants", "gradients", "residual")
MODEL = preset("qwen2.5-0.5b")


def run(offload: Any = LEVERS, **memory: Any):
    config = run_config("qwen2.5-0.5b", 8, 4, "e4m3")
    return dataclasses.replace(config, memory=MemoryConfig(offload=offload, **memory))


def report(config, device=80 * GIB, host: int | None = None) -> Report:
    machine = Machine("cuda", device, host, "on the card", H200)
    return make_report(config, MODEL, machine, Search(config, MODEL, H200))


def said(found: Report) -> str:
    text = io.StringIO()
    print_report(found, Console(width=200, file=text))
    return text.getvalue()


def test_every_buffer_stands_in_its_place():
    found = report(run())
    lines = {(line.place, line.category): line for line in found.lines}
    blocks = [p for p in model_parameters(MODEL) if p.layer is not None]
    matrices = [p for p in blocks if p.kind == "matrix"]

    def size(parameters, itemsize):
        return sum(aligned(itemsize * math.prod(p.shape)) for p in parameters)

    expected = {
        "weights": size(matrices, 2),
        "quants": size(matrices, 1),
        "m": size(model_parameters(MODEL), 2),
        "v": size(model_parameters(MODEL), 2),
        "gradients": size(blocks, 2),
        "activations": (MODEL.L - 2) * 8 * 1024 * MODEL.C * 2,  # two stay where they are
    }
    assert {
        line.category: line.nbytes
        for line in found.lines
        if line.place == "pinned host" and line.ours
    } == expected
    assert sum(expected.values()) == found.plan.host_total
    on_gpu = sum(line.nbytes for line in found.lines if line.place == "GPU" and line.ours)
    assert on_gpu == found.plan.total == run_plan(run(), MODEL, "cuda").total
    assert ("GPU", "m") not in lines and ("GPU", "quants") not in lines
    staging = sum(b.nbytes for b in found.plan.buffers if b.name.startswith("stage/"))
    assert staging > 0 and "to and from the host" in lines["GPU", "scratch"].note
    assert lines["pinned host", "input slots"].nbytes == pinned_bytes(found.plan)
    assert lines["disk", "a checkpoint"].nbytes == 3 * 2 * sum(
        math.prod(p.shape) for p in model_parameters(MODEL)
    )


def test_the_host_is_part_of_the_verdict():
    config = run()
    total = run_plan(config, MODEL, "cuda").host_total
    rest = pageable_bytes(config, MODEL)
    unknown = report(config)
    assert unknown.fits and unknown.host_free is None and "--host-memory says" in said(unknown)
    enough = report(config, host=total + rest)
    assert enough.fits and enough.host_free == 0
    short = report(config, host=total + rest - GIB)
    assert not short.fits and short.host_free == -GIB and short.free > 0
    assert "short by 1.00 GiB of pinned host memory: needs" in said(short)
    assert short.better is not None and short.better.host_total == 0  # 80 GiB on the device
    both = report(config, device=GIB, host=total + rest - GIB)
    assert both.free < 0 and "\nshort by" in said(both) and "of pinned host memory" in said(both)
    json = to_json(short)
    assert json["fits"] is False and json["host_free"] == -GIB and json["pinned"] == total


def test_what_is_short_of_pageable_memory_alone_is_a_note():
    found = report(run(offload=()), host=GIB // 2)
    assert found.fits and any("host memory is short" in w for w in found.warnings)


@pytest.mark.parametrize("limit", [None, "1GiB", "100GiB"])
@pytest.mark.parametrize("available", [None, 2 * GIB, 200 * GIB])
def test_room_on_the_host_is_the_least_of_what_is_known(limit, available):
    known = [n for n in ({"1GiB": GIB, "100GiB": 100 * GIB}.get(limit or ""), available) if n]
    assert host_room(run(host_limit=limit), available) == (min(known) if known else None)


def test_memory_host_limit_refuses():
    total = run_plan(run(), MODEL, "cuda").host_total
    found = report(run(host_limit="1GiB"), host=100 * GIB)
    assert not found.fits and found.host_free == GIB - total
    assert "by memory.host_limit" in said(found)


def test_what_is_on_the_disk_has_its_lines_and_its_time(monkeypatch):
    """BF16 m and v of all but norms and biases; 2 GB/s both ways."""
    usage = {"free": 3 * GIB}
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(**usage))
    rest: Any = ("master", "quants", "gradients", "residual")
    found, none = report(run(rest, disk=("m", "v"))), report(run(rest))
    lines = {(line.place, line.category): line.nbytes for line in found.lines}
    large = [p for p in model_parameters(MODEL) if math.prod(p.shape) >= 1 << 16]
    size = sum(aligned(2 * math.prod(p.shape)) for p in large)
    assert lines["disk", "m"] == lines["disk", "v"] == size
    assert 2 * size <= found.plan.disk_total <= 2 * size + 2 * 4096 * len(large)
    assert to_json(found)["disk"] == found.plan.disk_total
    # a slice of 16 Mi elements of both, three times, at an aligned address
    assert lines["pinned host", "staging"] == 3 * aligned(4 * (16 << 20) + 4096)
    assert found.plan.total == none.plan.total - 2 * size
    assert found.speed is not None and none.speed is not None
    slower = found.speed.step_seconds - none.speed.step_seconds
    assert slower == pytest.approx(2 * found.plan.disk_total / 2e9, rel=0.1)
    text = said(found)
    assert "gone with the run" in text and "of the 3.00 GiB that are free here" in text
    usage["free"] = GIB
    assert "too little disk here" in said(report(run(rest, disk=("m", "v"))))


def test_the_disk_is_named_where_nothing_fits_and_its_states_are_offloaded_no_more():
    text = said(report(run(()), device=2 * GIB, host=GIB))
    moved = sum(aligned(2 * math.prod(p.shape)) for p in model_parameters(MODEL))
    assert "no setting" in text and "to the disk: --set 'memory.disk" in text
    assert f"moves {format_bytes(2 * moved)} of it" in text
    config = run((), disk=("m", "v"))
    found = Search(config, MODEL, H200).choose(4 * GIB, 8 * GIB)
    assert (
        found is not None and found.setting.offload and not set("mv") & set(found.setting.offload)
    )
    planned = run_plan(found.setting.applied(config), MODEL, "cuda")
    assert (planned.total, planned.host_total) == (found.total, found.host_total)
