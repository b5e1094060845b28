"""describe, empty_like and DLPack round trips, on NumPy arrays in the simulator and on the GPU.

Oracle: NumPy's own address, shape and bytes.
"""

import gc

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.core.dtype import DType
from llmq_nb.kernels import dlpack
from llmq_nb.kernels.arrays import DeviceArray, _is_contiguous, _last_stride, describe, empty_like
from tests.kernels.harness import Device, run_sim


def check_describe(device: Device) -> None:
    x = device.put(np.arange(24, dtype=ml_dtypes.bfloat16).reshape(2, 12)).array()
    found = describe(x, dtype=DType.BF16, shape=(None, 12), name="x")
    assert found.shape == (2, 12) and found.size == 24
    out = empty_like(found, shape=(3,), dtype=DType.FP32)
    assert tuple(out.shape) == (3,)


def check_describe_refuses(device: Device) -> None:
    host = np.zeros((4, 32), ml_dtypes.bfloat16)
    x = device.put(host).array()
    for bad, message in [
        (lambda: describe(x, dtype=DType.FP32, name="x"), "x is bf16, must be fp32"),
        (lambda: describe(x, dtype=DType.BF16, shape=(4, 31), name="x"), r"must be \(4, 31\)"),
        (lambda: describe(x, dtype=DType.BF16, shape=(4,), name="x"), r"must be \(4\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            bad()
    with pytest.raises(TypeError, match="x is a list"):
        describe([1.0], dtype=DType.FP32, name="x")


def check_describe_refuses_layouts(device: Device) -> None:
    x = device.put(np.zeros((4, 32), ml_dtypes.bfloat16)).array()
    with pytest.raises(ValueError, match="not C-contiguous"):
        describe(x[:, ::2], dtype=DType.BF16, name="x")
    with pytest.raises(ValueError, match="no multiple of 16"):
        describe(x.reshape(-1)[1:], dtype=DType.BF16, name="x")


def test_describe_simulated() -> None:
    run_sim(check_describe)


def test_refuses_simulated() -> None:
    run_sim(check_describe_refuses)
    run_sim(check_describe_refuses_layouts)


def test_numpy_is_refused_outside_the_simulator() -> None:
    with pytest.raises(ValueError, match="not in GPU memory"):
        describe(np.zeros(4, np.float32), dtype=DType.FP32, name="x")


def test_capsule_says_what_numpy_says() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = dlpack.read(x.__dlpack__())
    assert (found.address, found.shape, found.dtype) == (x.ctypes.data, (3, 4), DType.FP32)
    assert found.device == (1, 0)  # host memory


def test_numpy_reads_our_capsule_and_lets_go() -> None:
    class Host:
        def __init__(self) -> None:
            self.data = np.arange(6, dtype=np.int32)

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: object) -> object:
            return dlpack.write(self.data.ctypes.data, (2, 3), DType.INT32, (1, 0), self)

    before = len(dlpack._exported)
    view = np.from_dlpack(Host())  # pyright: ignore[reportArgumentType]
    gc.collect()
    np.testing.assert_array_equal(view, [[0, 1, 2], [3, 4, 5]])  # the owner is kept alive
    del view
    unused = Host().__dlpack__()
    del unused
    gc.collect()
    assert len(dlpack._exported) == before


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((2, 3), (12, 4), True),
        ((2, 3), (16, 4), False),
        ((2, 1), (4, 400), True),  # extents of one have any stride
        ((3, 2), (4, 12), False),
        ((0, 5), (7, 7), True),
    ],
)
def test_contiguity(shape, strides, contiguous) -> None:
    assert _is_contiguous(shape, strides) is contiguous


def test_last_stride_skips_extents_of_one() -> None:
    assert _last_stride((5, 1), (2, 77)) == 2
    assert _last_stride((1, 1), (3, 7)) is None


@pytest.mark.gpu
def test_describe(gpu: Device) -> None:
    check_describe(gpu)


@pytest.mark.gpu
def test_refuses(gpu: Device) -> None:
    check_describe_refuses(gpu)


@pytest.mark.gpu
def test_our_array_passes_through_dlpack(gpu: Device) -> None:
    x = DeviceArray((3, 16), DType.BF16, 0)
    found = describe(x, dtype=DType.BF16, name="x")
    assert (found.address, found.shape) == (x.address, (3, 16))
    assert x.numpy().dtype == ml_dtypes.bfloat16
