"""Files that are complete or absent, and free space, against the plain file system."""

import os
from pathlib import Path

import numpy as np
import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.core.files import (
    atomic_file,
    check_space,
    free_bytes,
    fsync_path,
    nearest_existing,
    remove_torn,
    synced_file,
)


def test_atomic_file_appears_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with atomic_file(path) as file:
        file.write(b"done")
        assert not path.exists()
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert path.read_bytes() == b"done"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"old"


def test_the_bytes_are_on_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(handle: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def traced_replace(source: Path, target: Path) -> None:
        events.append(f"replace {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    with atomic_file(tmp_path / "x") as file:
        file.write(b"new")
    assert events[0].startswith("fsync .x.") and events[0].endswith(".tmp")
    assert events[1:] == ["replace x", f"fsync {tmp_path.name}"]


@pytest.mark.parametrize("make", [atomic_file, synced_file])
def test_long_data_takes_several_system_calls(tmp_path: Path, monkeypatch, make) -> None:
    """And a disk that takes less than it is given is asked again."""
    data = np.random.default_rng(4).integers(0, 256, 1000, dtype=np.uint8)
    write, calls = os.write, []

    def short(handle: int, part: memoryview) -> int:
        calls.append(len(part))
        return write(handle, part[:5])

    monkeypatch.setattr("llmq_nb.core.files.WRITE_BYTES", 7)
    monkeypatch.setattr(os, "write", short)
    with make(tmp_path / "x") as file:
        assert file.write(data.data) == 1000
        file.write(b"")
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert calls == [7] * 199 + [5]


def test_what_killed_writers_left_goes(tmp_path: Path) -> None:
    for name in (".a[1].12ab.tmp", ".a1.12ab.tmp", "a[1]", ".a[1].toml"):
        (tmp_path / name).touch()
    remove_torn(tmp_path / "a[1]")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a1.12ab.tmp", ".a[1].toml", "a[1]"]


def test_fsync_of_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    fsync_path(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_path(tmp_path / "none")


def test_the_nearest_existing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert nearest_existing(tmp_path / "file" / "b") == tmp_path / "file"
    assert nearest_existing(tmp_path / "link") == tmp_path / "link"
    assert nearest_existing(Path("a/b")) == tmp_path


def test_free_space_of_a_path_to_be(tmp_path: Path) -> None:
    """Against `statvfs`; other processes write meanwhile, so within 1 GiB."""
    stat = os.statvfs(tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "a" / "b", tmp_path / "link" / "a"):
        assert abs(free_bytes(path) - stat.f_bavail * stat.f_frsize) < 2**30


def test_too_little_space_names_both_sizes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("llmq_nb.core.files.free_bytes", lambda path: 3 * 2**20)
    check_space(tmp_path, 3 * 2**20, "the export", mend="free some")
    with pytest.raises(UserError) as caught:
        check_space(tmp_path, 3 * 2**20 + 1, "the export", mend="free some")
    assert str(caught.value) == (
        f"too little disk: 3.00 MiB for the export, 3.00 MiB are free in {tmp_path}: free some"
    )
