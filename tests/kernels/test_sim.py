"""The simulator refuses what hardware would corrupt or hang on, and its mma and ldmatrix are
NumPy's.

Oracles: NumPy matrix products over the fragment layouts of the PTX ISA, written out here by
element.
"""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.launch import kernel
from llmq_nb.kernels.ptx import (
    ldg32,
    ldg32f,
    ldg128,
    ldsm4,
    ldsm4t,
    mma_bf16,
    mma_e4m3,
    shfl_xorf,
    smem_addr,
    stg32f,
    stg128,
    sts128,
)
from llmq_nb.kernels.reduce import make_block_sum, warp_max
from tests.kernels.harness import Device, run_sim

TWO = (types.uint64, types.uint64)
THREE = (types.uint64, types.uint64, types.uint64)


def make_copy_at(offset: int):
    def copy_at(y, x):
        stg128(y, ldg128(x + offset))

    return copy_at


def make_partial_warp():
    def partial_warp(y, x):
        lane = cuda.threadIdx.x
        if lane < 16:
            stg32f(y + lane * 4, shfl_xorf(ldg32f(x + lane * 4), 1))

    return partial_warp


def make_unwritten_shared():
    def unwritten_shared(y, x):
        shared = smem_addr(cuda.shared.array(128, dtype=types.uint32))
        lane = cuda.threadIdx.x
        if lane == 0:
            sts128(shared, ldg128(x))
        cuda.syncthreads()
        a, b, c, d = ldsm4(shared + lane * 16)
        stg128(y + lane * 16, (a, b, c, d))

    return unwritten_shared


def make_mma(kind: str):
    WORDS = 8  # 32-bit words of a row of k values
    FP8 = kind == "e4m3"

    def mma(c, a, b):
        lane = cuda.threadIdx.x
        g, t = lane >> 2, lane & 3
        a0 = ldg32(a + (g * WORDS + t) * 4)
        a1 = ldg32(a + ((g + 8) * WORDS + t) * 4)
        a2 = ldg32(a + (g * WORDS + t + 4) * 4)
        a3 = ldg32(a + ((g + 8) * WORDS + t + 4) * 4)
        b0 = ldg32(b + (g * WORDS + t) * 4)
        b1 = ldg32(b + (g * WORDS + t + 4) * 4)
        z = np.float32(0.5)
        if FP8:
            c0, c1, c2, c3 = mma_e4m3(z, z, z, z, a0, a1, a2, a3, b0, b1)
        else:
            c0, c1, c2, c3 = mma_bf16(z, z, z, z, a0, a1, a2, a3, b0, b1)
        stg32f(c + (g * 8 + t * 2) * 4, c0)
        stg32f(c + (g * 8 + t * 2 + 1) * 4, c1)
        stg32f(c + ((g + 8) * 8 + t * 2) * 4, c2)
        stg32f(c + ((g + 8) * 8 + t * 2 + 1) * 4, c3)

    return mma


def make_ldmatrix(transposed: bool):
    def ldmatrix(y, x):
        shared = smem_addr(cuda.shared.array(128, dtype=types.uint32))
        lane = cuda.threadIdx.x
        sts128(shared + lane * 16, ldg128(x + lane * 16))
        cuda.syncthreads()
        if transposed:
            a, b, c, d = ldsm4t(shared + lane * 16)
        else:
            a, b, c, d = ldsm4(shared + lane * 16)
        stg128(y + lane * 16, (a, b, c, d))

    return ldmatrix


def make_sums(THREADS: int):
    block_sum = make_block_sum(THREADS, 2)

    def sums(y, x):
        i = cuda.threadIdx.x
        tile = cuda.local.array(2, dtype=types.float32)
        tile[0] = ldg32f(x + i * 4)
        tile[1] = -ldg32f(x + i * 4)
        largest = warp_max(tile[0])
        block_sum(tile)
        stg32f(y + i * 12, tile[0])
        stg32f(y + i * 12 + 4, tile[1])
        stg32f(y + i * 12 + 8, largest)

    return sums


def check_raises(device: Device, case: str) -> None:
    x, y = device.put(np.zeros(4, np.float32)), device.empty((4,), np.float32)
    expectations = {
        "misaligned": (make_copy_at, {"offset": 4}, 1, MemoryError, "misaligned 16-byte"),
        "out of bounds": (make_copy_at, {"offset": 1 << 45}, 1, MemoryError, "out-of-bounds"),
        "partial warp": (make_partial_warp, {}, 32, RuntimeError, "never reach"),
    }
    factory, constants, threads, kind, message = expectations[case]
    if case == "partial warp":
        x, y = device.put(np.zeros(32, np.float32)), device.empty((32,), np.float32)
    with pytest.raises(kind, match=message):
        kernel(factory, TWO, threads=threads, **constants)(0, (1,), y.address, x.address)


def check_unwritten_shared_is_nan(device: Device) -> None:
    x, y = device.put(np.zeros(4, np.uint32)), device.empty((32, 4), np.uint32)
    kernel(make_unwritten_shared, TWO, threads=32)(device.stream, (1,), y.address, x.address)
    words = y.numpy()
    assert (words[:4, 0] == 0).all() and (words[4:] == 0xFFFFFFFF).all()


def check_mma(device: Device, kind: str) -> None:
    rng = np.random.default_rng(0)
    dtype, k = (ml_dtypes.bfloat16, 16) if kind == "bf16" else (ml_dtypes.float8_e4m3fn, 32)
    a, b = rng.standard_normal((16, k)).astype(dtype), rng.standard_normal((8, k)).astype(dtype)
    c = device.empty((16, 8), np.float32)
    arguments = c.address, device.put(a).address, device.put(b).address
    kernel(make_mma, THREE, threads=32, kind=kind)(device.stream, (1,), *arguments)
    exact = a.astype(np.float64) @ b.astype(np.float64).T + 0.5
    # one rounding to float32 here; hardware truncates inside the product: 2^-12 of the magnitudes
    magnitude = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T + 0.5
    assert (np.abs(c.numpy() - exact) <= magnitude * 2.0**-12).all()


def check_ldmatrix(device: Device, transposed: bool) -> None:
    x = np.arange(4 * 8 * 8, dtype=np.uint16).reshape(4, 8, 8)  # matrix, row, column
    y = device.empty((32, 4, 2), np.uint16)
    k = kernel(make_ldmatrix, TWO, threads=32, transposed=transposed)
    k(device.stream, (1,), y.address, device.put(x).address)
    result = y.numpy()
    for lane in range(32):
        for matrix in range(4):
            m = x[matrix].T if transposed else x[matrix]
            pair = m[lane // 4, 2 * (lane % 4) :][:2]
            np.testing.assert_array_equal(result[lane, matrix], pair)


def check_sums(device: Device, threads: int) -> None:
    x = np.random.default_rng(1).integers(-1000, 1000, threads).astype(np.float32)
    y = device.empty((threads, 3), np.float32)
    k = kernel(make_sums, TWO, threads=threads, THREADS=threads)
    k(device.stream, (1,), y.address, device.put(x).address)
    result = y.numpy()
    assert (result[:, 0] == x.sum()).all() and (result[:, 1] == -x.sum()).all()  # integers: exact
    np.testing.assert_array_equal(result[:, 2], np.repeat(x.reshape(-1, 32).max(1), 32))


@pytest.mark.parametrize("case", ["misaligned", "out of bounds", "partial warp"])
def test_refuses(case: str) -> None:
    run_sim(check_raises, case=case)


def test_unwritten_shared_memory_shows() -> None:
    run_sim(check_unwritten_shared_is_nan)


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_mma_simulated(kind: str) -> None:
    run_sim(check_mma, kind=kind)


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_simulated(transposed: bool) -> None:
    run_sim(check_ldmatrix, transposed=transposed)


@pytest.mark.parametrize("threads", [32, 96, 256])
def test_sums_simulated(threads: int) -> None:
    run_sim(check_sums, threads=threads)


def test_a_failing_check_fails_here() -> None:
    with pytest.raises(AssertionError, match="misaligned"):
        run_sim(check_unexpected_failure)


def check_unexpected_failure(device: Device) -> None:
    x, y = device.put(np.zeros(4, np.float32)), device.empty((4,), np.float32)
    kernel(make_copy_at, TWO, threads=1, offset=4)(0, (1,), y.address, x.address)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_mma(gpu: Device, kind: str) -> None:
    check_mma(gpu, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(gpu: Device, transposed: bool) -> None:
    check_ldmatrix(gpu, transposed)


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 96, 256])
def test_sums(gpu: Device, threads: int) -> None:
    check_sums(gpu, threads)
