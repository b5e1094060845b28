"""The gate+up product with SwiGLU in its epilogue against cuBLASLt's product and swiglu.py, each
cuBLASLt algorithm tuned first: python -m bench.bench_matmul_swiglu [MODEL ...]

Prints one JSON line a form: seconds of every candidate (median of rounds in which each ran once for
WINDOW seconds, so that all met the same clocks), TFLOP/s of the best kernel, and its gain.
"""

import json
import sys

import numpy as np

from bench.harness import Bench
from llmq_nb.core import device as core
from llmq_nb.core.dtype import DType
from llmq_nb.kernels.matmul import WORKSPACE_BYTES, Shape
from llmq_nb.kernels.products import Products

CASES = {
    "0.5B": (32768, 4864, 896), "1.5B": (32768, 8960, 1536), "3B": (16384, 11008, 2048),
    "7B": (16384, 18944, 3584), "7B/4": (4096, 18944, 3584),
}  # fmt: skip
"""(N, F, K)"""
FORMS = {"bf16": (DType.BF16, False), "e4m3 fast": (DType.E4M3, True), "e4m3": (DType.E4M3, False)}
ROUNDS, WINDOW = 3, 0.06


def run(model: str, form: str) -> None:
    N, F, K = CASES[model]
    dtype, fast = FORMS[form]
    with Bench("matmul_swiglu") as b:
        scale = b.put(np.full(4, 2.0**-6, np.float32))
        room = -(-2 * max(N * 2 * F, N * K, 2 * F * K) // 256) * 256
        workspace = b.empty(WORKSPACE_BYTES)
        memory = b.empty(4 * room)
        products = Products(device=0, workspace=workspace)
        shape = Shape("forward", N, 2 * F, K, dtype, DType.BF16, fast=fast, swiglu=True)
        plan = products.plan(shape)
        x, weight, gate_up, act = (memory + i * room for i in range(4))
        for address, size in ((x, N * K), (weight, 2 * F * K)):  # values that draw real power
            some = np.random.default_rng(0).standard_normal(1 << 22).astype(dtype.numpy)
            values = np.resize(some, size)
            core.check(
                core.driver().cuMemcpyHtoD(address, values.ctypes.data, values.nbytes), "upload"
            )
        products.choices[str(shape)] = 0
        products.tune(memory, 4 * room, stream=int(b.stream), progress=lambda _: None)
        common = {"workspace": workspace, "stream": int(b.stream), "act": act}
        if dtype.is_fp8:
            common |= {"scales": (scale, scale), "absmax": b.zeros(4)}
        seconds = np.zeros((ROUNDS, plan.count))
        for i in range(ROUNDS):
            for candidate in range(plan.count):
                plan.choose(candidate)
                seconds[i, candidate] = _seconds(b, lambda: plan(gate_up, x, weight, **common))
        middle = np.median(seconds, axis=0)
        best = float(middle[1:].min())
        line = {
            "kernel": "matmul_swiglu", "model": model, "form": form, "N": N, "F": F, "K": K,
            "seconds": [round(float(s), 7) for s in middle], "tflops": round(
                shape.flops / best / 1e12, 1
            ), "gain_percent": round(100 * (1 - best / float(middle[0])), 2),
            "device": b.device.name,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def _seconds(b: Bench, launch: object) -> float:
    """Of one launch, among as many as fill WINDOW."""
    assert callable(launch)

    def timed(count: int) -> float:
        core.record_event(b.events[0], b.stream)
        for _ in range(count):
            launch()
        core.record_event(b.events[1], b.stream)
        return core.elapsed_seconds(*b.events) / count

    return timed(max(2, int(WINDOW / timed(2))))


if __name__ == "__main__":
    for model in sys.argv[1:] or CASES:
        for form in FORMS:
            run(model, form)
