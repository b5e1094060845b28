"""A process and what it takes while it runs: device memory as nvidia-smi counts it, host memory.

    figures, taken = in_child(work, config)        a function in a fork of this process
    taken = watch(process.pid, alive)              any process

nvidia-smi asks NVML; so does this, up to 20 times a second from outside, and keeps the largest.
The fork needs a process without a CUDA context; it spares each child the imports.
"""

import dataclasses
import importlib
import multiprocessing
import os
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmq_nb.core.device import driver

INTERVAL = 0.05
"""Between two samples [s]."""


@dataclasses.dataclass(slots=True)
class Taken:
    """The largest values [MiB]. device: of the process by NVML; rss: of its host memory, pinned
    pages among them."""

    device_mib: float = 0.0
    rss_mib: float = 0.0
    seconds: float = 0.0


def process_mib(pid: int | None = None) -> float:
    """Device memory of a process (None: this one) now, 0 where NVML shows none. [MiB]

    In a container whose process ids NVML does not know, that of the largest process that it shows.
    """
    used = _used_bytes()
    own = os.getpid() if pid is None else pid
    return used.get(own, max(used.values(), default=0)) / 2**20


def _used_bytes() -> dict[int, int]:
    """By process; NVML through nvidia-ml-py, or nvidia-smi where it is not installed."""
    used: dict[int, int] = {}
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory"]
        query.append("--format=csv,noheader,nounits")
        out = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        pairs = [line.split(",") for line in out.splitlines()]
        return {int(pid): int(mib) << 20 for pid, mib in pairs if mib.strip().isdigit()}
    nvml.nvmlInit()  # counts its callers, and answers at once from the second time on
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            used[p.pid] = used.get(p.pid, 0) + (p.usedGpuMemory or 0)
    return used


def status_mib(pid: int | str, key: str) -> float:
    """Such as VmRSS or VmHWM of /proc/PID/status; 0 where the process is gone. [MiB]"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":")), 0.0)


def watch(pid: int, alive: Callable[[], bool]) -> Taken:
    """Sample a process until `alive` says no."""
    start, taken = time.perf_counter(), Taken()
    while alive():
        taken.device_mib = max(taken.device_mib, process_mib(pid))
        taken.rss_mib = max(taken.rss_mib, status_mib(pid, "VmHWM"))
        time.sleep(INTERVAL)
    taken.seconds = time.perf_counter() - start
    return taken


def in_child(work: Callable[..., Any], *args: Any) -> tuple[Any, Taken]:
    """What `work(*args)` returns in a fork, and what the fork took. RuntimeError if it failed."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, work, args))
    process.start()
    theirs.close()
    found: list[Any] = []

    def alive() -> bool:
        if not found and ours.poll():
            try:
                found.append(ours.recv())
            except EOFError:  # it died without a word
                found.append((False, "ended without a result"))
        return process.is_alive()

    assert process.pid is not None
    try:
        taken = watch(process.pid, alive)
    finally:
        process.kill()  # of an error here; else it has ended
        process.join()
    alive()
    ok, value = found[0] if found else (False, "ended without a result")
    if not ok:
        raise RuntimeError(f"{value} (exit code {process.exitcode})")
    return value, taken


def _child(pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, work(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()


class Asked:
    """Bytes that this process asks of the driver from now on. Pages that are registered count as
    pinned."""

    def __init__(self) -> None:
        self.device = self.pinned = 0
        bindings = driver()
        self._count(bindings, "cuMemAlloc", lambda nbytes: ("device", nbytes))
        self._count(bindings, "cuMemHostAlloc", lambda nbytes, flags: ("pinned", nbytes))
        self._count(
            bindings, "cuMemHostRegister", lambda address, nbytes, flags: ("pinned", nbytes)
        )

    def _count(self, bindings: Any, name: str, size: Callable[..., tuple[str, int]]) -> None:
        call = getattr(bindings, name)

        def counted(*args: Any) -> Any:
            result = call(*args)
            if int(result[0]) == 0:
                place, nbytes = size(*args)
                setattr(self, place, getattr(self, place) + int(nbytes))
            return result

        setattr(bindings, name, counted)
