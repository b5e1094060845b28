"""transpose moves bits: exact against NumPy, NaN patterns included."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import transpose
from llmq_nb.kernels.transpose import transpose_ref
from tests.kernels.harness import Device, run_sim

BF16 = np.dtype(ml_dtypes.bfloat16)


def random_bits(R: int, C: int) -> np.ndarray:
    return np.random.default_rng(R + C).integers(0, 65536, (R, C)).astype(np.uint16)


def check(device: Device, R: int, C: int) -> None:
    x = random_bits(R, C)
    y = device.empty((C, R), np.uint16)
    transpose.transpose_launch(y.address, device.put(x).address, R=R, C=C, stream=device.stream)
    np.testing.assert_array_equal(y.numpy(), transpose_ref(x))


def check_user_function(device: Device) -> None:
    x = random_bits(16, 24).view(BF16)
    y = transpose.transpose(device.put(x).array())
    y = y if isinstance(y, np.ndarray) else y.numpy()
    np.testing.assert_array_equal(y.view(np.uint16), x.T.view(np.uint16))
    with pytest.raises(ValueError, match="multiples of 8"):
        transpose.transpose(device.put(np.zeros((16, 12), BF16)).array())


# one piece; one tile; tails both ways
@pytest.mark.parametrize(("R", "C"), [(8, 8), (64, 64), (72, 136)])
def test_simulated(R: int, C: int) -> None:
    run_sim(check, R=R, C=C)


def test_user_function_simulated() -> None:
    run_sim(check_user_function)


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "C"), [(8, 8), (64, 64), (72, 136), (4096, 896), (1000, 4864)])
def test_transpose(gpu: Device, R: int, C: int) -> None:
    check(gpu, R, C)


@pytest.mark.gpu
def test_user_function(gpu: Device) -> None:
    check_user_function(gpu)
