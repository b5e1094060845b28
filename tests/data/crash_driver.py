"""Writes a store in forked children that are killed. Run as a program by test_crash.py.

steps FOLDER   for n = 1, 2, ...: a child writes FOLDER/n.zarr and kills itself (SIGKILL) at its
               n-th file operation (open, rename, remove, ...), until a child gets through. Prints
               the last n.
random FOLDER SEED   ten children in turn write FOLDER/s.zarr; each is killed from outside when a
               random number of its documents is written. Prints how far each got.
tokenize FOLDER STEP   as `steps`, but `tokenize_split` of FOLDER/text/*, killed at operations 1,
               1 + STEP, ... and each time run again, killed again, over the same two stores.
"""

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from llmq_nb.data.store import TokenizerInfo
from llmq_nb.data.store_writer import StoreWriter
from llmq_nb.data.tokenize import tokenize_split
from llmq_nb.data.tokenizer import ByteTokenizer

RECORD = TokenizerInfo(name="test", sha256="ab" * 32, vocab_size=259, eos_id=1)
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate", "shutil.rmtree"}


def documents(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(12)
    lengths = rng.integers(1, 200, count)
    return [(rng.integers(0, 259, n), rng.random(n) < 0.5) for n in lengths]


def write(path: Path, count: int, done: Callable[[], object] = lambda: None) -> None:
    with StoreWriter(path, RECORD, True, chunk=64, shard=256) as writer:
        for tokens, mask in documents(count)[writer.appended :]:
            writer.append(tokens, mask)
            done()


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a fork; returns the signal that ended it, 0 if it got through."""
    # zarr's threads start with its first use, which is in the child: this process has none to lose.
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def killed_at(operation: int, work: Callable[[], None]) -> int:
    def with_hook() -> None:
        count = 0

        def hook(event: str, _: tuple) -> None:
            nonlocal count
            count += event in FILE_EVENTS
            if count == operation and event in FILE_EVENTS:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()

    return in_child(with_hook)


def steps(folder: Path) -> None:
    operation = 1
    while killed_at(operation, partial(write, folder / f"{operation}.zarr", 6)):
        operation += 1
    print(operation)


def random(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(10):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            write(folder / "s.zarr", 600, partial(os.write, writer, b"."))
            os._exit(0)
        os.close(writer)
        seen, limit = 0, int(rng.integers(1, 55))
        while seen < limit and os.read(reader, 1):
            seen += 1
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), "got through before it was killed"
        os.close(reader)
        print(seen)


def tokenize(folder: Path, step: int) -> None:
    def work() -> None:
        tokenize_split(
            [f"{folder}/text/*"], folder / "t.zarr", folder / "v.zarr", ByteTokenizer(), 0.3
        )

    kills = 0
    for operation in range(1, 10**6, step):
        if not killed_at(operation, work):
            break
        kills += 1
    print(kills)


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:]
    {"steps": steps, "random": random, "tokenize": tokenize}[command](
        Path(folder), *(int(value) for value in rest)
    )
