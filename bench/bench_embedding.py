"""embedding forward and backward against DRAM bandwidth: python -m bench.bench_embedding"""

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.kernels import embedding
from llmq_nb.kernels.embedding import (
    embedding_backward_bytes,
    embedding_backward_scratch,
    embedding_forward_bytes,
)

V = 151936
CASES = [(32768, 896), (32768, 1536), (16384, 3584)]  # (N, C)


def run(N: int, C: int) -> None:
    rng = np.random.default_rng(0)
    tokens = (V * rng.random(N) ** 8).astype(np.int32)  # a few tokens are frequent, as in text
    with Bench("embedding_forward") as b:
        table, x = b.random((V, C), ml_dtypes.bfloat16), b.random((N, C), ml_dtypes.bfloat16)
        tokens_ = b.put(tokens)
        order = b.put(np.argsort(tokens, kind="stable").astype(np.int32))
        scratch = b.empty(embedding_backward_scratch(N, C))
        distinct = len(np.unique(tokens))
        case = {"N": N, "C": C, "distinct": distinct, "most": int(np.bincount(tokens).max())}
        b.measure(
            case,
            lambda: embedding.embedding_forward_launch(
                x, tokens_, table, N=N, C=C, stream=b.stream
            ),
            bytes=embedding_forward_bytes(N, C),
        )
        b.name = "embedding_backward"
        b.measure(
            case,
            lambda: embedding.embedding_backward_launch(
                table, x, tokens_, order, scratch=scratch, N=N, C=C, stream=b.stream
            ),
            bytes=embedding_backward_bytes(N, C, distinct),
        )


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
