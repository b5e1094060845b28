"""CudaLink on a stand-in for the driver: right data in any order that the events allow, no race.

All work is joined and the driver's rules are kept; direct and staged copies, several captures,
shared devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq_nb.comm import copy_engine
from llmq_nb.comm.copy_engine import CudaLink, cut, make_links
from llmq_nb.comm.link import Pull
from llmq_nb.kernels.launch import preparing
from tests.comm.fake_cuda import HOST, Cuda, Node, install

Direct = Callable[[int, int], bool]


def none(i: int, j: int) -> bool:
    return False


def all_(i: int, j: int) -> bool:
    return True


def some(i: int, j: int) -> bool:
    return (i + j) % 2 == 0


class Ranks:
    """Ranks on devices of a Cuda, each with a vector, room for all vectors, and a sum."""

    def __init__(
        self, monkeypatch: Any, devices: Sequence[int], direct: Direct, n: int, staging: int
    ) -> None:
        ranks = range(len(devices))
        peers = {(devices[i], devices[j]) for i in ranks for j in ranks if direct(i, j)}
        self.cuda, self.n, self.devices = Cuda(max(devices) + 1, peers), n, devices
        install(self.cuda, monkeypatch)
        self.streams = []
        for device in devices:
            self.cuda.current = device
            self.streams.append(self.cuda.create_stream())
        self.cuda.current = 0
        opened: Any = [self.cuda.devices[d] for d in devices]
        self.links = make_links(opened, self.streams, staging_bytes=staging, direct=direct)
        place = self.cuda.place
        self.own = [place(np.zeros(n, np.uint32), d) for d in devices]
        self.host = [place(np.zeros(n, np.uint32), HOST) for d in devices]
        self.received = [place(np.zeros((len(devices), n), np.uint32), d) for d in devices]
        self.sums = [place(np.zeros(n, np.uint32), d) for d in devices]
        self.written, self.taken = ([link.mark() for link in self.links] for _ in range(2))
        self.points = [link.mark() for link in self.links]

    def kernel(self, rank: int, work: Callable[[], None], reads=(), writes=(), stream=None) -> None:
        """On a rank's compute stream, or another."""

        def spans(arrays: Sequence[np.ndarray]) -> list[tuple[int, int]]:
            return [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in arrays]

        stream = self.streams[rank] if stream is None else stream
        self.cuda.add(stream, work, spans(reads), spans(writes))

    def begin(self) -> None:
        """Fork all streams from rank 0's."""
        self.cuda.begin()
        for link in self.links:
            link.reset()
        self.kernel(0, lambda: None)
        self.links[0].record(self.points[0])
        for link in self.links[1:]:
            link.wait(self.points[0])

    def end(self) -> None:
        """Join them."""
        for link, point in zip(self.links[1:], self.points[1:], strict=True):
            link.record(point)
            self.links[0].wait(point)
        self.kernel(0, lambda: None)

    def write(self, rank: int, seed: int) -> None:
        """The rank's vector, on its compute stream."""
        values = np.random.default_rng((seed, rank)).integers(0, 1 << 20, self.n, np.uint32)
        own = self.own[rank]
        self.kernel(rank, lambda: own.__setitem__(slice(None), values), writes=[own])

    def pulls(self, rank: int) -> list[Pull]:
        """All vectors."""
        base, nbytes = self.received[rank].ctypes.data, 4 * self.n
        return [
            Pull(base + r * nbytes, own.ctypes.data, nbytes, r) for r, own in enumerate(self.own)
        ]

    def add(self, rank: int, *, queue: bool) -> None:
        """What was received, to the sum."""
        sums, received = self.sums[rank], self.received[rank]

        def work() -> None:
            sums[:] += received.sum(axis=0, dtype=np.uint32)

        stream = self.links[rank].queue if queue else self.streams[rank]
        self.kernel(rank, work, [received, sums], [sums], stream)

    def exchange(self, seed: int, *, queue: bool = False) -> None:
        """Every rank writes its vector, pulls all vectors, and adds them up."""
        ranks = range(len(self.links))
        for r in ranks:
            if seed:
                for mark in self.taken:
                    self.links[r].wait(mark)
            self.write(r, seed)
            self.links[r].record(self.written[r])
        for r in ranks:
            if queue:
                self.links[r].pull(self.pulls(r), after=self.written)
                self.add(r, queue=True)
                self.links[r].set(self.taken[r], after=self.written)
            else:
                self.links[r].pull(self.pulls(r), done=self.taken[r], after=self.written)
                assert self.cuda.current == self.devices[r]
        for r in ranks:
            if not queue:
                self.links[r].wait(self.taken[r])
                self.add(r, queue=False)
                self.links[r].record(self.taken[r])

    def expected(self, rounds: int) -> np.ndarray:
        parts = [
            np.random.default_rng((seed, r)).integers(0, 1 << 20, self.n, np.uint32)
            for seed in range(rounds)
            for r in range(len(self.links))
        ]
        return np.stack(parts).sum(axis=0, dtype=np.uint32)


@pytest.mark.parametrize("queue", [False, True])
@pytest.mark.parametrize("direct", [none, all_, some])
@pytest.mark.parametrize("devices", [(0,), (0, 0), (0, 1), (0, 1, 2), (0, 0, 1, 1), (1, 0, 1)])
def test_exchange(devices: tuple[int, ...], direct: Direct, queue: bool, monkeypatch) -> None:
    """Two captures one after the other, each with three rounds, replayed in random orders."""
    monkeypatch.setattr(copy_engine, "LEAST_CHUNK", 512)
    ranks = Ranks(monkeypatch, devices, direct, n=1500, staging=2048)  # 6000 bytes: 6 chunks
    for _ in range(2):
        ranks.begin()
        for seed in range(3):
            ranks.exchange(seed, queue=queue)
        for link in ranks.links:
            link.join()
        ranks.end()
        ranks.cuda.check()
        for replay in range(3):
            for s in ranks.sums:
                s[:] = 0
            ranks.cuda.run(np.random.default_rng(replay))
            for s in ranks.sums:
                np.testing.assert_array_equal(s, ranks.expected(3))


@pytest.mark.parametrize("direct", [none, all_])
def test_host_memory_is_read_by_every_rank_itself(direct: Direct, monkeypatch) -> None:
    ranks = Ranks(monkeypatch, (0, 1), direct, n=700, staging=1024)
    for r, host in enumerate(ranks.host):
        host[:] = np.arange(700) + 1000 * r
    ranks.begin()
    for r, link in enumerate(ranks.links):
        base = ranks.received[r].ctypes.data
        done = link.mark()
        link.pull(
            [Pull(base + 2800 * s, h.ctypes.data, 2800, s, True) for s, h in enumerate(ranks.host)],
            done=done,
        )
        link.wait(done)
    ranks.end()
    ranks.cuda.check()
    ranks.cuda.run(np.random.default_rng(0))
    for received in ranks.received:
        np.testing.assert_array_equal(received, np.stack(ranks.host))
    assert len([n for n in ranks.cuda.nodes if n.reads]) == 4


def test_nothing_to_pull_still_sets_its_mark_and_is_joined(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, (0, 1), none, n=8, staging=1024)
    ranks.begin()
    address = ranks.own[1].ctypes.data
    for pulls in ([], [Pull(ranks.received[0].ctypes.data, address, 0, 1)]):
        done = ranks.links[0].mark()
        ranks.links[0].pull(pulls, done=done, after=[ranks.points[0]])
        ranks.links[1].wait(done)
        ranks.links[0].join()
    only = ranks.links[1].mark()  # a mark on a queue that held nothing yet
    ranks.links[1].set(only)
    ranks.links[0].wait(only)
    ranks.links[1].join()
    ranks.end()
    ranks.cuda.check()


def test_while_preparing_nothing_happens(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, (0, 1), none, n=8, staging=1024)
    ranks.begin()
    before = len(ranks.cuda.nodes)
    with preparing():
        for r, link in enumerate(ranks.links):
            link.record(ranks.written[r])
            link.pull(ranks.pulls(r), done=ranks.taken[r], after=ranks.written)
            link.set(ranks.taken[r], after=ranks.written)
            link.wait(ranks.taken[r])
            link.join()
    assert len(ranks.cuda.nodes) == before
    ranks.end()
    ranks.cuda.check()


def test_marks_belong_to_the_links_device_and_leave_the_current_one(monkeypatch) -> None:
    ranks = Ranks(monkeypatch, (0, 1), none, n=8, staging=1024)
    ranks.cuda.current = 0
    assert ranks.links[1].mark().device == 1
    assert ranks.cuda.current == 0


@pytest.mark.parametrize("missing", ["written", "taken", "full", "empty"])
def test_a_missing_order_is_a_race(missing: str, monkeypatch) -> None:
    """The check that the others rely on: without one of the waits it fails."""
    monkeypatch.setattr(copy_engine, "LEAST_CHUNK", 512)
    ranks = Ranks(monkeypatch, (0, 1), none, n=1500, staging=2048)
    lanes = [lane for link in ranks.links for lane in link._lanes.values()]
    events = {
        "written": ranks.written,
        "taken": ranks.taken,
        "full": [e for lane in lanes for e in lane._full],
        "empty": [e for lane in lanes for e in lane._empty],
    }[missing]
    wait = ranks.cuda.wait_event

    def without(stream: int, event: Any) -> None:
        if not any(event is e for e in events):
            wait(stream, event)

    monkeypatch.setattr("llmq_nb.comm.copy_engine.wait_event", without)
    ranks.begin()
    for seed in range(2):
        ranks.exchange(seed)
    for link in ranks.links:
        link.join()
    ranks.end()
    with pytest.raises(AssertionError, match="race|not joined"):
        ranks.cuda.check()


def test_a_race_needs_no_order_between_the_two() -> None:
    cuda = Cuda(1, set())
    stream = cuda.create_stream()
    cuda.add(stream, lambda: None, writes=[(0, 8)])
    cuda.add(stream, lambda: None, reads=[(4, 12)])
    cuda.check()
    cuda.nodes.append(Node([0], lambda: None, writes=[(8, 9)]))
    cuda.tails[0] = [1, 2]
    with pytest.raises(AssertionError, match="race"):
        cuda.check()


def test_links_of_each_pair_have_their_own_memory(monkeypatch) -> None:
    cuda = Cuda(3, set())
    install(cuda, monkeypatch)
    streams = [cuda.create_stream() for _ in range(3)]
    opened: Any = cuda.devices
    links = make_links(opened, streams, staging_bytes=4096, direct=some)
    places = [array for _, device, array in cuda.memory if device == HOST]
    assert [p.nbytes for p in places] == [4096] * 4
    assert all(isinstance(link, CudaLink) for link in links)


@given(
    st.lists(st.integers(0, 5000), max_size=8),
    st.integers(1, 9).map(lambda x: 256 * x),
)
def test_chunks_hold_every_byte_once(sizes: list[int], limit: int) -> None:
    pulls, target, source = [], 0, 1 << 20
    for nbytes in sizes:
        pulls.append(Pull(target, source, nbytes, 0))
        target, source = target + nbytes + 3, source + nbytes + 7
    seen = []
    for chunk in cut(pulls, limit):
        assert chunk
        end = 0
        for p in chunk:
            assert p.place >= end and p.place % 256 == 0 and p.nbytes > 0
            end = p.place + p.nbytes
            seen.append((p.target, p.source, p.nbytes))
        assert end <= limit
    pieces = iter(seen)
    for pull in pulls:
        done = 0
        while done < pull.nbytes:
            t, s, nbytes = next(pieces)
            assert (t, s) == (pull.target + done, pull.source + done)
            done += nbytes
        assert done == pull.nbytes
    assert next(pieces, None) is None
    total = sum(-(-n // 256) * 256 for n in sizes)
    assert len(cut(pulls, limit)) <= total // limit + 1
