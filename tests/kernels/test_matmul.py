"""cuBLASLt products against float64 NumPy (matmul_ref: the three equations). Needs a GPU.

Tolerance: K products summed in float32 in an unknown order: K 2^-24 sum |a b| at worst, about
sqrt(K) of it for random signs. Asserted: 4 times that, plus an ulp of BF16 where it is the output.
"""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.matmul import WORKSPACE_BYTES, Kind, Products, Shape, matmul_ref
from tests.kernels.harness import Device

U32 = 2.0**-24
# 16: the smallest legal; 48 x 80: no power of two; 896 x 1152: Qwen2.5-0.5B's qkv
SIZES = [(16, 16, 16), (48, 80, 112), (100, 1152, 896), (1, 64, 4864)]


def run(device: Device, kind: Kind, N: int, M: int, K: int, dtype: DType, **options: bool) -> None:
    rng = np.random.default_rng(N * M + K)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32).astype(dtype.numpy)

    operands = {"x": random(N, K), "weight": random(M, K), "dy": random(N, M)}
    names, shape = {
        "forward": (("x", "weight"), (N, M)),
        "dgrad": (("dy", "weight"), (N, K)),
        "wgrad": (("dy", "x"), (M, K)),
    }[kind]
    before, bias = random(*shape), random(M)
    first, second = (operands[name] for name in names)
    out, workspace = device.put(before), device.empty((WORKSPACE_BYTES,), np.uint8)
    bias_address = device.put(bias).address if options.get("bias") else 0
    products = Products(device=0, workspace=workspace.address)
    product = Shape(kind, N, M, K, dtype, dtype, **options)
    products(
        product,
        out.address,
        device.put(first).address,
        device.put(second).address,
        stream=int(device.stream),
        bias=bias_address,
    )
    expected = matmul_ref(
        kind,
        first,
        second,
        bias=bias if options.get("bias") else None,
        before=before if options.get("accumulate") else None,
    )
    inner = {"forward": K, "dgrad": M, "wgrad": N}[kind]
    size = matmul_ref(kind, np.abs(first), np.abs(second)) / np.sqrt(inner)
    bound = 4 * inner * U32 * size + 4 * U32 * np.abs(expected)
    if dtype is DType.BF16:
        added = np.abs(before.astype(np.float64)) if options.get("accumulate") else 0.0
        # two roundings to 8 bits with accumulation, and |product| <= |expected| + |before|
        bound = bound + 2.0**-8 * (2 * np.abs(expected) + added)
    error = np.abs(out.numpy().astype(np.float64) - expected)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
@pytest.mark.parametrize(("N", "M", "K"), SIZES)
@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
def test_product_within_error_model_of_float64(gpu, kind, N, M, K, dtype):
    run(gpu, kind, N, M, K, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_bias_and_accumulation(gpu, dtype):
    run(gpu, "forward", 48, 80, 112, dtype, bias=True)
    run(gpu, "wgrad", 48, 80, 112, dtype, accumulate=True)


@pytest.mark.gpu
def test_every_candidate_repeats_its_bits(gpu):
    """Algorithms whose sums depend on which block finishes first are excluded."""
    rng = np.random.default_rng(1)
    N, M, K = 4096, 128, 96  # a long inner extent and a small output: split K is tempting
    dy, x = (rng.standard_normal((N, c)).astype(ml_dtypes.bfloat16) for c in (M, K))
    a, b = gpu.put(dy).address, gpu.put(x).address
    workspace = gpu.empty((WORKSPACE_BYTES,), np.uint8)
    plan = Products(device=0, workspace=workspace.address).plan(
        Shape("wgrad", N, M, K, DType.BF16, DType.BF16)
    )
    for algorithm in range(plan.count):
        plan.choose(algorithm)
        results = []
        for _ in range(5):
            out = gpu.empty((M, K), ml_dtypes.bfloat16)
            plan(out.address, a, b, workspace=workspace.address, stream=int(gpu.stream))
            results.append(out.numpy().view(np.uint16))
        assert all((r == results[0]).all() for r in results), algorithm
