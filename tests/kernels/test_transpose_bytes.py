"""transpose_bytes moves bits: exact against NumPy, padding zero."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import transpose_bytes
from llmq_nb.kernels.transpose_bytes import transpose_bytes_ref
from tests.kernels.harness import Device, run_sim

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def check(device: Device, R: int, C: int) -> None:
    x = np.random.default_rng(R + C).integers(0, 256, (R, C)).astype(np.uint8)
    want = transpose_bytes_ref(x)
    y = device.empty(want.shape, np.uint8)
    transpose_bytes.transpose_bytes_launch(
        y.address, device.put(x).address, R=R, C=C, stream=device.stream
    )
    np.testing.assert_array_equal(y.numpy(), want)


def check_user_function(device: Device) -> None:
    x = np.random.default_rng(1).integers(0, 256, (20, 32)).astype(np.uint8).view(E4M3)
    y = transpose_bytes.transpose(device.put(x).array())
    y = y if isinstance(y, np.ndarray) else y.numpy()
    np.testing.assert_array_equal(y.view(np.uint8)[:, :20], x.T.view(np.uint8))
    assert y.shape == (32, 32) and not y.view(np.uint8)[:, 20:].any()
    with pytest.raises(ValueError, match="multiple of 16"):
        transpose_bytes.transpose(device.put(np.zeros((16, 24), np.uint8).view(E4M3)).array())


# one chunk; rows that need padding; one tile; tails both ways
@pytest.mark.parametrize(("R", "C"), [(16, 16), (5, 32), (128, 128), (130, 144)])
def test_simulated(R: int, C: int) -> None:
    run_sim(check, R=R, C=C)


def test_user_function_simulated() -> None:
    run_sim(check_user_function)


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "C"), [(16, 16), (130, 144), (3584, 4864), (1001, 18944)])
def test_transpose_bytes(gpu: Device, R: int, C: int) -> None:
    check(gpu, R, C)


@pytest.mark.gpu
def test_user_function(gpu: Device) -> None:
    check_user_function(gpu)
