"""quantize and quantize_transpose against DRAM bandwidth: python -m bench.bench_quantize"""

import ml_dtypes

from bench.harness import Bench
from llmq_nb.kernels.fp8 import has_units
from llmq_nb.kernels.quantize import quantize_bytes, quantize_launch, quantize_transpose_launch

BF16 = ml_dtypes.bfloat16
CASES = [(16384, 16384), (32768, 4864), (32768, 896)]  # (R, C)


def run(R: int, C: int, hardware: bool) -> None:
    with Bench("quantize") as b:
        x, q, q_t = b.random((R, C), BF16), b.empty(R * C), b.empty(R * C)
        slot, scale = b.random((1,), "float32"), b.zeros(4)
        case = {"R": R, "C": C, "format": "e4m3", "hardware": hardware}
        common = {"format": "e4m3", "hardware": hardware, "stream": b.stream}
        b.measure(
            case,
            lambda: quantize_launch(q, scale, x, slot, n=R * C, **common),
            bytes=quantize_bytes(R * C),
        )
        b.name = "quantize_transpose"
        b.measure(
            case,
            lambda: quantize_transpose_launch(q, q_t, scale, x, slot, R=R, C=C, **common),
            bytes=quantize_bytes(R * C, outputs=2),
        )


if __name__ == "__main__":
    for shape in CASES:
        run(*shape, hardware=False)
        if has_units():
            run(*shape, hardware=True)
