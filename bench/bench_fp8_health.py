"""fp8_health against DRAM bandwidth: python -m bench.bench_fp8_health"""

import ml_dtypes

from bench.harness import Bench
from llmq_nb.kernels.fp8_health import fp8_health_bytes, fp8_health_launch

CASES = [1 << 28, 32768 * 4864, 4096 * 896]  # n


def run(n: int) -> None:
    with Bench("fp8_health") as b:
        x, slot, counts = b.random((n,), ml_dtypes.bfloat16), b.random((1,), "float32"), b.zeros(8)
        b.measure(
            {"n": n, "format": "e4m3"},
            lambda: fp8_health_launch(counts, x, slot, n=n, format="e4m3", stream=b.stream),
            bytes=fp8_health_bytes(n),
        )


if __name__ == "__main__":
    for size in CASES:
        run(size)
