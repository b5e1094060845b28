"""A scratch file for what lies on the disk during a run, read and written past the page cache.

The file has no name: the system takes its space back when the process ends, however it ends, and no
checkpoint ever holds it. All of its space is taken at the start. Direct I/O wants whole blocks at
aligned addresses and offsets; a file system that refuses it gets ordinary I/O, and one line says
so.
"""

import ctypes
import dataclasses
import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.core.files import BLOCK, check_space, in_blocks, nearest_existing
from llmq_nb.core.sizes import format_bytes

WHAT = "optimizer states (memory.disk)"
MEND = "free some, or set run.out_dir to a folder on another disk"


def check_disk(folder: Path, nbytes: int) -> None:
    """Raise UserError where the disk of the folder has too little space; makes nothing."""
    if nbytes:
        check_space(folder, nbytes, WHAT, mend=MEND)


class ScratchFile:
    """nbytes of zeros on the disk of `folder`, or of the nearest folder above it that exists.

    announce: takes the line of a file system without direct I/O. Raises UserError: no space, or no
    such file can be made. Later failures are MachineErrors, after which nothing is read any more:
    some of the states would be of one step and some of another.
    """

    def __init__(
        self, folder: Path, nbytes: int, *, announce: Callable[[str], None] = lambda line: None
    ) -> None:
        self.folder, self.nbytes = nearest_existing(folder.absolute()), nbytes
        check_disk(self.folder, nbytes)
        self.failure: str | None = None
        """Why nothing is read any more."""
        try:
            self._handle, self.direct = _open(self.folder)
            _take(self._handle, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                what = f"too little disk: {format_bytes(nbytes)} for {WHAT}"
                raise UserError(what, where=str(self.folder), mend=MEND) from None
            what = f"cannot make a file for {WHAT} ({error.strerror or error})"
            raise UserError(what, where=str(self.folder), mend=MEND) from None
        if not self.direct:
            announce(f"memory.disk: no direct I/O in {self.folder}, its page cache is in between")

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Fill memory from the file. All three are multiples of BLOCK."""
        self._move(os.preadv, "reading", address, nbytes, offset)

    def write(self, address: int, nbytes: int, offset: int) -> None:
        """The other way."""
        self._move(os.pwritev, "writing", address, nbytes, offset)

    def fail(self, why: str) -> None:
        """Let nothing be read any more; the first reason stays."""
        self.failure = self.failure or f"{why}; they are lost, go on from a checkpoint"

    def close(self) -> None:
        """Give the space back."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _move(
        self, call: Callable[..., int], what: str, address: int, nbytes: int, offset: int
    ) -> None:
        if self.failure is not None:
            raise MachineError(self.failure)
        done, memory = 0, memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        try:
            while done < nbytes:
                moved = call(self._handle, [memory[done:]], offset + done)
                if not moved:
                    raise OSError(errno.EIO, "the file is too short")
                done += moved
        except OSError as error:
            self.fail(f"{what} {WHAT} in {self.folder}: {error.strerror or error}")
            raise MachineError(self.failure) from error


def _open(folder: Path) -> tuple[int, bool]:
    """A handle of a file without a name, and whether it takes direct I/O. Raises OSError."""
    handle = _nameless(folder, os.O_DIRECT)
    if handle is not None:
        if _takes_blocks(handle):
            return handle, True
        os.close(handle)
    handle = _nameless(folder, 0)
    if handle is None:  # a file system that cannot: the name goes at once
        handle, name = tempfile.mkstemp(prefix=".states-", suffix=".tmp", dir=folder)
        os.unlink(name)
    return handle, False


def _nameless(folder: Path, flags: int) -> int | None:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            return None
        raise


def _takes_blocks(handle: int) -> bool:
    """Whether a block is written and read: some file systems refuse only now."""
    block = mmap.mmap(-1, BLOCK)
    try:
        return os.pwritev(handle, [block], 0) == os.preadv(handle, [block], 0) == BLOCK
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        block.close()


def _take(handle: int, nbytes: int) -> None:
    """Make the file as long, its space taken where the file system can."""
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.truncate(handle, nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class OnDisk:
    """The `data` of a tensor that lies in the file: (offset in the file, bytes) of its pieces."""

    file: ScratchFile
    pieces: Sequence[tuple[int, int]]

    def read(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The whole tensor. MachineError."""
        out = np.empty(shape, dtype)
        self._through(out, self.file.read, before=False)
        return out

    def write(self, array: NDArray[Any]) -> None:
        """The whole tensor, from a contiguous array of its format. MachineError."""
        self._through(array, self.file.write, before=True)

    def _through(
        self, array: NDArray[Any], move: Callable[[int, int, int], None], *, before: bool
    ) -> None:
        """Piece by piece through aligned memory, filled before or emptied after the move."""
        data, start = array.reshape(-1).view(np.uint8), 0
        largest = in_blocks(max(nbytes for _, nbytes in self.pieces))
        bounce = np.frombuffer(mmap.mmap(-1, largest), np.uint8)  # ends with this array
        for offset, nbytes in self.pieces:
            part = data[start : start + nbytes]
            if before:
                bounce[:nbytes] = part
            move(bounce.ctypes.data, in_blocks(nbytes), offset)
            if not before:
                part[...] = bounce[:nbytes]
            start += nbytes
