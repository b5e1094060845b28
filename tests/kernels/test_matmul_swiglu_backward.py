"""The down projection's data gradient with SwiGLU backward: against float64 NumPy, and the
candidates against each other. Compiling needs no GPU (test_compile.py), running it needs an sm_90.

Tolerance: dact as in test_matmul_swiglu.py; then dact's rounding and swiglu's own error, relative
to |dact| times the derivative's bound, and one rounding to bfloat16.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.matmul import WORKSPACE_BYTES, Shape
from llmq_nb.kernels.matmul_swiglu import GROUPS
from llmq_nb.kernels.matmul_swiglu_backward import (
    has_backward_kernel,
    matmul_swiglu_backward_launch,
    matmul_swiglu_backward_ref,
)
from llmq_nb.kernels.products import Products
from tests.kernels.harness import U16, U32, assert_within
from tests.kernels.test_matmul_swiglu import FORMS, SIZES, operand

BF16 = ml_dtypes.bfloat16


class Case:
    """Operands of one data gradient on a GPU."""

    def __init__(self, gpu: Any, form: str, N: int, F: int, C: int, seed: int = 0) -> None:
        rng = np.random.default_rng((seed, N, F, C))
        self.gpu, self.N, self.F, self.C = gpu, N, F, C
        self.dtype, self.fast = DType.BF16 if form == "bf16" else DType.E4M3, form != "promoted"
        self.dy_host, dy_scale = operand(rng, N, C, self.dtype)
        weight_t, weight_scale = operand(rng, F, C, self.dtype)  # as FP8 products read it
        self.weight_host = weight_t.T
        self.gate_up_host = (rng.standard_normal((N, 2 * F)) * 2).astype(BF16)
        self.scale = float(dy_scale) * float(weight_scale)
        stored = weight_t if self.dtype.is_fp8 else np.ascontiguousarray(weight_t.T)
        self.dy, self.weight, self.gate_up = map(gpu.put, (self.dy_host, stored, self.gate_up_host))
        self.slots = [gpu.put(np.full(4, s, np.float32)) for s in (dy_scale, weight_scale)]
        self.scales = tuple(s.address for s in self.slots) if self.dtype.is_fp8 else ()

    def launch(self, group: int = GROUPS[0], *, absmax: bool = True) -> Any:
        """(dgate_up, absmax) of one launch."""
        out = self.gpu.empty((self.N, 2 * self.F), BF16)
        slot = self.gpu.zeros((1,), np.float32)
        matmul_swiglu_backward_launch(
            out.address, self.dy.address, self.weight.address,
            self.gate_up.address, rows=self.N, F=self.F, C=self.C, dtype=self.dtype,
            fast=self.fast, scales=self.scales, absmax=slot.address if absmax else 0, group=group,
            stream=self.gpu.stream,
        )  # fmt: skip
        return out, slot

    def dact_bound(self) -> np.ndarray:
        """Of dact's error before it is rounded."""
        dy, weight = (np.abs(a.astype(np.float64)) for a in (self.dy_host, self.weight_host))
        magnitudes = self.scale * (dy @ weight)
        sums = 4 * np.sqrt(self.C) * U32
        if self.dtype.is_fp8:
            sums += 2.0**-13 * (-(-self.C // 128) if self.fast else 1)
        return sums * magnitudes


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("N", "F", "C"), SIZES)
def test_gradient(gpu: Any, N: int, F: int, C: int, form: str) -> None:
    case = Case(gpu, form, N, F, C)
    got, slot = case.launch()
    want = matmul_swiglu_backward_ref(
        case.dy_host, case.weight_host, case.gate_up_host, scale=case.scale
    )
    gate, up = np.split(case.gate_up_host.astype(np.float64), 2, axis=1)
    # |d silu| <= 1.1, |silu(g)| <= |g|; float32 arithmetic: as swiglu.py says, (1 + |g|)^2 at most
    dact = np.abs(case.scale * (case.dy_host.astype(np.float64) @ case.weight_host.astype(float)))
    error = case.dact_bound() + 1.01 * U16 * dact
    arithmetic = dact * (1 + np.abs(gate)) ** 2 * 16 * U32
    bound = np.concatenate(
        [(1.1 * error + arithmetic) * np.abs(up), error * np.abs(gate) + arithmetic], axis=1
    )
    assert_within(got.numpy(), want, relative=1.01 * U16, absolute=bound, what="dgate_up")
    assert slot.numpy()[0] == np.abs(got.numpy().astype(np.float32)).max()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_launch_has_the_same_bits(gpu: Any, form: str) -> None:
    """Repeats, either order of tiles, with and without absmax."""
    case = Case(gpu, form, 1537, 784, 1040, seed=1)
    first = case.launch()[0].numpy().view(np.uint16)
    for group in GROUPS * 3:
        assert (case.launch(group)[0].numpy().view(np.uint16) == first).all()
    got, slot = case.launch(absmax=False)
    assert (got.numpy().view(np.uint16) == first).all()
    assert slot.numpy()[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_candidates_of_the_products(gpu: Any, form: str) -> None:
    """The library's product and swiglu.py, or the kernel: the same to their roundings; tuning
    chooses among them and leaves the operands of the products after it alone."""
    N, F, C = 1000, 304, 512
    case = Case(gpu, form, N, F, C, seed=2)
    fast = case.fast and case.dtype.is_fp8
    shape = Shape("dgrad", N, C, F, case.dtype, DType.BF16, fast=fast, swiglu=True)
    assert has_backward_kernel(gpu.device.cc, shape)
    workspace = gpu.empty((WORKSPACE_BYTES,), np.uint8)
    products = Products(device=0, workspace=workspace.address)
    found = []
    for algorithm in range(products.plan(shape).count):
        products.plan(shape).choose(algorithm)
        out, dact = gpu.empty((N, 2 * F), BF16), gpu.empty((N, F), BF16)
        products.with_swiglu_backward(
            shape, out.address, dact.address, case.dy.address, case.weight.address,
            case.gate_up.address, scales=case.scales, stream=int(gpu.stream),
        )  # fmt: skip
        found.append(out.numpy().astype(np.float64))
        if algorithm:
            assert (dact.numpy().view(np.uint8) == 0xFF).all()
    gate_up = np.abs(case.gate_up_host.astype(np.float64))
    dact = np.abs(case.scale * (case.dy_host.astype(np.float64) @ case.weight_host.astype(float)))
    error = 2 * (case.dact_bound() + 1.01 * U16 * dact)
    bound = np.concatenate([1.1 * error * gate_up[:, F:], error * gate_up[:, :F]], axis=1)
    for other in found[1:]:
        assert_within(other, found[0], relative=2.02 * U16, absolute=bound, what="candidates")
    room = products.plan(shape).shape.timing_room
    memory = gpu.zeros((7 * room + 256,), np.uint8)
    products.tune(
        -(-memory.address // 256) * 256, 7 * room, stream=int(gpu.stream), progress=lambda _: None
    )
    assert products.choices[str(shape)] == products.plan(shape).algorithm
    assert set(products.choices) == {str(shape), str(products.plan(shape).plain.shape)}


def shape(**changes: Any) -> Shape:
    fields = {"kind": "dgrad", "N": 7, "M": 48, "K": 96, "operand": DType.BF16, "swiglu": True}
    return Shape(**{**fields, "out": DType.BF16, **changes})


def test_where_there_is_a_kernel() -> None:
    assert has_backward_kernel((9, 0), shape())
    assert has_backward_kernel((9, 0), shape(operand=DType.E4M3, fast=True))
    for cc in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert not has_backward_kernel(cc, shape())
    for change in (
        {"K": 40}, {"M": 40}, {"operand": DType.FP32}, {"operand": DType.E5M2},
        {"out": DType.FP32}, {"codes": True},
    ):  # fmt: skip
        assert not has_backward_kernel((9, 0), shape(**change)), change


def test_timing_order() -> None:
    """The library's product alone before the one with SwiGLU backward, and no operand of a product
    is written by one before it."""
    products = Products(device=0, workspace=0)
    fused = [shape(N=7), shape(N=4000)]
    alone = [dataclasses.replace(s, swiglu=False) for s in fused]
    for planned in (*fused, *alone):
        products._plans[planned] = None
    assert products.timing_order() == [alone[1], fused[1], alone[0], fused[0]]
    assert fused[1].timing_bytes == 7 * fused[1].timing_room == 7 * 2 * 4000 * 96
