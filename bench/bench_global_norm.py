"""global_norm against DRAM bandwidth: python -m bench.bench_global_norm"""

import ml_dtypes

from bench.harness import Bench
from llmq_nb.kernels.global_norm import chunk_table, global_norm_bytes, global_norm_launch

TENSORS, N = 200, 1 << 21  # 0.4 G elements


def main() -> None:
    with Bench("global_norm") as b:
        grads = b.random((TENSORS, N), ml_dtypes.bfloat16)
        chunks, first = chunk_table([(grads + 2 * N * t, N) for t in range(TENSORS)])
        chunks_, first_, total = b.put(chunks), b.put(first), b.zeros(12)
        norms, scratch = b.zeros(4 * TENSORS), b.zeros(4 * len(chunks))
        b.measure(
            {"tensors": TENSORS, "n": TENSORS * N},
            lambda: global_norm_launch(
                norms, total, chunks_, first_, scratch=scratch, n_chunks=len(chunks),
                tensors=TENSORS, max_norm=1.0, stream=b.stream,
            ),
            bytes=global_norm_bytes(TENSORS * N),
        )  # fmt: skip


if __name__ == "__main__":
    main()
