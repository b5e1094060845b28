"""Memory of the cuda engine: what it may take, asked before it is taken, and the addresses."""

from llmq_nb.config import Config
from llmq_nb.core.device import Device
from llmq_nb.core.errors import UserError
from llmq_nb.core.host import pinnable_bytes
from llmq_nb.core.sizes import format_bytes
from llmq_nb.core.tensor import Tensor
from llmq_nb.offload.pinned import HostMemory, check_pinnable
from llmq_nb.plan.buffers import Plan
from llmq_nb.plan.limits import LIMIT_RESERVE, RESERVE, device_limit, host_limit
from llmq_nb.report.console import announce


def check_offload(config: Config, device: Device) -> None:
    """Refuse to offload where the host's memory is the device's. UserError."""
    if config.memory.offload and device.integrated:
        what = f"offload = {list(config.memory.offload)}: {device.name} shares the host's memory"
        raise UserError(what, where="memory.offload", mend="leave it out, it would free nothing")


def check_memory(plan: Plan, device: Device, config: Config | None = None, ranks: int = 1) -> None:
    """Raise UserError where the plan is more than what is free or `memory.device_limit`.

    ranks: how many share the device."""
    room = device.free_bytes()
    total = ranks * plan.total
    needs, what = total + RESERVE, f"free {format_bytes(room)}"
    limit = device_limit(config) if config is not None else None
    if limit is not None and limit - LIMIT_RESERVE < room - RESERVE:
        # the context is in the limit, and no longer in what is free
        room, needs = limit, total + LIMIT_RESERVE
        what = f"memory.device_limit {format_bytes(limit)}"
    if needs <= room:
        return
    groups = sorted(plan.group_bytes().items(), key=lambda item: -item[1])
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in groups[:4] if size)
    raise UserError(
        f"out of memory on {device.name}: {format_bytes(needs - room)} short"
        f" (needs {format_bytes(needs)}, {what}; {largest})",
        where="the plan",
        mend="lower batch.micro_batch, set memory.recompute = ['block'], more head_chunks or"
        " memory.offload",
    )


def check_host(plan: Plan, config: Config) -> None:
    """Raise UserError where all ranks together would pin more than is free or allowed."""
    check_pinnable(config.ranks_each * plan.host_total, host_limit(config), pinnable_bytes())


def host_memory(plan: Plan, config: Config) -> HostMemory:
    """Pin what the plan puts on the host, with lines of progress. UserError."""
    return HostMemory(
        plan.host_chunks(),
        limit=host_limit(config),
        write_combined=config.memory.write_combined,
        announce=announce,
    )


def tensors_at(plan: Plan, base: int, host: HostMemory | None) -> dict[str, Tensor]:
    """The plan's buffers at their addresses, those on the disk without data yet. host: None where
    nothing reads or writes them."""
    out = {}
    for b, offset in zip(plan.buffers, plan.offsets, strict=True):
        if b.place == "disk":
            out[b.name] = Tensor(b.name, b.shape, b.dtype, None)
            continue
        on_host = b.place == "host"
        address = host.address(offset) if host is not None and on_host else base + offset
        out[b.name] = Tensor(b.name, b.shape, b.dtype, address, host=on_host)
    return out
