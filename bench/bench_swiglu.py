"""swiglu forward and backward against DRAM bandwidth: python -m bench.bench_swiglu"""

import ml_dtypes

from bench.harness import Bench
from llmq_nb.kernels import swiglu
from llmq_nb.kernels.fp8 import has_units
from llmq_nb.kernels.swiglu import (
    swiglu_backward_bytes,
    swiglu_forward_bytes,
    swiglu_quantize_bytes,
)

BF16 = ml_dtypes.bfloat16
CASES = [(32768, 4864), (32768, 8960), (16384, 11008), (8192, 18944)]  # (N, F)


def run(N: int, F: int) -> None:
    with Bench("swiglu_forward") as b:
        gate_up, y, dgate_up = (
            b.random((N, 2 * F), BF16),
            b.random((N, F), BF16),
            b.empty(4 * N * F),
        )
        absmax = b.zeros(4)
        common = {"rows": N, "F": F, "absmax": absmax, "stream": b.stream}
        b.measure(
            {"N": N, "F": F},
            lambda: swiglu.swiglu_forward_launch(y, gate_up, **common),
            bytes=swiglu_forward_bytes(N, F),
        )
        b.name = "swiglu_backward"
        b.measure(
            {"N": N, "F": F},
            lambda: swiglu.swiglu_backward_launch(dgate_up, y, gate_up, **common),
            bytes=swiglu_backward_bytes(N, F),
        )
        b.name = "swiglu_quantize"
        q, q_t, scale, slot = y, dgate_up, b.zeros(4), b.random((1,), "float32")
        for hardware in [True, False] if has_units() else [False]:
            for outputs in ((0, q_t), (q, q_t), (q, 0)):
                b.measure(
                    {"N": N, "F": F, "hardware": hardware, "q": bool(outputs[0]),
                     "q_t": bool(outputs[1])},
                    lambda o=outputs, h=hardware: swiglu.swiglu_quantize_launch(
                        *o, scale, gate_up, slot, rows=N, F=F, format="e4m3", hardware=h,
                        stream=b.stream,
                    ),
                    bytes=swiglu_quantize_bytes(N, F, outputs=sum(map(bool, outputs))),
                )  # fmt: skip


if __name__ == "__main__":
    for shape in CASES:
        run(*shape)
