"""The files of one checkpoint: tensors, state and the manifest that lists them."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llmq_nb.core.files import fsync_path, json_bytes, synced_file
from llmq_nb.io.safetensors_io import INDEX_SUFFIX, SafetensorsWriter, TensorSpec, index_bytes

FORMAT = 1
"""Version of the folder's layout, in state.json and manifest.json."""

Tensors = Iterable[tuple[str, NDArray[Any]]]


def write_files(
    folder: Path, step: int, parts: Mapping[str, Tensors], state: dict[str, Any], shard_bytes: int
) -> None:
    """Every file of the checkpoint, on the disk when this returns; the manifest last."""
    hashes: dict[str, Future[str]] = {}
    with ThreadPoolExecutor(1) as pool:  # hashes a finished file while the next one is written

        def add(file: Path) -> None:
            hashes[str(file.relative_to(folder))] = pool.submit(sha256, file)

        for part, tensors in parts.items():
            (folder / part).mkdir()
            for file in _write_part(folder / part, tensors, shard_bytes):
                add(file)
            fsync_path(folder / part)
        state_file = {"format": FORMAT, "step": step, "state": state}
        add(_write(folder / "state.json", json_bytes(state_file)))
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": digest.result()}
        for name, digest in hashes.items()
    }
    manifest = {"format": FORMAT, "step": step, "files": files}
    _write(folder / "manifest.json", json_bytes(manifest))
    fsync_path(folder)


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """(size, sha256) of each file by name.

    Raises OSError where there is none, ValueError, KeyError, TypeError or AttributeError where it
    is not one of this version.
    """
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
    return {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}


def sha256(path: Path) -> str:
    """Hash of a file, as the `sha256sum` tool prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_part(folder: Path, tensors: Tensors, shard_bytes: int) -> Iterator[Path]:
    """Each file of a part as soon as it is complete, the index last.

    A file is closed where the next tensor does not fit; a part without tensors has an empty one.
    """
    stream = iter(tensors)
    waiting = next(stream, None)
    weight_map: dict[str, str] = {}
    number = total = 0
    while waiting is not None or number == 0:
        number += 1
        file = folder / f"model-{number:05}.safetensors"
        with synced_file(file) as out:
            writer = SafetensorsWriter(out)
            while waiting is not None:
                name, array = waiting
                if name in weight_map:
                    raise ValueError(f"two tensors named {name!r} in part {folder.name}")
                full = writer.data_bytes + array.nbytes > shard_bytes
                if writer.data_bytes and (full or not _fits(writer, name, array)):
                    break
                writer.add(name, array)
                weight_map[name] = file.name
                waiting = next(stream, None)
            writer.finish()
            total += writer.data_bytes
        yield file
    yield _write(folder / f"model{INDEX_SUFFIX}", index_bytes(weight_map, total))


def _fits(writer: SafetensorsWriter, name: str, array: NDArray[Any]) -> bool:
    return writer.fits(TensorSpec(name, array.dtype, array.shape))


def _write(path: Path, data: bytes) -> Path:
    with synced_file(path) as file:
        file.write(data)
    return path
