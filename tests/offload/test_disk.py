"""States on the disk: the bits of a run that keeps them in memory, the file, refusals, the plan."""

import ctypes
import dataclasses
import errno
import itertools
import math
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from llmq_nb.config import ParallelConfig
from llmq_nb.core import files
from llmq_nb.core.arena import aligned
from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.model.engine_cpu import rows
from llmq_nb.model.parameters import model_parameters
from llmq_nb.offload import disk
from llmq_nb.offload.disk import OnDisk, ScratchFile
from llmq_nb.offload.disk_states import DiskSlice, DiskStates, Done
from llmq_nb.offload.transfer import ImmediateTransfer
from llmq_nb.plan import places
from llmq_nb.plan.buffers import make_plan
from llmq_nb.train.setup import Device, check_supported
from tests.offload.harness import LEVERS, MODEL, STORAGE, batch, config_of, engine_of, resident, run
from tests.offload.test_levers import OneThread

B = files.BLOCK
SETS: tuple[Any, ...] = (("m",), ("v",), ("m", "v"))
SMALLEST, SLICE = 100, 1024


@pytest.fixture(autouse=True)
def small_slices(monkeypatch, tmp_path):
    """One thread, states of several slices, norms and biases in memory, files in tmp_path."""
    rows.pool()
    monkeypatch.setattr(rows, "pool", OneThread)
    monkeypatch.setattr(places, "SLICE", SLICE)
    monkeypatch.setattr(places, "STREAMED", SMALLEST)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def poisoned(monkeypatch):
    """A staging buffer is filled with NaN once it is written: a late reader shows."""
    write = ScratchFile.write

    def wiping(self: ScratchFile, address: int, nbytes: int, offset: int) -> None:
        write(self, address, nbytes, offset)
        ctypes.memset(address, 0xFF, nbytes)

    monkeypatch.setattr(ScratchFile, "write", wiping)


def on_disk(config, states):
    memory = dataclasses.replace(
        config.memory,
        disk=states,
        offload=tuple(s for s in config.memory.offload if s not in states),
    )
    return dataclasses.replace(config, memory=memory)


@pytest.mark.parametrize("storage", STORAGE)
def test_the_bits_of_a_run_in_memory(storage, poisoned):
    want = resident(storage, 2)
    for states, transfer in itertools.product(SETS, ("zero_copy", "copy")):
        for offload in ((), LEVERS):
            config = config_of(storage, offload=offload, transfer=transfer)
            assert run(on_disk(config, states), ImmediateTransfer) == want, (states, offload)
    assert os.listdir() == []


def test_what_is_written_is_read_and_trained_on(poisoned):
    """A checkpoint's way: states of one engine, in memory, written into one on the disk."""
    config = config_of("e4m3, kept quants")
    plain, other = (engine_of(c, ImmediateTransfer) for c in (config, on_disk(config, ("m", "v"))))
    for step in range(2):
        plain.train_step(batch(2, step), step=step, updates=step, learning_rate=1e-2)
    pieces = []
    for a, b in zip(plain.states, other.states, strict=True):
        for name in ("master", "m", "m_scale", "v"):
            target = getattr(b, name)
            value = plain.read(getattr(a, name))
            other.write(target, value)
            assert other.read(target).tobytes() == value.tobytes(), (name, a.parameter.name)
            if isinstance(target.data, OnDisk):
                pieces.append(len(target.data.pieces))
    assert min(pieces) < max(pieces) == 3  # slices of 1024 elements
    results = [e.train_step(batch(2, 2), step=2, updates=2, learning_rate=1e-2) for e in
               (plain, other)]  # fmt: skip
    assert results[0] == results[1]
    for a, b in zip(plain.states, other.states, strict=True):
        assert plain.read(a.m).tobytes() == other.read(b.m).tobytes()
    other.write(other.states[0].m, np.zeros((), np.float32))  # as `clear_moments` does
    assert not other.read(other.states[0].m).astype(np.float32).any()
    other.close()


# ---- the file ----------------------------------------------------------------------------------
class Memory:
    """Aligned bytes."""

    def __init__(self, nbytes: int) -> None:
        self.raw = np.zeros(nbytes + B, np.uint8)
        start = -self.raw.ctypes.data % B
        self.bytes = self.raw[start : start + nbytes]
        self.address = self.bytes.ctypes.data


def test_a_file_keeps_what_is_written_and_has_no_name(tmp_path):
    file, rng = ScratchFile(tmp_path / "runs" / "later", 9 * B), np.random.default_rng(0)
    assert os.listdir(tmp_path) == [] and file.folder == tmp_path
    memory = Memory(9 * B)
    file.read(memory.address, 9 * B, 0)
    assert not memory.bytes.any()
    content = rng.integers(0, 256, 9 * B, np.uint8)
    memory.bytes[...] = content
    for first, count in ((4, 5), (0, 3), (3, 1)):
        file.write(memory.address + first * B, count * B, first * B)
    memory.bytes[...] = 0
    file.read(memory.address + B, 7 * B, 2 * B)
    np.testing.assert_array_equal(memory.bytes[B : 8 * B], content[2 * B :])
    file.close()


def test_a_killed_process_leaves_nothing(tmp_path):
    code = (
        "import sys, time; from pathlib import Path;"
        "from llmq_nb.offload.disk import ScratchFile;"
        "file = ScratchFile(Path(sys.argv[1]), 1 << 20); print('made', flush=True); time.sleep(60)"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    )
    assert process.stdout is not None and process.stdout.readline() == b"made\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("refuses", ["open", "write", "nameless"])
def test_ordinary_io_where_direct_io_is_refused(refuses, tmp_path, monkeypatch):
    real_open, real_write = os.open, os.pwritev

    def fail(*args: Any) -> Any:
        raise OSError(errno.EINVAL, "refused")

    def refusing_open(path: Any, flags: int, *mode: int) -> int:
        refused = os.O_DIRECT if refuses == "open" else os.O_TMPFILE
        return fail() if flags & refused == refused else real_open(path, flags, *mode)

    def refusing_write(handle: int, data: Any, offset: int) -> int:
        return fail() if offset == 0 and len(data[0]) == B else real_write(handle, data, offset)

    if refuses == "write":
        monkeypatch.setattr(os, "pwritev", refusing_write)
    else:
        monkeypatch.setattr(os, "open", refusing_open)
    said: list[str] = []
    file = ScratchFile(tmp_path, 2 * B, announce=said.append)
    assert not file.direct and len(said) == 1 and "no direct I/O" in said[0]
    assert os.listdir(tmp_path) == []
    memory = Memory(2 * B)
    memory.bytes[...] = 7
    file.write(memory.address, 2 * B, 0)
    memory.bytes[...] = 0
    file.read(memory.address, 2 * B, 0)
    assert (memory.bytes == 7).all()
    file.close()


def test_too_little_space_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 3 << 20})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"too little disk: 4.00 MiB for optimizer states"):
        ScratchFile(tmp_path, 4 << 20)
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"too little disk: 4.00 MiB .* run.out_dir"):
        ScratchFile(tmp_path, 4 << 20)


def test_after_a_failure_nothing_is_read_any_more(tmp_path, monkeypatch):
    """Half of the states would be of one step and half of another: no checkpoint may have them."""
    file, memory = ScratchFile(tmp_path, 4 * B), Memory(B)
    slices = [DiskSlice(i, i % 3, memory.address, B, i * B) for i in range(4)]
    states = DiskStates(slices, file, Done(), 3)
    assert list(states) == [0, 1, 2, 3]

    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, "worn out")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(MachineError, match=r"writing optimizer states .* worn out"):
        list(states)
    monkeypatch.undo()
    with pytest.raises(MachineError, match="lost"):
        OnDisk(file, [(0, B)]).read((B,), np.uint8)
    # so it is where the update itself failed
    file = ScratchFile(tmp_path, 4 * B)
    iterator = iter(DiskStates(slices, file, Done(), 3))
    next(iterator)
    iterator.close()  # type: ignore
    with pytest.raises(MachineError, match="lost"):
        file.read(memory.address, B, 0)


def test_a_short_file_is_no_endless_loop(tmp_path):
    file = ScratchFile(tmp_path, B)
    memory = Memory(2 * B)
    with pytest.raises(MachineError, match="too short"):
        file.read(memory.address, 2 * B, 0)


# ---- the plan ----------------------------------------------------------------------------------
@pytest.mark.parametrize("states", SETS)
def test_what_the_plan_moves(states):
    """From the parameters' shapes: those of 100 elements and more, in whole blocks a slice."""
    config = config_of("e4m3, kept quants")
    before, plan = (make_plan(c, MODEL) for c in (config, on_disk(config, states)))
    sizes = {p.name: math.prod(p.shape) for p in model_parameters(MODEL)}
    itemsize, moved, file, largest = {"m": 1, "v": 2}, 0, 0, 0
    for size in (n for n in sizes.values() if n >= SMALLEST):
        moved += sum(aligned(size * itemsize[s]) for s in states)
        moved += aligned(4 * -(-size // 128)) if "m" in states else 0
        for start in range(0, size, SLICE):
            n = min(SLICE, size - start)
            parts = [n * itemsize[s] for s in states] + [4 * -(-n // 128)] * ("m" in states)
            record = sum(-(-nbytes // B) * B for nbytes in parts)
            file, largest = file + record, max(largest, record)
    assert before.disk_total == 0 and plan.disk_total == file
    assert plan.total == before.total - moved
    assert plan.host_total == 3 * aligned(largest + B)
    assert sum(plan.group_bytes("disk").values()) == moved
    assert any(n < SMALLEST for n in sizes.values())


def test_a_state_has_one_place():
    config = config_of("bf16", offload=["m", "master"])
    with pytest.raises(UserError, match=r"\['m'\] is in memory.offload too in memory.disk"):
        dataclasses.replace(config.memory, disk=("m", "v"))
    assert disk.WHAT.startswith("optimizer states")


def test_several_ranks_are_refused():
    config = on_disk(config_of("bf16"), ("m",))
    ranks = dataclasses.replace(config, parallel=ParallelConfig(devices=(0, 0)))
    check_supported(config, Device("cpu", "here"))
    with pytest.raises(UserError, match=r"disk = \['m'\] on several ranks in memory.disk"):
        check_supported(ranks, Device("cpu", "here"))
