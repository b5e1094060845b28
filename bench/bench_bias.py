"""Bias gradient against DRAM bandwidth: python -m bench.bench_bias"""

import ml_dtypes

from bench.harness import Bench
from llmq_nb.kernels.bias import bias_backward_bytes, bias_backward_launch, bias_backward_scratch

CASES = [(32768, 1152), (32768, 2048), (16384, 4608)]  # (N, M): qkv of 0.5B, 1.5B, 7B


def run(N: int, M: int) -> None:
    with Bench("bias_backward") as b:
        dy, dbias = b.random((N, M), ml_dtypes.bfloat16), b.zeros(2 * M)
        scratch = b.empty(bias_backward_scratch(M))
        b.measure(
            {"N": N, "M": M},
            lambda: bias_backward_launch(
                dbias, dy, scratch=scratch, rows=N, M=M, accumulate=True, stream=b.stream
            ),
            bytes=bias_backward_bytes(N, M),
        )


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
