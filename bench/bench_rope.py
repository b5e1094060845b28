"""rope against DRAM bandwidth: python -m bench.bench_rope"""

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.kernels.rope import rope_bytes, rope_forward_launch

CASES = [(32, 1024, 14, 2, 64), (32, 1024, 12, 2, 128), (8, 4096, 28, 4, 128)]  # (B, T, H, G, D)


def run(B: int, T: int, H: int, G: int, D: int) -> None:
    with Bench("rope") as b:
        qkv = b.random((B * T, (H + 2 * G) * D), ml_dtypes.bfloat16)
        cos, sin = (b.random((T, D // 2), np.float32) for _ in range(2))
        start = b.zeros(4 * B * T)
        b.measure(
            {"B": B, "T": T, "H": H, "G": G, "D": D},
            lambda: rope_forward_launch(
                qkv, cos, sin, start, rows=B * T, T=T, H=H, G=G, D=D, stream=b.stream
            ),
            bytes=rope_bytes(B * T, H, G, D),
        )


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
