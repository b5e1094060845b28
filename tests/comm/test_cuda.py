"""Copies between ranks on real GPUs, recorded into one graph and replayed with new random data.

Ranks share GPU 0 (and, marked multi_gpu, lie on two). The oracle is NumPy on the host; a compute
stream is kept busy here and there, so that what does not wait is too early.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmq_nb.comm import copy_engine, topology
from llmq_nb.comm.collectives import all_gather, rows
from llmq_nb.comm.copy_engine import make_links
from llmq_nb.comm.exchange import Exchange, Seat
from llmq_nb.comm.topology import check_peers
from llmq_nb.core.device import (
    Device,
    allocate,
    check,
    create_stream,
    current_device,
    driver,
    free,
    open_device,
)
from llmq_nb.core.dtype import DType
from llmq_nb.core.graph import capture
from llmq_nb.core.tensor import Tensor
from llmq_nb.kernels.accumulate import accumulate_launch, accumulate_ref
from llmq_nb.kernels.elementwise import copy_launch
from llmq_nb.kernels.launch import preparing

pytestmark = pytest.mark.gpu
Direct = Callable[[int, int], bool]
BF16 = np.dtype(ml_dtypes.bfloat16)
N = 100_016
ROUNDS, REPLAYS = 3, 4
BUSY_BYTES, BUSY_COPIES = 64 << 20, 4
"""Some 0.2 ms of a compute stream."""


def direct_all(i: int, j: int) -> bool:
    return True


def direct_none(i: int, j: int) -> bool:
    return False


def direct_some(i: int, j: int) -> bool:
    return j == i + 1


class Ranks:
    """Ranks with streams, links and memory. bytes: of each rank."""

    def __init__(self, ordinals: Sequence[int], direct: Direct | None, nbytes: int) -> None:
        self.devices = [open_device(i) for i in ordinals]
        self.bases, self.busy, self.streams, self.offsets = [], [], [], [0] * len(ordinals)
        for device in self.devices:
            device.make_current()
            self.bases.append(allocate(nbytes))
            self.busy.append(allocate(2 * BUSY_BYTES))
            check(driver().cuMemsetD8(self.bases[-1], 0xFF, nbytes), "poison")
            self.streams.append(int(create_stream()))
        said: list[str] = []
        self.links = make_links(
            self.devices, self.streams, staging_bytes=1 << 18, direct=direct, announce=said.append
        )
        self.exchange = Exchange(
            [Seat(x, d.make_current) for x, d in zip(self.links, self.devices, strict=True)]
        )
        self.synchronize()

    def take(self, rank: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Some of a rank's memory."""
        tensor = Tensor(f"{rank}", shape, dtype, self.bases[rank] + self.offsets[rank])
        self.offsets[rank] += -(-tensor.nbytes // 256) * 256
        return tensor

    def write(self, rank: int, tensor: Tensor, array: np.ndarray) -> None:
        self.devices[rank].make_current()
        host = np.ascontiguousarray(array)
        check(driver().cuMemcpyHtoD(tensor.data, host.ctypes.data, host.nbytes), "write")
        self.synchronize()

    def read(self, rank: int, tensor: Tensor) -> np.ndarray:
        self.devices[rank].make_current()
        host = np.empty(tensor.shape, tensor.dtype.numpy)
        check(driver().cuMemcpyDtoH(host.ctypes.data, tensor.data, tensor.nbytes), "read")
        return host

    def occupy(self, rank: int) -> None:
        """Keep a compute stream busy for a while."""
        base = self.busy[rank]
        for _ in range(BUSY_COPIES):
            copy_launch(base, base + BUSY_BYTES, nbytes=BUSY_BYTES, stream=self.streams[rank])

    def synchronize(self) -> None:
        for device in self.devices:
            device.synchronize()
        self.devices[0].make_current()

    def step(self, body: Callable[[], None], *, recorded: bool = True) -> Callable[[], None]:
        """A step over all ranks, as one graph or launched anew each time."""

        def record() -> None:
            self.exchange.begin()
            body()
            for link, device in zip(self.links, self.devices, strict=True):
                device.make_current()
                link.join()
            self.exchange.end()

        with preparing():  # loads the kernels
            record()
        graph = capture(self.streams[0], record, name="step") if recorded else None

        def run() -> None:
            if graph is None:
                record()
            else:
                graph.launch(self.streams[0])
            self.synchronize()

        return run

    def close(self) -> None:
        self.synchronize()
        for link in self.links:
            link.close()
        for device, *addresses in zip(self.devices, self.bases, self.busy, strict=True):
            device.make_current()
            for address in addresses:
                free(address)


@pytest.fixture
def make(monkeypatch) -> Iterator[Callable[..., Ranks]]:
    monkeypatch.setattr(copy_engine, "LEAST_CHUNK", 1 << 14)
    made: list[Ranks] = []

    def build(*args: Any) -> Ranks:
        made.append(Ranks(*args))
        return made[-1]

    yield build
    for ranks in made:
        ranks.close()


def reduce_gradients(ranks: Ranks, seed: int, *, recorded: bool = True) -> None:
    """Rounds of the gradients' pattern: every rank writes, all pull to a queue and add there; who
    writes again waits until all have taken. A pull in two runs of one receive buffer."""
    R, half = len(ranks.devices), N // 2
    inputs = [ranks.take(r, (ROUNDS, N), DType.BF16) for r in range(R)]
    own = [ranks.take(r, (N,), DType.BF16) for r in range(R)]
    received = [ranks.take(r, (R, half), DType.BF16) for r in range(R)]
    sums = [ranks.take(r, (N,), DType.BF16) for r in range(R)]
    counters = [ranks.take(r, (1,), DType.INT32) for r in range(R)]
    written, taken = ([link.mark() for link in ranks.links] for _ in range(2))
    rng = np.random.default_rng(seed)

    def body() -> None:
        for n in range(ROUNDS):
            for r, (link, device) in enumerate(zip(ranks.links, ranks.devices, strict=True)):
                device.make_current()
                for mark in taken if n else ():
                    link.wait(mark)
                if rng.random() < 0.5:
                    ranks.occupy(r)
                row = inputs[r].rows(n, n + 1)
                copy_launch(own[r].data, row.data, nbytes=2 * N, stream=ranks.streams[r])
                link.record(written[r])
            for r, (link, device) in enumerate(zip(ranks.links, ranks.devices, strict=True)):
                device.make_current()
                for first in (0, half):
                    link.pull(rows(received[r], own, first=first, count=half), after=written)
                    accumulate_launch(
                        sums[r].data + 2 * first, received[r].data, ranks=R, stride=2 * half,
                        n=half, first=first, start=n == 0, counter=counters[r].data, seed=3,
                        tensor=n, stream=link.queue,
                    )  # fmt: skip
                link.set(taken[r], after=written)

    run = ranks.step(body, recorded=recorded)
    for replay in range(REPLAYS):
        data = rng.standard_normal((R, ROUNDS, N)).astype(BF16)
        for r in range(R):
            ranks.write(r, inputs[r], data[r])
            ranks.write(r, counters[r], np.array([replay], np.int32))
        run()
        expected: np.ndarray | None = None
        for n in range(ROUNDS):
            expected = accumulate_ref(expected, data[:, n], seed=3, tensor=n, step=replay)
        assert expected is not None
        for r in range(R):
            found = ranks.read(r, sums[r])
            np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))


def gather_shards(ranks: Ranks, seed: int) -> None:
    """Units in shards of odd sizes, double-buffered: one is gathered while the other is read."""
    R = len(ranks.devices)
    sizes = {2: (200_001, 777), 3: (165_536, 0, 133_001)}[R]
    total = sum(sizes)
    shards = [[ranks.take(r, (s,), DType.E4M3) for r, s in enumerate(sizes)] for _ in range(4)]
    stages = [[ranks.take(r, (total,), DType.E4M3) for r in range(R)] for _ in range(2)]
    out = [[ranks.take(r, (-(-total // 16) * 16,), DType.E4M3) for r in range(R)] for _ in range(4)]
    ready = [[link.mark() for link in ranks.links] for _ in range(2)]
    rng = np.random.default_rng(seed)

    def gather(unit: int) -> None:
        for r, (link, device) in enumerate(zip(ranks.links, ranks.devices, strict=True)):
            device.make_current()
            link.pull(all_gather(stages[unit % 2][r], shards[unit]), done=ready[unit % 2][r])

    def body() -> None:
        gather(0)
        for unit in range(4):
            if unit + 1 < 4:
                gather(unit + 1)
            for r, (link, device) in enumerate(zip(ranks.links, ranks.devices, strict=True)):
                device.make_current()
                link.wait(ready[unit % 2][r])
                if rng.random() < 0.5:
                    ranks.occupy(r)
                target, source = out[unit][r], stages[unit % 2][r]
                copy_launch(target.data, source.data, nbytes=target.nbytes, stream=ranks.streams[r])

    run = ranks.step(body)
    for _ in range(REPLAYS):
        data = rng.integers(0, 256, (4, total), np.uint8)
        for unit in range(4):
            cuts = np.split(data[unit], np.cumsum(sizes)[:-1])
            for r, part in enumerate(cuts):
                ranks.write(r, shards[unit][r], part)
        run()
        for unit in range(4):
            for r in range(R):
                found = ranks.read(r, out[unit][r]).view(np.uint8)[:total]
                np.testing.assert_array_equal(found, data[unit])


DIRECT = [direct_all, direct_none, direct_some]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("direct", DIRECT)
def test_gradients_of_ranks_on_one_gpu(direct: Direct, count: int, recorded: bool, make) -> None:
    reduce_gradients(make((0,) * count, direct, 32 << 20), seed=count, recorded=recorded)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("direct", DIRECT)
def test_gathers_of_ranks_on_one_gpu(direct: Direct, count: int, make) -> None:
    gather_shards(make((0,) * count, direct, 32 << 20), seed=count)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("ordinals", [(0, 1), (1, 0), (0, 1, 1)])
@pytest.mark.parametrize("direct", [None, direct_none])
def test_two_gpus(direct: Direct | None, ordinals: tuple[int, ...], make) -> None:
    """As they are, and as if they could not read each other."""
    ranks = make(ordinals, direct, 64 << 20)
    reduce_gradients(ranks, seed=1)
    gather_shards(ranks, seed=2)


@pytest.mark.multi_gpu
def test_every_pair_is_tried() -> None:
    said: list[str] = []
    matrix = check_peers([open_device(0), open_device(1)], said.append)
    assert len(said) == len(set(matrix.trouble.values()))
    assert current_device().ordinal == 0


def test_a_pattern_arrives_on_one_gpu() -> None:
    """The check itself, where it cannot fail."""
    device = open_device(0)
    assert topology.arrives(device, device)
    assert check_peers([device, device], pytest.fail).trouble == {}


def test_a_mark_is_of_the_links_device(make) -> None:
    ranks = make((0, 0), direct_none, 1 << 20)
    mark = ranks.links[1].mark()
    ranks.links[1].record(mark)
    ranks.links[0].wait(mark)
    ranks.synchronize()
    device: Device = current_device()
    assert device.ordinal == 0
