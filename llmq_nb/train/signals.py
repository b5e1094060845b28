"""Signals that end a run with a full checkpoint: SIGINT, SIGTERM and SIGUSR1.

The first sets a flag that the training loop reads between two steps. While there is nothing to save
(data are made, kernels compiled) or all is saved (the export), it ends the work at once by an
exception. A second SIGINT or SIGTERM leaves at once with 128 + n; SIGUSR1 is only ever a request,
so that a scheduler's "time is nearly up" followed by its SIGTERM does not cut the checkpoint short.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

ENDING = (signal.SIGINT, signal.SIGTERM)
HANDLED = (*ENDING, signal.SIGUSR1)
SHOW_CURSOR = b"\x1b[?25h"


class Stopped(BaseException):
    """A signal ended work that leaves nothing to save."""


class Signals:
    """Context manager; `received` is the first signal's number, or None.

    Outside the main thread Python cannot handle signals: there it changes nothing and `received`
    stays None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._endings = 0
        self._raises = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: the handler was not set from Python, so Python cannot set it again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    @property
    def exit_code(self) -> int:
        """128 + n after signal n, else 0."""
        return 0 if self.received is None else 128 + self.received

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises Stopped, in the main thread between two of Python's steps."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False
        if self.received is not None:  # where it could not be raised, in a callback
            raise Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        if number in ENDING:
            self._endings += 1
        if self._endings >= 2:
            if sys.__stdout__ is not None and sys.__stdout__.isatty():
                os.write(sys.__stdout__.fileno(), SHOW_CURSOR)  # a progress bar hides it
            os._exit(128 + number)  # no clean-up: what is half-written stays in its staging folder
        if self._raises:
            self._raises = False  # once: the clean-up must not be cut short
            raise Stopped
