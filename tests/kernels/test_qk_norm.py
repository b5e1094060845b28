"""qk_norm against float64 NumPy; bounds are the kernel docstring's error models, value heads
exact."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import qk_norm
from llmq_nb.kernels.column_sum import BLOCKS
from llmq_nb.kernels.qk_norm import (
    THREADS,
    qk_norm_backward_ref,
    qk_norm_backward_scratch,
    qk_norm_forward_ref,
)
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": U32}
EPS = 1e-6
RSTD = 8.5 * U32 + 2.0**-22


def random(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def check_forward(device: Device, N: int, H: int, G: int, D: int, dtype: str = "bf16") -> None:
    qkv = random(0, (N, (H + 2 * G) * D), dtype)
    qw, kw = random(1, (D,), dtype), random(2, (D,), dtype)
    y, rstd = device.empty(qkv.shape, DTYPES[dtype]), device.empty((N, H + G), np.float32)
    qk_norm.qk_norm_forward_launch(
        y.address, rstd.address, device.put(qkv).address, device.put(qw).address,
        device.put(kw).address, rows=N, H=H, G=G, D=D, eps=EPS, dtype=dtype, stream=device.stream,
    )  # fmt: skip
    y_ref, rstd_ref = qk_norm_forward_ref(qkv, qw, kw, H, G, EPS)
    assert_within(rstd.numpy(), rstd_ref, relative=RSTD, what="rstd")
    assert_within(y.numpy(), y_ref, relative=RSTD + 2 * U32 + ROUNDING[dtype], what="y")
    values = (H + G) * D
    assert y.numpy()[:, values:].tobytes() == qkv[:, values:].tobytes()


def check_backward(
    device: Device, N: int, H: int, G: int, D: int, accumulate: bool, dtype: str = "bf16",
    grad_dtype: str = "bf16", repeats: int = 1,
) -> None:  # fmt: skip
    qkv, dy = (random(s, (N, (H + 2 * G) * D), dtype) for s in (0, 1))
    qw, kw = random(2, (D,), dtype), random(3, (D,), dtype)
    rstd = qk_norm_forward_ref(qkv, qw, kw, H, G, EPS)[1].astype(np.float32)
    old = [random(s, (D,), grad_dtype) for s in (4, 5)]
    inputs: list[int] = [device.put(a).address for a in (qkv, qw, kw, rstd)]
    scratch = device.empty((qk_norm_backward_scratch(D) // 4,), np.float32)
    results = []
    for _ in range(repeats):
        dx, dweights = device.put(dy), [device.put(o) for o in old]
        qk_norm.qk_norm_backward_launch(
            dx.address, dweights[0].address, dweights[1].address, dx.address, *inputs,
            scratch=scratch.address, rows=N, H=H, G=G, D=D, accumulate=accumulate, dtype=dtype,
            grad_dtype=grad_dtype, stream=device.stream,
        )  # fmt: skip
        results.append([b.numpy() for b in (dx, *dweights)])
    assert len({tuple(a.tobytes() for a in r) for r in results}) == 1
    dx_ref, *dweight_ref = qk_norm_backward_ref(dy, qkv, qw, kw, rstd, H, G)
    values = (H + G) * D
    assert results[0][0][:, values:].tobytes() == dy[:, values:].tobytes()
    heads = (N, H + 2 * G, D)
    g, x = (np.abs(a.astype(np.float64)).reshape(heads)[:, : H + G] for a in (dy, qkv))
    r = rstd.astype(np.float64)[..., None]
    weight = np.concatenate([np.tile(np.abs(qw), (H, 1)), np.tile(np.abs(kw), (G, 1))])
    product = weight.astype(np.float64) * g
    size = r * (product + x * r * r * (product * x).mean(-1, keepdims=True))
    actual = results[0][0][:, :values].reshape(N, H + G, D)
    expected = dx_ref[:, :values].reshape(N, H + G, D)
    assert_within(actual, expected, relative=ROUNDING[dtype], absolute=24 * U32 * size, what="dx")
    groups = THREADS // (D // 8)
    adds = (N * (H + 2 * G) / (BLOCKS * groups) + 2 * groups + 50) * U32
    terms = g * x * r
    for name, out, ref, before, part in (
        ("dq_weight", results[0][1], dweight_ref[0], old[0], terms[:, :H]),
        ("dk_weight", results[0][2], dweight_ref[1], old[1], terms[:, H:]),
    ):
        base = before.astype(np.float64) if accumulate else 0.0
        bound = adds * (part.sum((0, 1)) + np.abs(base))
        assert_within(out, ref + base, relative=ROUNDING[grad_dtype], absolute=bound, what=name)


def check_user_functions(device: Device) -> None:
    H, G, D = 2, 1, 16
    qkv, dy = (random(s, (2, 3, (H + 2 * G) * D), "bf16") for s in (0, 1))
    qw, kw = random(2, (D,), "bf16"), random(3, (D,), "bf16")
    arrays = [device.put(a).array() for a in (qkv, qw, kw)]
    x_, qw_, kw_ = arrays
    y, rstd = qk_norm.forward(x_, qw_, kw_, heads=H, kv_heads=G, eps=EPS)
    grads = qk_norm.backward(device.put(dy).array(), x_, qw_, kw_, rstd, heads=H, kv_heads=G)
    host = [a if isinstance(a, np.ndarray) else a.numpy() for a in (y, rstd, *grads)]
    rows = qkv.reshape(6, -1)
    y_ref, rstd_ref = qk_norm_forward_ref(rows, qw, kw, H, G, EPS)
    assert_within(host[0].reshape(6, -1), y_ref, relative=1.01 * U16)
    expected = qk_norm_backward_ref(dy.reshape(6, -1), rows, qw, kw, rstd_ref, H, G)
    for actual, ref in zip(host[2:], expected, strict=True):
        size = np.abs(ref).max()
        assert_within(actual.reshape(ref.shape), ref, relative=U16, absolute=2.0**-18 * size)
    with pytest.raises(ValueError, match="do not share"):
        qk_norm.forward(*arrays, heads=3, kv_heads=1, eps=EPS)


# 16: two lanes a head; 128: sixteen; 3 + 2 heads: blocks end inside a row
@pytest.mark.parametrize(("N", "H", "G", "D"), [(1, 1, 1, 16), (3, 3, 2, 128), (5, 2, 1, 64)])
def test_simulated(N: int, H: int, G: int, D: int) -> None:
    run_sim(check_forward, N=N, H=H, G=G, D=D)


def test_backward_simulated() -> None:
    run_sim(check_backward, N=30, H=3, G=2, D=256, accumulate=True)


def test_fp32_simulated() -> None:
    run_sim(check_forward, N=2, H=2, G=1, D=32, dtype="fp32")
    run_sim(check_backward, N=2, H=2, G=1, D=32, accumulate=False, dtype="fp32", grad_dtype="fp32")


def test_user_functions_simulated() -> None:
    run_sim(check_user_functions)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("N", "H", "G", "D"), [(1, 1, 1, 16), (1001, 16, 8, 128), (4096, 14, 2, 64), (100, 8, 1, 256)]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_both(gpu: Device, N: int, H: int, G: int, D: int, dtype: str) -> None:
    check_forward(gpu, N, H, G, D, dtype)
    check_backward(gpu, N, H, G, D, True, dtype=dtype, grad_dtype=dtype, repeats=2)
    check_backward(gpu, N, H, G, D, False, dtype=dtype)


@pytest.mark.gpu
def test_user_functions(gpu: Device) -> None:
    check_user_functions(gpu)
