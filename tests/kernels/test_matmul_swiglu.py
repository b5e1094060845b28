"""The gate+up product with SwiGLU: gate_up against float64 NumPy, act bit for bit against swiglu.py
of the gate_up that it wrote. Compiling needs no GPU (test_compile.py), running it needs an sm_90.

Tolerance: as test_matmul.py: K products summed in float32, 4 sqrt(K) 2^-24 of the sum of
magnitudes; e4m3: sums of at least 13 bits, promoted every 128 products, or with `fast` never; then
one rounding to bfloat16.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import FP8_MAX, DType
from llmq_nb.kernels.matmul import WORKSPACE_BYTES, Shape
from llmq_nb.kernels.matmul_swiglu import GROUPS, has_kernel, matmul_swiglu_launch
from llmq_nb.kernels.products import Products
from llmq_nb.kernels.swiglu import swiglu_forward_launch
from tests.kernels.harness import U16, U32, assert_within

BF16 = ml_dtypes.bfloat16
# one row, one step; tails of everything; several tiles of rows, columns and steps, odd N; K of the
# 0.5B, an F that ends inside a tile; more tiles than blocks, so that blocks take several
SIZES = [(1, 16, 16), (130, 48, 80), (513, 272, 336), (1001, 4864, 896), (4099, 1536, 256)]
FORMS = ["bf16", "fast", "promoted"]


def operand(rng: np.random.Generator, rows: int, columns: int, dtype: DType) -> Any:
    """(stored, scale): normal values, or their e4m3 codes."""
    values = rng.standard_normal((rows, columns)).astype(np.float32) * 1.5 / columns**0.25
    if dtype is DType.BF16:
        return values.astype(BF16), np.float32(1.0)
    scale = np.float32(np.abs(values).max() / FP8_MAX[dtype])
    return (values / scale).astype(dtype.numpy), scale


class Case:
    """Operands of one product on a GPU."""

    def __init__(self, gpu: Any, form: str, N: int, F: int, K: int, seed: int = 0) -> None:
        rng = np.random.default_rng((seed, N, F, K))
        self.gpu, self.N, self.F, self.K = gpu, N, F, K
        self.dtype, self.fast = DType.BF16 if form == "bf16" else DType.E4M3, form == "fast"
        self.host = [operand(rng, rows, K, self.dtype) for rows in (N, 2 * F)]
        self.x, self.weight = (gpu.put(codes) for codes, _ in self.host)
        self.slots = [gpu.put(np.full(4, scale, np.float32)) for _, scale in self.host]
        self.scales = tuple(s.address for s in self.slots) if self.dtype.is_fp8 else ()

    def launch(self, group: int = GROUPS[0], *, act: bool = True, absmax: bool = True) -> Any:
        """(gate_up, act, absmax) of one launch."""
        gate_up = self.gpu.empty((self.N, 2 * self.F), BF16)
        y, slot = self.gpu.empty((self.N, self.F), BF16), self.gpu.zeros((1,), np.float32)
        matmul_swiglu_launch(
            y.address if act else 0, gate_up.address, self.x.address, self.weight.address,
            rows=self.N, F=self.F, K=self.K, dtype=self.dtype, fast=self.fast, scales=self.scales,
            absmax=slot.address if absmax else 0, group=group, stream=self.gpu.stream,
        )  # fmt: skip
        return gate_up, y, slot

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """float64: the product, and the bound of its error before the last rounding."""
        (x, a), (weight, b) = self.host
        x64, w64 = x.astype(np.float64), weight.astype(np.float64)
        scale = float(a) * float(b)
        magnitudes = scale * (np.abs(x64) @ np.abs(w64).T)
        if self.dtype is DType.BF16:
            sums = 4 * np.sqrt(self.K) * U32
        else:
            sums = 2.0**-13 * (-(-self.K // 128) if self.fast else 1) + 4 * np.sqrt(self.K) * U32
        return scale * (x64 @ w64.T), sums * magnitudes


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("N", "F", "K"), SIZES)
def test_product_and_swiglu(gpu: Any, N: int, F: int, K: int, form: str) -> None:
    case = Case(gpu, form, N, F, K)
    gate_up, act, slot = case.launch()
    want, bound = case.expected()
    assert_within(gate_up.numpy(), want, relative=1.01 * U16, absolute=bound, what="gate_up")
    apart, apart_slot = gpu.empty((N, F), BF16), gpu.zeros((1,), np.float32)
    swiglu_forward_launch(
        apart.address, gate_up.address, rows=N, F=F, absmax=apart_slot.address, stream=gpu.stream
    )
    assert (act.numpy().view(np.uint16) == apart.numpy().view(np.uint16)).all()
    assert slot.numpy()[0] == apart_slot.numpy()[0] == np.abs(act.numpy().astype(np.float32)).max()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_launch_has_the_same_bits(gpu: Any, form: str) -> None:
    """Repeats, either order of tiles, and a recomputation that wants gate_up alone."""
    case = Case(gpu, form, 1537, 784, 1040, seed=1)
    first = [b.numpy().view(np.uint8) for b in case.launch()]
    for group in GROUPS * 3:
        again = [b.numpy().view(np.uint8) for b in case.launch(group)]
        assert all((a == b).all() for a, b in zip(first, again, strict=True))
    gate_up, act, slot = case.launch(act=False, absmax=False)
    assert (gate_up.numpy().view(np.uint8) == first[0]).all()
    assert (act.numpy().view(np.uint8) == 0xFF).all()
    assert slot.numpy()[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_candidates_of_the_products(gpu: Any, form: str) -> None:
    """The library's product and swiglu.py, or the kernel: the same to their roundings; tuning
    chooses among them."""
    N, F, K = 1000, 304, 512
    case = Case(gpu, form, N, F, K, seed=2)
    shape = Shape("forward", N, 2 * F, K, case.dtype, DType.BF16, fast=case.fast, swiglu=True)
    assert has_kernel(gpu.device.cc, shape)
    workspace = gpu.empty((WORKSPACE_BYTES,), np.uint8)
    products = Products(device=0, workspace=workspace.address)
    want, bound = case.expected()
    for algorithm in range(products.plan(shape).count):
        products.plan(shape).choose(algorithm)
        gate_up, act = gpu.empty((N, 2 * F), BF16), gpu.empty((N, F), BF16)
        products.with_swiglu(
            shape, act.address, gate_up.address, case.x.address, case.weight.address,
            scales=case.scales, stream=int(gpu.stream),
        )  # fmt: skip
        assert_within(gate_up.numpy(), want, relative=1.01 * U16, absolute=bound, what="gate_up")
        apart = gpu.empty((N, F), BF16)
        swiglu_forward_launch(apart.address, gate_up.address, rows=N, F=F, stream=gpu.stream)
        assert (act.numpy().view(np.uint16) == apart.numpy().view(np.uint16)).all(), algorithm
    room = -(-2 * max(N * 2 * F, N * K, 2 * F * K) // 256) * 256
    memory = gpu.zeros((4 * room + 256,), np.uint8)
    products.tune(
        -(-memory.address // 256) * 256, 4 * room, stream=int(gpu.stream), progress=lambda _: None
    )
    assert products.choices[str(shape)] == products.plan(shape).algorithm
    assert set(products.choices) == {str(shape), str(products.plan(shape).plain.shape)}


def shape(**changes: Any) -> Shape:
    fields = {"kind": "forward", "N": 7, "M": 96, "K": 48, "operand": DType.BF16, "swiglu": True}
    return Shape(**{**fields, "out": DType.BF16, **changes})


def test_where_there_is_a_kernel() -> None:
    assert has_kernel((9, 0), shape())
    assert has_kernel((9, 0), shape(operand=DType.E4M3, fast=True))
    for cc in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert not has_kernel(cc, shape())
    for change in (
        {"K": 40}, {"M": 80}, {"operand": DType.FP32}, {"out": DType.FP32}, {"codes": True},
        {"bias": True},
    ):  # fmt: skip
        assert not has_kernel((9, 0), shape(**change)), change


def test_timing_order() -> None:
    """No product writes, in its turn, what a later one reads; the library's product alone before
    the one with SwiGLU, which is timed with its best algorithm."""
    products = Products(device=0, workspace=0)
    few, many = shape(N=7), shape(N=4000)
    alone = [dataclasses.replace(s, swiglu=False) for s in (few, many)]
    for planned in (few, many, *alone):
        products._plans[planned] = None
    assert products.timing_order() == [alone[1], many, alone[0], few]
    assert many.timing_bytes == 4 * many.timing_room == 4 * 2 * 4000 * 96
