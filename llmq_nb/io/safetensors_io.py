r"""Safetensors files: a checked header, tensors read one at a time, shards written as a stream.

    file = [header length: uint64, little endian] [header: JSON, padded with spaces] [data]
    header = {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}

The data has no holes and ends the file, so a truncated file is found from its header alone. Tensors
are read straight into the caller's rows; memory is one tensor. Writing asks for one tensor at a
time and goes to a temporary name that is fsynced and then renamed.

Source   The format's own description (safetensors README, "Format"). Written from it, because the
         library's NumPy interface holds a whole file in memory when it writes.
"""

import contextlib
import dataclasses
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError

INDEX_SUFFIX = ".safetensors.index.json"
_MAX_HEADER = 100_000_000
"""The format's limit on the header's bytes."""

_NAMES: dict[np.dtype[Any], str] = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(np.int64): "I64",
    np.dtype(np.int32): "I32",
    np.dtype(np.int16): "I16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint64): "U64",
    np.dtype(np.uint32): "U32",
    np.dtype(np.uint16): "U16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.bool_): "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a file: name, NumPy dtype (ml_dtypes included) and shape."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One file: the header is read and checked when it is opened, data only on request.

    UserError if the file is missing, truncated, longer than it says or not safetensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.specs: dict[str, TensorSpec] = {}
        self.metadata: dict[str, str] = {}
        self._offsets: dict[str, int] = {}
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                self._read_header(file, size)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error

    def _bad(self, what: str, mend: str = "copy or download the file again") -> UserError:
        return UserError(what, where=str(self.path), mend=mend)

    def _read_header(self, file: BinaryIO, size: int) -> None:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > _MAX_HEADER:
            raise self._bad("no safetensors header")
        if size < 8 + length:
            raise self._bad(f"truncated: {size} bytes, the header alone takes {8 + length}")
        try:
            header = json.loads(file.read(length))
            self.metadata = header.pop("__metadata__", {})
            end = self._parse(header, 8 + length)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._bad(f"unreadable safetensors header ({error})") from error
        if size < end:
            raise self._bad(f"truncated: {size} of {end} bytes")
        if size > end:
            raise self._bad(f"{size - end} bytes after the last tensor")

    def _parse(self, header: dict[str, Any], base: int) -> int:
        """Fill specs and offsets; the file's length. Ranges must follow each other."""
        expected = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] not in _DTYPES:
                raise self._bad(f"tensor {name} has dtype {entry['dtype']}", "not supported")
            spec = TensorSpec(name, _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])))
            begin, end = entry["data_offsets"]
            if begin != expected or end - begin != spec.nbytes or min(spec.shape, default=0) < 0:
                raise self._bad(f"tensor {name} has a wrong byte range {begin} to {end}")
            self.specs[name], self._offsets[name] = spec, base + begin
            expected = end
        return base + expected

    def read(self, name: str) -> NDArray[Any]:
        """A new array with the tensor, in its stored dtype."""
        spec = self.specs[name]
        out = np.empty(spec.shape, spec.dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: NDArray[Any]) -> None:
        """Fill `out`: C-contiguous, of the tensor's shape and stored dtype."""
        spec = self.specs[name]
        if out.shape != spec.shape or out.dtype != spec.dtype or not out.flags.c_contiguous:
            raise ValueError(f"{name} is {spec.dtype} {spec.shape}, not {out.dtype} {out.shape}")
        view = out.reshape(-1).view(np.uint8).data
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._offsets[name])
            while view:
                count = file.readinto(view)  # at most 2 GiB a call on Linux
                if not count:
                    raise self._bad(f"truncated inside tensor {name}")
                view = view[count:]

    def chunks(self, name: str, size: int = 1 << 24) -> Iterator[bytes]:
        """The tensor's bytes, `size` at a time."""
        left = self.specs[name].nbytes
        with self.path.open("rb") as file:
            file.seek(self._offsets[name])
            while left:
                chunk = file.read(min(size, left))
                if not chunk:
                    raise self._bad(f"truncated inside tensor {name}")
                left -= len(chunk)
                yield chunk


def header_bytes(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str]
) -> tuple[list[TensorSpec], bytes]:
    """(tensors in file order, length word and header). Wide dtypes first keep data aligned."""
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for spec in ordered:
        end = begin + spec.nbytes
        entry = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape)}
        header[spec.name] = {**entry, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return ordered, len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    get: Callable[[str], NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a file whole or not at all; its size in bytes. `get` is called once a tensor, in order.

    ValueError if `get` returns another dtype or shape than its spec says.
    """
    ordered, header = header_bytes(specs, {"format": "pt"} if metadata is None else metadata)
    with atomic_file(path) as file:
        file.write(header)
        for spec in ordered:
            array = get(spec.name)
            if array.dtype != spec.dtype or array.shape != spec.shape:
                raise ValueError(f"{spec} was given {array.dtype} {array.shape}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return len(header) + sum(spec.nbytes for spec in ordered)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file that appears under `path` when the block ends, on disk, or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the data does
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def fsync_folder(folder: str | os.PathLike[str]) -> None:
    """Make names created, renamed or removed in the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def plan_shards(specs: Sequence[TensorSpec], max_shard_size: int) -> list[list[TensorSpec]]:
    """Cut in order so that no shard's data exceeds `max_shard_size` bytes (one tensor may)."""
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if shards[-1] and used + spec.nbytes > max_shard_size:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.nbytes
    return shards


def shard_names(stem: str, count: int) -> list[str]:
    """`model.safetensors`, or `model-00001-of-00003.safetensors` and so on."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_sharded(
    folder: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    get: Callable[[str], NDArray[Any]],
    *,
    max_shard_size: int,
    stem: str = "model",
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """One file, or shards and `<stem>.safetensors.index.json`; the names written.

    `get` is called once a tensor, in the order of `specs` if they have one dtype.
    """
    folder = Path(folder)
    shards = plan_shards(specs, max_shard_size)
    names = shard_names(stem, len(shards))
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard, get, metadata)
        weight_map.update((spec.name, name) for spec in shard)
    if len(names) == 1:
        return names
    total = sum(spec.nbytes for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with atomic_file(folder / (stem + INDEX_SUFFIX)) as file:
        file.write((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    return [*names, stem + INDEX_SUFFIX]
