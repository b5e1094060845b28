"""accumulate against DRAM bandwidth: python -m bench.bench_accumulate"""

import ml_dtypes

from bench.harness import Bench
from llmq_nb.kernels.accumulate import accumulate_bytes, accumulate_launch

N = 1 << 25


def main() -> None:
    with Bench("accumulate") as b:
        shard, rows = (b.random((count * N,), ml_dtypes.bfloat16) for count in (1, 16))
        counter = b.zeros(4)
        for ranks, start in (
            (1, False),
            (2, True),
            (2, False),
            (4, False),
            (8, False),
            (16, False),
        ):
            b.measure(
                {"n": N, "ranks": ranks, "start": start},
                lambda ranks=ranks, start=start: accumulate_launch(
                    shard, rows, ranks=ranks, stride=2 * N, n=N, start=start, counter=counter,
                    seed=1, tensor=1, stream=b.stream,
                ),
                bytes=accumulate_bytes(N, ranks, start=start),
            )  # fmt: skip


if __name__ == "__main__":
    main()
