"""The `gpu` fixture of the kernel tests."""

from collections.abc import Iterator

import pytest

from tests.kernels.harness import GpuDevice


@pytest.fixture
def gpu() -> Iterator[GpuDevice]:
    """Memory and a stream on the first GPU, freed after the test."""
    device = GpuDevice()
    yield device
    device.close()
