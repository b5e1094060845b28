"""Which files a list of inputs names, and a fingerprint of what is in them.

An input is a file or a glob: `~` is the home folder, `**` any folders, `${stdlib}` the Python
standard library that came with the interpreter (without site-packages and caches).
"""

import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq_nb.core.errors import UserError
from llmq_nb.data.formats import FORMATS, detect_format

STDLIB_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}
SAMPLE = 2**18  # bytes hashed at the begin, middle and end of a file


@dataclass(frozen=True, slots=True)
class Source:
    """One input file. key: its path below the input's fixed folder, the same on any machine."""

    path: Path
    key: str
    kind: str
    from_glob: bool
    bytes: int


def resolve(inputs: Sequence[str], kind: str = "auto") -> list[Source]:
    """The files of all inputs, sorted by path, each once. Opens each to see its format.

    Raises UserError on an input without a file, an unknown variable or format, an unreadable file.
    """
    if kind not in ("auto", *FORMATS):
        raise UserError(f"unknown format {kind!r}", mend=f"known are auto, {', '.join(FORMATS)}")
    if not inputs:
        raise UserError("no input files", mend="name files or globs")
    found: dict[Path, Source] = {}
    for pattern in inputs:
        is_glob, matches = _expand(pattern)
        for path, key in matches:
            try:
                format_ = detect_format(path) if kind == "auto" else kind
                size = path.stat().st_size
            except OSError as error:
                raise UserError(f"not readable ({error.strerror})", where=str(path)) from error
            found.setdefault(path, Source(path, key, format_, is_glob, size))
    return [found[path] for path in sorted(found, key=lambda path: path.as_posix())]


def _expand(pattern: str) -> tuple[bool, list[tuple[Path, str]]]:
    """Whether the input is a glob; path and key of each file it names."""
    stdlib = glob.escape(sysconfig.get_paths()["stdlib"])
    for name in re.findall(r"\$\{([^}]*)\}", pattern):
        if name != "stdlib":
            raise UserError(
                f"unknown variable ${{{name}}}", where=pattern, mend="known is ${stdlib}"
            )
    full = os.path.expanduser(pattern.replace("${stdlib}", stdlib))
    if not glob.has_magic(full) or Path(full).is_file():
        path = Path(full)
        if path.is_dir():
            raise UserError("a folder", where=pattern, mend=f"name its files: {pattern}/**/*.txt")
        if not path.is_file():
            raise UserError("no such file", where=pattern, mend=_begins(pattern))
        return False, [(path, path.name)]
    parts = Path(full).parts
    depth = next(i for i, part in enumerate(parts) if glob.has_magic(part) or i == len(parts) - 1)
    if "${stdlib}" in pattern:
        depth = len(Path(sysconfig.get_paths()["stdlib"]).parts)
    matches = []
    for name in glob.glob(full, recursive=True):
        below = Path(name).parts[depth:]
        excluded = STDLIB_EXCLUDED if "${stdlib}" in pattern else set()
        if Path(name).is_file() and excluded.isdisjoint(below):
            matches.append((Path(name), "/".join(below)))
    if not matches:
        raise UserError("no file matches", where=pattern, mend=_begins(pattern))
    return True, matches


def _begins(pattern: str) -> str:
    """Where a path is looked for: relative ones are not beside the config."""
    absolute = Path(os.path.expanduser(pattern)).is_absolute() or pattern.startswith("${")
    return "name other files" if absolute else f"relative paths begin at {Path.cwd()}"


def fingerprint(sources: Sequence[Source], options: dict[str, Any]) -> str:
    """sha256 of the options and of each file's name, size and content, sampled above 768 KiB."""
    total = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for source in sources:
        total.update(f"\0{source.key}\0{source.kind}\0{source.bytes}\0".encode())
        with source.path.open("rb") as file:
            if source.bytes <= 3 * SAMPLE:
                total.update(file.read())
                continue
            for offset in (0, (source.bytes - SAMPLE) // 2, source.bytes - SAMPLE):
                file.seek(offset)
                total.update(file.read(SAMPLE))
    return total.hexdigest()
