"""How much memory our allocations may take, and what a plan cannot know.

    device   min(device memory, memory.device_limit) - CONTEXT - RESERVE
    host     min(what the machine can pin, memory.host_limit)

The engine refuses by the same constants that `llmq-nb plan` counts with.

Source   CONTEXT + RESERVE: on an H200 a process of 1.5B FP8 training took 535 MiB beside our
         allocation, 541 MiB with all of it offloaded (nvidia-smi).
         Contexts: 291 MiB on an RTX 3090 (llama.cpp), 0.5 GiB on an A100. WSL2: Windows keeps
         about 15 % of a card (ollama), pinned memory ends at 0.5 to 1 GiB in total (NVIDIA's WSL
         guide and issue reports). A driven display: 0.35 to 1.2 GiB.
"""

from llmq_nb.config import Config
from llmq_nb.core.sizes import parse_bytes

CONTEXT = 384 << 20
"""The CUDA context: what a process takes before it allocates [bytes]; an estimate."""
RESERVE = 256 << 20
"""Kernels, recorded graphs, cuBLASLt and 512 KiB of tensor maps (Hopper) beside our one allocation
[bytes]; an estimate."""
LIMIT_RESERVE = CONTEXT + RESERVE
"""What the process takes besides: within 128 MiB of what was measured."""
RING_SLOTS = 3
"""Pinned copies of a micro-batch's inputs: one being filled, one being copied, one spare."""
PYTHON = 1 << 30
"""Interpreter, libraries and driver in host memory [bytes]; an estimate."""
WSL_SHARE = 0.85
"""Of a card's memory that a process gets under WSL2."""
WSL_PINNED = 512 << 20
"""Pinned host memory that WSL2 surely gives [bytes]."""
DISPLAY = int(1.2 * 2**30)
"""The most that a driven display takes [bytes]."""


def device_limit(config: Config) -> int | None:
    """`memory.device_limit` in bytes."""
    text = config.memory.device_limit
    return None if text is None else parse_bytes(text, where="memory.device_limit")


def host_limit(config: Config) -> int | None:
    """`memory.host_limit` in bytes."""
    text = config.memory.host_limit
    return None if text is None else parse_bytes(text, where="memory.host_limit")


def host_room(config: Config, available: int | None) -> int | None:
    """Bytes of buffers that may be pinned; None: nothing is known. available: on the machine."""
    known = [n for n in (host_limit(config), available) if n is not None]
    return max(0, min(known)) if known else None


def room_now(config: Config, free: int) -> int:
    """Bytes for our allocation in this process. free: what the driver says once our context
    exists."""
    limit = device_limit(config)
    return (free if limit is None else min(free, limit - CONTEXT)) - RESERVE


def under_wsl() -> bool:
    """Whether this is Linux inside Windows."""
    try:
        with open("/proc/sys/kernel/osrelease", encoding="ascii", errors="replace") as file:
            return "microsoft" in file.read().lower()
    except OSError:
        return False
