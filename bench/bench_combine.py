"""combine: what a launch of each takes; too small for a bandwidth. python -m bench.bench_combine"""

import numpy as np

from bench.harness import Bench
from llmq_nb.kernels.combine import combine_absmax_launch, combine_norms_launch

TENSORS, SLOTS, RANKS = 707, 256, 8
"""Of a 32B model: 64 blocks."""


def main() -> None:
    with Bench("combine_norms") as b:
        gathered, norms, total = (b.random((n,), np.float32) for n in (RANKS * TENSORS, TENSORS, 3))
        b.measure(
            {"tensors": TENSORS, "ranks": RANKS},
            lambda: combine_norms_launch(
                norms, total, gathered, tensors=TENSORS, ranks=RANKS, max_norm=1.0, stream=b.stream
            ),
            bytes=4 * TENSORS * (RANKS + 2),
        )
        b.name = "combine_absmax"
        slots = b.zeros(16 * SLOTS * (RANKS + 1))
        b.measure(
            {"slots": SLOTS, "ranks": RANKS},
            lambda: combine_absmax_launch(
                slots + 4, slots + 16 * SLOTS + 4, n=SLOTS, ranks=RANKS, spacing=16,
                stride=16 * SLOTS, stream=b.stream,
            ),
            bytes=4 * SLOTS * (RANKS + 1),
        )  # fmt: skip


if __name__ == "__main__":
    main()
