"""Time on the link between a GPU and pinned host memory, one direction alone or both at once.

A copy engine and a kernel that reads the host by itself have rates of their own: which one is
faster differs between cards, so `bench offload` measures both.

Source   H200: calibrated from training steps of 1.5B with everything offloaded (bench/README.md):
         50 GB/s in one direction and 45 in each of both give the optimizer step that was measured.
         An RTX 5090 copies 56 and 51 GB/s (tinygrad #29), hence `BOTH`.
"""

import dataclasses

BOTH = 0.9
"""Rate in each direction while the other one is busy, over one direction's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """GB/s, as seen from the GPU.

    to_device, to_host: copies in one direction. both_to_device, both_to_host: in each, both busy.
    read, write: kernels on host memory. update: in each direction, of a kernel that does both.
    """

    to_device: float
    to_host: float
    both_to_device: float
    both_to_host: float
    read: float
    write: float
    update: float
    measured: bool = False
    """On the machine that the plan is for."""

    def copies(self, to_device: float, to_host: float) -> float:
        """Seconds of two queues of copies [bytes] that begin together."""
        return _together(
            (to_device, self.to_device, self.both_to_device),
            (to_host, self.to_host, self.both_to_host),
        )

    def kernels(self, read: float, write: float) -> float:
        """Seconds of a kernel that reads and writes host memory [bytes]."""
        return _together((read, self.read, self.update), (write, self.write, self.update))


def symmetric(rate: float) -> Link:
    """A link of which only one direction's rate is known [GB/s]."""
    both = BOTH * rate
    return Link(rate, rate, both, both, rate, rate, both)


def _together(a: tuple[float, float, float], b: tuple[float, float, float]) -> float:
    """(bytes, GB/s alone, GB/s beside the other one) twice: until the slower one is done."""
    (first, _, first_both), (second, second_alone, second_both) = sorted(
        (a, b), key=lambda side: side[0] / side[2]
    )
    seconds = first / (first_both * 1e9)
    return seconds + max(0.0, second - seconds * second_both * 1e9) / (second_alone * 1e9)
