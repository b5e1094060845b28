"""Embedding forward and backward against DRAM bandwidth: python -m bench.bench_embedding

Tokens follow Zipf's law (rank^-1), so the commonest is 8 % of them; `same` is the worst case."""

from typing import Any

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.kernels import embedding, embedding_backward

BF16 = ml_dtypes.bfloat16
CASES = [(32768, 896, 151936), (32768, 1536, 151936), (16384, 4096, 128256)]  # (N, C, V)


def zipf(N: int, V: int) -> np.ndarray:
    """N tokens, scattered over the vocabulary."""
    rng = np.random.default_rng(0)
    weight = 1.0 / np.arange(1, V + 1)
    return rng.permutation(V)[rng.choice(V, N, p=weight / weight.sum())].astype(np.int32)


def run(N: int, C: int, V: int, name: str, tokens: np.ndarray) -> None:
    with Bench("embedding_forward") as b:
        table, x = b.random((V, C), BF16), b.random((N, C), BF16)
        order = b.put(np.argsort(tokens, kind="stable").astype(np.int32))
        scratch = b.empty(embedding_backward.embedding_backward_scratch(N, C))
        t, distinct = b.put(tokens), np.unique(tokens).size
        sizes: dict[str, Any] = {"rows": N, "C": C, "V": V, "stream": b.stream}
        case = {"N": N, "C": C, "V": V, "tokens": name}
        b.measure(
            case,
            lambda: embedding.embedding_forward_launch(x, t, table, **sizes),
            bytes=embedding.embedding_forward_bytes(N, C) - 2 * C * (N - distinct),
        )
        b.name = "embedding_backward"
        for accumulate in (True, False):
            b.measure(
                {**case, "accumulate": accumulate},
                lambda accumulate=accumulate: embedding_backward.embedding_backward_launch(
                    table, x, t, order, scratch=scratch, **sizes, accumulate=accumulate
                ),
                bytes=embedding_backward.embedding_backward_bytes(
                    N, C, V, distinct=distinct, accumulate=accumulate
                ),
            )


if __name__ == "__main__":
    for N, C, V in CASES:
        run(N, C, V, "zipf", zipf(N, V))
        run(N, C, V, "same", np.full(N, 7, np.int32))
