"""fp8_health: exact counts, against the codes of ml_dtypes' cast (fp8_health_ref)."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.kernels.fp8 import quantize_ref
from llmq_nb.kernels.fp8_health import fp8_health_launch, fp8_health_ref
from tests.kernels.harness import Device, run_sim

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ["e4m3", "e5m2"]


def expected(x: np.ndarray, absmax: float, format: str) -> tuple[int, int]:
    codes = quantize_ref(x, absmax, format).view(DType(format).numpy)
    return fp8_health_ref(x, codes, format)


def check_every_input(
    device: Device, format: str, absmax: float, exponents: tuple[int, ...]
) -> None:
    """All bfloat16 patterns with these exponents, a launch for each exponent and sign, so that no
    two mistakes add up to nothing."""
    groups = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(BF16).reshape(512, 128)
    x, slot = device.put(groups), device.put(np.array([absmax], np.float32))
    counts = device.zeros((512, 2), np.uint32)
    launched = [*exponents, *(256 + e for e in exponents)]
    for g in launched:
        fp8_health_launch(
            counts.address + 8 * g, x.address + 256 * g, slot.address, n=128, format=format,
            stream=device.stream,
        )  # fmt: skip
    want = [expected(groups[g], absmax, format) for g in launched]
    np.testing.assert_array_equal(counts.numpy()[launched], want)
    assert counts.numpy().sum() == np.sum(want)


def check_sizes(device: Device, n: int, format: str) -> None:
    """Values of all magnitudes; the counts are added to what is there."""
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) * np.exp2(rng.uniform(-60, 0, n))).astype(BF16)
    x[::7] = 0
    absmax = float(np.abs(x.astype(np.float32)).max())
    slot = device.put(np.array([0, 0, 5, 7], np.uint32))
    top = device.put(np.array([absmax], np.float32))
    fp8_health_launch(
        slot.address + 8, device.put(x).address, top.address, n=n, format=format,
        stream=device.stream,
    )  # fmt: skip
    underflowed, saturated = expected(x, absmax, format)
    assert 0 < underflowed < n and 0 < saturated
    np.testing.assert_array_equal(slot.numpy(), [0, 0, 5 + underflowed, 7 + saturated])


# With absmax 1 e4m3 becomes 0 at 2^-10 / 448 = 2^-18.8, e5m2 at 2^-17 / 57344 = 2^-32.8; 126 and
# 127: the largest code's; 0: zero and subnormals; 255: infinity and NaN
EXPONENTS = {"e4m3": (0, 107, 108, 109, 126, 127, 255), "e5m2": (0, 93, 94, 95, 126, 127, 255)}


@pytest.mark.parametrize("format", FORMATS)
def test_both_ends_simulated(format: str) -> None:
    run_sim(check_every_input, format=format, absmax=1.0, exponents=EXPONENTS[format])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [72, 8192 + 24])  # less than a block, and a ragged second one
def test_sizes_simulated(n: int, format: str) -> None:
    run_sim(check_sizes, n=n, format=format)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("absmax", [1.0, 448.0, 57344.0, 3e38, 1e-33, 0.0])
def test_every_input(gpu: Device, absmax: float, format: str) -> None:
    check_every_input(gpu, format, absmax, tuple(range(256)))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("n", [72, 8192, 8192 + 24, 1 << 22])
def test_sizes(gpu: Device, n: int, format: str) -> None:
    check_sizes(gpu, n, format)
