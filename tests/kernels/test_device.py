"""Device errors name the call and the mend (against a fake driver); graphs replay what was recorded
(GPU)."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmq_nb.core import device, graph
from llmq_nb.core.device import DeviceError
from llmq_nb.core.errors import UserError
from llmq_nb.kernels import elementwise
from tests.kernels.harness import Device


class FakeDriver(SimpleNamespace):
    """The few driver calls that opening a device makes, with chosen answers."""

    CUDA_VERSION = 13000
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
    )

    def __init__(
        self, *, init: Any = 0, version: int = 13000, cc: tuple[int, int] = (8, 9)
    ) -> None:
        self.init, self.version, self.cc = init, version, cc

    def cuInit(self, flags: int) -> tuple[int]:
        if isinstance(self.init, Exception):
            raise self.init
        return (self.init,)

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 1

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDeviceGetAttribute(self, which: int, handle: int) -> tuple[int, int]:
        return 0, {75: self.cc[0], 76: self.cc[1], 16: 80}[which]

    def cuDeviceGetName(self, size: int, handle: int) -> tuple[int, bytes]:
        return 0, b"Fake GPU\0\0"

    def cuGetErrorName(self, status: int) -> tuple[int, bytes]:
        return 0, b"CUDA_ERROR_OUT_OF_MEMORY"

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, b"out of memory"


@pytest.fixture
def fresh_caches() -> Any:
    def clear() -> None:
        device._initialise.cache_clear()
        device.open_device.cache_clear()

    clear()
    yield
    clear()


@pytest.mark.parametrize(
    ("answers", "ordinal", "what", "mend"),
    [
        ({"init": RuntimeError("libcuda.so.1")}, 0, "no NVIDIA driver", 'device = "cpu"'),
        ({"init": 100}, 0, "no NVIDIA GPU is visible", "CUDA_VISIBLE_DEVICES"),
        ({"version": 12040}, 0, "driver is for CUDA 12.4", "llmq-nb[cu12]"),
        ({}, 3, "GPU 3 does not exist", "this machine shows 1"),
        ({"cc": (7, 5)}, 0, "Fake GPU has compute capability 7.5", "8.0"),
    ],
)
def test_what_a_user_can_get_wrong(
    monkeypatch: pytest.MonkeyPatch, fresh_caches: None, answers: dict[str, Any], ordinal: int,
    what: str, mend: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(device, "driver", lambda: FakeDriver(**answers))
    with pytest.raises(UserError) as caught:
        device.open_device(ordinal)
    assert what in caught.value.what and mend in caught.value.mend
    assert "\n" not in str(caught.value)


def test_a_failed_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "driver", lambda: FakeDriver())
    with pytest.raises(
        DeviceError, match="cuMemAlloc of 3.0 MiB: CUDA_ERROR_OUT_OF_MEMORY"
    ) as caught:
        device.check((2, None), "cuMemAlloc of 3.0 MiB")
    assert caught.value.code == "CUDA_ERROR_OUT_OF_MEMORY"
    assert device.check((0, 5), "x") == 5 and device.check((0, 5, 6), "x") == (5, 6)


@pytest.mark.gpu
def test_graph_replays_and_a_failed_recording_leaves_the_stream_usable(gpu: Any) -> None:
    x, y = gpu.put(np.arange(64, dtype=np.float32)), gpu.zeros((64,), np.float32)

    def copy() -> None:
        elementwise.copy_launch(y.address, x.address, nbytes=256, stream=gpu.stream)

    def fail() -> None:
        copy()
        raise KeyError("planned")

    copy()  # loads the kernel, which must not happen inside a capture
    elementwise.clear_launch(y.address, nbytes=256, stream=gpu.stream)
    with pytest.raises(KeyError, match="planned"):
        graph.capture(gpu.stream, fail, name="failing")
    recorded = graph.capture(gpu.stream, copy, name="copy")
    assert recorded.nodes == 1 and (y.numpy() == 0).all()  # nothing ran while recording
    recorded.launch(gpu.stream)
    np.testing.assert_array_equal(y.numpy(), x.numpy())
    recorded.close()


@pytest.mark.gpu
def test_guards_catch_a_write_outside(gpu: Device) -> None:
    x, y = gpu.zeros((64,), np.float32), gpu.zeros((32,), np.float32)
    elementwise.copy_launch(y.address, x.address, nbytes=144, stream=gpu.stream)
    with pytest.raises(AssertionError, match="outside a buffer"):
        y.numpy()
