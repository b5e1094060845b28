"""reduce_loss against float64 NumPy; the maximum is exact, the bound of the sum the docstring's."""

import numpy as np
import pytest

from llmq_nb.kernels import reduce_loss
from llmq_nb.kernels.reduce_loss import reduce_loss_ref
from tests.kernels.harness import U32, Device, assert_within, run_sim


def check(device: Device, N: int, accumulate: bool) -> None:
    rng = np.random.default_rng(N)
    loss, lse = rng.gamma(2.0, size=N).astype(np.float32), rng.normal(size=N).astype(np.float32)
    lse[rng.integers(N)] = 5.0
    scale = np.float32(1 / 3)
    for before in ([2.5, 1.0], [2.5, 9.0]) if accumulate else ([np.nan, np.nan],):
        total = device.put(np.array(before, np.float32))
        reduce_loss.reduce_loss_launch(
            total.address, device.put(loss).address, device.put(lse).address,
            device.put(np.array([scale])).address, rows=N, accumulate=accumulate,
            stream=device.stream,
        )  # fmt: skip
        mean, top = reduce_loss_ref(loss, lse, float(scale))
        if accumulate:
            mean, top = mean + before[0], max(top, before[1])
        got = total.numpy()
        assert_within(got[0], mean, relative=(N / 1024 + 37 + 2) * U32, what="mean")
        assert got[1] == np.float32(top)


def check_user_function(device: Device) -> None:
    loss, lse = device.put(np.arange(6, dtype=np.float32)), device.put(np.ones(6, np.float32))
    total = reduce_loss.reduce_loss(
        loss.array(), lse.array(), device.put(np.array([0.5], np.float32)).array()
    )
    host = total if isinstance(total, np.ndarray) else total.numpy()
    assert host.tolist() == [7.5, 1.0]


# 1025: a second loss for one thread
def test_simulated() -> None:
    run_sim(check, N=1, accumulate=False)
    run_sim(check, N=1025, accumulate=True)
    run_sim(check_user_function)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 1025, 32768, 131071])
def test_reduce(gpu: Device, N: int) -> None:
    check(gpu, N, False)
    check(gpu, N, True)
    check_user_function(gpu)
