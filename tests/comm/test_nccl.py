"""The NCCL wire: its calls (a stand-in), a communicator of one GPU, two processes as two machines.

Two processes on one GPU go through MPI instead, since NCCL wants a GPU for each rank: that leaves
the engine to be tested there and the wire on two. The yardstick is one process with two ranks.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq_nb.comm.nccl import BYTE, NcclWire
from llmq_nb.comm.wire import Parcel
from llmq_nb.core.device import DeviceError
from llmq_nb.kernels.launch import preparing

ROOT = Path(__file__).parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")


class FakeNccl:
    """Notes the calls; `fails`: the one that raises."""

    class NCCLError(Exception):
        pass

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any) -> None:
            self.calls.append((name, *values))
            if name == self.fails:
                raise self.NCCLError("unhandled system error")

        return call


PARCELS = [
    Parcel(source=0, target=2, address=100, nbytes=7, sends=False),
    Parcel(source=2, target=0, address=200, nbytes=8, sends=True),
    Parcel(source=3, target=1, address=300, nbytes=9, sends=True),
]


def test_all_parcels_of_a_phase_are_one_group_on_the_queues_of_their_ranks():
    nccl = FakeNccl()
    wire = NcclWire(nccl, ["end 2", "end 3"], first=2)
    wire.exchange(PARCELS, [22, 33])
    assert nccl.calls == [
        ("group_start",),
        ("recv", 100, 7, BYTE, 0, "end 2", 22),
        ("send", 200, 8, BYTE, 0, "end 2", 22),
        ("send", 300, 9, BYTE, 1, "end 3", 33),
        ("group_end",),
    ]
    wire.close()
    assert nccl.calls[5:] == [("comm_destroy", "end 2"), ("comm_destroy", "end 3")]


def test_nothing_is_sent_while_steps_are_prepared():
    nccl = FakeNccl()
    with preparing():
        NcclWire(nccl, ["end"], first=2).exchange(PARCELS[:2], [22])
    assert nccl.calls == []


@pytest.mark.parametrize("call", ["send", "group_end"])
def test_an_error_of_nccl_is_a_device_error_and_closes_the_group(call: str):
    nccl = FakeNccl(call)
    with pytest.raises(DeviceError, match="between machines: unhandled system error"):
        NcclWire(nccl, ["end", "end"], first=2).exchange(PARCELS, [22, 33])
    assert nccl.calls[-1] == ("group_end",)


# ---- on GPUs -----------------------------------------------------------------------------------
@pytest.mark.gpu
def test_a_communicator_of_one_gpu_carries_parcels_eagerly_and_in_a_graph():
    """A rank that sends to itself: the bindings, the library, the queue, the capture."""
    from llmq_nb.comm.nccl import bindings, join
    from llmq_nb.core.device import (
        allocate,
        check,
        create_stream,
        driver,
        free,
        open_device,
        synchronize_stream,
    )
    from llmq_nb.core.graph import capture

    device, nccl, n = open_device(0), bindings(), 1 << 20
    token = bytes(nccl.get_unique_id())
    wire = NcclWire(nccl, join(nccl, token, 1, range(1), [device]), first=0)
    device.make_current()
    queue, room = int(create_stream()), allocate(4 * n)
    parcels = []
    for part in range(2):  # two in flight between the same ends keep their order
        parcels.append(Parcel(0, 0, room + part * n, n, sends=True))
        parcels.append(Parcel(0, 0, room + (2 + part) * n, n, sends=False))

    def carried(send: Any) -> None:
        data = np.random.default_rng(send is None).integers(0, 256, 4 * n, np.uint8)
        check(driver().cuMemcpyHtoD(room, data.ctypes.data, data.nbytes), "writing")
        send() if send is not None else wire.exchange(parcels, [queue])
        synchronize_stream(queue)
        found = np.empty_like(data)
        check(driver().cuMemcpyDtoH(found.ctypes.data, room, found.nbytes), "reading")
        np.testing.assert_array_equal(found[2 * n :], data[: 2 * n])

    carried(None)
    graph = capture(queue, lambda: wire.exchange(parcels, [queue]), name="parcels")
    for _ in range(3):
        carried(lambda: graph.launch(queue))
    graph.close()
    wire.close()
    free(room)


def two_processes(tmp_path: Path, wire: str, storage: str, gradients: bool, apart: bool) -> None:
    """Against one process with two ranks, to the bit. apart: each process has a GPU of its own."""
    from tests.comm.machine_worker import digest
    from tests.comm.test_sharding_cuda import plain

    want, tuning = plain(storage, 2, gradients)
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    job.write_text(json.dumps(dict(storage=storage, gradients=gradients, wire=wire, tuning=tuning)))
    worker = [sys.executable, "-m", "tests.comm.machine_worker", str(job), str(result)]
    line = ["mpirun" if not MPIRUN.exists() else str(MPIRUN)]
    for process in range(2):
        device = f"CUDA_VISIBLE_DEVICES={process if apart else 0}"
        line += [":"] * process + ["-n", "1", "env", device, *worker]
    done = subprocess.run(
        line, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(result.read_text()) == [digest(want)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["bf16, fp32 master", "e4m3, kept quants"])
@pytest.mark.parametrize("gradients", [False, True])
def test_two_processes_that_share_a_gpu(tmp_path: Path, storage: str, gradients: bool):
    two_processes(tmp_path, "staged", storage, gradients, apart=False)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("storage", ["bf16, fp32 master", "e4m3, kept quants"])
@pytest.mark.parametrize("gradients", [False, True])
def test_two_processes_with_a_gpu_each(tmp_path: Path, storage: str, gradients: bool):
    two_processes(tmp_path, "nccl", storage, gradients, apart=True)
