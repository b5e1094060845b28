"""combine: norms against float64 NumPy within the docstring's bound; maxima exact, NaN included."""

import numpy as np
import pytest

from llmq_nb.kernels.combine import (
    combine_absmax_launch,
    combine_absmax_ref,
    combine_norms_launch,
    combine_norms_ref,
)
from llmq_nb.kernels.global_norm import TOTAL_THREADS
from tests.kernels.harness import U32, Device, assert_within, run_sim


def launch_norms(device: Device, gathered: np.ndarray, max_norm: float):
    ranks, tensors = gathered.shape
    norms, total = device.empty((tensors,), np.float32), device.empty((3,), np.float32)
    combine_norms_launch(
        norms.address, total.address, device.put(gathered).address, tensors=tensors, ranks=ranks,
        max_norm=max_norm, stream=device.stream,
    )  # fmt: skip
    return norms.numpy(), total.numpy()


def check_norms(device: Device, ranks: int, tensors: int) -> None:
    rng = np.random.default_rng(ranks)
    gathered = (rng.random((ranks, tensors)) * 2.0 ** rng.integers(-9, 9, (ranks, tensors))).astype(
        np.float32
    )
    gathered[-1, 0] = 0.0  # a rank without a part of the tensor
    norms, total = launch_norms(device, gathered, 1.0)
    norms_ref, norm_ref, clip_ref = combine_norms_ref(gathered, 1.0)
    bound = (ranks / 2 + 1) * U32
    assert_within(norms, norms_ref, relative=bound, what="norms")
    whole = bound + (tensors / TOTAL_THREADS + 40) / 2 * U32
    assert_within(total[:2], [norm_ref, clip_ref], relative=whole + U32, what="norm, clip")
    assert total[2] == 1.0


def check_flags(device: Device) -> None:
    for bad in (np.nan, np.inf, 3e38):  # 3e38: its square overflows
        gathered = np.ones((3, 5), np.float32)
        gathered[1, 3] = bad
        norms, total = launch_norms(device, gathered, 1.0)
        assert [bool(np.isfinite(x)) for x in norms] == [True, True, True, False, True]
        assert total[1] == 0.0 and total[2] == 0.0
    _, total = launch_norms(device, np.zeros((2, 4), np.float32), 1.0)
    assert total.tolist() == [0.0, 1.0, 1.0]


def check_one_rank_is_itself(device: Device) -> None:
    """Powers of two: squares and roots are exact."""
    gathered = 2.0 ** np.arange(-20, 20, dtype=np.float32)[None]
    norms, _ = launch_norms(device, gathered, np.inf)
    np.testing.assert_array_equal(norms, gathered[0])


def check_absmax(device: Device, ranks: int, n: int) -> None:
    """Word 1 of slots of four; the others, and rows beyond n, stay as they are."""
    rng = np.random.default_rng(ranks)
    gathered = rng.standard_normal((ranks, n + 3, 4)).astype(np.float32)
    gathered[..., 1] = np.abs(gathered[..., 1]) * 2.0 ** rng.integers(-30, 30, (ranks, n + 3))
    gathered[0, 0, 1], gathered[-1, n // 2, 1], gathered[:, 1, 1] = np.nan, np.inf, 0.0
    slots = rng.standard_normal((n + 3, 4)).astype(np.float32)
    own = device.put(slots)
    combine_absmax_launch(
        own.address + 4, device.put(gathered).address + 4, n=n, ranks=ranks, spacing=16,
        stride=16 * (n + 3), stream=device.stream,
    )  # fmt: skip
    expected = slots.copy()
    expected[:n, 1] = combine_absmax_ref(gathered[:, :n, 1])
    assert np.isnan(expected[0, 1])
    np.testing.assert_array_equal(own.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("ranks", "tensors"), [(1, 3), (3, 5), (2, 300)])
def test_norms_simulated(ranks: int, tensors: int) -> None:
    run_sim(check_norms, ranks=ranks, tensors=tensors)


def test_flags_simulated() -> None:
    run_sim(check_flags)
    run_sim(check_one_rank_is_itself)


@pytest.mark.parametrize(("ranks", "n"), [(1, 5), (3, 140)])
def test_absmax_simulated(ranks: int, n: int) -> None:
    run_sim(check_absmax, ranks=ranks, n=n)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_combine(gpu: Device, ranks: int) -> None:
    check_norms(gpu, ranks, 707)
    check_absmax(gpu, ranks, 256)


@pytest.mark.gpu
def test_flags(gpu: Device) -> None:
    check_flags(gpu)
    check_one_rank_is_itself(gpu)
