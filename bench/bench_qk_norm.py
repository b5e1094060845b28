"""qk_norm forward and backward against DRAM bandwidth: python -m bench.bench_qk_norm"""

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.kernels import qk_norm
from llmq_nb.kernels.qk_norm import qk_norm_backward_scratch, qk_norm_bytes

BF16 = ml_dtypes.bfloat16
CASES = [(32768, 16, 8, 128), (16384, 32, 8, 128)]  # (N, H, G, D)


def run(N: int, H: int, G: int, D: int) -> None:
    with Bench("qk_norm_forward") as b:
        x, dy = (b.random((N, (H + 2 * G) * D), BF16) for _ in range(2))
        y, rstd = b.empty(2 * N * (H + 2 * G) * D), b.random((N, H + G), np.float32)
        qw, kw, dqw, dkw = (b.random((D,), BF16) for _ in range(4))
        scratch = b.empty(qk_norm_backward_scratch(D))
        common = {"rows": N, "H": H, "G": G, "D": D, "stream": b.stream}
        case = {"N": N, "H": H, "G": G, "D": D}
        b.measure(
            case,
            lambda: qk_norm.qk_norm_forward_launch(y, rstd, x, qw, kw, eps=1e-6, **common),
            bytes=qk_norm_bytes(N, H, G, D),
        )
        b.name = "qk_norm_backward"
        b.measure(
            case,
            lambda: qk_norm.qk_norm_backward_launch(
                y, dqw, dkw, dy, x, qw, kw, rstd, scratch=scratch, accumulate=True, **common
            ),
            bytes=qk_norm_bytes(N, H, G, D, backward=True),
        )


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
