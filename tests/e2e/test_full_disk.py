"""A disk that fills up anywhere in a run loses nothing: exit code 1, one line, and with space again
the run ends with the bits of one that never saw a full disk.

A real tmpfs of 64 MiB where it can be mounted; elsewhere every write below the run's folder fails
with ENOSPC from the same moment on.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import Cli, hashes, listing, make_run, numbers, read_log

FILLING = """
import errno, os, shutil
from pathlib import Path

def fill(leave, mounted=%(mounted)r):
    if not mounted:
        write = os.write
        def refuse(file, *data):
            if os.readlink(f"/proc/self/fd/{file}").startswith(os.getcwd()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, *data) if data else None
        os.write = os.fsync = refuse
        return
    with open("filler", "wb", buffering=0) as file:
        size = 0
        try:
            while True:
                size += file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(max(size - leave, 0))
"""
AFTER_STEP = """
from llmq_nb.train.trainer import Trainer
step = Trainer.step
def filling(self):
    metrics = step(self)
    if metrics.step == 5:
        fill(%d)
    return metrics
Trainer.step = filling
"""
BEFORE_EXPORT = """
from llmq_nb.train.trainer import Trainer
export = Trainer.export
def filling(self, *arguments):
    fill(%d)
    return export(self, *arguments)
Trainer.export = filling
"""
LYING = """
usage = shutil.disk_usage(".")
shutil.disk_usage = lambda path: usage._replace(free=10**12)
"""
MOMENTS = {
    "log": AFTER_STEP % 0,
    "check before the checkpoint": AFTER_STEP % 300_000,
    "writing the checkpoint": LYING + AFTER_STEP % 100_000,
    "export": LYING + BEFORE_EXPORT % 8192,
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """A folder, and whether it is a 64 MiB tmpfs."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(place)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    yield place, mounted
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture(scope="module")
def whole(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("whole"))
    assert cli("train", "config.toml", cwd=folder).code == 0
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_full(moment: str, whole: Path, disk: tuple[Path, bool], cli: Cli) -> None:
    folder, mounted = disk
    make_run(folder)
    before = FILLING % {"mounted": mounted} + MOMENTS[moment]
    result = cli("train", "config.toml", cwd=folder, before=before)
    assert result.code == 1, (result.out, result.err)
    assert "space" in result.error or "disk is full" in result.error
    assert "out/" in result.error
    log = read_log(folder / "out")
    assert [r["step"] for r in log if r["log"] == "step"][:4] == [1, 2, 3, 4]
    assert list(folder.glob("out/checkpoints/step_*/manifest.json"))
    assert not [name for name in listing(folder) if "staging" in name or "trash" in name]
    (folder / "filler").unlink(missing_ok=True)
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert numbers(folder / "out") == numbers(whole / "out")
    for part in ("checkpoints/step_00000012", "export"):
        assert hashes(folder / "out" / part) == hashes(whole / "out" / part)
    assert listing(folder) == listing(whole)


@pytest.mark.parametrize("leave", [0, 20_000, 60_000])
def test_full_from_the_start(leave: int, whole: Path, disk: tuple[Path, bool], cli: Cli) -> None:
    """While tokenizing too. A store that cannot even be begun is the user's to mend: code 2."""
    folder, mounted = disk
    make_run(folder)
    before = FILLING % {"mounted": mounted} + LYING + f"fill({leave})"
    result = cli("train", "config.toml", cwd=folder, before=before)
    assert result.code in (1, 2), (result.out, result.err)
    assert "space" in result.error.lower()
    (folder / "filler").unlink(missing_ok=True)
    result = cli("train", "config.toml", cwd=folder)
    assert result.code == 0, result.err
    assert numbers(folder / "out") == numbers(whole / "out")
    assert listing(folder) == listing(whole)
