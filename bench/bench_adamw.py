"""AdamW against DRAM bandwidth: python -m bench.bench_adamw"""

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.kernels.adamw import adamw_bytes, adamw_launch

SIZE = {"fp32": 4, "bf16": 2, "e4m3": 1}
N = 1 << 27
# (master, m, v, grad, working copy)
CASES = [
    ("fp32", "fp32", "fp32", "bf16", True),
    ("bf16", "fp32", "fp32", "bf16", False),
    ("bf16", "bf16", "bf16", "bf16", False),
    ("bf16", "e4m3", "bf16", "bf16", False),
]


def run(master: str, m: str, v: str, grad: str, copy: bool) -> None:
    with Bench("adamw") as b:
        dtypes = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
        p, g = b.random((N,), dtypes[master], 0.02), b.random((N,), dtypes[grad], 1e-4)
        m_ = b.zeros(N) if m == "e4m3" else b.random((N,), dtypes[m], 1e-4)
        v_ = b.put(np.full(N, 1e-8, dtypes[v]))
        weight, m_scale = (b.empty(2 * N) if copy else 0), b.put(np.full(N // 128, 1e-6, "f4"))
        floats = np.array([1e-5, 0.0, 0.3, 0.1], np.float32).view(np.uint32).tolist()
        scalars = b.put(np.array([*floats, 5], np.uint32))
        total = b.put(np.array([1.0, 1.0, 1.0], np.float32))
        absmax = b.zeros(4)
        for slot in (0, absmax):
            b.measure(
                {
                    "n": N, "master": master, "m": m, "v": v, "grad": grad, "copy": copy,
                    "absmax": bool(slot),
                },
                lambda slot=slot: adamw_launch(
                    p, weight, m_, v_, g, n=N, scalars=scalars, total=total, m_scale=m_scale,
                    absmax=slot, beta1=0.9, beta2=0.95, epsilon=1e-8, decay=0.1, seed=1, tensor=2,
                    master_dtype=master, m_dtype=m, v_dtype=v, grad_dtype=grad, stream=b.stream,
                ),
                bytes=adamw_bytes(
                    N, master=SIZE[master], m=SIZE[m] + (4 / 128 if m == "e4m3" else 0),
                    v=SIZE[v], grad=SIZE[grad], copy=copy,
                ),
            )  # fmt: skip


if __name__ == "__main__":
    for case in CASES:
        run(*case)
