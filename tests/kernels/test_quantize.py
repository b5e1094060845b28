"""FP8 conversions, exact: every bfloat16 input and every code, against ml_dtypes' casts."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.kernels import quantize
from llmq_nb.kernels.fp8 import quantize_ref, scales_ref
from tests.kernels.harness import Device, run_sim

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ["e4m3", "e5m2"]


def same_codes(actual: np.ndarray, expected: np.ndarray, format: str) -> None:
    """Equal bits, but any NaN is as good as another (encodings of NaN differ)."""
    kind = DType(format).numpy
    nan = np.isnan(expected.view(kind).astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.view(kind).astype(np.float32)), nan)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])


def check_all_inputs(
    device: Device, format: str, hardware: bool, absmax: float, part: int = 1
) -> None:
    """All 65536 bfloat16 patterns (every part-th), scaled by an absmax that makes all regimes
    occur."""
    x = np.arange(0, 65536, part, dtype=np.uint32).astype(np.uint16).view(BF16)
    x = x[: x.size // 16 * 16]
    q, scale = device.empty((x.size,), np.uint8), device.empty((1,), np.float32)
    slot = device.put(np.array([absmax], np.float32))
    quantize.quantize_launch(
        q.address, scale.address, device.put(x).address, slot.address, n=x.size, format=format,
        hardware=hardware, stream=device.stream,
    )  # fmt: skip
    same_codes(q.numpy(), quantize_ref(x, absmax, format), format)
    assert scale.numpy()[0] == scales_ref(np.float32(absmax), format)[1]


def check_transpose(
    device: Device, R: int, C: int, format: str, hardware: bool, row_major: bool
) -> None:
    x = np.random.default_rng(R * C).standard_normal((R, C)).astype(BF16)
    absmax = float(np.abs(x.astype(np.float32)).max())
    q, q_t = device.empty((R, C), np.uint8), device.empty((C, R), np.uint8)
    scale = device.empty((1,), np.float32)
    quantize.quantize_transpose_launch(
        q.address if row_major else 0, q_t.address, scale.address, device.put(x).address,
        device.put(np.array([absmax], np.float32)).address, R=R, C=C, format=format,
        hardware=hardware, stream=device.stream,
    )  # fmt: skip
    expected = quantize_ref(x, absmax, format)
    np.testing.assert_array_equal(q_t.numpy(), expected.T)
    np.testing.assert_array_equal(q.numpy(), expected if row_major else np.full((R, C), 0xFF))
    assert scale.numpy()[0] == scales_ref(np.float32(absmax), format)[1]


def check_decode(device: Device, format: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    out = device.empty((256,), BF16)
    quantize.decode_launch(
        out.address, device.put(codes).address, n=256, format=format, stream=device.stream
    )
    expected = codes.view(DType(format).numpy).astype(np.float32)
    result = out.numpy().astype(np.float32)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(result[finite].view(np.uint32), expected[finite].view(np.uint32))
    assert np.isnan(result[~finite]).all()  # e5m2's infinities too: encode saturates instead


def check_user_function(device: Device) -> None:
    x = np.random.default_rng(0).standard_normal((32, 48)).astype(BF16)
    absmax = np.abs(x.astype(np.float32)).max()
    slot = device.put(np.array([absmax], np.float32)).array()
    for transpose in (False, True):
        q, scale = quantize.quantize(device.put(x).array(), slot, transpose=transpose)
        q, scale = (a if isinstance(a, np.ndarray) else a.numpy() for a in (q, scale))
        expected = quantize_ref(x, float(absmax), "e4m3")
        np.testing.assert_array_equal(q.view(np.uint8), expected.T if transpose else expected)
        # the promise of `scale`: half a step of e4m3, 2^-4, and the two float32 roundings
        back = scale * q.astype(np.float32)
        error = np.abs((back.T if transpose else back) - x.astype(np.float32))
        assert (
            error <= np.maximum(np.abs(x.astype(np.float32)), absmax * 2.0**-14) * 2.0**-3.9
        ).all()


def check_user_errors(device: Device) -> None:
    slot = device.put(np.ones(1, np.float32)).array()
    with pytest.raises(ValueError, match="multiples of 16"):
        quantize.quantize(device.put(np.zeros((16, 24), BF16)).array(), slot)
    with pytest.raises(ValueError, match="'e4m3' or 'e5m2'"):
        quantize.quantize(device.put(np.zeros((16, 16), BF16)).array(), slot, format="e3m4")


# 1: scaled values from saturation to below the least subnormal; 3e38: no saturation; 0: the floor
ABSMAX = [1.0, 3e38, 0.0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hardware", [True, False], ids=["hardware", "software"])
def test_inputs_simulated(format: str, hardware: bool) -> None:
    for absmax in ABSMAX:
        run_sim(check_all_inputs, format=format, hardware=hardware, absmax=absmax, part=5)


@pytest.mark.parametrize(
    ("R", "C", "format", "hardware", "row_major"),
    [
        (128, 128, "e4m3", True, True),
        (16, 48, "e5m2", False, True),  # less than a tile
        (144, 272, "e4m3", True, False),  # tails both ways
    ],
)
def test_transpose_simulated(R, C, format, hardware, row_major) -> None:
    run_sim(check_transpose, R=R, C=C, format=format, hardware=hardware, row_major=row_major)


@pytest.mark.parametrize("format", FORMATS)
def test_decode_simulated(format: str) -> None:
    run_sim(check_decode, format=format)


def test_user_function_simulated() -> None:
    run_sim(check_user_function)
    run_sim(check_user_errors)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hardware", [True, False], ids=["hardware", "software"])
@pytest.mark.parametrize("absmax", ABSMAX)
def test_inputs(gpu: Device, format: str, hardware: bool, absmax: float) -> None:
    check_all_inputs(gpu, format, hardware, absmax)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hardware", [True, False], ids=["hardware", "software"])
@pytest.mark.parametrize(("R", "C"), [(16, 16), (144, 272), (1024, 896), (2000, 4864)])
def test_transpose(gpu: Device, R: int, C: int, format: str, hardware: bool) -> None:
    check_transpose(gpu, R, C, format, hardware, row_major=True)
    check_transpose(gpu, R, C, format, hardware, row_major=False)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_decode(gpu: Device, format: str) -> None:
    check_decode(gpu, format)


@pytest.mark.gpu
def test_user_function(gpu: Device) -> None:
    check_user_function(gpu)
