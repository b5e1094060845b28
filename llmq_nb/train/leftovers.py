"""Folders that exist only while a checkpoint is written or deleted, and what a kill leaves of them.

A staging folder is locked by the process that fills it, and the kernel drops the lock with the
process; so a leftover is known even where process ids repeat (in a container they do). Where the
file system cannot lock folders, the process id in the name decides.
"""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = re.compile(r"\.(staging|trash)-\d+-(\d+)")


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Make the folder, which is not there yet, and hold its lock. Raises OSError."""
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the process id decides
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def trash(path: Path) -> None:
    """Delete a checkpoint's folder: it loses its name first, so no half of it is ever seen."""
    step = "".join(c for c in path.name if c.isdigit()) or "0"
    target = path.with_name(f".trash-{int(step)}-{os.getpid()}")
    shutil.rmtree(target, ignore_errors=True)
    os.rename(path, target)
    shutil.rmtree(target, ignore_errors=True)  # what stays is removed with the next checkpoint


def remove_leftovers(root: Path) -> None:
    """Delete the temporary folders under `root` that no living process fills."""
    for path in root.iterdir():
        match = TEMPORARY.fullmatch(path.name)
        if match and path.is_dir() and not _in_use(path, int(match[2])):
            shutil.rmtree(path, ignore_errors=True)


def _in_use(folder: Path, process: int) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False  # gone in the meantime, or not ours to touch: rmtree will see
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return process != os.getpid() and _is_alive(process)
    finally:
        os.close(handle)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
