"""CUDA streams, events and copies of several GPUs as a graph of operations over host memory.

`install` puts it in the place of what comm/copy_engine.py calls. Every call adds a node with what
it reads and writes; `Cuda.check` finds pairs that touch the same bytes without an order between
them, work that is not joined to the first stream, and `Cuda.run` does the work in a random order
that the edges allow. Breaches of the driver's rules (an event on a stream of another device, a wait
for an event of an earlier capture, the wrong current context, peer access where there is none)
fail at the call.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Span = tuple[int, int]
"""First byte and the one behind the last."""
HOST = -1


@dataclasses.dataclass
class Node:
    """An operation: after `before`, it does `work`."""

    before: list[int]
    work: Callable[[], object]
    reads: list[Span] = dataclasses.field(default_factory=list)
    writes: list[Span] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A GPU of a `Cuda`."""

    cuda: "Cuda"
    ordinal: int

    def make_current(self) -> None:
        self.cuda.current = self.ordinal


@dataclasses.dataclass
class Event:
    """Belongs to a device; recorded at a node of a capture."""

    device: int
    node: int | None = None
    capture: int = -1


def move(target: int, source: int, nbytes: int) -> Callable[[], object]:
    return lambda: ctypes.memmove(target, source, nbytes)


class Cuda:
    """All GPUs. peers: (reader, source) that have peer access."""

    def __init__(self, devices: int, peers: set[tuple[int, int]]) -> None:
        self.devices = [FakeDevice(self, i) for i in range(devices)]
        self.peers, self.current, self.capture = peers, 0, 0
        self.stream_device: list[int] = []
        self.memory: list[tuple[Span, int, Any]] = []
        self.begin()

    def begin(self) -> None:
        """A new capture: events of an earlier one mean nothing."""
        self.nodes: list[Node] = []
        self.tails: dict[int, list[int]] = {}
        self.capture += 1

    # ---- memory --------------------------------------------------------------------------------
    def place(self, array: np.ndarray, device: int) -> np.ndarray:
        """Let an array be memory of a device."""
        start = array.ctypes.data
        self.memory.append(((start, start + array.nbytes), device, array))
        return array

    def where(self, address: int, nbytes: int) -> int:
        """The device whose memory that is. Fails if it leaves an array."""
        found = [d for (a, b), d, _ in self.memory if a <= address and address + nbytes <= b]
        assert len(found) == 1, f"{nbytes} bytes at {address:#x} are in no array"
        return found[0]

    # ---- streams and events --------------------------------------------------------------------
    def create_stream(self) -> int:
        self.stream_device.append(self.current)
        return len(self.stream_device) - 1

    def create_event(self) -> Event:
        return Event(self.current)

    def record_event(self, event: Event, stream: int) -> None:
        assert event.device == self.stream_device[stream], "an event of another device"
        event.node, event.capture = self.add(stream, lambda: None), self.capture

    def wait_event(self, stream: int, event: Event) -> None:
        assert event.node is not None, "a wait for an event that was never recorded"
        assert event.capture == self.capture, "a wait for an event of an earlier capture"
        self.tails.setdefault(stream, []).append(event.node)

    def add(
        self,
        stream: int,
        work: Callable[[], object],
        reads: Sequence[Span] = (),
        writes: Sequence[Span] = (),
    ) -> int:
        """A node at the end of a stream."""
        assert self.tails.get(stream) or stream == 0, "a stream that was not forked"
        self.nodes.append(Node(self.tails.get(stream, []), work, list(reads), list(writes)))
        self.tails[stream] = [len(self.nodes) - 1]
        return len(self.nodes) - 1

    def copy(self, target: int, source: int, nbytes: int, stream: int, *, ends: str) -> Any:
        """ends: "DD", "HD" (host to device) or "DH"."""
        device = self.stream_device[stream]
        assert self.current == device, "another device is current"
        there, here = self.where(source, nbytes), self.where(target, nbytes)
        assert ("H" if there == HOST else "D") + ("H" if here == HOST else "D") == ends
        if ends == "DD":
            assert here == device and (there == device or (device, there) in self.peers)
        else:
            assert device in (here, there)
        spans = [(source, source + nbytes)], [(target, target + nbytes)]
        self.add(stream, move(target, source, nbytes), *spans)
        return (0,)

    # ---- the driver's names --------------------------------------------------------------------
    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> Any:
        return self.copy(target, source, nbytes, stream, ends="DD")

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> Any:
        return self.copy(target, source, nbytes, stream, ends="HD")

    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: int) -> Any:
        return self.copy(target, source, nbytes, stream, ends="DH")

    def cuCtxGetCurrent(self) -> Any:
        return (0, self.current)

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.current = context
        return (0,)

    # ---- what was recorded ---------------------------------------------------------------------
    def ancestors(self) -> list[int]:
        """Bit sets of all nodes before each."""
        out: list[int] = []
        for node in self.nodes:
            bits = 0
            for b in node.before:
                bits |= out[b] | 1 << b
            out.append(bits)
        return out

    def check(self) -> None:
        """No races; everything comes before the end of stream 0."""
        before = self.ancestors()
        joined = 0
        for tail in self.tails[0]:
            joined |= before[tail] | 1 << tail
        assert joined == (1 << len(self.nodes)) - 1, "work that is not joined"
        for j, later in enumerate(self.nodes):
            for i, earlier in enumerate(self.nodes[:j]):
                if not before[j] >> i & 1 and (
                    _meet(earlier.writes, later.reads)
                    or _meet(earlier.writes, later.writes)
                    or _meet(earlier.reads, later.writes)
                ):
                    raise AssertionError(f"nodes {i} and {j} of {len(self.nodes)} race")

    def run(self, rng: np.random.Generator) -> None:
        """All work, in a random order that the edges allow."""
        missing = [len(set(node.before)) for node in self.nodes]
        after: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for b in set(node.before):
                after[b].append(index)
        ready = [i for i, count in enumerate(missing) if not count]
        while ready:
            index = ready.pop(int(rng.integers(len(ready))))
            self.nodes[index].work()
            for other in after[index]:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)


def _meet(a: Sequence[Span], b: Sequence[Span]) -> bool:
    return any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)


def install(cuda: Cuda, monkeypatch: Any) -> None:
    """comm/copy_engine.py talks to `cuda`."""

    class FakePinned:
        def __init__(self, nbytes: int, *, mapped: bool) -> None:
            assert mapped, "not pinned for every device"
            self.bytes = cuda.place(np.full(nbytes, 0xEE, np.uint8), HOST)
            self.address = self.bytes.ctypes.data

        def close(self) -> None:
            pass

    module = "llmq_nb.comm.copy_engine."
    for name in ("create_stream", "create_event", "record_event", "wait_event"):
        monkeypatch.setattr(module + name, getattr(cuda, name))
    monkeypatch.setattr(module + "driver", lambda: cuda)
    monkeypatch.setattr(module + "Pinned", FakePinned)
