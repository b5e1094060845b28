"""FP8 conversions, exact: every bfloat16 input and every code, against ml_dtypes' casts; special
values against the cpu engine's quantisation."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core import rounding
from llmq_nb.core.dtype import FP8_MAX, DType
from llmq_nb.kernels import elementwise, quantize
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


def all_bf16(part: int = 1) -> np.ndarray:
    """All 65536 bfloat16 patterns, or every part-th; a multiple of 16 of them."""
    x = np.arange(0, 65536, part, dtype=np.uint32).astype(np.uint16).view(BF16)
    return x[: x.size // 16 * 16]


def all_codes(
    device: Device, format: str, hardware: bool, absmax: float, part: int = 1
) -> np.ndarray:
    """Codes of `all_bf16`, scaled by an absmax that makes all regimes occur."""
    x = all_bf16(part)
    q, scale = device.empty((x.size,), np.uint8), device.empty((1,), np.float32)
    slot = device.put(np.array([absmax], np.float32))
    quantize.quantize_launch(
        q.address, scale.address, device.put(x).address, slot.address, n=x.size, format=format,
        hardware=hardware, stream=device.stream,
    )  # fmt: skip
    assert scale.numpy()[0] == scales_ref(np.float32(absmax), format)[1]
    return q.numpy()


def check_all_inputs(
    device: Device, format: str, hardware: bool, absmax: float, part: int = 1
) -> None:
    codes = all_codes(device, format, hardware, absmax, part)
    same_codes(codes, quantize_ref(all_bf16(part), absmax, format), format)


def check_transpose(
    device: Device, R: int, C: int, format: str, hardware: bool, row_major: bool
) -> None:
    x = np.random.default_rng(R * C).standard_normal((R, C)).astype(BF16)
    absmax = float(np.abs(x.astype(np.float32)).max())
    padding = -R % 16
    q, q_t = device.empty((R, C), np.uint8), device.empty((C, R + padding), np.uint8)
    scale = device.empty((1,), np.float32)
    quantize.quantize_transpose_launch(
        q.address if row_major else 0, q_t.address, scale.address, device.put(x).address,
        device.put(np.array([absmax], np.float32)).address, R=R, C=C, format=format,
        hardware=hardware, stream=device.stream,
    )  # fmt: skip
    expected = quantize_ref(x, absmax, format)
    np.testing.assert_array_equal(q_t.numpy(), np.pad(expected.T, ((0, 0), (0, padding))))
    np.testing.assert_array_equal(q.numpy(), expected if row_major else np.full((R, C), 0xFF))
    assert scale.numpy()[0] == scales_ref(np.float32(absmax), format)[1]


def special(name: str) -> np.ndarray:
    """(17, 32) with something in it that a user would ask about."""
    x = np.random.default_rng(7).standard_normal((17, 32)).astype(np.float32)
    if name == "zeros":
        x[:] = 0.0
    elif name in ("1e-38", "1e38"):
        x *= float(name) / np.abs(x).max()
    elif name == "outlier":
        x[3, 5] = 1e30
    elif name == "nan":
        x[16, 31] = np.nan  # where an edge is read again for the padding
        x[0, 0] = -np.nan
    elif name == "inf":
        x[16, 31], x[2, 2] = np.inf, -np.inf
    elif name == "all_nan":
        x[:] = np.nan
    return x.astype(BF16)


SPECIAL = ["zeros", "1e-38", "1e38", "outlier", "nan", "inf", "all_nan"]


def check_special(device: Device, name: str, format: str, hardware: bool) -> None:
    """The chain of a product's input, absmax to codes, against the cpu engine's: the same bits (of
    a NaN, that it is one). A NaN or infinity stays visible, everything else stays finite."""
    x, kind = special(name), DType(format)
    R, C = x.shape
    slot = device.zeros((4,), np.uint32)
    scale, absmax = slot.address, slot.address + 4
    source = device.put(x)
    q, q_t = device.empty((R, C), np.uint8), device.empty((C, 32), np.uint8)
    common = {"format": format, "hardware": hardware, "stream": device.stream}
    elementwise.absmax_launch(absmax, source.address, n=x.size, stream=device.stream)
    quantize.quantize_transpose_launch(
        q.address, q_t.address, scale, source.address, absmax, R=R, C=C, **common
    )
    flat = device.empty((R, C), np.uint8)
    quantize.quantize_launch(flat.address, scale, source.address, absmax, n=x.size, **common)

    top = rounding.absmax(x)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes, expected_scale = rounding.quantize(x, kind, top)
    got_scale, got_top = slot.numpy()[:2].view(np.float32)
    np.testing.assert_array_equal([got_top, got_scale], [top, expected_scale])
    same_codes(q.numpy(), codes.view(np.uint8), format)
    np.testing.assert_array_equal(flat.numpy(), q.numpy())
    np.testing.assert_array_equal(q_t.numpy()[:, :R], q.numpy().T)
    assert not q_t.numpy()[:, R:].any()  # the padding adds nothing, whatever the edge holds

    values = q.numpy().view(kind.numpy).astype(np.float32)
    finite = np.isfinite(x.astype(np.float32))
    if name == "inf":  # one infinity takes the scale with it: no product is finite
        assert np.isinf(got_scale) and np.isnan(values[~finite]).all()
    else:  # a NaN costs its own place, no other
        np.testing.assert_array_equal(np.isfinite(values), finite)
        assert np.isfinite(got_scale)
    if name == "1e38":
        assert np.abs(values).max() == FP8_MAX[kind]


def check_nan_absmax(device: Device, format: str, hardware: bool) -> None:
    """A scale that is not a number makes no finite code (max.f32 would have taken the floor)."""
    x = np.ones((16, 16), BF16)
    slot, scale = device.put(np.array([np.nan], np.float32)), device.empty((1,), np.float32)
    q = device.empty((16, 16), np.uint8)
    quantize.quantize_launch(
        q.address, scale.address, device.put(x).address, slot.address, n=x.size, format=format,
        hardware=hardware, stream=device.stream,
    )  # fmt: skip
    assert np.isnan(q.numpy().view(DType(format).numpy).astype(np.float32)).all()
    assert np.isnan(scale.numpy()).all()


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


def check_user_function(device: Device, R: int = 32) -> None:
    x = np.random.default_rng(0).standard_normal((R, 48)).astype(BF16)
    absmax = np.abs(x.astype(np.float32)).max()
    slot = device.put(np.array([absmax], np.float32)).array()
    for transpose in (False, True):
        q, scale = quantize.quantize(device.put(x).array(), slot, transpose=transpose)
        q, scale = (a if isinstance(a, np.ndarray) else a.numpy() for a in (q, scale))
        expected = quantize_ref(x, float(absmax), "e4m3")
        padded = np.pad(expected.T, ((0, 0), (0, -R % 16)))
        np.testing.assert_array_equal(q.view(np.uint8), padded if transpose else expected)
        # the promise of `scale`: half a step of e4m3, 2^-4, and the two float32 roundings
        back = scale * q.astype(np.float32)
        error = np.abs((back[:, :R].T if transpose else back) - x.astype(np.float32))
        assert (
            error <= np.maximum(np.abs(x.astype(np.float32)), absmax * 2.0**-14) * 2.0**-3.9
        ).all()


def check_user_errors(device: Device) -> None:
    slot = device.put(np.ones(1, np.float32)).array()
    with pytest.raises(ValueError, match="C a multiple of 16"):
        quantize.quantize(device.put(np.zeros((16, 24), BF16)).array(), slot)
    with pytest.raises(ValueError, match="'e4m3' or 'e5m2'"):
        quantize.quantize(device.put(np.zeros((16, 16), BF16)).array(), slot, format="e3m4")


# 1: scaled values from saturation to below the least subnormal; 3e38: no saturation; 0: the floor
ABSMAX = [1.0, 3e38, 0.0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hardware", [True, False], ids=["hardware", "software"])
def test_inputs_simulated(format: str, hardware: bool) -> None:
    for absmax in ABSMAX:
        part = 1 if absmax == 1.0 else 5
        run_sim(check_all_inputs, format=format, hardware=hardware, absmax=absmax, part=part)


# R of 1, 15, 16, 17: less than a tile, with and without padding; 130: a second tile of two rows
ROWS = [1, 15, 16, 17, 130]


@pytest.mark.parametrize(
    ("R", "C", "format", "hardware", "row_major"),
    [
        (128, 128, "e4m3", True, True),
        (16, 48, "e5m2", False, True),
        (144, 272, "e4m3", True, False),  # tails both ways
        *((R, 48, f, h, R != 15) for R in ROWS for f in FORMATS for h in (True, False)),
    ],
)
def test_transpose_simulated(R, C, format, hardware, row_major) -> None:
    run_sim(check_transpose, R=R, C=C, format=format, hardware=hardware, row_major=row_major)


@pytest.mark.parametrize("format", FORMATS)
def test_decode_simulated(format: str) -> None:
    run_sim(check_decode, format=format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hardware", [True, False], ids=["hardware", "software"])
def test_special_values_simulated(format: str, hardware: bool) -> None:
    for name in SPECIAL:
        run_sim(check_special, name=name, format=format, hardware=hardware)
    run_sim(check_nan_absmax, format=format, hardware=hardware)


def test_user_function_simulated() -> None:
    run_sim(check_user_function)
    run_sim(check_user_function, R=5)
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
@pytest.mark.parametrize(
    ("R", "C"), [*((R, 48) for R in ROWS), (144, 272), (1024, 896), (2000, 4864), (2011, 896)]
)
def test_transpose(gpu: Device, R: int, C: int, format: str, hardware: bool) -> None:
    check_transpose(gpu, R, C, format, hardware, row_major=True)
    check_transpose(gpu, R, C, format, hardware, row_major=False)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_decode(gpu: Device, format: str) -> None:
    check_decode(gpu, format)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hardware", [True, False], ids=["hardware", "software"])
def test_special_values(gpu: Device, format: str, hardware: bool) -> None:
    for name in SPECIAL:
        check_special(gpu, name, format, hardware)
    check_nan_absmax(gpu, format, hardware)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_hardware_and_software_give_the_same_bits(gpu: Device, format: str) -> None:
    """Of all 65536 inputs, NaN included."""
    for absmax in ABSMAX:
        hardware, software = (all_codes(gpu, format, h, absmax) for h in (True, False))
        np.testing.assert_array_equal(hardware, software)


@pytest.mark.gpu
def test_user_function(gpu: Device) -> None:
    check_user_function(gpu)
    check_user_function(gpu, R=5)
