"""bias gradient against DRAM bandwidth: python -m bench.bench_bias"""

import ml_dtypes

from bench.harness import Bench
from llmq_nb.kernels.bias import bias_backward_bytes, bias_backward_launch, bias_backward_scratch

CASES = [(32768, 1152), (32768, 2048), (16384, 4608)]  # (N, C)


def run(N: int, C: int) -> None:
    with Bench("bias_backward") as b:
        dy, dbias = b.random((N, C), ml_dtypes.bfloat16), b.zeros(2 * C)
        scratch = b.empty(bias_backward_scratch(C))
        b.measure(
            {"N": N, "C": C},
            lambda: bias_backward_launch(
                dbias, dy, scratch=scratch, rows=N, C=C, accumulate=True, stream=b.stream
            ),
            bytes=bias_backward_bytes(N, C),
        )


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
