"""A `Transfer` of one GPU: asynchronous copies on two streams of its own; and its `Fence`."""

from collections.abc import Sequence
from typing import Any

from llmq_nb.core.device import (
    Device,
    check,
    create_event,
    create_stream,
    driver,
    record_event,
    wait_event,
)
from llmq_nb.core.tensor import Tensor
from llmq_nb.kernels.launch import is_preparing
from llmq_nb.offload.transfer import Copy


class CudaTransfer:
    """Asynchronous copies on two streams of the current device.

    They are forked from the compute stream and joined back by events, so a capture of that stream
    holds them too. While steps are only prepared nothing is copied.
    """

    def __init__(self, compute: int) -> None:
        self._compute, self._point = compute, create_event()
        self._streams = (int(create_stream()), int(create_stream()))
        self._used = [False, False]

    def mark(self) -> Any:
        return create_event()

    def to_device(self, copies: Sequence[Copy], *, done: Any, after: Any = None) -> None:
        stream = self._start(0, after)
        if stream is not None:
            for copy in copies:
                check(
                    driver().cuMemcpyHtoDAsync(copy.device, copy.host, copy.nbytes, stream),
                    "copying to the device",
                )
            record_event(done, stream)

    def to_host(self, copies: Sequence[Copy], *, done: Any, after: Any = None) -> None:
        stream = self._start(1, after)
        if stream is not None:
            for copy in copies:
                check(
                    driver().cuMemcpyDtoHAsync(copy.host, copy.device, copy.nbytes, stream),
                    "copying to the host",
                )
            record_event(done, stream)

    def wait(self, mark: Any) -> None:
        if not is_preparing():
            wait_event(self._compute, mark)

    def free(self, staging: Tensor) -> None:
        """Nothing to do."""

    def join(self) -> None:
        for stream, used in zip(self._streams, self._used, strict=True):
            if used:
                record_event(self._point, stream)
                wait_event(self._compute, self._point)
        self._used = [False, False]

    def reset(self) -> None:
        self._used = [False, False]

    def _start(self, queue: int, after: Any) -> int | None:
        """The queue's stream, ordered after compute's work so far and `after`."""
        if is_preparing():
            return None
        stream = self._streams[queue]
        record_event(self._point, self._compute)
        wait_event(stream, self._point)
        if after is not None:
            wait_event(stream, after)
        self._used[queue] = True
        return stream


class CudaFence:
    """A `Fence` of one stream: an event for each of `count` staging buffers."""

    def __init__(self, device: Device, stream: int, count: int) -> None:
        self._device, self._stream = device, stream
        self._events = [create_event() for _ in range(count)]

    @property
    def launches(self) -> bool:
        return not is_preparing()

    def record(self, turn: int) -> None:
        record_event(self._events[turn], self._stream)

    def wait(self, turn: int) -> None:
        self._device.make_current()  # each thread has its own current context
        check(driver().cuEventSynchronize(self._events[turn]), "waiting for an update")
