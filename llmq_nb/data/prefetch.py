"""Runs an endless iterator ahead in a thread."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class Prefetch(Generic[Item]):
    """At most `depth` items of `source` wait to be taken. Knows nothing of its owner, so that the
    owner can be dropped while the thread runs.
    """

    def __init__(self, source: Iterator[Item], depth: int) -> None:
        self._source = source
        self._queue: queue.Queue[Item | _Failure] = queue.Queue(depth)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="llmq-nb loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._source:
                self._queue.put(item)
                if self._stopping.is_set():
                    return
        except BaseException as error:  # whatever it is, it belongs to the caller
            self._queue.put(_Failure(error))

    def get(self) -> Item:
        """The next item. Raises what `source` raised, ValueError after `stop`."""
        if self._error is not None:
            raise self._error
        if self._stopping.is_set():
            raise ValueError("the loader is closed")
        item = self._queue.get()
        if isinstance(item, _Failure):
            self._error = item.error
            raise item.error
        return item

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        while self._thread.is_alive():
            try:  # make room for the one put that may be waiting
                self._queue.get_nowait()
            except queue.Empty:
                pass
            self._thread.join(timeout=0.01)
