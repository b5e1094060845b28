"""`bench comm`: what it takes and prints; on a GPU, what it measures."""

import json

import pytest
from click.testing import CliRunner

from llmq_nb.cli import bench_command
from llmq_nb.core.errors import UserError
from llmq_nb.train import bench_comm
from llmq_nb.train.bench_comm import COLLECTIVES, Row, chosen_devices, measure_comm


@pytest.mark.parametrize("text", ["", "0", "0,", "a,b", "0,-1", "0;1"])
def test_a_list_of_devices_that_is_none(text: str) -> None:
    with pytest.raises(UserError) as error:
        chosen_devices(text)
    assert "--devices" in str(error.value) and "0,0" in str(error.value)


@pytest.mark.parametrize(("count", "found"), [(0, [0, 0]), (1, [0, 0]), (3, [0, 1, 2])])
def test_every_gpu_by_default(count: int, found: list[int], monkeypatch) -> None:
    monkeypatch.setattr(bench_comm, "device_count", lambda: count)
    assert chosen_devices(None) == found
    assert chosen_devices("2,0, 0") == [2, 0, 0]


def test_the_command_prints_and_writes_every_figure(tmp_path, monkeypatch) -> None:
    rows = [
        Row(name, transport, nbytes, 1e-3, index + 0.25)
        for index, (nbytes, transport, name) in enumerate(
            (n, t, c) for n in (1 << 16, 1 << 20) for t in ("peer", "staged") for c in COLLECTIVES
        )
    ]
    asked = []

    def measure(ordinals, *, announce):
        asked.append(ordinals)
        announce("GPUs 0 <- 1: no peer access")
        return rows

    monkeypatch.setattr(bench_comm, "measure_comm", measure)
    file = tmp_path / "out.json"
    argv = ["comm", "--devices", "0,1", "--json", str(file)]
    done = CliRunner().invoke(bench_command.command, argv)
    assert done.exit_code == 0, done.output
    assert asked == [[0, 1]]
    assert all(f"{row.gb_per_s:.2f}" in done.output for row in rows)
    assert "64.0 KiB" in done.output and "no peer access" in done.output
    assert "NCCL: not measured" in done.output
    assert [Row(**x) for x in json.loads(file.read_text())] == rows


@pytest.mark.gpu
def test_what_is_measured_is_plausible() -> None:
    """Two ranks of one GPU: no copy is faster than device memory, 10 TB/s, and none is idle."""
    found = measure_comm([0, 0], sizes=(1 << 20, 1 << 24), announce=pytest.fail)
    assert {(x.collective, x.transport) for x in found} == {
        (name, way) for name in COLLECTIVES for way in ("peer", "staged")
    }
    for row in found:
        assert 0.1 < row.gb_per_s < 10_000, row
    rate = {(x.collective, x.transport): x.gb_per_s for x in found if x.nbytes == 1 << 24}
    assert rate["copy", "staged"] < min(rate["copy", "peer"], 450), rate
