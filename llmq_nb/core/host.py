"""What the machine has: memory for the cpu engine's one allocation, and to pin for the GPU."""

from pathlib import Path

from llmq_nb.core.errors import UserError
from llmq_nb.core.sizes import format_bytes


def available_bytes() -> int | None:
    """Host memory that may still be taken, free swap included; None where the system is silent."""
    found = _meminfo()
    return found["MemAvailable"] + found.get("SwapFree", 0) if "MemAvailable" in found else None


def check_host_memory(needed: int) -> None:
    """Raise UserError where `needed` bytes are more than there are: the system would kill us."""
    available = available_bytes()
    if available is not None and needed > available:
        raise UserError(
            f"out of memory: needs {format_bytes(needed)}, available {format_bytes(available)}",
            where="the plan",
            mend="lower batch.micro_batch or batch.grad_accumulation, set memory.recompute ="
            " ['block'] or more head_chunks",
        )


CGROUPS = Path("/sys/fs/cgroup")


def pinnable_bytes(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Host memory that may be page-locked: available without swap, and what the cgroups leave."""
    found = [_meminfo().get("MemAvailable"), *_cgroup_room(root, own)]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def _meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        pairs = (line.split(":") for line in lines)
        return {key: int(rest.split()[0]) << 10 for key, rest in pairs}
    except (OSError, ValueError):
        return {}


def _cgroup_room(root: Path, own: Path) -> list[int]:
    """What the limits of this process's cgroup and those above it leave; page cache is free."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, use = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, use = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *(p for p in folder.parents if p == base or base in p.parents)):
            try:
                used = int((place / use).read_text()) - _reclaimable(place)
                rooms.append(max(0, int((place / limit).read_text()) - used))
            except (OSError, ValueError):  # no such file, or "max": no limit
                continue
    return rooms


def _reclaimable(place: Path) -> int:
    stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
