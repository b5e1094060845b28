"""cuBLASLt products against float64 NumPy (matmul_ref: the three equations). Needs a GPU.

Tolerance: K products summed in float32 in an unknown order: K 2^-24 sum |a b| at worst, about
sqrt(K) of it for random signs. Asserted: 4 times that, plus an ulp of BF16 where it is the output.
"""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import FP8_MAX, DType
from llmq_nb.kernels.matmul import WORKSPACE_BYTES, Kind, Shape, matmul_ref
from llmq_nb.kernels.products import Products
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
def test_every_candidate_is_right_and_repeats_its_bits(gpu):
    """Algorithms whose sums depend on which block finishes first are excluded."""
    rng = np.random.default_rng(1)
    N, M, K = 4096, 128, 96  # a long inner extent and a small output: split K is tempting
    dy, x = (rng.standard_normal((N, c)).astype(ml_dtypes.bfloat16) for c in (M, K))
    a, b = gpu.put(dy).address, gpu.put(x).address
    workspace = gpu.empty((WORKSPACE_BYTES,), np.uint8)
    plan = Products(device=0, workspace=workspace.address).plan(
        Shape("wgrad", N, M, K, DType.BF16, DType.BF16)
    )
    want = matmul_ref("wgrad", dy, x)
    sums = matmul_ref("wgrad", np.abs(dy.astype(np.float64)), np.abs(x.astype(np.float64)))
    bound = 4 * N**0.5 * U32 * sums + 2.0**-8 * np.abs(want)
    for algorithm in range(plan.count):
        plan.choose(algorithm)
        results = []
        for _ in range(5):
            out = gpu.empty((M, K), ml_dtypes.bfloat16)
            plan(out.address, a, b, workspace=workspace.address, stream=int(gpu.stream))
            results.append(out.numpy().view(np.uint16))
        assert all((r == results[0]).all() for r in results), algorithm
        error = np.abs(results[0].view(ml_dtypes.bfloat16).astype(np.float64) - want)
        assert (error <= bound).all(), algorithm


def quantised(rng: np.random.Generator, rows: int, columns: int, dtype: DType):
    """(values, codes, scale): normal values, quantised by ml_dtypes."""
    values = rng.standard_normal((rows, columns)) * 0.3
    scale = np.float32(np.abs(values).max() / FP8_MAX[dtype])
    return values, (values / scale).astype(np.float32).astype(dtype.numpy), scale


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["hardware", "fast", "codes"])
@pytest.mark.parametrize("dy", [DType.E4M3, DType.E5M2])
@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize(("N", "M", "K"), [(16, 16, 16), (48, 80, 112), (1040, 1152, 896)])
def test_fp8_products(gpu, kind, dy, form, N, M, K):
    """Tight against float64 of the codes: the tensor cores' sums keep at least 13 bits, promoted
    to float32 every 128 products at the latest, or with `fast` never (2^-13 of the sum of
    magnitudes for each 128); the output rounds to 8 bits. 20 dB or better against the unquantised.
    """
    if form != "codes" and gpu.device.cc < (8, 9):
        pytest.fail("needs FP8 units")
    rng = np.random.default_rng(N + M + K)
    gradient = dy if kind != "forward" else DType.E4M3
    shapes = {"x": (N, K, DType.E4M3), "weight": (M, K, DType.E4M3), "dy": (N, M, gradient)}
    made = {name: quantised(rng, *shape) for name, shape in shapes.items()}
    names = {"forward": ("x", "weight"), "dgrad": ("dy", "weight"), "wgrad": ("dy", "x")}[kind]
    (exact_a, a, scale_a), (exact_b, b, scale_b) = (made[name] for name in names)
    accumulate = kind == "wgrad"
    out_shape = {"forward": (N, M), "dgrad": (N, K), "wgrad": (M, K)}[kind]
    before = rng.standard_normal(out_shape).astype(ml_dtypes.bfloat16)
    scales = float(scale_a) * float(scale_b)
    want = matmul_ref(kind, a, b) * scales
    size = matmul_ref(kind, np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))) * scales
    layouts = {"forward": (a, b), "dgrad": (a, b.T), "wgrad": (a.T, b.T)}[kind]
    first, second = (np.ascontiguousarray(x) for x in layouts)
    options = {"bias": kind == "forward", "accumulate": accumulate}
    bias = rng.standard_normal(M).astype(ml_dtypes.bfloat16)
    if form == "codes":
        alpha = np.array([scales, float(accumulate), 0, 0], np.float32)
        addresses = (gpu.put(alpha).address,)
        shape = Shape(kind, N, M, K, DType.BF16, DType.BF16, codes=True, **options)
        first, second = first.astype(ml_dtypes.bfloat16), second.astype(ml_dtypes.bfloat16)
    else:
        slots = (gpu.put(np.full(4, s, np.float32)) for s in (scale_a, scale_b))
        addresses = tuple(slot.address for slot in slots)
        shape = Shape(kind, N, M, K, gradient, DType.BF16, fast=form == "fast", **options)
    out, workspace = gpu.put(before), gpu.empty((WORKSPACE_BYTES,), np.uint8)
    products = Products(device=0, workspace=workspace.address)
    products(
        shape, out.address, gpu.put(first).address, gpu.put(second).address,
        stream=int(gpu.stream), bias=gpu.put(bias).address if options["bias"] else 0,
        scales=addresses,
    )  # fmt: skip
    added = before.astype(np.float64) * accumulate
    added = added + (bias.astype(np.float64) if options["bias"] else 0.0)
    got = out.numpy().astype(np.float64)
    inner = {"forward": K, "dgrad": M, "wgrad": N}[kind]
    lost = 2.0**-13 * (max(1.0, inner / 128) if form == "fast" else 1.0)
    bound = lost * size + 2.0**-8 * (2 * np.abs(want + added) + np.abs(added))
    assert (np.abs(got - want - added) <= bound).all()
    unquantised = matmul_ref(kind, exact_a, exact_b)
    error = np.linalg.norm(got - added - unquantised) / np.linalg.norm(unquantised)
    assert -20 * np.log10(error) >= 20 or accumulate, error  # `before` hides the product's bits
