"""kill -9 at every operation and at random moments, full disks (a real small one where this machine
can mount one), and the order in which things reach the disk."""

import errno
import functools
import os
import random
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from llmq_nb.core.errors import MachineError
from llmq_nb.train.checkpoint import latest_checkpoint, read_checkpoint, save_checkpoint

OPERATIONS = ["write", "fsync", "rename", "mkdir", "rmdir", "unlink"]
SIZES = [900, 40, 1200, 7]


def arrays(step: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([step, seed])
    return {f"t{i}": rng.integers(0, 256, n, dtype=np.uint8) for i, n in enumerate(SIZES)}


def save(root: Path, step: int, *, seed: int = 0, keep: int = 1, tick=lambda: None, scale=1):
    def stream():
        for name, array in arrays(step, seed).items():
            tick()
            yield name, np.tile(array, scale)

    parts = {"master": stream(), "m": stream()}
    state = {"step": step, "seed": seed}
    return save_checkpoint(
        root, step=step, parts=parts, state=state, keep=keep, major_every=0, nbytes=0,
        shard_bytes=1000 * scale,
    )  # fmt: skip


def assert_complete(path: Path | None, allowed: set[tuple[int, int]], scale: int = 1) -> None:
    """The checkpoint is one of (step, seed), with every bit of it."""
    assert path is not None
    read = read_checkpoint(path, verify=True)
    assert (read.step, read.state["seed"]) in allowed
    for part in ("master", "m"):
        got = read.tensors(part)
        want = arrays(read.step, read.state["seed"])
        assert got.keys() == want.keys()
        assert all(np.array_equal(got[n], np.tile(want[n], scale)) for n in want)


def kill_at(number: int) -> None:
    """From here on, die at operation `number`: half-way through a write, before any other."""
    count = 0

    def wrap(name):
        original = getattr(os, name)

        def operation(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                if name == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, name, operation)

    for name in OPERATIONS:
        wrap(name)


def in_child(body) -> int:
    """Wait status of a forked process that runs `body` and ends."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize(("step", "seed"), [(3, 0), (2, 1)], ids=["next step", "same step again"])
def test_killed_at_every_operation_a_complete_one_remains(tmp_path, monkeypatch, step, seed):
    # a killed process loses nothing that was written, synced or not: a power cut does, and that
    # order has a test of its own; so the disk need not be waited for here
    monkeypatch.setattr("os.fsync", lambda file: None)
    base = tmp_path / "base"
    save(base, 1, keep=0)
    save(base, 2, keep=0)
    trials = 0
    while True:
        trials += 1
        root = tmp_path / f"{trials}"
        shutil.copytree(base, root)

        def body(root=root, number=trials):
            kill_at(number)
            save(root, step, seed=seed)

        status = in_child(body)
        assert_complete(latest_checkpoint(root, verify=True), {(2, 0), (step, seed)})
        save(root, 4)  # the next one goes through and clears what the kill left
        assert_complete(latest_checkpoint(root), {(4, 0)})
        assert [p.name for p in root.iterdir()] == ["step_00000004"]
        shutil.rmtree(root)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    # two parts of three shards and an index, state, manifest: each a write and an fsync at least
    assert trials > 30


def test_killed_at_random_moments_a_complete_one_remains(tmp_path, monkeypatch):
    """A process that saves without end is killed from outside at a random tensor."""
    monkeypatch.setattr("os.fsync", lambda file: None)  # as above
    rng = random.Random(7)
    newest = []
    for trial in range(12):
        root = tmp_path / f"{trial}"
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            tick = functools.partial(os.write, writer, b".")
            try:
                for step in range(10**6):
                    save(root, step, keep=2, tick=tick, scale=50)
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            for _ in range(rng.randrange(17, 80)):  # eight tensors a save: not before the third
                assert pipe.read(1) == b"."
            os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        path = latest_checkpoint(root, verify=True)
        assert path is not None
        newest.append(int(path.name.removeprefix("step_")))
        assert_complete(path, {(newest[-1], 0)}, scale=50)
    assert len(set(newest)) > 3  # the moments did differ


def mounted(size: str, folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return shutil.which("mount") is not None and (
        subprocess.run(command, capture_output=True).returncode == 0
    )


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        if mounted("1m", Path(folder)):
            unmount(Path(folder))
            return True
    return False


DISKS = ["fake", "tmpfs"] if can_mount() else ["fake"]


@pytest.fixture(params=DISKS)
def small_disk(request, tmp_path, monkeypatch):
    """A folder that takes 3 MiB: a mounted one, or os.write that fails like one."""
    root = tmp_path / "disk"
    root.mkdir()
    if request.param == "tmpfs":
        assert mounted("3m", root)
        yield root
        unmount(root)
        return
    write = os.write

    def limited(file, data):
        name = os.readlink(f"/proc/self/fd/{file}")
        if name.startswith(str(root)):
            used = sum(f.stat().st_blocks * 512 for f in root.rglob("*") if f.is_file())
            room = 3 * 2**20 - used
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[:room]  # what a real disk does with the last write that begins
        return write(file, data)

    monkeypatch.setattr("os.write", limited)
    yield root


def test_a_full_disk_loses_nothing(small_disk):
    save(small_disk, 1, keep=2, scale=100)
    before = {f: f.read_bytes() for f in small_disk.rglob("*") if f.is_file()}
    with pytest.raises(MachineError) as caught:
        save(small_disk, 2, keep=1, scale=500)
    text = str(caught.value)
    assert "no space left" in text and "step 2" in text and "untouched" in text
    assert str(small_disk) in text and "\n" not in text
    assert {f: f.read_bytes() for f in small_disk.rglob("*") if f.is_file()} == before
    assert_complete(latest_checkpoint(small_disk, verify=True), {(1, 0)}, scale=100)
    save(small_disk, 3, keep=1, scale=100)  # what fits goes on
    assert_complete(latest_checkpoint(small_disk, verify=True), {(3, 0)}, scale=100)


@pytest.mark.parametrize("failing", ["fsync", "rename", "mkdir"])
def test_a_failing_disk_loses_nothing(tmp_path, monkeypatch, failing):
    save(tmp_path, 1)

    def broken(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(f"os.{failing}", broken)
        with pytest.raises(MachineError, match="failure while writing.*Input/output error"):
            save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert_complete(latest_checkpoint(tmp_path, verify=True), {(1, 0)})


def test_everything_is_on_the_disk_before_its_name_and_before_a_deletion(tmp_path, monkeypatch):
    save(tmp_path, 1)
    events: list[tuple[str, str]] = []

    def name_of(value) -> str:
        text = os.readlink(f"/proc/self/fd/{value}") if isinstance(value, int) else str(value)
        return os.path.relpath(text, tmp_path)

    def wrap(operation):
        original = getattr(os, operation)

        def traced(first, *args, **kwargs):
            events.append((operation, name_of(first)))
            return original(first, *args, **kwargs)

        monkeypatch.setattr(f"os.{operation}", traced)

    for operation in ("write", "fsync", "rename"):
        wrap(operation)
    path = save(tmp_path, 2)
    monkeypatch.undo()

    staging = f".staging-2-{os.getpid()}"
    named = events.index(("rename", staging))
    for file in (p for p in path.rglob("*") if p.is_file()):
        name = f"{staging}/{file.relative_to(path)}"
        last_write = max(i for i, event in enumerate(events) if event == ("write", name))
        assert ("fsync", name) in events[last_write:named]
    for folder in (staging, f"{staging}/m", f"{staging}/master"):
        writes = [i for i, (o, n) in enumerate(events) if o == "write" and f"{folder}/" in n]
        assert ("fsync", folder) in events[max(writes) : named]
    written = [n for o, n in events if o == "write"]
    assert written[-1] == f"{staging}/manifest.json"
    deleted = events.index(("rename", "step_00000001"))
    assert ("fsync", ".") in events[named:deleted]


def test_new_folders_above_the_checkpoint_are_on_the_disk_too(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def traced(file):
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr("os.fsync", traced)
    save(tmp_path / "a" / "b", 1)
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(synced)
