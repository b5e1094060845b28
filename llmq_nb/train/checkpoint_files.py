"""The files of one checkpoint: tensors, state and the manifest that lists them."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llmq_nb.core.safetensors_file import SafetensorsWriter, write_all

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
            sync_folder(folder / part)
        add(_write_json(folder / "state.json", {"format": FORMAT, "step": step, "state": state}))
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": digest.result()}
        for name, digest in hashes.items()
    }
    _write_json(folder / "manifest.json", {"format": FORMAT, "step": step, "files": files})
    sync_folder(folder)


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


def sync_folder(path: Path) -> None:
    """Wait until the folder's entries (names) are on the disk."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_part(folder: Path, tensors: Tensors, shard_bytes: int) -> Iterator[Path]:
    """Each file of a part as soon as it is complete, the index last.

    A file is closed where the next tensor does not fit; a part without tensors has an empty one.
    """
    stream = iter(tensors)
    waiting = next(stream, None)
    weight_map: dict[str, str] = {}
    number = 0
    while waiting is not None or number == 0:
        number += 1
        file = folder / f"model-{number:05}.safetensors"
        with SafetensorsWriter(file, metadata={"format": "pt"}) as writer:
            while waiting is not None:
                name, array = waiting
                if name in weight_map:
                    raise ValueError(f"two tensors named {name!r} in part {folder.name}")
                full = writer.data_bytes + array.nbytes > shard_bytes
                if writer.data_bytes and (full or not writer.fits(name, array)):
                    break
                writer.add(name, array)
                weight_map[name] = file.name
                waiting = next(stream, None)
            writer.finish()
        yield file
    yield _write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def _write_json(path: Path, value: Any) -> Path:
    text = json.dumps(value, indent=1) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(file, memoryview(text.encode()))
        os.fsync(file)
    finally:
        os.close(file)
    return path
