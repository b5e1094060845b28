"""Fused classifier and loss reduction against DRAM bandwidth: python -m bench.bench_cross_entropy

Tiles (threads, pieces in shared memory) beside tile_of's own choice show what it is worth."""

import ml_dtypes
import numpy as np

from bench.harness import Bench
from llmq_nb.kernels.cross_entropy import cross_entropy_bytes, cross_entropy_launch, tile_of
from llmq_nb.kernels.reduce_loss import reduce_loss_bytes, reduce_loss_launch

CASES = [(8192, 151936), (8192, 128256), (16384, 32000)]  # (N, V)
TILES = [(512, 12), (512, 8), (512, 0), (256, 12), (256, 0), (1024, 4), (1024, 0)]


def run(N: int, V: int) -> None:
    with Bench("cross_entropy") as b:
        logits = b.random((N, V), ml_dtypes.bfloat16, 3.0)
        rng = np.random.default_rng(0)
        targets = b.put(rng.integers(0, V, N).astype(np.int32))
        loss, lse, inv = b.empty(4 * N), b.empty(4 * N), b.put(np.full(1, 1 / N, np.float32))

        def launch(gradient: bool, tile: tuple[int, int] | None) -> None:
            cross_entropy_launch(
                logits, loss, lse, targets, inv, rows=N, V=V, Vp=V, gradient=gradient,
                z_loss=1e-4, tile=tile, stream=b.stream,
            )  # fmt: skip

        for tile in [None, *TILES]:
            case = {"N": N, "V": V, "gradient": True, "tile": tile or tile_of(V)}
            traffic = cross_entropy_bytes(N, V)
            b.measure(case, lambda tile=tile: launch(True, tile), bytes=traffic)
        traffic = cross_entropy_bytes(N, V, gradient=False)
        b.measure({"N": N, "V": V, "gradient": False}, lambda: launch(False, None), bytes=traffic)
        b.name, total = "reduce_loss", b.zeros(8)
        b.measure(
            {"N": N},
            lambda: reduce_loss_launch(
                total, loss, lse, inv, rows=N, accumulate=True, stream=b.stream
            ),
            bytes=reduce_loss_bytes(N),
        )


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
