"""elementwise: exact against NumPy and ml_dtypes; normal values against float64 of the same Philox
words."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import elementwise
from llmq_nb.kernels.elementwise import fill_normal_ref
from tests.kernels.harness import U16, Device, assert_within, run_sim

BF16 = np.dtype(ml_dtypes.bfloat16)
FP32 = np.dtype(np.float32)


def wide(seed: int, n: int, dtype: np.dtype) -> np.ndarray:
    """Values over many binades, with both zeros, infinities and subnormals."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-30, 30, n)
    x[:6] = [0.0, -0.0, np.inf, -np.inf, 1e-40, -1e-40]
    return x.astype(dtype)


def check_copy(device: Device, n: int) -> None:
    x = wide(0, n, FP32)
    out = device.empty((n,), FP32)
    elementwise.copy_launch(out.address, device.put(x).address, nbytes=4 * n, stream=device.stream)
    np.testing.assert_array_equal(out.numpy().view(np.uint32), x.view(np.uint32))
    elementwise.clear_launch(out.address, nbytes=4 * n - 4, stream=device.stream)
    assert (out.numpy()[:-1] == 0).all() and out.numpy()[-1] == x[-1]


def check_mask(device: Device, n: int) -> None:
    """What products are timed on: no byte is NaN or infinite as e4m3 or e5m2."""
    x = np.random.default_rng(n).integers(0, 1 << 32, n, np.uint32)
    buffer = device.put(x)
    mask = elementwise.FINITE_BYTES
    elementwise.mask_launch(buffer.address, nbytes=4 * n, mask=mask, stream=device.stream)
    found = buffer.numpy()
    np.testing.assert_array_equal(found, x & np.uint32(0xBFBFBFBF))
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        assert np.isfinite(found.view(dtype).astype(np.float32)).all()


def check_convert(device: Device, n: int) -> None:
    x = wide(1, n, FP32)
    x16 = x.astype(BF16)
    out16, out32 = device.empty((n,), BF16), device.empty((n,), FP32)
    elementwise.convert_launch(
        out16.address,
        device.put(x).address,
        n=n,
        source="fp32",
        target="bf16",
        stream=device.stream,
    )
    elementwise.convert_launch(
        out32.address,
        device.put(x16).address,
        n=n,
        source="bf16",
        target="fp32",
        stream=device.stream,
    )
    np.testing.assert_array_equal(out16.numpy().view(np.uint16), x16.view(np.uint16))
    np.testing.assert_array_equal(
        out32.numpy().view(np.uint32), x16.astype(np.float32).view(np.uint32)
    )


def check_absmax(device: Device, n: int, dtype: str, position: int) -> None:
    x = np.random.default_rng(2).uniform(-1, 1, n).astype(BF16 if dtype == "bf16" else FP32)
    x[position] = -3.5  # the answer, at a chosen place
    for before, expected in ((0.0, 3.5), (7.0, 7.0)):
        slot = device.put(np.array([before], np.float32))
        elementwise.absmax_launch(
            slot.address, device.put(x).address, n=n, dtype=dtype, stream=device.stream
        )
        assert slot.numpy()[0] == expected


def check_fill_normal(device: Device, n: int, dtype: str, start: int = 0) -> None:
    storage = BF16 if dtype == "bf16" else FP32
    out = device.empty((n,), storage)
    elementwise.fill_normal_launch(
        out.address, n=n, start=start, seed=3, tensor=2, std=0.02, mean=0.5, dtype=dtype,
        stream=device.stream,
    )  # fmt: skip
    expected = fill_normal_ref(n, seed=3, tensor=2, std=0.02, mean=0.5, start=start)
    # radius <= 6.7 times 2^-20 of angle and radius each; lg2.approx near 1 adds sqrt(2^-22 * 1.4)
    bound = 0.02 * (6.7 * 2.0**-19 + 2.0**-10.5)
    assert_within(
        out.numpy(), expected, relative=U16 if dtype == "bf16" else 2.0**-23, absolute=bound
    )


def check_user_absmax(device: Device) -> None:
    x = device.put(wide(5, 64, BF16)[6:62].copy())
    result = elementwise.absmax(x.array())
    host = result if isinstance(result, np.ndarray) else result.numpy()
    assert host.shape == (1,) and host[0] == np.abs(x.numpy().astype(np.float32)).max()


def test_reference_normals_are_normal() -> None:
    z = fill_normal_ref(1 << 20, seed=0, tensor=0, std=1.0)
    n = z.size
    assert abs(z.mean()) < 5 / np.sqrt(n) and abs(z.std() - 1) < 5 / np.sqrt(2 * n)
    assert abs((z**3).mean()) < 5 * np.sqrt(15 / n) and abs((z**4).mean() - 3) < 5 * np.sqrt(96 / n)
    lag = z[:-1] * z[1:]  # the two values of a pair are independent
    assert abs(lag.mean()) < 5 / np.sqrt(n)


# 8: one piece; 4104: one piece more than half a block of four pieces a thread
@pytest.mark.parametrize("n", [8, 4104])
def test_copies_simulated(n: int) -> None:
    run_sim(check_copy, n=n)
    run_sim(check_mask, n=n)
    run_sim(check_convert, n=n)


@pytest.mark.parametrize(
    ("n", "dtype", "position"), [(8, "bf16", 7), (8200, "bf16", 8199), (8200, "fp32", 8192)]
)
def test_absmax_simulated(n: int, dtype: str, position: int) -> None:
    run_sim(check_absmax, n=n, dtype=dtype, position=position)


def test_fill_normal_simulated() -> None:
    run_sim(check_fill_normal, n=2056, dtype="bf16")
    run_sim(check_fill_normal, n=64, dtype="fp32", start=1 << 36)


def test_user_absmax_simulated() -> None:
    run_sim(check_user_absmax)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 4104, 1 << 20])
def test_copies(gpu: Device, n: int) -> None:
    check_copy(gpu, n)
    check_mask(gpu, n)
    check_convert(gpu, n)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("position", [0, (1 << 25) - 1])
def test_absmax(gpu: Device, dtype: str, position: int) -> None:
    check_absmax(gpu, 1 << 25, dtype, position)
    check_user_absmax(gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fill_normal(gpu: Device, dtype: str) -> None:
    check_fill_normal(gpu, 1_000_008, dtype, start=1 << 36)
