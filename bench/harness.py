"""Timing of one kernel on one GPU: CUDA events, cold L2, a copy measured in the same process as
yardstick.

    with Bench("rmsnorm_forward") as bench:
        x = bench.random((N, C), bfloat16)
        bench.measure({"N": N, "C": C}, lambda: rmsnorm_forward_launch(...),
        bytes=rmsnorm_forward_bytes(N, C))

Each measurement is the median of 20 single launches after 5 warm-ups; before every launch a buffer
larger than any L2 is overwritten. Prints one JSON line each: kernel, case, seconds (median and
quartiles), GB/s, percent of the rate (read + written bytes) of a copy of 1 GiB, percent of a copy
that moves as many bytes as the case (a launch costs some 5 us whatever it does, so small cases
cannot reach the rate of a large one), device, driver, package versions, commit.
"""

import json
import subprocess
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np

from llmq_nb.core import device as core
from llmq_nb.kernels.elementwise import copy_launch

WARM_UPS, RUNS = 5, 20
FLUSH_BYTES = 256 << 20
"""More than the L2 of any card (B200: 126 MiB)."""
COPY_BYTES = 1 << 30


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


class Bench:
    """A device, a stream, memory for one bench process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = core.open_device(0)
        self.stream = core.create_stream()
        self.events = core.create_event(timing=True), core.create_event(timing=True)
        self.addresses: list[int] = []
        self.flush = self.empty(FLUSH_BYTES)
        self.copy_rate = 2 * COPY_BYTES / self._copy_seconds(COPY_BYTES)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        for address in self.addresses:
            core.free(address)

    def empty(self, nbytes: int) -> int:
        """Address of uninitialised memory."""
        self.addresses.append(core.allocate(nbytes))
        return self.addresses[-1]

    def put(self, array: np.ndarray) -> int:
        """Address of a copy of the array."""
        address = self.empty(array.nbytes)
        core.check(core.driver().cuMemcpyHtoD(address, array.ctypes.data, array.nbytes), "upload")
        return address

    def zeros(self, nbytes: int) -> int:
        """Address of zeroed memory."""
        address = self.empty(nbytes)
        core.check(core.driver().cuMemsetD8(address, 0, nbytes), "clear")
        return address

    def random(self, shape: tuple[int, ...], dtype: Any, magnitude: float = 1.0) -> int:
        """Address of normal random values (a block of 2^22 repeated, so that hosts stay quick)."""
        size = int(np.prod(shape))
        some = np.random.default_rng(0).standard_normal(min(size, 1 << 22)) * magnitude
        return self.put(np.resize(some.astype(dtype), size))

    def seconds(self, launch: Callable[[], None]) -> np.ndarray:
        """Device seconds of each of RUNS launches on self.stream, cold L2."""
        core.synchronize_stream(0)
        times, d = [], core.driver()
        for _ in range(WARM_UPS + RUNS):
            core.check(d.cuMemsetD8Async(self.flush, 0, FLUSH_BYTES, self.stream), "flush")
            core.record_event(self.events[0], self.stream)
            launch()
            core.record_event(self.events[1], self.stream)
            times.append(core.elapsed_seconds(*self.events))
        return np.array(times[WARM_UPS:])

    def _copy_seconds(self, nbytes: int) -> float:
        """Median seconds of the copy kernel that reads and writes nbytes each."""
        source, target = self.zeros(nbytes), self.empty(nbytes)
        times = self.seconds(lambda: copy_launch(target, source, nbytes=nbytes, stream=self.stream))
        for address in (source, target):
            core.free(address)
            self.addresses.remove(address)
        return float(np.median(times))

    def measure(self, case: dict[str, Any], launch: Callable[[], None], *, bytes: int) -> float:
        """Time a launch that moves at least `bytes`; print the JSON line, return the median
        seconds."""
        low, middle, high = np.percentile(self.seconds(launch), [25, 50, 75])
        rate = bytes / middle
        half = max(16, min(COPY_BYTES, bytes // 32 * 16))
        equal = self._copy_seconds(half) * max(1.0, bytes / (2 * COPY_BYTES))
        line = {
            "kernel": self.name,
            **case,
            "seconds": round(float(middle), 9),
            "quartiles": [round(float(low), 9), round(float(high), 9)],
            "gb_per_s": round(rate / 1e9, 1),
            "percent_of_copy": round(100 * rate / self.copy_rate, 1),
            "percent_of_equal_copy": round(100 * equal / middle, 1),
            "copy_gb_per_s": round(self.copy_rate / 1e9, 1),
            "device": self.device.name,
            "driver": core.check(core.driver().cuDriverGetVersion(), "cuDriverGetVersion"),
            "numba_cuda": metadata.version("numba-cuda"),
            "commit": _commit(),
        }
        print(json.dumps(line), flush=True)
        return float(middle)
