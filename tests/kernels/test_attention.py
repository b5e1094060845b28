"""Attention against float64 NumPy (attention_*_ref: the equations, nothing shared with the kernels;
themselves checked against finite differences).

Bounds, element by element, U16 = 2^-8: P and dS are rounded once to bfloat16 before a product, the
result once after it; delta comes from the bfloat16 `out`. Everything in float32 (scores,
exp2.approx, sums) is covered by SLACK of the sum of magnitudes.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.device import device_count, open_device
from llmq_nb.core.dtype import DType
from llmq_nb.kernels import attention, attention_backward, attention_dkdv, attention_forward
from llmq_nb.kernels.attention import Tiles
from llmq_nb.kernels.attention_tiles import Tile
from llmq_nb.kernels.compile import to_ptx
from llmq_nb.kernels.ptx import SIMULATED as SIMULATOR
from tests.kernels.harness import Device, assert_within, run_sim

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
    """Two runs give the same bits."""
    qkv, dout, starts = inputs(B, T, H, G, D, mean=T / 3, dtype=BF16)
    x, dy, segment_start = device.put(qkv), device.put(dout), device.put(starts)
    results = []
    for _ in range(2):
        out, lse = device.empty((B, T, H, D), BF16), device.empty((B, H, T), np.float32)
        dqkv = device.empty(qkv.shape, BF16)
        stats = device.empty((attention.attention_scratch_bytes(B, T, H),), np.uint8)
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


# ---- the oracle --------------------------------------------------------------------------------
def test_reference_gradients_are_the_derivative_of_the_reference() -> None:
    rng = np.random.default_rng(1)
    q = rng.standard_normal((1, 6, 4, 8))
    k, v = rng.standard_normal((2, 1, 6, 2, 8))
    dout, starts = rng.standard_normal(q.shape), np.array([[0, 0, 0, 3, 3, 5]])
    gradients = attention.attention_backward_ref(dout, q, k, v, starts)
    for i, gradient in enumerate(gradients):
        direction = rng.standard_normal(gradient.shape)
        shifted = [
            [x + (sign * 1e-5 * direction if i == j else 0) for j, x in enumerate((q, k, v))]
            for sign in (1, -1)
        ]
        losses = [
            (attention.attention_forward_ref(x[0], x[1], x[2], starts)[0] * dout).sum()
            for x in shifted
        ]
        numeric = (losses[0] - losses[1]) / 2e-5
        assert abs(numeric - (gradient * direction).sum()) < 1e-8 * abs(dout).sum()


# ---- compiled code -----------------------------------------------------------------------------
@pytest.mark.parametrize("module", [attention_forward, attention_dkdv, attention_backward])
def test_products_run_on_tensor_cores(module) -> None:
    """One mma.sync for each 16 x 8 x 16 of the tile's products in one pass of the loop, operands by
    ldmatrix, tiles by 16-byte cp.async. (Registers and stack: test_compile.)"""
    case = next(c for c in module.COMPILE_CASES if "QUERIES" in c.constants)
    ptx = to_ptx(case.factory(**case.constants), case.signature, case.threads, (8, 9), case.options)
    extents = case.constants["QUERIES"] * case.constants["KEYS"] * case.constants["D"]
    products = {attention_forward: 2, attention_dkdv: 4, attention_backward: 3}[module]
    assert ptx.count("mma.sync") == products * extents // (16 * 8 * 16) // case.constants["WARPS"]
    assert "ldmatrix" in ptx and "cp.async.cg.shared.global" in ptx
    assert ".local" not in ptx  # no register tile is indexed at run time


def test_shapes_for_two_blocks_a_multiprocessor() -> None:
    """Every kernel has a shape of which two blocks fit 100 KB (1 KB of each is CUDA's)."""
    half = 102400 // 2 - 1024
    for D in attention.HEAD_DIMS:
        small = attention.default_tiles(D, (8, 6))
        assert attention_forward.shared_bytes(D, small.forward) <= half
        assert attention_dkdv.shared_bytes(D, small.dkdv) <= half
        assert attention_backward.shared_bytes(D, small.dq) <= half


# ---- simulator ---------------------------------------------------------------------------------
# Two warps at D = 64 (a load step must be eight rows). T: one short tile; past a tile by one with a
# border in it; two 16-row tiles a warp; a group of three.
SMALL = Tiles(Tile(32, 16, 2), Tile(16, 32, 2), Tile(32, 16, 2))
LARGE = Tiles(Tile(64, 16, 2), Tile(16, 64, 2, stages=1), Tile(64, 16, 2, stages=1))
SIMULATED = [
    pytest.param(dict(B=1, T=3, H=1, G=1, D=64, mean=None, tiles=SMALL), id="short"),
    pytest.param(dict(B=1, T=33, H=1, G=1, D=64, mean=8.0, tiles=SMALL), id="documents"),
    pytest.param(dict(B=1, T=36, H=1, G=1, D=64, mean=None, tiles=LARGE), id="two-m-tiles"),
    pytest.param(dict(B=2, T=19, H=3, G=1, D=64, mean=4.0, tiles=SMALL), id="group-of-three"),
]


@pytest.mark.parametrize("case", SIMULATED)
def test_forward_simulated(case) -> None:
    run_sim(check_forward, **case)


@pytest.mark.parametrize("case", SIMULATED)
def test_backward_simulated(case) -> None:
    run_sim(check_backward, **case)


FP32 = [
    pytest.param(dict(B=1, T=9, H=2, G=1, D=64, mean=4.0, dtype=DType.FP32), id="documents"),
    pytest.param(dict(B=1, T=5, H=1, G=1, D=128, mean=None, dtype=DType.FP32), id="wide"),
]


@pytest.mark.parametrize("case", FP32)
def test_fp32_simulated(case) -> None:
    run_sim(check_forward, **case)
    run_sim(check_backward, **case)


def test_nothing_to_do_simulated() -> None:
    run_sim(check_nothing_to_do)


def test_rejections_simulated() -> None:
    run_sim(check_rejections)


# ---- GPU ---------------------------------------------------------------------------------------
# T: 1; either side of 64 and 128 (every tile edge); several tiles with a ragged end; documents
# longer and shorter than a tile; groups of 1, 2, 3, 6, 7 (the models').
GPU_SHAPES = [
    (1, 1, 1, 1, None),
    (2, 17, 3, 1, 5.0),
    (1, 63, 2, 2, None),
    (3, 64, 2, 1, None),
    (1, 65, 6, 2, 20.0),
    (2, 127, 2, 1, None),
    (1, 128, 4, 2, 40.0),
    (1, 129, 1, 1, None),
    (2, 200, 12, 2, 30.0),
    (1, 513, 14, 2, 3.0),
    (1, 1000, 3, 1, 150.0),
    (2, 1024, 2, 2, None),
]


def implementations() -> list[str]:
    """What this machine can run: mma.sync everywhere, wgmma on sm_90."""
    if SIMULATOR or device_count() == 0 or open_device(0).cc != (9, 0):
        return ["mma.sync"]
    return ["mma.sync", "wgmma"]


def tiles_of(implementation: str, D: int) -> Tiles:
    return attention.default_tiles(D, (9, 0) if implementation == "wgmma" else (8, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("D", attention.HEAD_DIMS)
@pytest.mark.parametrize(("B", "T", "H", "G", "mean"), GPU_SHAPES)
def test_forward(gpu: Device, B, T, H, G, D, mean, implementation) -> None:
    check_forward(gpu, B, T, H, G, D, mean, tiles_of(implementation, D))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("D", attention.HEAD_DIMS)
@pytest.mark.parametrize(("B", "T", "H", "G", "mean"), GPU_SHAPES)
def test_backward(gpu: Device, B, T, H, G, D, mean, implementation) -> None:
    check_backward(gpu, B, T, H, G, D, mean, tiles_of(implementation, D))


EVERY_TILE = [
    pytest.param(D, tiles, id=f"{D}-{i}")
    for D in attention.HEAD_DIMS
    for i, tiles in enumerate(attention.candidate_tiles(D))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "tiles"), EVERY_TILE)
@pytest.mark.parametrize(("T", "mean"), [(131, None), (333, 25.0)])
def test_every_tile_shape(gpu: Device, D, tiles, T, mean) -> None:
    check_forward(gpu, 2, T, 6, 2, D, mean, tiles)
    check_backward(gpu, 2, T, 6, 2, D, mean, tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("D", attention.HEAD_DIMS)
def test_large_scores(gpu: Device, D, implementation) -> None:
    """Rows whose probability sits in one key: the running maximum carries them."""
    check_forward(gpu, 1, 300, 2, 1, D, tiles=tiles_of(implementation, D), size=4.0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FP32)
def test_fp32(gpu: Device, case) -> None:
    check_forward(gpu, **{**case, "T": 75})
    check_backward(gpu, **{**case, "T": 75})


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "D"), [(77, 64), (130, 128)])
def test_user_functions(gpu: Device, T, D, causal) -> None:
    check_user_functions(gpu, 2, T, 4, 2, D, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", implementations())
@pytest.mark.parametrize("D", attention.HEAD_DIMS)
def test_repeats_bit_for_bit(gpu: Device, D, implementation) -> None:
    check_repeats(gpu, 2, 700, 6, 2, D, tiles_of(implementation, D))


@pytest.mark.gpu
def test_nothing_to_do(gpu: Device) -> None:
    check_nothing_to_do(gpu)


@pytest.mark.gpu
def test_rejections(gpu: Device) -> None:
    check_rejections(gpu)
