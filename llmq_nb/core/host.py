"""What the machine has: memory for the cpu engine's one allocation."""

from llmq_nb.core.errors import UserError
from llmq_nb.core.sizes import format_bytes


def available_bytes() -> int | None:
    """Host memory that may still be taken, free swap included; None where the system is silent."""
    found = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                key, _, rest = line.partition(":")
                if key in ("MemAvailable", "SwapFree"):
                    found[key] = int(rest.split()[0]) << 10
    except OSError:
        return None
    return sum(found.values()) if "MemAvailable" in found else None


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
