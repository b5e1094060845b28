"""`bench offload`: what it stores is what `plan` and `auto` use; on a GPU, what it measures."""

import dataclasses
import json
import math

import pytest
from click.testing import CliRunner

from llmq_nb.cli import bench_command, plan_command
from llmq_nb.plan.link import Link, symmetric
from llmq_nb.plan.measured import SAID, keep_link, link_file, with_measured_link
from llmq_nb.plan.rates import H200, rates_of
from llmq_nb.train import bench_link
from tests.plan.test_report import write

LINK = Link(20.0, 19.0, 12.0, 11.0, 18.0, 17.0, 10.0, measured=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMQ_NB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_found_for_the_same_gpu_alone(cache):
    name = "NVIDIA GeForce RTX 4090"
    assert with_measured_link(H200, name) is H200
    file = keep_link(name, LINK)
    assert file == link_file(name) and file.parent == cache
    found = with_measured_link(rates_of(name), name)
    assert found == dataclasses.replace(rates_of(name), host_link=LINK)
    assert with_measured_link(H200, "NVIDIA H200") is H200
    keep_link(name, dataclasses.replace(LINK, read=1.0))
    assert with_measured_link(H200, name).host_link.read == 1.0


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"to_device": 3}', "null"]
    + [json.dumps({**dataclasses.asdict(LINK), "read": bad}) for bad in (0, -1, "x", None)],
)
def test_a_torn_file_counts_as_none(cache, text):
    link_file("GPU").write_text(text)
    assert with_measured_link(H200, "GPU") is H200


def test_the_command_prints_and_keeps_the_rates(cache, tmp_path, monkeypatch):
    gpu = dataclasses.make_dataclass("Gpu", ["name"])("NVIDIA H200")
    combined = dataclasses.replace(LINK, to_host=23.5)

    def measure(write_combined: bool = False):
        return gpu, combined if write_combined else LINK

    monkeypatch.setattr(bench_link, "measure_link", measure)
    file = tmp_path / "out.json"
    done = CliRunner().invoke(bench_command.command, ["offload", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "20.0" in done.output and "to the device" in done.output and str(cache) in done.output
    assert "23.5" in done.output and "memory.write_combined" in done.output
    found = json.loads(file.read_text())
    assert found["to_host"] == 19.0 and found["write_combined"]["to_host"] == 23.5
    assert with_measured_link(H200, "NVIDIA H200").host_link == LINK


def test_plan_uses_and_names_them_for_this_machines_gpu(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_command, "_local_card", lambda: ("NVIDIA H200", "here", True))
    argv = [write(tmp_path), "--set", "memory.offload=['m']", "--host-memory", "1TiB"]

    def out(*more: str) -> str:
        done = CliRunner().invoke(plan_command.command, [*argv, *more])
        assert done.exit_code == 0, done.output
        return done.output

    def seconds(*more: str) -> float:
        return json.loads(out("--json", *more))["speed"]["parts"]["host link"]

    assert SAID not in out()
    before = seconds()
    keep_link("NVIDIA H200", dataclasses.replace(symmetric(25.0), measured=True))
    assert SAID in out() and seconds() > 1.9 * before  # half as fast
    # another machine's card is planned from the table
    assert SAID not in out("--card", "H200") and seconds("--card", "H200") == before


@pytest.mark.gpu
@pytest.mark.parametrize("write_combined", [False, True])
def test_what_is_measured_is_plausible_and_moves_the_bytes(write_combined):
    """A link has one rate: alone at least what is left beside the other direction, and no copy is
    faster than 64 GB/s of PCIe 5 x16, but for NVLink-C2C's 450."""
    device, link = bench_link.measure_link(nbytes=64 << 20, write_combined=write_combined)
    assert device.name and link.measured
    figures = {k: v for k, v in dataclasses.asdict(link).items() if k != "measured"}
    assert all(math.isfinite(v) and 1 < v < 450 for v in figures.values()), figures
    assert link.both_to_device < 1.1 * link.to_device and link.both_to_host < 1.1 * link.to_host
    assert link.update < 1.1 * min(link.read, link.write), figures
