r"""Safetensors files: a checked header, tensors read one at a time, shards written as a stream.

    file = [header length: uint64, little endian] [header: JSON, padded with spaces] [data]
    header = {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}

The data has no holes and ends the file, so a truncated file is found from its header alone. Tensors
are read straight into the caller's rows, or looked at in the mapped file; memory is one tensor.
BF16 and FP8 are ml_dtypes formats.

Writing takes one tensor at a time. Where all of them are known before (`write_safetensors`, an
export) the header has its exact length and the file appears whole or not at all. A stream
(`SafetensorsWriter`, a checkpoint's part) has room reserved for the header, filled in at the end.

Source   The format's own description (safetensors README, "Format"). Written from it, because the
         library's NumPy interface holds a whole file in memory when it writes.
"""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.errors import UserError
from llmq_nb.core.files import atomic_file, json_bytes

INDEX_SUFFIX = ".safetensors.index.json"
HEADER_ROOM = 1 << 16
"""Bytes that a stream reserves for its header: about 450 names of a language model."""
FORMAT_METADATA = {"format": "pt"}
"""What transformers looks for: tensors as PyTorch lays them out."""
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
        """Bytes of its data in the file."""
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

    def views(self) -> dict[str, NDArray[Any]]:
        """Read-only views of the mapped file, by name; a page is read when it is touched."""
        data = np.memmap(self.path, np.uint8, "r").view(np.ndarray)
        return {
            name: data[begin : begin + spec.nbytes].view(spec.dtype).reshape(spec.shape)
            for name, spec in self.specs.items()
            for begin in (self._offsets[name],)
        }

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


class SafetensorsWriter:
    """Appends tensors to a new file whose names need not be known before the last one has come.

    file: empty and opened for writing (`core.files`). room: bytes reserved for the header, a
    multiple of 8; `finish` fills it in, and without that call readers refuse the file. metadata:
    text that readers can show. Raises OSError as the disk does, ValueError for what does not fit
    the format.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        metadata: Mapping[str, str] = FORMAT_METADATA,
        room: int = HEADER_ROOM,
    ) -> None:
        self.room = room
        self.data_bytes = 0
        """Bytes of the tensors so far."""
        self._file = file
        self._header: dict[str, Any] = {"__metadata__": dict(metadata)}
        self._header_bytes = len(_json(self._header))
        file.seek(room)

    def fits(self, spec: TensorSpec) -> bool:
        """Whether the header has room for one more tensor."""
        return self._header_bytes + self._entry_bytes(spec) <= self.room - 8

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Append a tensor; the file has its bytes when this returns."""
        spec = TensorSpec(name, array.dtype, array.shape)
        if name in self._header:
            raise ValueError(f"two tensors named {name!r}")
        if not self.fits(spec):
            raise ValueError(f"no room for {name!r} in the header")
        self._header_bytes += self._entry_bytes(spec)
        self._header[name] = _entry(spec, self.data_bytes)
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self.data_bytes += array.nbytes

    def finish(self) -> int:
        """Fill the header in; the file's size in bytes."""
        self._file.seek(0)
        length = self.room - 8
        self._file.write(length.to_bytes(8, "little") + _json(self._header).ljust(length))
        return self.room + self.data_bytes

    def _entry_bytes(self, spec: TensorSpec) -> int:
        """What the entry adds to the header: a comma and the entry, without two braces."""
        return len(_json({spec.name: _entry(spec, self.data_bytes)})) - 1


def write_safetensors(
    path: str | os.PathLike[str],
    specs: Sequence[TensorSpec],
    get: Callable[[str], NDArray[Any]],
    metadata: Mapping[str, str] = FORMAT_METADATA,
) -> int:
    """Write a file whole or not at all; its size in bytes. `get` is called once a tensor, in order.

    Wide dtypes come first, which keeps the data aligned. ValueError if `get` returns another dtype
    or shape than its spec says. Raises OSError as the disk does.
    """
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    with atomic_file(path) as file:
        writer = SafetensorsWriter(file, metadata=metadata, room=_exact_room(ordered, metadata))
        for spec in ordered:
            array = get(spec.name)
            if array.dtype != spec.dtype or array.shape != spec.shape:
                raise ValueError(f"{spec} was given {array.dtype} {array.shape}")
            writer.add(spec.name, array)
        return writer.finish()


def _exact_room(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> int:
    """The room of a header without spare bytes, its length word included."""
    begins = itertools.accumulate((spec.nbytes for spec in specs), initial=0)
    entries = {s.name: _entry(s, begin) for s, begin in zip(specs, begins, strict=False)}
    return 8 + -(-len(_json({"__metadata__": dict(metadata), **entries})) // 8) * 8


def _entry(spec: TensorSpec, begin: int) -> dict[str, Any]:
    """The header's entry of a tensor whose data begins at byte `begin`."""
    if spec.dtype not in _NAMES:
        raise ValueError(f"safetensors has no dtype {spec.dtype}")
    offsets = [begin, begin + spec.nbytes]
    return {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}


def _json(header: Mapping[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


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
    metadata: Mapping[str, str] = FORMAT_METADATA,
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
    with atomic_file(folder / (stem + INDEX_SUFFIX)) as file:
        file.write(index_bytes(weight_map, sum(spec.nbytes for spec in specs)))
    return [*names, stem + INDEX_SUFFIX]


def index_bytes(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index of shards: the file of each tensor, and the bytes of all of them."""
    return json_bytes({"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)})
