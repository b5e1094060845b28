"""accumulate: exact against NumPy's float32 sums and the rounding of the same Philox words."""

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels.accumulate import accumulate_launch, accumulate_ref
from tests.kernels.harness import Device, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}


def values(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Over many binades, so that the order of a sum shows; with signed zeros and what is no
    number."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)
    x[..., 0], x[..., 1], x[..., 2], x[..., 3] = 0.0, -0.0, np.inf, 1e-40
    return x.astype(DTYPES[dtype])


def check_accumulate(
    device: Device, n: int, ranks: int, *, first: int = 0, dtype: str = "bf16", start: bool = False
) -> None:
    width = n + 64  # rows are longer than what counts
    shard, contributions = values(3, (n,), dtype), values(4, (ranks, width), dtype)
    buffer = device.empty((n,), DTYPES[dtype]) if start else device.put(shard)
    counter = device.put(np.array([77], np.uint32))
    accumulate_launch(
        buffer.address, device.put(contributions).address, ranks=ranks,
        stride=width * shard.itemsize, n=n, first=first, start=start, counter=counter.address,
        seed=5, tensor=9, dtype=dtype, stream=device.stream,
    )  # fmt: skip
    expected = accumulate_ref(
        None if start else shard, contributions[:, :n], seed=5, tensor=9, step=77, first=first
    )
    bits = np.uint16 if dtype == "bf16" else np.uint32
    np.testing.assert_array_equal(buffer.numpy().view(bits), expected.view(bits))


def check_shards_agree(device: Device) -> None:
    """Pieces with their first element give the bits of the whole."""
    shard, rows = values(5, (64,), "bf16"), values(6, (3, 64), "bf16")
    counter, results = device.put(np.array([1], np.uint32)), []
    for cuts in ((0, 64), (0, 32, 64), (0, 8, 16, 64)):
        buffer, added = device.put(shard), device.put(rows)
        for begin, end in zip(cuts, cuts[1:], strict=False):
            accumulate_launch(
                buffer.address + 2 * begin, added.address + 2 * begin, ranks=3, stride=128,
                n=end - begin, first=begin, counter=counter.address, seed=5, tensor=9,
                stream=device.stream,
            )  # fmt: skip
        results.append(buffer.numpy().tobytes())
    assert results[0] == results[1] == results[2]


def check_nothing(device: Device) -> None:
    """A rank without elements."""
    buffer, counter = device.zeros((8,), np.uint16), device.zeros((1,), np.uint32)
    accumulate_launch(
        buffer.address, buffer.address, ranks=2, stride=16, n=0, counter=counter.address, seed=1,
        tensor=1, stream=device.stream,
    )  # fmt: skip
    assert not buffer.numpy().any()


def test_reference_is_unbiased() -> None:
    """The mean of many roundings of one sum is the sum: within five standard errors."""
    n = 1 << 16
    rows = np.stack([np.full(n, 1.0), np.full(n, 1e-3)]).astype(DTYPES["bf16"])
    exact = 1.0 + float(rows[1, 0])
    found = accumulate_ref(None, rows, seed=1, tensor=2, step=3).astype(np.float64)
    step = 2.0**-7  # the gap above 1
    share = (exact - 1.0) / step
    assert set(np.unique(found)) == {1.0, 1.0 + step}
    error = step * np.sqrt(share * (1 - share) / n)
    assert abs(found.mean() - exact) < 5 * error


# 2056: one piece more than a block; ranks: below, at and above the batch of four
@pytest.mark.parametrize(
    ("n", "ranks", "dtype", "start"),
    [(2056, 1, "bf16", False), (64, 3, "bf16", True), (64, 4, "fp32", False),
     (64, 7, "bf16", False), (64, 16, "bf16", True), (64, 6, "fp32", True)],
)  # fmt: skip
def test_accumulate_simulated(n: int, ranks: int, dtype: str, start: bool) -> None:
    run_sim(check_accumulate, n=n, ranks=ranks, first=1 << 36, dtype=dtype, start=start)


def test_shards_simulated() -> None:
    run_sim(check_shards_agree)
    run_sim(check_nothing)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 13, 16])
def test_accumulate(gpu: Device, ranks: int) -> None:
    check_accumulate(gpu, 100_008, ranks, first=1 << 36)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "start"), [("bf16", True), ("fp32", True), ("fp32", False)])
def test_other_forms(gpu: Device, dtype: str, start: bool) -> None:
    for ranks in (2, 5):
        check_accumulate(gpu, 100_008, ranks, first=1 << 36, dtype=dtype, start=start)


@pytest.mark.gpu
def test_shards(gpu: Device) -> None:
    check_shards_agree(gpu)
    check_nothing(gpu)


@pytest.mark.gpu
def test_shard_in_mapped_host_memory(gpu: Device) -> None:
    """The kernel reads and writes the host's own address."""
    from llmq_nb.core.device import check, driver, synchronize_stream
    from llmq_nb.core.pinned import Pinned

    n, ranks = 40_008, 3
    memory = Pinned(2 * n, mapped=True)
    shard, rows = values(3, (n,), "bf16"), values(4, (ranks, n), "bf16")
    host = memory.array(0, (n,), DTYPES["bf16"])
    host[...] = shard
    contributions, counter = gpu.put(rows), gpu.put(np.array([2], np.uint32))
    accumulate_launch(
        memory.address, contributions.address, ranks=ranks, stride=2 * n, n=n,
        counter=counter.address, seed=5, tensor=9, stream=gpu.stream,
    )  # fmt: skip
    synchronize_stream(gpu.stream)
    check(driver().cuCtxSynchronize(), "accumulate on the host")
    expected = accumulate_ref(shard, rows, seed=5, tensor=9, step=2)
    found = host.copy()
    memory.close()
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))
