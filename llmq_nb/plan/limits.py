"""How much device memory our one allocation may take, and what a plan cannot know.

    room = min(device memory, memory.device_limit) - CONTEXT - RESERVE

Source   Contexts: 291 MiB on an RTX 3090 (llama.cpp), 0.5 GiB on an A100. WSL2: Windows keeps
         about 15 % of a card (ollama), pinned memory ends at 0.5 to 1 GiB in total (NVIDIA's WSL
         guide and issue reports). A driven display: 0.35 to 1.2 GiB.
"""

from llmq_nb.config import Config
from llmq_nb.core.sizes import parse_bytes

CONTEXT = 512 << 20
"""The CUDA context: what a process takes before it allocates [bytes]; an upper estimate."""
RESERVE = 512 << 20
"""Kernels, recorded graphs and cuBLASLt beside our one allocation [bytes]."""
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
