"""What the attention tests share: data, bounds, and the checks that run in the simulator and on a
GPU, against float64 NumPy (attention_*_ref: the equations, nothing shared with the kernels).

Bounds, element by element, U16 = 2^-8: P and dS are rounded once to bfloat16 before a product, the
result once after it; delta comes from the bfloat16 `out`. Everything in float32 (scores,
exp2.approx, sums) is covered by SLACK of the sum of magnitudes.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.kernels import attention
from llmq_nb.kernels.attention_launch import Tiles
from tests.kernels.harness import Device, assert_within

BF16 = np.dtype(ml_dtypes.bfloat16)
U16 = 2.0**-8
"""Unit roundoff of bfloat16: half of its spacing 2^-7 at 1."""
SLACK = 2.0**-15
"""Relative error of P from float32: scores up to 40 with 2^-22 each, exp2.approx, sums of 4096."""
FP32_SLACK = 2.0**-17


# ---- data and bounds ---------------------------------------------------------------------------
def documents(rng: np.random.Generator, B: int, T: int, mean: float) -> np.ndarray:
    """segment_start (B, T) of random documents, about `mean` tokens long; the first is longer."""
    borders = rng.random((B, T)) < 1.0 / mean
    borders[:, : T // 3] = False
    start = np.where(borders, np.arange(T), 0)
    return np.maximum.accumulate(start, axis=1).astype(np.int32)


def inputs(
    B: int,
    T: int,
    H: int,
    G: int,
    D: int,
    *,
    mean: float | None,
    dtype: np.dtype,
    size: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Packed qkv (B, T, H + 2 G, D), dout (B, T, H, D), segment_start."""
    rng = np.random.default_rng([B, T, H, G, D])
    qkv = rng.standard_normal((B, T, H + 2 * G, D))
    qkv[:, :, : H + G] *= size
    dout = rng.standard_normal((B, T, H, D))
    starts = None if mean is None else documents(rng, B, T, mean)
    return qkv.astype(dtype), dout.astype(dtype), starts


def split(qkv: np.ndarray, H: int, G: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return qkv[:, :, :H], qkv[:, :, H : H + G], qkv[:, :, H + G :]


def probabilities(q, k, starts, causal):
    """P (B, H, T, T) in float64, and k repeated for every query head (B, H, T, D)."""
    q, k = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k))
    k = k.repeat(q.shape[1] // k.shape[1], axis=1)
    scores = np.einsum("bhtd,bhsd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores[
        ~np.broadcast_to(
            attention.attention_mask_ref(q.shape[2], starts, causal=causal), scores.shape
        )
    ] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True), k


def gradient_bounds(dout, q, k, v, starts, causal, unit, slack):
    """Largest errors of dq, dk, dv that the rounding points allow (heads as axis 1)."""
    P, k64 = probabilities(q, k, starts, causal)
    B, H, T, D = k64.shape
    group = H // k.shape[2]
    q64, d64 = (abs(x.astype(np.float64)).transpose(0, 2, 1, 3) for x in (q, dout))
    v64 = v.astype(np.float64).transpose(0, 2, 1, 3).repeat(group, axis=1)
    signed = dout.astype(np.float64).transpose(0, 2, 1, 3)
    dp = signed @ v64.swapaxes(2, 3)
    out = P @ v64
    delta = (signed * out).sum(-1, keepdims=True)
    magnitudes = d64 @ abs(v64).swapaxes(2, 3) + (d64 * abs(out)).sum(-1, keepdims=True)
    delta_error = unit * (d64 * abs(out)).sum(-1, keepdims=True)
    ds_error = (unit * P * abs(dp - delta) + P * delta_error * (1 + unit)) + slack * P * magnitudes
    ds_error /= np.sqrt(D)
    p_error = (unit + slack) * P
    by_group = (B, H // group, group, T, D)
    dq = ds_error @ abs(k64)
    dk = (ds_error.swapaxes(2, 3) @ q64).reshape(by_group).sum(2)
    dv = (p_error.swapaxes(2, 3) @ d64).reshape(by_group).sum(2)
    return [x.transpose(0, 2, 1, 3) for x in (dq, dk, dv)]


# ---- checks: simulator and GPU -----------------------------------------------------------------
def check_forward(
    device: Device, B: int, T: int, H: int, G: int, D: int, mean: float | None = None,
    tiles: Tiles | None = None, dtype: DType = DType.BF16, size: float = 1.0,
) -> None:  # fmt: skip
    qkv, _, starts = inputs(B, T, H, G, D, mean=mean, dtype=dtype.numpy, size=size)
    q, k, v = split(qkv, H, G)
    x = device.put(qkv)
    segment_start = None if starts is None else device.put(starts)
    out, lse = device.empty((B, T, H, D), dtype.numpy), device.empty((B, H, T), np.float32)
    attention.attention_launch(
        out.address, lse.address, x.address, segment_start.address if segment_start else 0,
        B=B, T=T, H=H, G=G, D=D, dtype=dtype, tiles=tiles, stream=device.stream,
    )  # fmt: skip
    expected, expected_lse = attention.attention_forward_ref(q, k, v, starts)
    magnitudes, _ = attention.attention_forward_ref(q, k, abs(v.astype(np.float64)), starts)
    unit, slack = (U16, SLACK) if dtype is DType.BF16 else (0.0, FP32_SLACK)
    scores = (
        np.abs(q.astype(np.float64)).sum(-1).max() * np.abs(k.astype(np.float64)).max() / np.sqrt(D)
    )
    assert_within(
        lse.numpy(), expected_lse, relative=2e-6, absolute=2.0**-23 * scores + 2e-6, what="lse"
    )
    bound = (unit + slack * max(1.0, size * size)) * magnitudes
    assert_within(out.numpy(), expected, relative=unit, absolute=bound, what="out")


def check_backward(
    device: Device, B: int, T: int, H: int, G: int, D: int, mean: float | None = None,
    tiles: Tiles | None = None, dtype: DType = DType.BF16,
) -> None:  # fmt: skip
    qkv, dout, starts = inputs(B, T, H, G, D, mean=mean, dtype=dtype.numpy)
    q, k, v = split(qkv, H, G)
    exact_out, exact_lse = attention.attention_forward_ref(q, k, v, starts)
    out, lse = device.put(exact_out.astype(dtype.numpy)), device.put(exact_lse.astype(np.float32))
    x, dy = device.put(qkv), device.put(dout)
    segment_start = None if starts is None else device.put(starts)
    dqkv = device.empty(qkv.shape, dtype.numpy)
    stats = device.empty((attention.attention_scratch_bytes(B, T, H),), np.uint8)
    attention.attention_backward_launch(
        dqkv.address, stats.address, dy.address, out.address, lse.address, x.address,
        segment_start.address if segment_start else 0,
        B=B, T=T, H=H, G=G, D=D, dtype=dtype, tiles=tiles, stream=device.stream,
    )  # fmt: skip
    stats.numpy()  # its guards
    unit, slack = (U16, SLACK) if dtype is DType.BF16 else (0.0, FP32_SLACK)
    expected = attention.attention_backward_ref(dout, q, k, v, starts)
    bounds = gradient_bounds(dout, q, k, v, starts, True, unit, slack)
    for name, found, wanted, bound in zip(
        ("dq", "dk", "dv"), split(dqkv.numpy(), H, G), expected, bounds, strict=True
    ):
        assert_within(found, wanted, relative=unit, absolute=bound, what=name)


def check_user_functions(
    device: Device, B: int, T: int, H: int, G: int, D: int, causal: bool
) -> None:
    """forward and backward on separate arrays, as a user calls them."""
    qkv, dout, _ = inputs(B, T, H, G, D, mean=None, dtype=BF16)
    host = [np.ascontiguousarray(x) for x in split(qkv, H, G)]
    q, k, v = [device.put(x).array() for x in host]
    out, lse = attention.forward(q, k, v, causal=causal)
    gradients = attention.backward(device.put(dout).array(), q, k, v, out, lse, causal=causal)
    expected, expected_lse = attention.attention_forward_ref(*host, causal=causal)
    magnitudes, _ = attention.attention_forward_ref(
        host[0], host[1], abs(host[2].astype(np.float64)), causal=causal
    )
    bound = (U16 + SLACK) * magnitudes
    assert_within(to_numpy(out), expected, relative=U16, absolute=bound, what="out")
    assert_within(to_numpy(lse), expected_lse, absolute=1e-5, what="lse")
    wanted = attention.attention_backward_ref(dout, *host, causal=causal)
    # out carries P's rounding beside its own, so delta errs twice as much as in check_backward
    bounds = gradient_bounds(dout, host[0], host[1], host[2], None, causal, U16, SLACK)
    for name, found, want, limit in zip(("dq", "dk", "dv"), gradients, wanted, bounds, strict=True):
        assert_within(to_numpy(found), want, relative=U16, absolute=2 * limit, what=name)


def to_numpy(x) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.numpy()


def check_repeats(
    device: Device, B: int, T: int, H: int, G: int, D: int, tiles: Tiles | None = None
) -> None:
    """Two runs into the same memory give the same bits: the first leaves counters as they were."""
    qkv, dout, starts = inputs(B, T, H, G, D, mean=T / 3, dtype=BF16)
    x, dy, segment_start = device.put(qkv), device.put(dout), device.put(starts)
    out, lse = device.empty((B, T, H, D), BF16), device.empty((B, H, T), np.float32)
    dqkv = device.empty(qkv.shape, BF16)
    stats = device.empty((attention.attention_scratch_bytes(B, T, H),), np.uint8)
    results = []
    for _ in range(2):
        shape: dict[str, Any] = {"B": B, "T": T, "H": H, "G": G, "D": D, "tiles": tiles}
        attention.attention_launch(
            out.address,
            lse.address,
            x.address,
            segment_start.address,
            **shape,
            stream=device.stream,
        )
        attention.attention_backward_launch(
            dqkv.address, stats.address, dy.address, out.address, lse.address, x.address,
            segment_start.address, **shape, stream=device.stream,
        )  # fmt: skip
        results.append([a.numpy() for a in (out, lse, dqkv)])
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first.view(np.uint8), second.view(np.uint8))


def check_nothing_to_do(device: Device) -> None:
    """No sequences, or sequences of no tokens: no launch, so that the addresses do not matter."""
    for B, T in ((0, 5), (2, 0)):
        for dtype in (DType.BF16, DType.FP32):
            shape: dict[str, Any] = {"B": B, "T": T, "H": 2, "G": 1, "D": 64, "dtype": dtype}
            attention.attention_launch(0, 0, 0, 0, **shape, stream=device.stream)
            attention.attention_backward_launch(0, 0, 0, 0, 0, 0, 0, **shape, stream=device.stream)


def check_rejections(device: Device) -> None:
    def array(*shape: int, dtype: Any = BF16) -> Any:
        return device.put(np.zeros(shape, dtype)).array()

    q, k = array(1, 4, 4, 64), array(1, 4, 2, 64)
    for arguments, words in [
        ((array(1, 4, 4, 96), array(1, 4, 4, 96), array(1, 4, 4, 96)), "head_dim 96"),
        ((q, array(1, 4, 3, 64), array(1, 4, 3, 64)), "no multiple of 3"),
        ((q, array(1, 5, 2, 64), k), "k has shape"),
        ((q, k, array(1, 4, 1, 64)), "v has shape"),
        ((q, k, k, array(1, 5, dtype=np.int32)), "segment_start has shape"),
        ((q, k, k, array(1, 4, dtype=np.float32)), "segment_start is fp32"),
    ]:
        with pytest.raises(ValueError, match=words):
            attention.forward(*arguments)
    with pytest.raises(ValueError, match="needs causal=True"):
        attention.forward(q, k, k, array(1, 4, dtype=np.int32), causal=False)


FP32_CASES = [
    pytest.param(dict(B=1, T=9, H=2, G=1, D=64, mean=4.0, dtype=DType.FP32), id="documents"),
    pytest.param(dict(B=1, T=5, H=1, G=1, D=128, mean=None, dtype=DType.FP32), id="wide"),
]
