"""Rank-independent checkpoints that a crash, a full disk or a kill -9 cannot spoil.

    ROOT/step_00000042/master/model-00001.safetensors         Hugging Face names
                              model.safetensors.index.json
                       m/..., v/...
                       state.json      what the trainer hands over
                       manifest.json   size and sha256 of every other file, written last

A checkpoint is written to ROOT/.staging-<step>-<pid>, every file and folder fsynced, and then
renamed: under its name it is complete, or was damaged from outside, which the manifest shows. One
that goes is renamed to ROOT/.trash-... before its files are deleted, so none is ever half there.
Older ones go only after the new one is complete. One process writes to a ROOT at a time.
"""

import dataclasses
import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.core.files import check_space, free_bytes, fsync_path
from llmq_nb.core.sizes import format_bytes
from llmq_nb.io.safetensors_io import HEADER_ROOM, SafetensorsFile
from llmq_nb.train.checkpoint_files import Tensors, read_manifest, sha256, write_files
from llmq_nb.train.leftovers import claim, remove_leftovers, trash

SHARD_BYTES = 5_000_000_000
"""Most tensor bytes of one file; a single larger tensor has a file of its own."""
SMALL_FILES = 1 << 20
"""Room for state.json, the indices, the manifest and the folders [bytes]."""
NAME = re.compile(r"step_(\d{8,})(\.old)?")
"""`.old`: the one that a new checkpoint of the same step is just replacing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. Tensors are read when they are touched."""

    path: Path
    step: int
    """Optimizer steps done."""
    state: dict[str, Any]
    """What the trainer saved, as JSON gives it back (tuples are lists)."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts: master, m, v, ..."""
        return tuple(sorted(p.name for p in self.path.iterdir() if p.is_dir()))

    def tensors(self, part: str) -> Mapping[str, NDArray[Any]]:
        """Read-only views of the part's tensors by Hugging Face name.

        Raises UserError: no such part, or a file that is not safetensors.
        """
        files = sorted((self.path / part).glob("*.safetensors"))
        if not files:
            has = ", ".join(self.parts)
            raise UserError(f"no part {part!r}", where=str(self.path), mend=f"it has {has}")
        return {name: array for f in files for name, array in SafetensorsFile(f).views().items()}


def save_checkpoint(
    root: Path,
    *,
    step: int,
    parts: Mapping[str, Tensors],
    state: dict[str, Any],
    keep: int,
    major_every: int,
    nbytes: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the checkpoint after `step` optimizer steps and delete older ones; returns its folder.

    parts: name -> stream of (Hugging Face name, array), taken one array at a time. state: JSON.
    keep: newest checkpoints up to this step that stay, 0 for all, multiples of major_every not
    counted and never deleted. nbytes: space it will take (`checkpoint_bytes`); None: as much as
    the newest one there.

    Raises MachineError where the disk fails or is full (before a byte is written, where it can be
    known) and whatever a stream raises; the staging folder is gone then, older ones untouched.
    """
    root = make_folder(root)
    remove_leftovers(root)
    if nbytes is None:
        newest = latest_checkpoint(root)
        nbytes = sum(s for s, _ in read_manifest(newest).values()) if newest else 0
    free = free_bytes(root)
    if nbytes > free:
        raise MachineError(
            f"no space for the checkpoint of step {step}: it needs {format_bytes(nbytes)},"
            f" {root} has {format_bytes(free)} free; older checkpoints are untouched"
        )
    staging = root / f".staging-{step}-{os.getpid()}"
    try:
        with claim(staging):
            write_files(staging, step, parts, state, shard_bytes)
            target = _publish(staging, root, step)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise MachineError(
            f"{'no space left' if full else 'failure'} while writing the checkpoint of step {step}"
            f" to {root}: {error.strerror or error}; older checkpoints are untouched"
        ) from error
    _delete_older(root, step, keep, major_every)
    return target


def latest_checkpoint(root: Path, *, verify: bool = False) -> Path | None:
    """The newest complete checkpoint under `root`, falling back over broken ones; None: none.

    verify: also compare the hash of every file, which reads them all.
    """
    for _, path in reversed(_folders(root)):
        if problem(path, verify=verify) is None:
            return path
    return None


def newest_checkpoint(root: Path, most: int) -> Path | None:
    """The newest complete checkpoint under `root` of at most `most` steps; None: none."""
    found = [path for step, path in _folders(root) if step <= most and problem(path) is None]
    return found[-1] if found else None


def read_checkpoint(path: Path, *, verify: bool = False) -> Checkpoint:
    """The checkpoint in a folder. Raises UserError where it is not complete."""
    why = problem(path, verify=verify)
    if why is not None:
        raise UserError("no complete checkpoint", where=str(path), mend=why)
    saved = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return Checkpoint(path, saved["step"], saved["state"])


def problem(path: Path, *, verify: bool = False) -> str | None:
    """Why the folder is no complete checkpoint of this version; None: it is one."""
    try:
        files = read_manifest(path)
        for name, (size, digest) in files.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if verify and sha256(file) != digest:
                return f"{name} has changed since it was written"
    except FileNotFoundError:
        return "manifest.json is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json is not readable: {error}"
    return None if "state.json" in files else "state.json is missing"


def checkpoint_bytes(parts: Mapping[str, int], *, shard_bytes: int = SHARD_BYTES) -> int:
    """Space that a checkpoint takes, from the tensor bytes of each part; an upper bound.

    A file is closed when the next tensor does not fit, so two in a row hold more than one full.
    """
    files = sum(2 * nbytes // shard_bytes + 2 for nbytes in parts.values())
    return sum(parts.values()) + files * HEADER_ROOM + SMALL_FILES


def check_out_dir(root: Path, nbytes: int) -> None:
    """Before a run: make `root` and raise UserError where it cannot be written or is too full."""
    check_checkpoint_space(root, nbytes)
    root = make_folder(root)
    try:
        with claim(root / f".staging-0-{os.getpid()}"):
            pass
        remove_leftovers(root)
    except OSError as error:
        raise UserError(f"cannot write to {root}", mend=error.strerror or str(error)) from None


def check_checkpoint_space(root: Path, nbytes: int) -> None:
    """Raise UserError where less than nbytes are free; makes nothing."""
    mend = "free some, set run.out_dir to another disk or keep fewer (checkpoint.keep)"
    check_space(root, nbytes, "checkpoints", mend=mend)


def make_folder(path: Path) -> Path:
    """The folder, made where it is missing. Raises UserError where that is not possible."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:  # else a power cut may take the new folder and all that is in it
            fsync_path(folder.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot make the folder {path}", mend=reason) from None
    return path


def _publish(staging: Path, root: Path, step: int) -> Path:
    """Give the finished folder its name; one of the same step stays as `.old` until then."""
    target = root / f"step_{step:08}"
    old = target.with_name(target.name + ".old")
    if target.exists():
        if old.exists():
            trash(old)
        os.rename(target, old)
    os.rename(staging, target)
    fsync_path(root)
    return target


def _delete_older(root: Path, step: int, keep: int, major_every: int) -> None:
    """Delete complete checkpoints up to `step` beyond the newest `keep`; majors stay.

    Broken ones are neither counted nor touched. Later steps belong to a run that this one was
    resumed in the middle of: not counted either. Replaced ones (`.old`), broken or not, always go.
    """
    complete = [(n, path) for n, path in _folders(root) if n <= step and problem(path) is None]
    paths = {path for _, path in complete}
    replaced = [p for _, p in _folders(root) if p.suffix and p.with_suffix("") in paths]
    minors = [
        path
        for n, path in complete
        if path not in replaced and not (major_every and n % major_every == 0)
    ]
    for path in replaced + (minors[:-keep] if keep else []):
        try:
            trash(path)
        except OSError as error:
            raise MachineError(f"cannot delete the old checkpoint {path}: {error}") from error


def _folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, oldest first."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():  # `.old` sorts before the one that replaces it
            found.append((int(match[1]), match[2] is None, path))
    return [(number, path) for number, _, path in sorted(found)]
