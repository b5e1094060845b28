"""copy, absmax, fill_normal against DRAM bandwidth: python -m bench.bench_elementwise"""

import ml_dtypes

from bench.harness import Bench
from llmq_nb.kernels import elementwise
from llmq_nb.kernels.elementwise import absmax_bytes, copy_bytes

BF16 = ml_dtypes.bfloat16
N = 1 << 28


def main() -> None:
    with Bench("copy") as b:
        x, out = b.random((N,), BF16), b.random((N,), BF16)
        slot = b.zeros(4)
        b.measure(
            {"n": N},
            lambda: elementwise.copy_launch(out, x, nbytes=2 * N, stream=b.stream),
            bytes=copy_bytes(2 * N),
        )
        b.name = "absmax"
        b.measure(
            {"n": N},
            lambda: elementwise.absmax_launch(slot, x, n=N, stream=b.stream),
            bytes=absmax_bytes(N),
        )
        b.name = "fill_normal"
        b.measure(
            {"n": N},
            lambda: elementwise.fill_normal_launch(
                out, n=N, seed=1, tensor=1, std=0.02, stream=b.stream
            ),
            bytes=2 * N,
        )


if __name__ == "__main__":
    main()
