"""global_norm against float64 NumPy; bound: the kernel docstring's error model. Flags and clipping
exact."""

import math

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.kernels import global_norm
from llmq_nb.kernels.global_norm import (
    CHUNK,
    TENSOR_THREADS,
    THREADS,
    TOTAL_THREADS,
    chunk_table,
    global_norm_ref,
)
from tests.kernels.harness import U32, Device, assert_within, run_sim

DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}


def launch(device: Device, grads: list[np.ndarray], max_norm: float, dtype: str = "bf16"):
    buffers = [device.put(g) for g in grads]
    chunks, first = chunk_table(
        [(b.address, g.size) for b, g in zip(buffers, grads, strict=True)],
        itemsize=DTYPES[dtype].itemsize,
    )
    norms, total = device.empty((len(grads),), np.float32), device.empty((3,), np.float32)
    scratch = device.empty((len(chunks),), np.float32)
    global_norm.global_norm_launch(
        norms.address, total.address, device.put(chunks).address, device.put(first).address,
        scratch=scratch.address, n_chunks=len(chunks), tensors=len(grads), max_norm=max_norm,
        dtype=dtype, stream=device.stream,
    )  # fmt: skip
    return norms.numpy(), total.numpy(), len(chunks)


def random(sizes: list[int], dtype: str, magnitude: float = 1.0) -> list[np.ndarray]:
    rng = np.random.default_rng(len(sizes))
    return [(rng.standard_normal(n) * magnitude).astype(DTYPES[dtype]) for n in sizes]


def check_norm(
    device: Device, sizes: list[int], dtype: str = "bf16", magnitude: float = 1.0
) -> None:
    grads = random(sizes, dtype, magnitude)
    norms, total, n_chunks = launch(device, grads, 1.0, dtype)
    norms_ref, norm_ref, clip_ref = global_norm_ref(grads, 1.0)
    adds = CHUNK / THREADS + n_chunks / TENSOR_THREADS + len(sizes) / TOTAL_THREADS + 40
    bound = adds / 2 * U32
    assert_within(norms, norms_ref, relative=bound, what="norms")
    assert_within(total[:2], [norm_ref, clip_ref], relative=bound + U32, what="norm, clip")
    assert total[2] == 1.0


def check_flags(device: Device) -> None:
    for bad in (np.nan, np.inf, -np.inf, 3e38):  # 3e38: its square overflows
        grads = random([16, 64, 8], "bf16")
        grads[1][40] = bad
        norms, total, _ = launch(device, grads, 1.0)
        assert total[2] == 0.0 and total[1] == 0.0
        assert [bool(np.isfinite(n)) for n in norms] == [True, False, True]
    _, total, _ = launch(device, [np.zeros(16, DTYPES["bf16"])], 1.0)
    assert list(total[:2]) == [0.0, 1.0] and total[2] == 1.0
    _, total, _ = launch(device, random([16], "bf16", 100.0), math.inf)
    assert total[1] == 1.0


def check_user_function(device: Device) -> None:
    grads = random([16, 64], "bf16", 3.0)
    out = global_norm.norm([device.put(g).array() for g in grads], max_norm=1.0)
    out = out if isinstance(out, np.ndarray) else out.numpy()
    _, norm_ref, clip_ref = global_norm_ref(grads, 1.0)
    assert_within(out[:2], [norm_ref, clip_ref], relative=2.0**-20)
    with pytest.raises(ValueError, match="multiple of 8"):
        global_norm.norm([device.put(np.zeros(12, DTYPES["bf16"])).array()])


def check_repeats_bitwise(device: Device) -> None:
    grads = random([CHUNK * 3 + 8, 1024, CHUNK], "bf16")
    first, second = (launch(device, grads, 1.0) for _ in range(2))
    assert first[0].tobytes() == second[0].tobytes() and first[1].tobytes() == second[1].tobytes()


def test_chunk_table_covers_every_element_once() -> None:
    chunks, first = chunk_table([(1000 << 4, CHUNK + 8), (0, 0), (1 << 40, 16)])
    np.testing.assert_array_equal(first, [0, 2, 2, 3])
    expected = [[16000, CHUNK], [16000 + 2 * CHUNK, 8], [1 << 40, 16]]
    np.testing.assert_array_equal(chunks, expected)


# one piece; a ragged round of the block; tensors of several chunks
@pytest.mark.parametrize("sizes", [[8], [8 * 1025, 16, 896], [CHUNK + 8]])
def test_norm_simulated(sizes: list[int]) -> None:
    run_sim(check_norm, sizes=sizes)


def test_fp32_simulated() -> None:
    run_sim(check_norm, sizes=[72, 8], dtype="fp32", magnitude=1e-3)


def test_flags_simulated() -> None:
    run_sim(check_flags)


def test_user_function_simulated() -> None:
    run_sim(check_user_function)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("sizes", [[8], [CHUNK * 40 + 24, 896, 8 * 1025], [896 * 8] * 1500])
def test_norm(gpu: Device, sizes: list[int], dtype: str) -> None:
    check_norm(gpu, sizes, dtype)


@pytest.mark.gpu
def test_flags(gpu: Device) -> None:
    check_flags(gpu)
    check_user_function(gpu)
    check_repeats_bitwise(gpu)
