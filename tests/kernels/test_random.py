"""Philox against Random123's published vectors, stochastic rounding against neighbour arithmetic in
NumPy."""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from llmq_nb.kernels.launch import kernel
from llmq_nb.kernels.ptx import ldg32f, stg32, stg128
from llmq_nb.kernels.random import (
    Purpose,
    pack_stochastic,
    philox,
    philox_ref,
    random_bits_ref,
    round_stochastic_ref,
)
from tests.kernels.harness import Device, run_sim

# counter, key, result: kat_vectors of Random123 for philox4x32-10
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def make_philox_kernel():
    def philox_kernel(out, seed, purpose, piece, tensor, step):
        stg128(out, philox(seed, purpose, piece, tensor, step))

    return philox_kernel


def make_round_kernel():
    def round_kernel(out, x, seed, tensor, step):
        i = cuda.threadIdx.x  # a pair a thread
        words = philox(seed, 1, i >> 2, tensor, step)
        word = words[0]
        for k in range(1, 4):
            word = words[k] if (i & 3) == k else word
        stg32(out + i * 4, pack_stochastic(ldg32f(x + i * 8), ldg32f(x + i * 8 + 4), word))

    return round_kernel


PHILOX_SIGNATURE = (
    types.uint64,
    types.uint32,
    types.uint32,
    types.uint64,
    types.uint32,
    types.uint32,
)
ROUND_SIGNATURE = (types.uint64, types.uint64, types.uint32, types.uint32, types.uint32)


def check_known_vectors(device: Device) -> None:
    k = kernel(make_philox_kernel, PHILOX_SIGNATURE, threads=1)
    for counter, key, expected in KNOWN:
        out = device.empty((4,), np.uint32)
        piece = counter[0] | counter[1] << 32
        k(device.stream, (1,), out.address, key[0], key[1], piece, counter[2], counter[3])
        np.testing.assert_array_equal(out.numpy(), np.array(expected, np.uint32))


def check_rounding(device: Device) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(128) * 10.0 ** rng.integers(-20, 20, 128)).astype(np.float32)
    x[:6] = [np.inf, -np.inf, 0.0, -0.0, 3.4e38, -1e-45]
    x[6] = np.uint32(0x7FFFFFFF).view(np.float32)  # the hardware's NaN
    out, source = device.empty((128,), ml_dtypes.bfloat16), device.put(x)
    k = kernel(make_round_kernel, ROUND_SIGNATURE, threads=64)
    k(device.stream, (1,), out.address, source.address, 7, 3, 11)
    expected = round_stochastic_ref(x, random_bits_ref(7, Purpose.MASTER, 128, 3, 11))
    result = out.numpy()
    assert np.isnan(result[6]) and np.isnan(expected[6])
    np.testing.assert_array_equal(
        np.delete(result, 6).view(np.uint16), np.delete(expected, 6).view(np.uint16)
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_reference_gives_known_vectors(counter, key, expected) -> None:
    piece = np.uint64(counter[0] | counter[1] << 32)
    result = philox_ref(key[0], key[1], piece, counter[2], counter[3])
    np.testing.assert_array_equal(result, np.array(expected, np.uint32))


def test_reference_rounding_is_unbiased_between_the_two_neighbours() -> None:
    bits = np.arange(65536, dtype=np.uint16)  # every pattern once: the mean is exact
    for value in (1.001, -3.14159, 1e-3):
        x = np.float32(value)
        rounded = round_stochastic_ref(np.full(65536, x), bits).astype(np.float64)
        spacing = np.ptp(rounded)
        assert len(np.unique(rounded)) == 2
        assert abs(rounded.mean() - float(x)) <= spacing * 2.0**-16


def test_known_vectors_simulated() -> None:
    run_sim(check_known_vectors)


def test_rounding_simulated() -> None:
    run_sim(check_rounding)


@pytest.mark.gpu
def test_known_vectors(gpu: Device) -> None:
    check_known_vectors(gpu)


@pytest.mark.gpu
def test_rounding(gpu: Device) -> None:
    check_rounding(gpu)
