"""QK norm forward and backward against DRAM bandwidth: python -m bench.bench_qk_norm"""

from typing import Any

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.kernels import qk_norm

BF16 = ml_dtypes.bfloat16
CASES = [(32768, 16, 8, 128), (16384, 32, 8, 128)]  # (N, H, G, D): Qwen3 0.6B and 1.7B, 8B


def run(N: int, H: int, G: int, D: int) -> None:
    with Bench("qk_norm_forward") as b:
        shape = (N, (H + 2 * G) * D)
        qkv, heads, dqkv = (b.random(shape, BF16) for _ in range(3))
        q, k = b.random((D,), BF16), b.random((D,), BF16)
        rstd, dq, dk = b.random((N, H + G), np.float32), b.zeros(2 * D), b.zeros(2 * D)
        scratch, slot = b.empty(qk_norm.qk_norm_backward_scratch(D)), b.zeros(4)
        sizes: dict[str, Any] = {"rows": N, "H": H, "G": G, "D": D, "stream": b.stream}
        case = {"N": N, "H": H, "G": G, "D": D}
        b.measure(
            case,
            lambda: qk_norm.qk_norm_forward_launch(heads, rstd, qkv, q, k, eps=1e-6, **sizes),
            bytes=qk_norm.qk_norm_forward_bytes(N, H, G, D),
        )
        b.name = "qk_norm_backward"
        b.measure(
            case,
            lambda: qk_norm.qk_norm_backward_launch(
                dqkv, dq, dk, heads, qkv, q, k, rstd, scratch=scratch, accumulate=True,
                absmax=slot, **sizes,
            ),
            bytes=qk_norm.qk_norm_backward_bytes(N, H, G, D),
        )  # fmt: skip


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
