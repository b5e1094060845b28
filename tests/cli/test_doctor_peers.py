"""`doctor` on a machine with several GPUs: which copy from each other."""

import pytest
from click.testing import CliRunner

from llmq_nb.cli import doctor_command
from llmq_nb.comm import topology
from llmq_nb.comm.topology import NO_ACCESS, PeerMatrix
from llmq_nb.core import device, driver
from llmq_nb.core.errors import MachineError


def doctor(monkeypatch, *names: str, missing=()) -> list[str]:
    monkeypatch.setattr(driver, "find_driver", lambda: driver.Driver(13000, names))
    monkeypatch.setattr(driver, "missing_packages", lambda found: list(missing))
    monkeypatch.setattr(device, "open_device", lambda ordinal: ordinal)
    done = CliRunner().invoke(doctor_command.command)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_the_matrix_and_what_is_wrong(monkeypatch) -> None:
    def check(devices, announce):
        announce("GPUs 1 <- 0: no peer access; copies go through host memory")
        return PeerMatrix(tuple(devices), {(1, 0): NO_ACCESS})

    monkeypatch.setattr(topology, "check_peers", check)
    assert doctor(monkeypatch, "A", "B")[-5:] == [
        "GPUs 1 <- 0: no peer access; copies go through host memory",
        "copies between GPUs (row takes from column)",
        "               0       1",
        "       0       -    peer",
        "       1  staged       -",
    ]


@pytest.mark.parametrize(("names", "missing"), [(("A",), ()), (("A", "B"), ("nvmath",))])
def test_nothing_is_tried_with_one_gpu_or_without_packages(names, missing, monkeypatch) -> None:
    monkeypatch.setattr(topology, "check_peers", lambda *a, **k: pytest.fail("tried"))
    assert not [x for x in doctor(monkeypatch, *names, missing=missing) if "copies" in x]


def test_a_gpu_that_cannot_be_opened_is_said(monkeypatch) -> None:
    def check(devices, announce):
        raise MachineError("out of memory")

    monkeypatch.setattr(topology, "check_peers", check)
    assert doctor(monkeypatch, "A", "B")[-1] == "copies between GPUs were not tried: out of memory"
