"""safetensors files, written as a stream and read as views of the mapped file.

    bytes 0-7      N, little-endian uint64
    bytes 8-N+7    JSON {name: {dtype, shape, data_offsets: [begin, end]}}, padded with spaces
    bytes N+8 ...  the tensors, row-major and little-endian, one after the other

The names are not known before the last tensor has come, so the writer reserves the header's room
first and fills it at the end: no tensor is held back. BF16 and FP8 are ml_dtypes formats, which
safetensors' own NumPy binding does not know in all versions.

Source   the format description in the safetensors README. Written from it.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
HEADER_ROOM = 1 << 16
"""Bytes before the first tensor that the writer reserves: about 450 names of a language model."""
MAX_HEADER = 100_000_000
"""Largest header that readers of the format accept."""
WRITE_BYTES = 1 << 26
"""Most bytes of one system call: Linux cuts longer ones at 2 GiB, and signals wait for it."""


class SafetensorsWriter:
    """Writes one file; a context manager that closes it. `finish` makes it a complete one.

    room: bytes for the header, a multiple of 8. metadata: text that readers can show. Raises
    OSError as the disk does, ValueError for a dtype that the format does not have.
    """

    def __init__(
        self, path: Path, *, metadata: dict[str, str] | None = None, room: int = HEADER_ROOM
    ) -> None:
        self.path, self.room = path, room
        self.entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        self.data_bytes = 0
        self._header_bytes = len(_json(self.entries))
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.lseek(self._file, room, os.SEEK_SET)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def fits(self, name: str, array: NDArray[Any]) -> bool:
        """Whether the header has room for one more tensor."""
        return self._header_bytes + self._entry_bytes(name, array) <= self.room - 8

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Append a tensor; the bytes are in the file when this returns."""
        if name in self.entries:
            raise ValueError(f"two tensors named {name!r} in {self.path}")
        if not self.fits(name, array):
            raise ValueError(f"no room for {name!r} in the header of {self.path}")
        self._header_bytes += self._entry_bytes(name, array)
        self.entries[name] = _entry(array, self.data_bytes)
        flat = np.ascontiguousarray(array).reshape(-1)
        write_all(self._file, flat.view(np.uint8).data)
        self.data_bytes += array.nbytes

    def finish(self) -> None:
        """Fill the header in and wait until everything is on the disk."""
        header = _json(self.entries).ljust(self.room - 8)
        os.lseek(self._file, 0, os.SEEK_SET)
        write_all(self._file, memoryview((self.room - 8).to_bytes(8, "little") + header))
        os.fsync(self._file)

    def _entry_bytes(self, name: str, array: NDArray[Any]) -> int:
        return len(_json({name: _entry(array, self.data_bytes)}))  # its braces pay for the comma


def write_safetensors(
    path: Path,
    tensors: Iterable[tuple[str, NDArray[Any]]],
    *,
    metadata: dict[str, str] | None = None,
    room: int = HEADER_ROOM,
) -> None:
    """One file with the tensors in their order, on the disk when this returns."""
    with SafetensorsWriter(path, metadata=metadata, room=room) as writer:
        for name, array in tensors:
            writer.add(name, array)
        writer.finish()


def open_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read-only views of the mapped file, by name; a page is read when it is touched.

    Raises UserError: no such file, not safetensors, cut short, unknown dtype.
    """
    header, start, data = _read_header(path)
    tensors: dict[str, NDArray[Any]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            right = end - begin == math.prod(shape) * dtype.itemsize and min(shape, default=0) >= 0
        except (KeyError, TypeError, ValueError):
            raise _broken(path, f"the entry of {name!r} is {entry}") from None
        if not right or not 0 <= begin <= end <= len(data) - start:
            raise _broken(path, f"{name!r} does not fit the file")
        tensors[name] = data[start + begin : start + end].view(dtype).reshape(shape)
    return tensors


def write_all(file: int, data: memoryview) -> None:
    """All bytes of `data` to a file descriptor."""
    while data:
        data = data[os.write(file, data[:WRITE_BYTES]) :]


def _read_header(path: Path) -> tuple[dict[str, Any], int, NDArray[np.uint8]]:
    """(header, offset of the first tensor, the mapped bytes)."""
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}", mend="give the path of a .safetensors") from None
    except OSError as error:
        raise UserError(f"cannot read {path}", mend=str(error)) from None
    length = int.from_bytes(data[:8].tobytes(), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise _broken(path, "the header does not fit the file")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise _broken(path, "the header is not a JSON object")
    return header, 8 + length, data.view(np.ndarray)


def _entry(array: NDArray[Any], begin: int) -> dict[str, Any]:
    code = CODES.get(array.dtype)
    if code is None:
        raise ValueError(f"safetensors has no dtype {array.dtype}")
    offsets = [begin, begin + array.nbytes]
    return {"dtype": code, "shape": list(array.shape), "data_offsets": offsets}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _broken(path: Path, why: str) -> UserError:
    return UserError("not a complete safetensors file", where=str(path), mend=why)
