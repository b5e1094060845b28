"""Files and folders that are on the disk when a call returns, and the space for them.

synced_file    a file written in place; fsynced when the block ends
atomic_file    the same under a temporary name: it appears complete or not at all
fsync_path     the bytes of a file, or the names in a folder, made durable
check_space    refuses before anything is written
"""

import contextlib
import glob
import io
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from llmq_nb.core.errors import UserError
from llmq_nb.core.sizes import format_bytes

BLOCK = 4096
"""Bytes that addresses, lengths and offsets of direct I/O are multiples of."""
WRITE_BYTES = 1 << 26
"""Most bytes of one system call: Linux cuts longer ones at 2 GiB, and signals wait for it."""


class _WholeFile(io.FileIO):
    """An unbuffered file whose `write` takes all bytes: a short write is gone on with."""

    def write(self, data: Any, /) -> int:
        """data: bytes, or a memoryview of single bytes; returns its length."""
        left = memoryview(data)
        while left:
            left = left[os.write(self.fileno(), left[:WRITE_BYTES]) :]
        return len(data)


@contextlib.contextmanager
def synced_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write anew in place, on the disk when the block ends. Raises OSError."""
    with _WholeFile(path, "wb") as file:
        yield file
        os.fsync(file.fileno())


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that appears under `path` when the block ends, on the disk, or not at all.

    Until then an older file of that name stays. Raises OSError as the disk does.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with synced_file(temporary) as file:  # a rename may reach the disk before the data does
            yield file
        temporary.replace(path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_torn(path: Path) -> None:
    """Delete what writers of `path` left that were killed inside `atomic_file`."""
    for torn in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        torn.unlink(missing_ok=True)


def json_bytes(value: Any) -> bytes:
    """The JSON text of a file that people read too: keys sorted, indented, a last newline."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def fsync_path(path: str | os.PathLike[str]) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def nearest_existing(path: Path) -> Path:
    """The path itself or the nearest one above it that is there; a broken link is."""
    return next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))


def in_blocks(nbytes: int) -> int:
    """Rounded up to whole blocks of direct I/O."""
    return -(-nbytes // BLOCK) * BLOCK


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the disk where `path` is or would be made."""
    return shutil.disk_usage(nearest_existing(path.resolve())).free


def check_space(path: Path, needed: int, what: str, *, mend: str) -> None:
    """Raise UserError where the disk of `path` has fewer than `needed` bytes free.

    what: who needs them, in the plural or with its article ("checkpoints", "the export").
    """
    free = free_bytes(path)
    if free < needed:
        raise UserError(
            f"too little disk: {format_bytes(needed)} for {what}, {format_bytes(free)} are free",
            where=str(path),
            mend=mend,
        )
