"""The gate+up product with SwiGLU behind it, and down's data gradient with SwiGLU backward, each in
one kernel against cuBLASLt's product and swiglu.py: python -m bench.bench_matmul_swiglu
[MODEL ...]

Each cuBLASLt algorithm is tuned first. Prints one JSON line a form: seconds of every candidate once
the clock has settled under it (products.py says why), and in a short run on a GPU that has cooled;
the gain of the best kernel.
"""

import json
import sys
import time
from collections.abc import Callable

import numpy as np

from bench.harness import Bench
from llmq_nb.core import device as core
from llmq_nb.core.dtype import DType
from llmq_nb.kernels.matmul import WORKSPACE_BYTES, Shape
from llmq_nb.kernels.products import Products

CASES = {
    "0.5B": (32768, 4864, 896), "1.5B": (32768, 8960, 1536), "3B": (16384, 11008, 2048),
    "7B": (8192, 18944, 3584), "7B/4": (4096, 18944, 3584),
}  # fmt: skip
"""(N, F, C)"""
FORMS = {"bf16": (DType.BF16, False), "e4m3 fast": (DType.E4M3, True), "e4m3": (DType.E4M3, False)}
SETTLE, WINDOW, REST, SHORT = 0.12, 0.12, 0.1, 0.004
"""Seconds before the long runs and of them; before the short runs and of them."""


def run(model: str, form: str, kind: str) -> None:
    N, F, C = CASES[model]
    dtype, fast = FORMS[form]
    M, K = (2 * F, C) if kind == "forward" else (C, F)
    with Bench("matmul_swiglu") as b:
        shape = Shape(kind, N, M, K, dtype, DType.BF16, fast=fast, swiglu=True)  # pyright: ignore
        memory = b.empty(shape.timing_bytes)
        products = Products(device=0, workspace=b.empty(WORKSPACE_BYTES))
        plan = products.plan(shape)
        # values that draw real power: of bfloat16, and of FP8 codes none of which is a NaN
        some = np.random.default_rng(0).standard_normal(1 << 22).astype(dtype.numpy)
        values = np.resize(some.view(np.uint8), 4 * shape.timing_room)
        upload = core.driver().cuMemcpyHtoD(memory, values.ctypes.data, values.nbytes)
        core.check(upload, "upload")
        products.choices[str(shape)] = 0
        stream = int(b.stream)
        products.tune(memory, shape.timing_bytes, stream=stream, progress=lambda _: None)
        launch = products._launch_of(plan, memory, stream)
        settled, short = [], []
        for candidate in range(plan.count):
            plan.choose(candidate)
            _seconds(b, launch, SETTLE)
            settled.append(_seconds(b, launch, WINDOW))
        for candidate in range(plan.count):
            plan.choose(candidate)
            time.sleep(REST)
            short.append(min(_seconds(b, launch, SHORT) for _ in range(3)))
        line = {
            "kernel": "matmul_swiglu", "kind": kind, "model": model, "form": form, "N": N, "F": F,
            "C": C, "settled": [round(s, 7) for s in settled],
            "short": [round(s, 7) for s in short],
            "gain_percent": round(100 * (1 - min(settled[1:]) / settled[0]), 2),
            "short_gain_percent": round(100 * (1 - min(short[1:]) / short[0]), 2),
            "tflops": round(shape.flops / min(settled[1:]) / 1e12, 1), "device": b.device.name,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def _seconds(b: Bench, launch: Callable[[], None], window: float) -> float:
    """Of one launch, among as many as fill the window."""

    def timed(count: int) -> float:
        core.record_event(b.events[0], b.stream)
        for _ in range(count):
            launch()
        core.record_event(b.events[1], b.stream)
        return core.elapsed_seconds(*b.events) / count

    return timed(max(2, int(window / timed(2))))


if __name__ == "__main__":
    for model in sys.argv[1:] or CASES:
        for form in FORMS:
            for kind in ("forward", "dgrad"):
                run(model, form, kind)
