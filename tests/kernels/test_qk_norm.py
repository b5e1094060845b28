"""qk_norm against float64 NumPy (the equations, nothing shared with the kernels).

Bounds are the error models of the docstring. Values are copies, absmax is exact.
"""

from math import log2

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import qk_norm
from llmq_nb.kernels.qk_norm import (
    BLOCKS,
    THREADS,
    qk_norm_backward_ref,
    qk_norm_backward_scratch,
    qk_norm_forward_ref,
)
from tests.kernels.harness import U16, U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}
ROUNDING = {"bf16": U16, "fp32": 0.0}
EPS = 1e-6


def random(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def rstd_bound(D: int) -> float:
    return (8 + log2(D / 8) + 4) / 2 * U32 + 2.0**-22


def check_forward(device: Device, N: int, H: int, G: int, D: int, dtype: str = "bf16") -> None:
    qkv = random(0, (N, (H + 2 * G) * D), dtype) * np.float32(8)
    qkv = qkv.astype(DTYPES[dtype])
    wq, wk = random(1, (D,), dtype), random(2, (D,), dtype)
    heads = device.empty((N, H + 2 * G, D), DTYPES[dtype])
    rstd = device.empty((N, H + G), np.float32)
    qk_norm.qk_norm_forward_launch(
        heads.address, rstd.address, device.put(qkv).address, device.put(wq).address,
        device.put(wk).address, rows=N, H=H, G=G, D=D, eps=EPS, dtype=dtype, stream=device.stream,
    )  # fmt: skip
    heads_ref, rstd_ref = qk_norm_forward_ref(qkv, wq, wk, H, G, EPS)
    assert_within(rstd.numpy(), rstd_ref, relative=rstd_bound(D), what="rstd")
    relative = rstd_bound(D) + 2 * U32 + ROUNDING[dtype]
    assert_within(heads.numpy(), heads_ref, relative=relative, what="heads")
    values = qkv.reshape(N, -1, D)[:, H + G :]
    assert heads.numpy()[:, H + G :].tobytes() == values.tobytes()


def check_backward(
    device: Device, N: int, H: int, G: int, D: int, accumulate: bool = False, dtype: str = "bf16",
    grad_dtype: str = "bf16", runs: int = 2,
) -> None:  # fmt: skip
    qkv, dheads = (random(s, (N, (H + 2 * G) * D), dtype) for s in (0, 3))
    wq, wk = random(1, (D,), dtype), random(2, (D,), dtype)
    rstd = qk_norm_forward_ref(qkv, wq, wk, H, G, EPS)[1].astype(np.float32)
    old = [random(s, (D,), grad_dtype) for s in (4, 5)]
    inputs = [device.put(a).address for a in (dheads, qkv, wq, wk, rstd)]
    results = []
    for _ in range(runs):
        dqkv = device.empty((N, H + 2 * G, D), DTYPES[dtype])
        dq, dk = (device.put(a) for a in old)
        slot = device.zeros((1,), np.float32)
        scratch = device.empty((qk_norm_backward_scratch(D) // 4,), np.float32)
        qk_norm.qk_norm_backward_launch(
            dqkv.address, dq.address, dk.address, *inputs, scratch=scratch.address, rows=N, H=H,
            G=G, D=D, accumulate=accumulate, absmax=slot.address, dtype=dtype,
            grad_dtype=grad_dtype, stream=device.stream,
        )  # fmt: skip
        results.append([b.numpy() for b in (dqkv, dq, dk, slot)])
    assert [a.tobytes() for a in results[0]] == [a.tobytes() for a in results[-1]]
    got, got_q, got_k, absmax = results[0]
    want, want_q, want_k = qk_norm_backward_ref(dheads, qkv, wq, wk, rstd, H, G)
    dy, x = (np.abs(a.astype(np.float64)).reshape(N, -1, D) for a in (dheads, qkv))
    weight = np.abs(np.stack([wq] * H + [wk] * G).astype(np.float64))
    dy, x, r = dy[:, : H + G], x[:, : H + G], rstd.astype(np.float64)[..., None]
    size = r * (dy * weight + x * r * r * (dy * weight * x).mean(-1, keepdims=True))
    absolute = np.zeros(got.shape)
    absolute[:, : H + G] = (8 + log2(D / 8) + 10) * U32 * size
    assert_within(got, want, relative=ROUNDING[dtype], absolute=absolute, what="dqkv")
    values = dheads.reshape(N, -1, D)[:, H + G :]
    assert got[:, H + G :].tobytes() == values.tobytes()
    assert absmax[0] == np.abs(got.astype(np.float32)).max()
    adds = N * (H + 2 * G) * D / (8 * THREADS * BLOCKS) + 4 + 8 * THREADS / D + 16 + 33
    for result, wanted, before, heads in (
        (got_q, want_q, old[0], slice(0, H)),
        (got_k, want_k, old[1], slice(H, H + G)),
    ):
        terms = (dy * x * r)[:, heads].sum(axis=(0, 1))
        if accumulate:
            wanted, terms = wanted + before.astype(np.float64), terms + np.abs(before).astype("f8")
        bound = adds * U32 * terms
        assert_within(result, wanted, relative=ROUNDING[grad_dtype], absolute=bound, what="dw")


def check_user_functions(device: Device) -> None:
    H, G, D = 2, 1, 16
    qkv, dheads = (random(s, (2, 3, (H + 2 * G) * D), "bf16") for s in (0, 1))
    wq, wk = random(2, (D,), "bf16"), random(3, (D,), "bf16")
    a, b, c = (device.put(x).array() for x in (qkv, wq, wk))
    heads, rstd = qk_norm.forward(a, b, c, H=H, G=G, eps=EPS)
    assert tuple(heads.shape) == qkv.shape and tuple(rstd.shape) == (2, 3, H + G)
    host = heads if isinstance(heads, np.ndarray) else heads.numpy()
    want, _ = qk_norm_forward_ref(qkv, wq, wk, H, G, EPS)
    assert_within(host.reshape(want.shape), want, relative=rstd_bound(D) + 2 * U32 + U16)
    with pytest.raises(ValueError, match="last extent must be 80"):
        qk_norm.forward(a, b, c, H=3, G=1, eps=EPS)
    odd = device.put(random(4, (24,), "bf16")).array()
    with pytest.raises(ValueError, match="head_dim is 24"):
        qk_norm.forward(a, odd, odd, H=H, G=G, eps=EPS)


def check_user_backward(device: Device) -> None:
    H, G, D = 2, 1, 16
    qkv, dheads = (random(s, (6, (H + 2 * G) * D), "bf16") for s in (0, 1))
    wq, wk = random(2, (D,), "bf16"), random(3, (D,), "bf16")
    rstd = qk_norm_forward_ref(qkv, wq, wk, H, G, EPS)[1].astype(np.float32)
    arrays = [device.put(x).array() for x in (dheads, qkv, wq, wk, rstd)]
    results = qk_norm.backward(*arrays, H=H, G=G)
    wanted = qk_norm_backward_ref(dheads, qkv, wq, wk, rstd, H, G)
    for result, want in zip(results, wanted, strict=True):
        host = result if isinstance(result, np.ndarray) else result.numpy()
        assert_within(host.reshape(want.shape), want, relative=U16, absolute=2.0**-17)


# 5 rows of 16 x 8 lanes: two blocks, the second ragged; D 8: one lane a head; 256: a whole warp.
@pytest.mark.parametrize(("N", "H", "G", "D"), [(9, 14, 1, 64), (1, 1, 1, 8), (3, 2, 1, 256)])
def test_simulated(N: int, H: int, G: int, D: int) -> None:
    run_sim(check_forward, N=N, H=H, G=G, D=D)
    if D < 256:  # 16 blocks of 1024 threads for the weights' gradients: too slow to simulate
        run_sim(check_backward, N=N, H=H, G=G, D=D, accumulate=N > 1, runs=1)


def test_fp32_simulated() -> None:
    run_sim(check_forward, N=2, H=2, G=1, D=32, dtype="fp32")


def test_user_functions_simulated() -> None:
    run_sim(check_user_functions)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("N", "H", "G", "D"), [(1, 1, 1, 8), (1000, 16, 8, 128), (777, 14, 2, 64), (5, 3, 1, 256)]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_both(gpu: Device, N: int, H: int, G: int, D: int, dtype: str) -> None:
    check_forward(gpu, N, H, G, D, dtype)
    check_backward(gpu, N, H, G, D, True, dtype, dtype)
    check_backward(gpu, N, H, G, D, False, dtype, "fp32")
    check_user_functions(gpu)
    check_user_backward(gpu)
