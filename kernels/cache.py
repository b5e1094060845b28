"""What the machine code of a kernel depends on, and where compiled kernels are kept.

The key is the source of the kernel's module and of all kernel modules it imports, its closure
constants (device functions by their own source and constants), what the caller adds (signature,
target, options) and the versions of the packages that compile. Folder: LLMQ_NB_CACHE, else
~/.cache/llmq-nb; if that cannot be written (read-only home) or is on NFS (slow, and renames there
are not seen at once), a folder of this user under the system's temporary directory, said in one
line.
"""

import contextlib
import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np

_HOST_MODULES = {"arrays", "cache", "compile", "dlpack", "launch", "sim", "sim_ops"}
"""Kernel modules that never reach machine code."""
_PACKAGES = ("numba", "numba-cuda", "llvmlite", "cuda-core")
_NVVM_PACKAGES = (
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12",
)


@cache
def module_digest(path: str) -> str:
    """Hash of a source file and of every kernel module that it imports."""
    source = Path(path).read_text(encoding="utf-8")
    parts = [hashlib.sha256(source.encode()).hexdigest()]
    pattern = r"^\s*from llmq_nb\.kernels\.(\w+) import|^\s*from llmq_nb\.kernels import (\w+)"
    names = {a or b for a, b in re.findall(pattern, source, re.M)} - _HOST_MODULES
    for name in sorted(names):
        imported = inspect.getsourcefile(import_module(f"llmq_nb.kernels.{name}"))
        if imported and os.path.realpath(imported) != os.path.realpath(path):
            parts.append(module_digest(imported))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _describe_constant(value: Any) -> Any:
    """A closure variable as JSON: a number by value and type, a device function by its own
    description."""
    function = getattr(value, "py_func", value)
    if inspect.isfunction(function):
        return _describe_function(function)
    if isinstance(value, (tuple, list)):
        return [_describe_constant(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str, np.generic)):
        return [type(value).__name__, repr(value)]
    # intrinsics, Numba types: their own source is in the module digest, repr tells two of them
    # apart
    return [type(value).__name__, re.sub(r" at 0x[0-9a-f]+", "", repr(value))]


def _describe_function(function: Callable[..., Any]) -> list[Any]:
    code = function.__code__
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    closure = [
        [name, _describe_constant(value)]
        for name, value in zip(code.co_freevars, cells, strict=True)
    ]
    return [function.__qualname__, module_digest(code.co_filename), closure]


@cache
def package_versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES + _NVVM_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found["numpy"] = np.__version__.rsplit(".", 1)[0]
    return found


def source_key(function: Callable[..., None], *rest: Any) -> str:
    """32 hexadecimal digits that change with the function's source and constants, the package
    versions, and `rest`, which must go through JSON."""
    blob = [_describe_function(function), *rest, package_versions()]
    return hashlib.sha256(json.dumps(blob, sort_keys=True).encode()).hexdigest()[:32]


# ---- cache folder ------------------------------------------------------------------------------
def _on_nfs(path: Path) -> bool:
    """Whether the file system that holds path is NFS (Linux; False where that is not known)."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False
    resolved = str(path.resolve()) + "/"
    holding = [
        (len(point), kind) for point, kind in mounts if resolved.startswith(point.rstrip("/") + "/")
    ]
    return bool(holding) and max(holding)[1].startswith("nfs")


def is_writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


@cache
def choose_folder(override: str | None) -> Path:
    if override:
        wanted = Path(override).expanduser()
        if is_writable(wanted):
            return wanted
    else:
        wanted = Path("~/.cache/llmq-nb").expanduser()
        if is_writable(wanted) and not _on_nfs(wanted):
            return wanted
    fallback = Path(tempfile.gettempdir()) / f"llmq-nb-{os.getuid()}"
    fallback.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fallback.stat().st_uid != os.getuid():  # code is loaded from here: nobody else may own it
        fallback = Path(tempfile.mkdtemp(prefix="llmq-nb-"))
    reason = "is on NFS" if is_writable(wanted) else "cannot be written"
    print(
        f"kernel cache: {wanted} {reason}, using {fallback} (set LLMQ_NB_CACHE to choose)",
        file=sys.stderr,
    )
    return fallback


def cache_folder() -> Path:
    """Where cubins are kept; created if need be."""
    return choose_folder(os.environ.get("LLMQ_NB_CACHE"))


def write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
