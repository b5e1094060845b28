"""What the link between the GPU and pinned host memory moves: copies and kernels, each direction
alone and both at once. `plan` and `memory.policy = "auto"` predict offload from it.
"""

import statistics
from collections.abc import Callable
from typing import Any

from llmq_nb.core.device import (
    Device,
    allocate,
    check,
    create_event,
    create_stream,
    driver,
    elapsed_seconds,
    free,
    open_device,
    record_event,
    wait_event,
)
from llmq_nb.kernels.elementwise import copy_launch
from llmq_nb.offload.pinned import HostMemory
from llmq_nb.plan.link import Link

NBYTES = 256 << 20
"""Of one copy: a block's gradients are 0.1 to 0.5 GB."""
COPIES, RUNS = 4, 5
"""Copies in a row, and how often that is measured; the median counts."""


def measure_link(
    ordinal: int = 0, nbytes: int = NBYTES, *, write_combined: bool = False
) -> tuple[Device, Link]:
    """Pins and allocates 2 nbytes (a multiple of 16) for as long as it measures. UserError."""
    device = open_device(ordinal)
    host = HostMemory([(0, nbytes), (nbytes, 2 * nbytes)], write_combined=write_combined)
    memory = allocate(2 * nbytes)
    try:
        bench = _Bench(nbytes, host.address(0), host.address(nbytes), memory)
        both_in, both_out = bench.both(bench.copy_in, bench.copy_out)
        link = Link(
            to_device=bench.alone(bench.copy_in),
            to_host=bench.alone(bench.copy_out),
            both_to_device=both_in,
            both_to_host=both_out,
            read=bench.alone(bench.kernel(memory, host.address(0))),
            write=bench.alone(bench.kernel(host.address(nbytes), memory)),
            update=bench.alone(bench.kernel(host.address(nbytes), host.address(0))),
            measured=True,
        )
    finally:
        device.synchronize()
        free(memory)
        host.close()
    return device, link


Work = Callable[[Any], None]
"""Puts work on a stream."""


class _Bench:
    """Addresses: two host buffers, the first is read, and 2 nbytes of the device."""

    def __init__(self, nbytes: int, source: int, target: int, memory: int) -> None:
        self.nbytes, self.source, self.target, self.memory = nbytes, source, target, memory
        self.streams = create_stream(), create_stream()

    def copy_in(self, stream: Any) -> None:
        result = driver().cuMemcpyHtoDAsync(self.memory, self.source, self.nbytes, stream)
        check(result, "copying to the device")

    def copy_out(self, stream: Any) -> None:
        # not what copy_in writes
        start = self.memory + self.nbytes
        result = driver().cuMemcpyDtoHAsync(self.target, start, self.nbytes, stream)
        check(result, "copying to the host")

    def kernel(self, out: int, x: int) -> Work:
        return lambda stream: copy_launch(out, x, nbytes=self.nbytes, stream=stream)

    def alone(self, work: Work) -> float:
        """GB/s of one direction."""
        return self._rates([work])[0]

    def both(self, first: Work, second: Work) -> tuple[float, float]:
        """GB/s of each while both run."""
        rates = self._rates([first, second])
        return rates[0], rates[1]

    def _rates(self, works: list[Work]) -> list[float]:
        runs = [self._seconds(works) for _ in range(RUNS + 1)][1:]  # the first one warms up
        moved = COPIES * self.nbytes / 1e9
        return [moved / statistics.median(times) for times in zip(*runs, strict=True)]

    def _seconds(self, works: list[Work]) -> list[float]:
        """From a common start to the end of each queue."""
        start, ends = create_event(timing=True), [create_event(timing=True) for _ in works]
        record_event(start, self.streams[0])
        for stream in self.streams[1:]:
            wait_event(stream, start)
        for _ in range(COPIES):
            for work, stream in zip(works, self.streams, strict=False):
                work(stream)
        for end, stream in zip(ends, self.streams, strict=False):
            record_event(end, stream)
        return [elapsed_seconds(start, end) for end in ends]
