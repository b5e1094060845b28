"""Products of the cpu engine: float32 and BF16 against float64, FP8 against the oracle's codes."""

import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from tests import oracles
from tests.model.harness import U, assert_within, f64, garbage, make_ops, tensor

STORAGE = [DType.FP32, DType.BF16]
# (N, K, M): one row; odd rows; N over one slice of 256 rows; M over it (dweight's slices)
SHAPES = [(1, 32, 16), (7, 48, 32), (300, 32, 48), (33, 64, 272)]
SQNR_FLOOR = 20.0
"""dB, of an FP8 product against the unquantised one.

A code is off by at most 2^-4 of its value, uniformly: deviation 2^-4 / sqrt(3) = 3.6 %, 28.9 dB
for one operand of e4m3; two add up to 25.8 dB, and e5m2 (6 dB coarser) with e4m3 to 22 dB.
"""


def operands(shape, dtype, seed, scales=(1.0, 1.0, 1.0)):
    """x, weight, dy."""
    N, K, M = shape
    rng = np.random.default_rng(seed)
    sizes = ((N, K), (M, K), (N, M))
    return [tensor(s * rng.standard_normal(n), dtype) for n, s in zip(sizes, scales, strict=True)]


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(dtype, shape, with_bias):
    N, K, M = shape
    x, weight, _ = operands(shape, dtype, 1)
    bias = tensor(np.random.default_rng(2).standard_normal(M), dtype) if with_bias else None
    y = garbage(N, M, dtype=dtype)
    make_ops().linear(y, x, weight, bias)
    b = f64(bias) if bias else np.zeros(M)
    size = np.abs(f64(x)) @ np.abs(f64(weight)).T + np.abs(b)
    assert_within(y, oracles.linear(f64(x), f64(weight), b), (K + 1) * U * size)


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_linear_backward(dtype, shape, accumulate):
    N, K, M = shape
    x, weight, dy = operands(shape, dtype, 3)
    rng = np.random.default_rng(4)
    dx = garbage(N, K, dtype=dtype)
    dweight, dbias = tensor(rng.random((M, K)), dtype), tensor(rng.random(M), dtype)
    start_w, start_b = f64(dweight) * accumulate, f64(dbias) * accumulate
    make_ops().linear_backward(dx, dweight, dbias, dy, x, weight, accumulate=accumulate)
    want = oracles.linear_backward(f64(dy), f64(x), f64(weight))
    size = oracles.linear_backward(*(np.abs(f64(t)) for t in (dy, x, weight)))
    assert_within(dx, want[0], (M + 1) * U * size[0])
    assert_within(dweight, start_w + want[1], (N + 1) * U * (start_w + size[1]))
    assert_within(dbias, start_b + want[2], (N + 1) * U * (start_b + size[2]))


def dequantised(t, format: DType):
    codes, scale = oracles.quantize(f64(t), format.value)
    return oracles.decode(codes, format.value) * float(scale)


def sqnr(got, want) -> float:
    return float(10 * np.log10((want**2).sum() / ((got - want) ** 2).sum()))


@pytest.mark.parametrize("gradient", [DType.E4M3, DType.E5M2])
@pytest.mark.parametrize("shape", [(64, 48, 32), (300, 64, 272)])
# operands of very different sizes: a lost or doubled scale cannot hide
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (300.0, 0.02, 1e-6)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_fp8_products_are_those_of_the_codes(gradient, shape, scales, accumulate):
    N, K, M = shape
    x, weight, dy = operands(shape, DType.BF16, 5, scales)
    plain = [tensor(f64(t), DType.BF16) for t in (x, weight, dy)]
    x, weight = (tensor(f64(t), DType.BF16, DType.E4M3) for t in (x, weight))
    dy = tensor(f64(dy), DType.BF16, gradient)
    y, dx = garbage(N, M, dtype=DType.BF16), garbage(N, K, dtype=DType.BF16)
    before = scales[0] * scales[2] * np.random.default_rng(6).standard_normal((M, K))
    dweight = tensor(before, DType.BF16)
    start = f64(dweight) * accumulate
    ops = make_ops()
    ops.linear(y, x, weight)
    ops.linear_backward(dx, dweight, None, dy, x, weight, accumulate=accumulate)
    xq, wq, dq = (dequantised(t, f) for t, f in ((x, DType.E4M3), (weight, DType.E4M3),
                                                 (dy, gradient)))  # fmt: skip
    # exact codes: the sums, the product of two scales and the product with it
    assert_within(y, xq @ wq.T, (K + 3) * U * (np.abs(xq) @ np.abs(wq).T))
    assert_within(dx, dq @ wq, (M + 3) * U * (np.abs(dq) @ np.abs(wq)))
    size = np.abs(dq).T @ np.abs(xq) + np.abs(start)
    assert_within(dweight, start + dq.T @ xq, (N + 4) * U * size)
    for got, want in ((f64(y), f64(plain[0]) @ f64(plain[1]).T),
                      (f64(dx), f64(plain[2]) @ f64(plain[1])),
                      (f64(dweight) - start, f64(plain[2]).T @ f64(plain[0]))):  # fmt: skip
        assert sqnr(got, want) >= SQNR_FLOOR
    for t in (x, weight, dy):
        assert t.fp8 is not None and t.fp8.absmax[0] == np.abs(f64(t)).max()


def test_an_outlier_costs_the_others_their_precision_and_no_more():
    """One element of 1e4 among values of 1: below e4m3's normals, not wrong in size."""
    x, weight, _ = operands((64, 48, 32), DType.BF16, 7)
    x.data[3, 5] = 1e4
    x8, w8 = (tensor(f64(t), DType.BF16, DType.E4M3) for t in (x, weight))
    y = garbage(64, 32, dtype=DType.BF16)
    make_ops().linear(y, x8, w8)
    xq, wq = dequantised(x8, DType.E4M3), dequantised(w8, DType.E4M3)
    assert_within(y, xq @ wq.T, 51 * U * (np.abs(xq) @ np.abs(wq).T))
    rest = np.arange(64) != 3
    assert np.abs(xq - f64(x))[rest].max() <= max(1e4 / 448 * 2**-10, 2**-4 * 4) * (1 + 1e-6)


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (300.0, 0.02, 1e-6)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_bias_gradient_under_fp8_has_the_bits_of_bf16s(scales, accumulate):
    """Q6: a sum of dy itself. LLMQ's was multiplied by the input's scale."""
    shape = (300, 48, 32)
    x, weight, dy = operands(shape, DType.BF16, 8, scales)
    grads = []
    for fp8 in (None, DType.E4M3):
        args = [tensor(f64(t), DType.BF16, fp8) for t in (dy, x, weight)]
        outs = [tensor(np.full(s, scales[2]), DType.BF16) for s in ((300, 48), (32, 48), (32,))]
        make_ops().linear_backward(*outs, *args, accumulate=accumulate)
        grads.append(outs[2])
    assert np.array_equal(grads[0].data, grads[1].data)
    start = scales[2] * accumulate
    assert sqnr(f64(grads[1]), start + f64(dy).sum(axis=0)) > 26  # 5 %


def test_zeros_and_what_is_not_finite_through_an_fp8_product():
    x, weight, _ = operands((16, 32, 16), DType.BF16, 9)
    zero, w8 = (tensor(f64(t) * s, DType.BF16, DType.E4M3) for t, s in ((x, 0), (weight, 1)))
    y = garbage(16, 16, dtype=DType.BF16)
    make_ops().linear(y, zero, w8)
    assert (f64(y) == 0).all()
    bad = tensor(f64(x), DType.BF16, DType.E4M3)
    bad.data[2, 2] = np.nan
    make_ops().linear(y, bad, w8)
    assert np.isnan(f64(y)).any()
