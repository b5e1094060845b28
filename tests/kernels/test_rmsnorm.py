"""rmsnorm against float64 NumPy (the equations, nothing shared with the kernels).

Bounds are the error models of the kernel docstrings. Residual sums and absmax are exact.
"""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import rmsnorm, rmsnorm_backward
from llmq_nb.kernels.rmsnorm import lanes_of, rmsnorm_forward_ref
from llmq_nb.kernels.rmsnorm_backward import rmsnorm_backward_ref, tile_of
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

BF16 = ml_dtypes.bfloat16
DTYPES = {"bf16": np.dtype(BF16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": 0.0}  # of the storage format, beside the float32 arithmetic
EPS = 1e-6


def random(seed: int, shape: tuple[int, ...], dtype: str, magnitude: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * magnitude).astype(DTYPES[dtype])


def rstd_bound(C: int) -> float:
    return (C / lanes_of(C) + 13) / 2 * U32 + 2.0**-22


def check_forward(
    device: Device, N: int, C: int, residual: bool, dtype: str = "bf16", magnitude: float = 1.0
) -> None:
    storage = DTYPES[dtype]
    x, old = random(0, (N, C), dtype, magnitude), random(1, (N, C), dtype, magnitude)
    weight = random(2, (C,), dtype)
    y, rstd = device.empty((N, C), storage), device.empty((N,), np.float32)
    absmax = device.zeros((1,), np.float32)
    common = {"rows": N, "C": C, "eps": EPS, "absmax": absmax.address, "dtype": dtype}
    weight_, x_ = device.put(weight), device.put(x)
    if residual:
        out = device.empty((N, C), storage)
        rmsnorm.residual_rmsnorm_forward_launch(
            out.address, y.address, rstd.address, device.put(old).address, x_.address,
            weight_.address, stream=device.stream, **common,
        )  # fmt: skip
        x = (old.astype(np.float32) + x.astype(np.float32)).astype(storage)
        np.testing.assert_array_equal(out.numpy(), x)
    else:
        rmsnorm.rmsnorm_forward_launch(
            y.address, rstd.address, x_.address, weight_.address, stream=device.stream, **common
        )
    y_ref, rstd_ref = rmsnorm_forward_ref(x, weight, EPS)
    assert_within(rstd.numpy(), rstd_ref, relative=rstd_bound(C), what="rstd")
    assert_within(y.numpy(), y_ref, relative=rstd_bound(C) + 2 * U32 + ROUNDING[dtype], what="y")
    assert absmax.numpy()[0] == np.abs(y.numpy().astype(np.float32)).max()


def check_backward(
    device: Device, N: int, C: int, residual: bool, accumulate: bool = False, dtype: str = "bf16",
    grad_dtype: str = "bf16",
) -> None:  # fmt: skip
    storage = DTYPES[dtype]
    x, dy, weight = (random(s, (N, C)[s == 2 :], dtype) for s in range(3))
    dresidual = random(3, (N, C), dtype) if residual else None
    rstd = rmsnorm_forward_ref(x, weight, EPS)[1].astype(np.float32)
    old = random(4, (C,), grad_dtype, 10.0)
    dx, dweight = device.empty((N, C), storage), device.put(old)
    absmax = device.zeros((1,), np.float32)
    scratch = device.empty((rmsnorm_backward.rmsnorm_backward_scratch(C) // 4,), np.float32)
    rmsnorm_backward.rmsnorm_backward_launch(
        dx.address, dweight.address, device.put(dy).address,
        0 if dresidual is None else device.put(dresidual).address, device.put(x).address,
        device.put(weight).address, device.put(rstd).address, scratch=scratch.address, rows=N, C=C,
        accumulate=accumulate, absmax=absmax.address, dtype=dtype, grad_dtype=grad_dtype,
        stream=device.stream,
    )  # fmt: skip
    dx_ref, dweight_ref = rmsnorm_backward_ref(dy, dresidual, x, weight, rstd)
    x64, dy64, w64, r = (a.astype(np.float64) for a in (x, dy, weight, rstd[:, None]))
    product = np.abs(w64 * dy64)
    size = r * (product + np.abs(x64) * r * r * (product * np.abs(x64)).mean(-1, keepdims=True))
    if dresidual is not None:
        size = size + np.abs(dresidual.astype(np.float64))
    terms = C / tile_of(C, dtype).threads + 8 + 5 + tile_of(C, dtype).threads / 32 + 8
    assert_within(
        dx.numpy(), dx_ref, relative=ROUNDING[dtype], absolute=terms * U32 * size, what="dx"
    )
    assert absmax.numpy()[0] == np.abs(dx.numpy().astype(np.float32)).max()
    if accumulate:
        dweight_ref = dweight_ref + old.astype(np.float64)
    sums = np.abs(dy64 * x64 * r).sum(0) + np.abs(old.astype(np.float64))
    adds = (N / tile_of(C).blocks + tile_of(C).rows + 50 + 4) * U32
    assert_within(
        dweight.numpy(), dweight_ref, relative=ROUNDING[grad_dtype], absolute=adds * sums, what="dw"
    )


def check_user_functions(device: Device) -> None:
    x, old, dy = (device.put(random(s, (2, 3, 64), "bf16")).array() for s in range(3))
    weight = device.put(random(3, (64,), "bf16")).array()
    y, rstd = rmsnorm.forward(x, weight, eps=EPS)
    total, y2, rstd2 = rmsnorm.forward(x, weight, eps=EPS, residual=old)
    dx, dweight = rmsnorm.backward(dy, total, weight, rstd2, dresidual=old)
    shapes = [tuple(a.shape) for a in (y, rstd, total, y2, rstd2, dx, dweight)]
    row = (2, 3, 64)
    assert shapes == [row, (2, 3), row, row, (2, 3), row, (64,)]
    host = [a if isinstance(a, np.ndarray) else a.numpy() for a in (total, y2, dx)]
    y_ref, rstd_ref = rmsnorm_forward_ref(host[0], random(3, (64,), "bf16"), EPS)
    assert_within(host[1], y_ref, relative=rstd_bound(64) + 2 * U32 + U16)
    dx_ref, _ = rmsnorm_backward_ref(
        random(2, row, "bf16"), random(1, row, "bf16"), host[0], random(3, (64,), "bf16"),
        rstd_ref.astype(np.float32),
    )  # fmt: skip
    assert_within(host[2], dx_ref, relative=U16, absolute=2.0**-18 * np.abs(dx_ref).max())


def check_user_errors(device: Device) -> None:
    x, weight = device.put(random(0, (4, 64), "bf16")).array(), device.put(random(1, (32,), "bf16"))
    with pytest.raises(ValueError, match=r"weight has shape \(32,\), must be \(64\)"):
        rmsnorm.forward(x, weight.array(), eps=EPS)
    odd = device.put(random(0, (4, 12), "bf16")).array()
    with pytest.raises(ValueError, match="multiple of 8"):
        rmsnorm.forward(odd, odd, eps=EPS)


def check_repeats_bitwise(device: Device, N: int, C: int) -> None:
    """dweight of many rows, twice into differently poisoned memory."""
    x, dy, weight = (device.put(random(s, (N, C)[s == 2 :], "bf16")) for s in range(3))
    rstd = device.put(np.ones(N, np.float32))
    results = []
    for _ in range(2):
        dx, dweight = device.empty((N, C), BF16), device.empty((C,), BF16)
        scratch = device.empty((tile_of(C).blocks * C,), np.float32)
        rmsnorm_backward.rmsnorm_backward_launch(
            dx.address, dweight.address, dy.address, 0, x.address, weight.address, rstd.address,
            scratch=scratch.address, rows=N, C=C, accumulate=False, stream=device.stream,
        )  # fmt: skip
        results.append((dx.numpy().tobytes(), dweight.numpy().tobytes()))
    assert results[0] == results[1]


# 8: one busy lane; 264: second piece of lane 0 only; 2056: the block-wide row, last piece ragged.
SIM_SHAPES = [(1, 8), (5, 264), (2, 2056)]
# real hidden sizes, one row and a row count that is no multiple of the block's
GPU_SHAPES = [(1, 8), (3, 264), (1001, 896), (257, 2048), (64, 3584), (33, 5120), (17, 8192)]


@pytest.mark.parametrize(("N", "C"), SIM_SHAPES)
@pytest.mark.parametrize("residual", [False, True])
def test_forward_simulated(N: int, C: int, residual: bool) -> None:
    run_sim(check_forward, N=N, C=C, residual=residual)


@pytest.mark.parametrize("magnitude", [1e-4, 1e4], ids="x{:g}".format)
def test_forward_scales_simulated(magnitude: float) -> None:
    run_sim(check_forward, N=2, C=64, residual=False, magnitude=magnitude)


def test_fp32_simulated() -> None:
    run_sim(check_forward, N=2, C=264, residual=True, dtype="fp32")
    run_sim(check_backward, N=3, C=40, residual=True, dtype="fp32", grad_dtype="fp32")


@pytest.mark.parametrize(
    ("N", "C", "residual", "accumulate"), [(5, 264, True, True), (1, 8, False, False)]
)
def test_backward_simulated(N: int, C: int, residual: bool, accumulate: bool) -> None:
    run_sim(check_backward, N=N, C=C, residual=residual, accumulate=accumulate)


def test_user_functions_simulated() -> None:
    run_sim(check_user_functions)
    run_sim(check_user_errors)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "C"), GPU_SHAPES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_forward(gpu: Device, N: int, C: int, dtype: str) -> None:
    check_forward(gpu, N, C, residual=False, dtype=dtype)
    check_forward(gpu, N, C, residual=True, dtype=dtype, magnitude=100.0)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "C"), [*GPU_SHAPES, (5000, 896)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_backward(gpu: Device, N: int, C: int, dtype: str) -> None:
    check_backward(gpu, N, C, residual=True, accumulate=True, dtype=dtype, grad_dtype=dtype)
    check_backward(gpu, N, C, residual=False, dtype=dtype)


@pytest.mark.gpu
def test_user_functions(gpu: Device) -> None:
    check_user_functions(gpu)


@pytest.mark.gpu
def test_backward_repeats_bitwise(gpu: Device) -> None:
    check_repeats_bitwise(gpu, 3000, 1536)
