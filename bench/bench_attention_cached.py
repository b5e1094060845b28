"""attention_cached against DRAM bandwidth, one new token a row over a full cache:
python -m bench.bench_attention_cached"""

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.kernels.attention_cached import attention_cached_bytes, attention_cached_launch

CASES = [  # (B, S, H, G, D)
    (8, 1024, 14, 2, 64), (64, 1024, 14, 2, 64), (8, 4096, 28, 4, 128), (64, 4096, 28, 4, 128)
]  # fmt: skip


def run(B: int, S: int, H: int, G: int, D: int) -> None:
    with Bench("attention_cached") as b:
        heads = b.random((B, (H + 2 * G) * D), ml_dtypes.bfloat16)
        cache = b.random((B * S, 2 * G * D), ml_dtypes.bfloat16)
        start = b.put(np.full(B, 1 - S, np.int32))
        out = b.zeros(2 * B * H * D)
        b.measure(
            {"B": B, "S": S, "H": H, "G": G, "D": D},
            lambda: attention_cached_launch(
                out, cache, heads, start, B=B, T=1, S=S, H=H, G=G, D=D, stream=b.stream
            ),
            bytes=attention_cached_bytes(B, 1, S, H, G, D),
        )


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
