"""Which GPU can read which other's memory: asked of the driver, then tried.

Some cards report peer access and deliver zeros, or data of another address, so every ordered pair
copies a pattern first. Where it does not arrive, copies go through host memory (copy_engine.py).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from llmq_nb.core.device import (
    Device,
    allocate,
    check,
    create_stream,
    driver,
    free,
    synchronize_stream,
)

PATTERN_BYTES = 8 << 20
ROUNDS = 2
"""Patterns a pair: what was left from the first must not pass for the second."""
ALREADY_ENABLED = 704
"""CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"""
NO_ACCESS, WRONG_DATA = "no peer access", "peer access that delivers wrong data"


@dataclasses.dataclass(frozen=True, slots=True)
class PeerMatrix:
    """Called with ranks i, j: whether i can read j's memory itself; ranks of one GPU always can.

    devices: the GPU of each rank. trouble: (reader, source) of GPUs that cannot, and why.
    """

    devices: tuple[int, ...]
    trouble: Mapping[tuple[int, int], str]

    def __call__(self, i: int, j: int) -> bool:
        return (self.devices[i], self.devices[j]) not in self.trouble


def matrix_lines(matrix: PeerMatrix) -> list[str]:
    """A table of ranks: "peer" where the row's takes from the column's itself, else "staged"."""
    ranks = range(len(matrix.devices))
    words = [
        ["-" if i == j else "peer" if matrix(i, j) else "staged" for j in ranks] for i in ranks
    ]
    cells = [["", *map(str, matrix.devices)]]
    cells += [[str(d), *row] for d, row in zip(matrix.devices, words, strict=True)]
    return ["".join(f"{cell:>8}" for cell in row) for row in cells]


def check_peers(devices: Sequence[Device], announce: Callable[[str], None]) -> PeerMatrix:
    """Enable and try every ordered pair of the ranks' GPUs; a rank's GPU is current afterwards.

    announce: takes one line a cause, if there is one.
    """
    distinct = {device.ordinal: device for device in devices}
    trouble = {}
    for i, reader in distinct.items():
        for j, source in distinct.items():
            if i != j and (why := trouble_between(reader, source)):
                trouble[i, j] = why
    for why in sorted(set(trouble.values())):
        pairs = ", ".join(f"{i} <- {j}" for (i, j), w in trouble.items() if w == why)
        announce(f"GPUs {pairs}: {why}; copies go through host memory")
    devices[0].make_current()
    return PeerMatrix(tuple(device.ordinal for device in devices), trouble)


def trouble_between(reader: Device, source: Device) -> str | None:
    """Why `reader` cannot copy from `source`'s memory; None: it can, and it is enabled."""
    d = driver()
    what = f"asking GPU {reader.ordinal} for peer access to {source.ordinal}"
    if not check(d.cuDeviceCanAccessPeer(reader.handle, source.handle), what):
        return NO_ACCESS
    reader.make_current()
    (status,) = d.cuCtxEnablePeerAccess(source.context, 0)
    if int(status) not in (0, ALREADY_ENABLED):  # more peers than the driver takes, or a fault
        return f"peer access refused ({check(d.cuGetErrorName(status), what).decode()})"
    if not arrives(reader, source):
        reader.make_current()
        check(d.cuCtxDisablePeerAccess(source.context), what)
        return WRONG_DATA
    return None


def arrives(reader: Device, source: Device, nbytes: int = PATTERN_BYTES) -> bool:
    """Whether a copy brings random patterns from one GPU's memory to another's."""
    d = driver()
    rng = np.random.default_rng((reader.ordinal, source.ordinal))
    source.make_current()
    there = allocate(nbytes)
    reader.make_current()
    here, stream = allocate(nbytes), create_stream()
    try:
        for _ in range(ROUNDS):
            sent = rng.integers(0, 256, nbytes, np.uint8)
            found = np.empty_like(sent)
            source.make_current()
            check(d.cuMemcpyHtoD(there, sent.ctypes.data, nbytes), "writing a pattern")
            source.synchronize()
            reader.make_current()
            check(d.cuMemcpyDtoDAsync(here, there, nbytes, stream), "copying a pattern")
            synchronize_stream(stream)
            check(d.cuMemcpyDtoH(found.ctypes.data, here, nbytes), "reading a pattern")
            if not np.array_equal(found, sent):
                return False
        return True
    finally:
        reader.make_current()
        check(d.cuStreamDestroy(stream), "cuStreamDestroy")
        free(here)
        source.make_current()
        free(there)
