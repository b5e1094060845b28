"""rmsnorm forward, residual + forward, backward against DRAM bandwidth: python -m
bench.bench_rmsnorm"""

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.kernels import rmsnorm
from llmq_nb.kernels.rmsnorm import rmsnorm_forward_bytes
from llmq_nb.kernels.rmsnorm_backward import rmsnorm_backward_bytes, rmsnorm_backward_scratch

BF16 = ml_dtypes.bfloat16
CASES = [(32768, 896), (32768, 1536), (16384, 2048), (16384, 3584), (8192, 5120)]  # (N, C)


def run(N: int, C: int) -> None:
    with Bench("rmsnorm_forward") as b:
        x, y, weight = b.random((N, C), BF16), b.empty(2 * N * C), b.random((C,), BF16)
        rstd, absmax = b.random((N,), np.float32), b.zeros(4)
        common = {"rows": N, "C": C, "eps": 1e-6, "absmax": absmax, "stream": b.stream}
        b.measure(
            {"N": N, "C": C},
            lambda: rmsnorm.rmsnorm_forward_launch(y, rstd, x, weight, **common),
            bytes=rmsnorm_forward_bytes(N, C),
        )
        old, out = b.random((N, C), BF16), b.empty(2 * N * C)
        b.name = "residual_rmsnorm_forward"
        b.measure(
            {"N": N, "C": C},
            lambda: rmsnorm.residual_rmsnorm_forward_launch(out, y, rstd, old, x, weight, **common),
            bytes=rmsnorm_forward_bytes(N, C, residual=True),
        )
        dy, dweight = b.random((N, C), BF16), b.zeros(2 * C)
        scratch = b.empty(rmsnorm_backward_scratch(C))
        b.name = "rmsnorm_backward"
        b.measure(
            {"N": N, "C": C},
            lambda: rmsnorm.rmsnorm_backward_launch(
                out, dweight, dy, old, x, weight, rstd, scratch=scratch, rows=N, C=C,
                accumulate=True, absmax=absmax, stream=b.stream,
            ),
            bytes=rmsnorm_backward_bytes(N, C),
        )  # fmt: skip


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
