"""Checkpoints: content, completeness, rotation, damage (kills, full disks: test_checkpoint_crash).

Oracle: the arrays and bytes that were handed in; hashes by hashlib on the files.
"""

import hashlib
import json
import os
import subprocess
import sys
import types
import weakref

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.io.safetensors_io import HEADER_ROOM
from llmq_nb.train import leftovers
from llmq_nb.train.checkpoint import (
    check_out_dir,
    checkpoint_bytes,
    latest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)

DTYPES = {
    "master": np.float32, "m": ml_dtypes.float8_e4m3fn, "v": ml_dtypes.bfloat16,
    "m_scale": np.float32,
}  # fmt: skip


def make_parts(seed: int, count: int = 5) -> dict[str, dict[str, np.ndarray]]:
    """Random bits in every part, so that NaN payloads and subnormals are among them."""
    rng = np.random.default_rng(seed)
    parts = {}
    for part, dtype in DTYPES.items():
        size = np.dtype(dtype).itemsize
        shapes = {f"model.layers.{i}.weight": (3 + i, 7) for i in range(count)}
        parts[part] = {
            name: rng.integers(0, 256, (a, b * size), dtype=np.uint8).view(dtype)
            for name, (a, b) in shapes.items()
        }
    return parts


def save(root, step, *, seed=None, keep=0, major_every=0, **options):
    parts = {p: t.items() for p, t in make_parts(step if seed is None else seed).items()}
    state = {"loader": [step, 2**60 + 1], "config": "a = 1\n", "loss": 0.1}
    return save_checkpoint(
        root, step=step, parts=parts, state=state, keep=keep, major_every=major_every, **options
    )


def assert_holds(path, step, *, seed=None):
    read = read_checkpoint(path, verify=True)
    assert read.step == step
    assert read.state == {"loader": [step, 2**60 + 1], "config": "a = 1\n", "loss": 0.1}
    for part, tensors in make_parts(step if seed is None else seed).items():
        got = read.tensors(part)
        assert got.keys() == tensors.keys()
        for name, want in tensors.items():
            assert got[name].dtype == want.dtype and got[name].shape == want.shape
            assert got[name].tobytes() == want.tobytes()


def steps_in(root) -> list[str]:
    return sorted(p.name for p in root.iterdir())


@pytest.mark.parametrize("shard_bytes", [1, 100, 250, 10**9])
def test_round_trip_is_bitwise_for_any_shard_size(tmp_path, shard_bytes):
    path = save(tmp_path / "a" / "b", 42, shard_bytes=shard_bytes)
    assert path == tmp_path / "a" / "b" / "step_00000042"
    assert_holds(path, 42)
    assert read_checkpoint(path).parts == ("m", "m_scale", "master", "v")


def test_shards_hold_what_fits_and_the_index_names_them(tmp_path):
    tensors = [(f"t{i}", np.full(size, i, np.uint8)) for i, size in enumerate([60, 40, 1, 300, 99])]
    path = save_checkpoint(
        tmp_path, step=1, parts={"m": tensors}, state={}, keep=0, major_every=0, shard_bytes=100
    )
    files = sorted((path / "m").glob("*.safetensors"))
    content = [sorted(safetensors.numpy.load_file(f)) for f in files]
    assert content == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]  # t3 alone is larger than a shard
    index = json.loads((path / "m" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        name: f.name for f, names in zip(files, content, strict=True) for name in names
    }


def test_more_names_than_a_header_holds_start_another_file(tmp_path):
    count = HEADER_ROOM // 1000 + 5
    tensors = {f"{i:0950}": np.full(1, i, np.int32) for i in range(count)}
    parts = {"v": tensors.items()}
    path = save_checkpoint(tmp_path, step=1, parts=parts, state={}, keep=0, major_every=0)
    assert len(list((path / "v").glob("*.safetensors"))) == 2
    got = read_checkpoint(path).tensors("v")
    assert {name: int(array[0]) for name, array in got.items()} == {
        name: int(array[0]) for name, array in tensors.items()
    }


def test_manifest_has_size_and_hash_of_every_other_file(tmp_path):
    path = save(tmp_path, 3, shard_bytes=100)
    manifest = json.loads((path / "manifest.json").read_text())
    files = {
        str(f.relative_to(path)): {
            "size": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()
        }
        for f in path.rglob("*") if f.is_file() and f.name != "manifest.json"
    }  # fmt: skip
    assert manifest["files"] == files
    assert manifest["step"] == 3


def test_streams_are_taken_one_array_at_a_time(tmp_path):
    made: list[weakref.ref[np.ndarray]] = []
    most = 0

    def stream():
        nonlocal most
        for i in range(20):
            array = np.zeros(50, np.uint8)
            made.append(weakref.ref(array))
            most = max(most, sum(one() is not None for one in made))
            yield f"t{i}", array

    parts = {"m": stream()}
    save_checkpoint(tmp_path, step=1, parts=parts, state={}, keep=0, major_every=0, shard_bytes=120)
    assert most == 2  # the one just written and the one just made


def test_a_stream_may_refill_one_buffer(tmp_path):
    """As a copy from the GPU through one pinned buffer does."""
    buffer = np.zeros(50, np.uint8)

    def stream():
        for i in range(7):
            buffer[:] = i
            yield f"t{i}", buffer

    parts = {"m": stream()}
    path = save_checkpoint(
        tmp_path, step=1, parts=parts, state={}, keep=0, major_every=0, shard_bytes=120
    )
    got = read_checkpoint(path).tensors("m")
    assert {name: set(a.tolist()) for name, a in got.items()} == {f"t{i}": {i} for i in range(7)}


def test_a_part_without_tensors_and_an_unknown_part(tmp_path):
    path = save_checkpoint(tmp_path, step=1, parts={"m": []}, state={}, keep=0, major_every=0)
    assert read_checkpoint(path).tensors("m") == {}
    with pytest.raises(UserError, match=r"no part 'v' .*it has m"):
        read_checkpoint(path).tensors("v")


def test_keep_counts_the_newest_that_are_no_majors(tmp_path):
    for step in range(10, 101, 10):
        save(tmp_path, step, keep=2, major_every=40)
    assert steps_in(tmp_path) == [f"step_{n:08}" for n in (40, 80, 90, 100)]


def test_fewer_than_keep_all_stay(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=5, major_every=2)
    assert steps_in(tmp_path) == [f"step_{n:08}" for n in (1, 2, 3)]


def test_keep_zero_keeps_all(tmp_path):
    for step in range(5):
        save(tmp_path, step, keep=0)
    assert steps_in(tmp_path) == [f"step_{n:08}" for n in range(5)]


def test_q9_all_checkpoints_are_majors(tmp_path):
    """LLMQ's Q9: interval 100, major 100, keep 3 wrapped around below zero."""
    for step in range(100, 601, 100):
        save(tmp_path, step, keep=3, major_every=100)
    assert steps_in(tmp_path) == [f"step_{n:08}" for n in range(100, 601, 100)]


def damage_manifest_missing(path):
    (path / "manifest.json").unlink()


def damage_manifest_cut(path):
    os.truncate(path / "manifest.json", 30)


def damage_manifest_of_another_kind(path):
    (path / "manifest.json").write_text("[1]")


def damage_manifest_of_another_version(path):
    manifest = json.loads((path / "manifest.json").read_text()) | {"format": 99}
    (path / "manifest.json").write_text(json.dumps(manifest))


def damage_state_missing(path):
    (path / "state.json").unlink()


def damage_tensors_cut(path):
    os.truncate(path / "m" / "model-00001.safetensors", HEADER_ROOM + 3)


def damage_tensors_missing(path):
    (path / "v" / "model-00001.safetensors").unlink()


DAMAGE = [
    damage_manifest_missing, damage_manifest_cut, damage_manifest_of_another_kind,
    damage_manifest_of_another_version, damage_state_missing, damage_tensors_cut,
    damage_tensors_missing,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_q8_the_latest_falls_back_over_broken_ones(tmp_path, damage):
    """LLMQ's Q8: the largest step was taken unseen, and broken ones counted for keep."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "step_00000003")
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000002"
    with pytest.raises(UserError, match="no complete checkpoint in .*step_00000003"):
        read_checkpoint(tmp_path / "step_00000003")
    save(tmp_path, 4, keep=2)
    assert steps_in(tmp_path) == [f"step_{n:08}" for n in (2, 3, 4)]  # 3 neither counted nor gone
    assert_holds(tmp_path / "step_00000002", 2)


def test_a_flipped_bit_is_found_by_its_hash(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    file = path / "master" / "model-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert latest_checkpoint(tmp_path, verify=True) == tmp_path / "step_00000001"
    assert latest_checkpoint(tmp_path) == path
    with pytest.raises(UserError, match=r"master/model-00001.safetensors has changed"):
        read_checkpoint(path, verify=True)


def test_latest_of_nothing(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "step_x").mkdir()
    (tmp_path / ".staging-7-1").mkdir()
    (tmp_path / "step_00000007").write_text("a file")
    assert latest_checkpoint(tmp_path) is None


def test_steps_of_more_than_eight_digits_are_newer(tmp_path):
    save(tmp_path, 99_999_999)
    save(tmp_path, 100_000_000)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_100000000"


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_saved_again_replaces_the_first(tmp_path, broken):
    path = save(tmp_path, 5)
    if broken:
        damage_tensors_cut(path)
    assert save(tmp_path, 5, seed=99) == path
    assert_holds(path, 5, seed=99)
    assert steps_in(tmp_path) == ["step_00000005"]


def test_later_steps_of_an_older_branch_do_not_push_the_new_one_out(tmp_path):
    """A run resumed from step 10 by hand, with 20 and 30 still there."""
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(tmp_path, 15, keep=1)
    assert steps_in(tmp_path) == [f"step_{n:08}" for n in (15, 20, 30)]


def test_leftovers_of_dead_processes_go_and_those_of_the_living_stay(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f".staging-7-{dead.pid}", f".trash-1-{dead.pid}", f".staging-8-{os.getpid()}"):
        (tmp_path / name / "m").mkdir(parents=True)
    (tmp_path / ".staging-x").mkdir()
    with leftovers.claim(tmp_path / ".staging-9-1"):  # locked, as by another process
        save(tmp_path, 1)
        assert steps_in(tmp_path) == [".staging-9-1", ".staging-x", "step_00000001"]


def test_without_locks_the_process_id_decides(tmp_path, monkeypatch):
    def no_locks(handle, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for process in (dead.pid, os.getpid(), os.getppid()):
        (tmp_path / f".staging-7-{process}").mkdir()
    save(tmp_path, 1)
    assert steps_in(tmp_path) == [f".staging-7-{os.getppid()}", "step_00000001"]


def test_a_failing_stream_leaves_nothing_behind(tmp_path):
    def stream():
        yield "a", np.zeros(3)
        raise KeyboardInterrupt

    save(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, step=2, parts={"m": stream()}, state={}, keep=1, major_every=0)
    with pytest.raises(ValueError, match="two tensors named 'a'"):
        twice = [("a", np.zeros(3)), ("a", np.zeros(3))]
        save_checkpoint(tmp_path, step=2, parts={"m": twice}, state={}, keep=1, major_every=0)
    assert steps_in(tmp_path) == ["step_00000001"]


def test_root_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make the folder .*file/x"):
        save(tmp_path / "file" / "x", 1)
    with pytest.raises(UserError, match="cannot make the folder"):
        check_out_dir(tmp_path / "file", 0)


def test_check_out_dir_tries_to_write_and_looks_at_the_space(tmp_path, monkeypatch):
    check_out_dir(tmp_path / "new", 1)
    assert steps_in(tmp_path / "new") == []
    with pytest.raises(
        UserError, match=r"too little disk: 909495 TiB for checkpoints, .* are free"
    ):
        check_out_dir(tmp_path, 10**18)

    def read_only(path, mode=0o777):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.mkdir", read_only)
    with pytest.raises(UserError, match="cannot write to .*Read-only file system"):
        check_out_dir(tmp_path, 0)


def test_missing_space_is_named_before_a_byte_is_written(tmp_path):
    save(tmp_path, 1)
    before = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")}
    with pytest.raises(MachineError, match=r"step 2: it needs 909495 TiB, .* [GT]iB free"):
        save(tmp_path, 2, keep=1, nbytes=10**18)
    assert before == {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*")}


def test_without_a_size_the_newest_one_is_taken_as_large(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    size = sum(f.stat().st_size for f in path.rglob("*.*") if f.name != "manifest.json")
    usage = types.SimpleNamespace(free=size - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match="no space for the checkpoint of step 2"):
        save(tmp_path, 2)
    usage.free = size
    assert_holds(save(tmp_path, 2), 2)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=0, max_size=12), shard_bytes=st.integers(1, 500)
)
def test_checkpoint_bytes_is_a_close_upper_bound(tmp_path_factory, sizes, shard_bytes):
    root = tmp_path_factory.mktemp("size")
    tensors = [(f"t{i}", np.zeros(n, np.uint8)) for i, n in enumerate(sizes)]
    parts = {"m": tensors, "v": tensors}
    path = save_checkpoint(
        root, step=1, parts=parts, state={}, keep=0, major_every=0, shard_bytes=shard_bytes
    )
    files = [f for f in path.rglob("*") if f.is_file()]
    taken = sum(f.stat().st_size for f in files)
    bound = checkpoint_bytes({"m": sum(sizes), "v": sum(sizes)}, shard_bytes=shard_bytes)
    assert taken <= bound


def test_checkpoint_bytes_of_a_7b_model_is_within_a_tenth_of_a_percent():
    """7.6e9 parameters: master and m FP32, v BF16, so 10 bytes each."""
    parts = {"master": 30_400_000_000, "m": 30_400_000_000, "v": 15_200_000_000}
    assert 76e9 <= checkpoint_bytes(parts) <= 76e9 * 1.001
