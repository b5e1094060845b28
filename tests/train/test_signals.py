"""Signals: real signals to this process, and to a child where the process must end."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from llmq_nb.train.signals import Signals

HANDLED = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.parametrize("number", HANDLED)
def test_first_signal_sets_the_flag(number):
    with Signals() as signals:
        assert signals.received is None
        assert signals.exit_code == 0
        os.kill(os.getpid(), number)
        assert signals.received == number
        assert signals.exit_code == 128 + number


def test_handlers_are_put_back():
    def handler(number, frame):
        raise AssertionError

    before = [signal.signal(number, handler) for number in HANDLED]
    try:
        with Signals():
            assert all(signal.getsignal(n) is not handler for n in HANDLED)
        assert all(signal.getsignal(n) is handler for n in HANDLED)
    finally:
        for number, old in zip(HANDLED, before, strict=True):
            signal.signal(number, old)


def test_sigusr1_before_sigterm_is_not_a_second_ending():
    with Signals() as signals:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert signals.received == signal.SIGUSR1


CHILD = """
import os, signal, sys
from llmq_nb.train.signals import Signals
try:
    with Signals() as signals:
        for number in map(int, sys.argv[1:]):
            os.kill(os.getpid(), number)
        print(signals.received, flush=True)
finally:
    print("cleaned", flush=True)
"""


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGTERM, signal.SIGTERM), 143),
        ((signal.SIGTERM, signal.SIGINT), 130),
        ((signal.SIGUSR1, signal.SIGINT, signal.SIGTERM), 143),
    ],
)
def test_second_ending_leaves_at_once(numbers, code):
    arguments = [str(int(n)) for n in numbers]
    command = [sys.executable, "-c", CHILD, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stdout == ""  # neither the rest of the loop nor the clean-up ran


def test_in_another_thread_nothing_is_touched():
    before = [signal.getsignal(n) for n in HANDLED]
    seen = []

    def body():
        with Signals() as signals:
            seen.append((signals.received, [signal.getsignal(n) for n in HANDLED]))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
