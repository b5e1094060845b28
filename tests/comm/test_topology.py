"""The peer matrix from what the driver says and from what copies deliver, on a stand-in for it."""

import ctypes
from typing import Any

import numpy as np
import pytest

from llmq_nb.comm import topology
from llmq_nb.comm.topology import NO_ACCESS, WRONG_DATA, check_peers, matrix_lines


class Driver:
    """GPUs whose peer access may be absent, refused, or deliver what was not sent."""

    def __init__(self, no: set, refused: set, broken: dict) -> None:
        self.no, self.refused, self.broken = no, refused, broken
        self.current = 0
        self.memory: dict[int, np.ndarray] = {}
        self.owner: dict[int, int] = {}
        self.enabled: set[tuple[int, int]] = set()

    def cuDeviceCanAccessPeer(self, reader: int, source: int) -> Any:
        return (0, int((reader, source) not in self.no))

    def cuCtxEnablePeerAccess(self, source: int, flags: int) -> Any:
        pair = self.current, source
        if pair in self.refused:
            return (711,)
        if pair in self.enabled:
            return (704,)
        self.enabled.add(pair)
        return (0,)

    def cuCtxDisablePeerAccess(self, source: int) -> Any:
        self.enabled.remove((self.current, source))
        return (0,)

    def cuGetErrorName(self, status: int) -> Any:
        return (0, b"CUDA_ERROR_TOO_MANY_PEERS")

    def cuMemcpyHtoD(self, target: int, source: int, nbytes: int) -> Any:
        assert self.owner[target] == self.current
        ctypes.memmove(target, source, nbytes)
        return (0,)

    def cuMemcpyDtoH(self, target: int, source: int, nbytes: int) -> Any:
        assert self.owner[source] == self.current
        ctypes.memmove(target, source, nbytes)
        return (0,)

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: Any) -> Any:
        pair = self.owner[target], self.owner[source]
        assert pair in self.enabled and pair[0] == self.current
        found = self.memory[source].copy()
        self.memory[target][:] = self.broken.get(pair, lambda x: x)(found)
        return (0,)

    def cuStreamDestroy(self, stream: Any) -> Any:
        return (0,)

    def allocate(self, nbytes: int) -> int:
        array = np.zeros(nbytes, np.uint8)
        address = array.ctypes.data
        self.memory[address], self.owner[address] = array, self.current
        return address

    def free(self, address: int) -> None:
        assert self.owner.pop(address) == self.current
        del self.memory[address]


class Gpu:
    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver, self.ordinal, self.handle, self.context = driver, ordinal, ordinal, ordinal

    def make_current(self) -> None:
        self.driver.current = self.ordinal

    def synchronize(self) -> None:
        self.make_current()


@pytest.fixture
def gpus(monkeypatch):
    def make(count: int, no=(), refused=(), broken=None) -> tuple[Driver, list[Any]]:
        driver = Driver(set(no), set(refused), broken or {})
        monkeypatch.setattr(topology, "driver", lambda: driver)
        monkeypatch.setattr(topology, "allocate", driver.allocate)
        monkeypatch.setattr(topology, "free", driver.free)
        monkeypatch.setattr(topology, "create_stream", lambda: 0)
        monkeypatch.setattr(topology, "synchronize_stream", lambda stream: None)
        return driver, [Gpu(driver, i) for i in range(count)]

    return make


def test_all_peers(gpus) -> None:
    driver, devices = gpus(3)
    said: list[str] = []
    for _ in range(2):  # the second time it is enabled already
        matrix = check_peers(devices, said.append)
        assert matrix.trouble == {} and said == []
        assert all(matrix(i, j) for i in range(3) for j in range(3))
    assert len(driver.enabled) == 6 and driver.memory == {} and driver.current == 0


def test_each_ordered_pair_is_on_its_own(gpus) -> None:
    _, devices = gpus(3, no={(0, 1), (2, 1)}, refused={(1, 2)})
    said: list[str] = []
    matrix = check_peers(devices, said.append)
    assert dict(matrix.trouble) == {
        (0, 1): NO_ACCESS,
        (2, 1): NO_ACCESS,
        (1, 2): "peer access refused (CUDA_ERROR_TOO_MANY_PEERS)",
    }
    assert matrix(1, 0) and not matrix(0, 1)
    assert said == [
        "GPUs 0 <- 1, 2 <- 1: no peer access; copies go through host memory",
        "GPUs 1 <- 2: peer access refused (CUDA_ERROR_TOO_MANY_PEERS); "
        "copies go through host memory",
    ]


def zeros(found: np.ndarray) -> np.ndarray:
    return np.zeros_like(found)


def shifted(found: np.ndarray) -> np.ndarray:
    return np.roll(found, 4096)


def last_byte(found: np.ndarray) -> np.ndarray:
    found[-1] ^= 1
    return found


class Stale:
    """The first pattern for ever."""

    def __init__(self) -> None:
        self.first: np.ndarray | None = None

    def __call__(self, found: np.ndarray) -> np.ndarray:
        if self.first is None:
            self.first = found
        return self.first


@pytest.mark.parametrize("fault", [zeros, shifted, last_byte, Stale()])
def test_access_that_lies_is_not_used(fault, gpus) -> None:
    driver, devices = gpus(2, broken={(1, 0): fault})
    said: list[str] = []
    matrix = check_peers(devices, said.append)
    assert dict(matrix.trouble) == {(1, 0): WRONG_DATA}
    assert matrix(0, 1) and not matrix(1, 0)
    assert driver.enabled == {(0, 1)} and driver.memory == {}
    (line,) = said
    assert line.startswith("GPUs 1 <- 0: ") and "\n" not in line


def test_ranks_of_one_gpu_are_direct(gpus) -> None:
    _, (a, b) = gpus(2, no={(0, 1), (1, 0)})
    matrix = check_peers([a, a, b, b], lambda line: None)
    direct = [[matrix(i, j) for j in range(4)] for i in range(4)]
    assert direct == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_the_matrix_as_a_table(gpus) -> None:
    _, devices = gpus(3, no={(0, 2), (2, 1)})
    assert matrix_lines(check_peers(devices, lambda line: None)) == [
        "               0       1       2",
        "       0       -    peer  staged",
        "       1    peer       -    peer",
        "       2    peer  staged       -",
    ]
