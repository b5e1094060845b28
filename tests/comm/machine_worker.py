"""One of two processes that are machines to each other: the run of test_sharding_cuda on its GPU.

    mpirun -n 2 python -m tests.comm.machine_worker JOB.json RESULT.json

JOB: {storage, gradients, wire, tuning}. wire: "nccl", each process with a GPU of its own; "staged",
through host memory and MPI, where they share one, which NCCL refuses (nothing is recorded then: a
graph cannot hold MPI). RESULT: a digest of what each process found.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmq_nb.comm.cluster import Cluster, open_cluster
from llmq_nb.comm.wire import Parcel, Wire
from llmq_nb.core.device import check, driver, synchronize_stream
from llmq_nb.kernels.launch import is_preparing
from llmq_nb.train.engine_cuda import CudaEngine
from tests.comm.test_machines import spread
from tests.comm.test_sharding_cuda import MODEL, cuda_config, with_weights, work


class StagedWire:
    """Device memory through host memory and a wire between those."""

    def __init__(self, inner: Wire) -> None:
        self.inner = inner

    def exchange(self, parcels: Sequence[Parcel], queues: Sequence[Any]) -> None:
        if is_preparing():
            return
        for queue in queues:
            synchronize_stream(queue)
        rooms = [np.empty(p.nbytes, np.uint8) for p in parcels]
        for p, room in zip(parcels, rooms, strict=True):
            if p.sends:
                check(driver().cuMemcpyDtoH(room.ctypes.data, p.address, p.nbytes), "sending")
        moved = [
            dataclasses.replace(p, address=room.ctypes.data)
            for p, room in zip(parcels, rooms, strict=True)
        ]
        self.inner.exchange(moved, [None] * len(queues))
        for p, room in zip(parcels, rooms, strict=True):
            if not p.sends:
                check(driver().cuMemcpyHtoD(p.address, room.ctypes.data, p.nbytes), "receiving")

    def close(self) -> None:
        pass


def digest(found: Any) -> str:
    """Of (results, the state as bits)."""
    results, state = found
    text = repr(results).encode() + b"".join(hashlib.sha256(part).digest() for part in state)
    return hashlib.sha256(text).hexdigest()


def main(cluster: Cluster, job: dict[str, Any], result: Path) -> None:
    staged = job["wire"] == "staged"
    config = cuda_config(job["storage"], 2, gradients=job["gradients"], graphs=not staged)
    config = spread(config, 2)
    wire = StagedWire(cluster.wire(1)) if staged else None
    engine = CudaEngine(config, MODEL, tuning=job["tuning"], cluster=cluster, wire=wire)
    with_weights(engine, MODEL)
    found = cluster.gather(digest(work(engine, config, MODEL)))
    engine.close()
    if cluster.leads:
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    processes = open_cluster()
    with processes.guard():
        main(processes, json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
