"""transpose against DRAM bandwidth: python -m bench.bench_transpose"""

import ml_dtypes

from bench.harness import Bench
from llmq_nb.kernels.transpose import transpose_bytes, transpose_launch

CASES = [(32768, 896), (32768, 4864), (16384, 16384)]  # (R, C)


def run(R: int, C: int) -> None:
    with Bench("transpose") as b:
        x, y = b.random((R, C), ml_dtypes.bfloat16), b.empty(2 * R * C)
        b.measure(
            {"R": R, "C": C},
            lambda: transpose_launch(y, x, R=R, C=C, stream=b.stream),
            bytes=transpose_bytes(R, C),
        )


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
