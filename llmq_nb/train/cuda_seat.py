"""One rank's device, memory, stream and operations, and the links between the ranks."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from llmq_nb.comm.cluster import Cluster
from llmq_nb.comm.copy_engine import CudaLink, make_links
from llmq_nb.comm.link import Link
from llmq_nb.comm.topology import check_peers
from llmq_nb.comm.wire import NoWire, Wire
from llmq_nb.config import Config
from llmq_nb.core.device import (
    Device,
    allocate,
    check,
    create_event,
    create_stream,
    driver,
    free,
    synchronize_stream,
)
from llmq_nb.core.errors import UserError
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cuda.ops import CudaOps
from llmq_nb.offload.cuda_transfer import CudaTransfer
from llmq_nb.offload.pinned import HostMemory
from llmq_nb.plan.buffers import Plan
from llmq_nb.plan.shards import LINKS, STAGING_BYTES
from llmq_nb.report.console import announce
from llmq_nb.train.cuda_memory import host_memory, tensors_at
from llmq_nb.train.host_stores import MakeTransfer
from llmq_nb.train.input_ring import InputRing
from llmq_nb.train.sharding import Seats, all_tensors


@dataclasses.dataclass(slots=True)
class CudaSeat:
    """base: address of the plan's device memory. ready: an event of its device."""

    device: Device
    base: int
    host: HostMemory
    tensors: dict[str, Tensor]
    stream: int
    ops: CudaOps
    ring: InputRing
    ready: Any
    links: tuple[CudaLink, ...] = ()

    def read(self, tensor: Tensor) -> NDArray[Any]:
        """Of its memory."""
        self.device.make_current()
        return self.ops.read(tensor)

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        self.device.make_current()
        self.ops.write(tensor, array)

    def synchronize(self) -> None:
        """Wait for all that its stream was given."""
        self.device.make_current()
        synchronize_stream(self.stream)

    def clear(self, nbytes: int) -> None:
        """Zero the plan's device memory."""
        self.synchronize()
        check(driver().cuMemsetD8(self.base, 0, nbytes), "clearing device memory")
        check(driver().cuCtxSynchronize(), "clearing device memory")

    def close(self) -> None:
        """Give the device's and the pinned memory back; nothing is in flight."""
        self.device.make_current()
        self.ring.close()
        for link in self.links:
            link.close()
        free(self.base)
        self.host.close()


def take_seat(
    config: Config, model: ModelConfig, plan: Plan, device: Device, tuning: dict[str, int]
) -> CudaSeat:
    """Allocate a rank's plan on its device. UserError, DeviceError."""
    device.make_current()
    host = host_memory(plan, config)
    base = allocate(plan.total)
    tensors = tensors_at(plan, base, host)
    stream = int(create_stream())
    ops = CudaOps(config, model, tensors, device=device, stream=stream, tuning=tuning)
    ring = InputRing(tensors, stream)
    return CudaSeat(device, base, host, tensors, stream, ops, ring, create_event())


def ranks_of(
    config: Config, plan: Plan, seats: Sequence[CudaSeat], local: range, wire: Wire
) -> tuple[Seats, list[MakeTransfer]]:
    """The seats of this machine's ranks as `make_ranks` takes them: what each rank has, and its
    copies to the host."""
    transfers: list[MakeTransfer] = [functools.partial(CudaTransfer, s.stream) for s in seats]
    links: list[tuple[Link, ...]] = [() for _ in seats]
    if config.world_size > 1:
        devices, streams = [s.device for s in seats], [s.stream for s in seats]
        if config.parallel.peer_copies == "off":
            peers = lambda i, j: False  # noqa: E731
        else:
            peers = check_peers(devices, announce)
        sets = [
            make_links(devices, streams, staging_bytes=STAGING_BYTES, direct=peers)
            for _ in range(LINKS)
        ]
        for r, seat in enumerate(seats):
            seat.links = tuple(links[r] for links in sets)
            links[r] = seat.links
    activate = [s.device.make_current for s in seats]
    tensors = all_tensors(plan, [s.tensors for s in seats], local, config.world_size)
    return Seats(tensors, [s.ops for s in seats], links, activate, local, wire), transfers


def make_wire(cluster: Cluster, devices: Sequence[Device]) -> Wire:
    """From this machine's GPUs to those of the others."""
    if not cluster.several:
        return NoWire()
    from llmq_nb.comm.nccl import open_wire

    return open_wire(cluster, devices)


def check_alike(devices: Sequence[Device], cluster: Cluster) -> None:
    """Raise UserError where GPUs of this machine, or of another one, would give other bits."""
    first = devices[0]
    for device in devices:
        if device.cc != first.cc:
            what = f"GPU {device.ordinal} is a {device.name}, GPU {first.ordinal} a {first.name}"
            mend = "choose GPUs of one compute capability"
            raise UserError(what, where="parallel.devices", mend=mend)
    found = first.name, ".".join(map(str, first.cc))
    cluster.same("GPU", found, "choose machines with GPUs of one model")
