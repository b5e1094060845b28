"""adamw against DRAM bandwidth: python -m bench.bench_adamw"""

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.core.dtype import DType
from llmq_nb.kernels.adamw import adamw_bytes, adamw_launch, scalars_of

N = 1 << 28
CASES = [("bf16", "fp32", "fp32"), ("fp32", "fp32", "fp32"), ("bf16", "bf16", "bf16")]


def run(master: str, m: str, v: str) -> None:
    size = {"master": DType(master).itemsize, "m": DType(m).itemsize, "v": DType(v).itemsize}
    with Bench("adamw") as b:
        p_, m_, v_ = (b.zeros(s * N) for s in size.values())
        grad = b.random((N,), ml_dtypes.bfloat16, 1e-3)
        weights = b.empty(2 * N) if master == "fp32" else 0
        scalars = b.put(scalars_of(learning_rate=1e-3, beta1=0.9, beta2=0.95, step=1))
        norm, slot = b.put(np.ones(3, np.float32)), b.zeros(4)
        b.measure(
            {"n": N, "master": master, "m": m, "v": v},
            lambda: adamw_launch(
                p_, weights, m_, v_, grad, scalars=scalars, norm=norm, n=N, beta1=0.9, beta2=0.95,
                epsilon=1e-8, weight_decay=0.1, seed=1, tensor=1, absmax=slot, master_dtype=master,
                m_dtype=m, v_dtype=v, stream=b.stream,
            ),
            bytes=adamw_bytes(N, **size, weights=2 if weights else 0),
        )  # fmt: skip


if __name__ == "__main__":
    for formats in CASES:
        run(*formats)
