"""Our safetensors reader and writer against the safetensors library, byte for byte."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq_nb.core.errors import UserError
from llmq_nb.core.files import synced_file
from llmq_nb.io.safetensors_io import (
    HEADER_ROOM,
    SafetensorsFile,
    SafetensorsWriter,
    TensorSpec,
    plan_shards,
    write_safetensors,
    write_sharded,
)
from tests.io.folders import leftovers, library_save

DTYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F64": np.float64,
    **{f"I{n}": np.dtype(f"i{n // 8}") for n in (64, 32, 16, 8)},
    **{f"U{n}": np.dtype(f"u{n // 8}") for n in (64, 32, 16, 8)},
}
# scalar, empty, one row, odd sizes: everything that a range computation can get wrong
SHAPES = [(), (0, 3), (1, 7), (5, 3)]


def random_bits(dtype: object, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bit pattern, NaN payloads included: a file format must not touch them."""
    kind = np.dtype(dtype)  # type: ignore[arg-type]
    count = int(np.prod(shape)) * kind.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return raw.view(kind).reshape(shape)


def all_tensors() -> dict[str, np.ndarray]:
    return {
        f"{name}{list(shape)}": random_bits(dtype, shape, 100 * i + j)
        for i, (name, dtype) in enumerate(DTYPES.items())
        for j, shape in enumerate(SHAPES)
    }


def write(path: Path, tensors: dict[str, np.ndarray]) -> int:
    specs = [TensorSpec(n, t.dtype, t.shape) for n, t in tensors.items()]
    return write_safetensors(path, specs, tensors.__getitem__)


def test_the_library_reads_our_bytes(tmp_path: Path) -> None:
    tensors = all_tensors()
    size = write(tmp_path / "a.safetensors", tensors)
    data = (tmp_path / "a.safetensors").read_bytes()
    assert size == len(data)
    read = {
        name: (e["dtype"], tuple(e["shape"]), bytes(e["data"]))
        for name, e in safetensors.deserialize(data)
    }
    assert read == {n: (n.split("[")[0], t.shape, t.tobytes()) for n, t in tensors.items()}
    with safetensors.safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_the_librarys_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16)
    y = rng.standard_normal(4).astype(np.float32)
    library_save(tmp_path / "b.safetensors", {"x": x, "y": y})
    file = SafetensorsFile(tmp_path / "b.safetensors")
    assert file.metadata == {"format": "pt"}
    assert file.read("x").dtype == x.dtype and file.read("x").tobytes() == x.tobytes()
    assert file.read("y").tobytes() == y.tobytes()
    rows = np.zeros((6, 5), ml_dtypes.bfloat16)
    file.read_into("x", rows[2:5])
    assert rows[2:5].tobytes() == x.tobytes()
    assert not rows[:2].any() and not rows[5:].any()
    assert b"".join(file.chunks("x", 7)) == x.tobytes()


def test_data_is_aligned_to_its_dtype(tmp_path: Path) -> None:
    tensors = {"odd": random_bits(np.uint8, (3,), 1), "wide": random_bits(np.float32, (2,), 2)}
    write(tmp_path / "a.safetensors", tensors)
    data = (tmp_path / "a.safetensors").read_bytes()
    assert data.index(tensors["wide"].tobytes()) % 8 == 0


def test_read_into_refuses_another_dtype_or_shape(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": random_bits(np.float32, (4, 4), 1)})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    for out in (np.zeros((4, 4), np.int32), np.zeros((4, 3), np.float32), np.zeros((8, 4), "f4").T):
        with pytest.raises(ValueError, match="x is float32"):
            file.read_into("x", out)


def test_a_file_cut_anywhere_or_longer_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"x": random_bits(np.float32, (4, 2), 1)})
    data = (tmp_path / "a.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match="cut.safetensors"):
            SafetensorsFile(path)
    path.write_bytes(data[:-5])
    with pytest.raises(UserError, match=f"truncated: {len(data) - 5} of {len(data)} bytes"):
        SafetensorsFile(path)
    path.write_bytes(data + b"more")
    with pytest.raises(UserError, match="4 bytes after the last tensor"):
        SafetensorsFile(path)


def craft(path: Path, header: object, data: bytes = b"\0" * 16) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ([], "unreadable"),
        ({"x": 3}, "unreadable"),
        ({"x": {"dtype": "F32", "shape": [4]}}, "unreadable"),
        ({"x": ["F32"]}, "unreadable"),
        ({"x": None}, "unreadable"),
        ({"x": {"dtype": "F32", "shape": [4], "data_offsets": [16]}}, "unreadable"),
        ({"x": {"dtype": "F32", "data_offsets": [0, 16]}}, "unreadable"),
        ({"x": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}, "byte range -16 to 0"),
        ({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 16]}}, "dtype F4"),
        ({"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]}}, "byte range 0 to 16"),
        ({"x": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, "byte range"),
        ({"x": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}}, "byte range 4 to 16"),
        (
            {
                "x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "y": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
            },
            "tensor y has a wrong byte range",
        ),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: object, what: str) -> None:
    path = craft(tmp_path / "lie.safetensors", header)
    with pytest.raises(UserError, match=what):
        SafetensorsFile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.safetensors: No such file"):
        SafetensorsFile(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="cannot read"):
        SafetensorsFile(tmp_path)


@pytest.mark.parametrize("text", [b"{", b"\xff\xff"])
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(UserError, match="unreadable safetensors header"):
        SafetensorsFile(tmp_path / "x")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"x": random_bits(np.float32, (4,), 1)})
    before = path.read_bytes()
    specs = [TensorSpec("x", np.dtype(np.float32), (4,)), TensorSpec("y", np.dtype("f4"), (4,))]
    with pytest.raises(KeyError):
        write_safetensors(path, specs, {"x": np.zeros(4, np.float32)}.__getitem__)
    with pytest.raises(ValueError, match="int32"):
        write_safetensors(path, specs[:1], lambda _: np.zeros(4, np.int32))
    assert path.read_bytes() == before and not leftovers(tmp_path)


def test_shards_stay_below_the_limit_and_keep_the_order() -> None:
    specs = [TensorSpec(f"t{i}", np.dtype(np.uint8), (n,)) for i, n in enumerate([4, 6, 11, 1, 9])]
    shards = plan_shards(specs, 10)
    assert [[s.name for s in shard] for shard in shards] == [["t0", "t1"], ["t2"], ["t3", "t4"]]


def test_sharded_write_asks_for_each_tensor_once_in_order(tmp_path: Path) -> None:
    tensors = {f"t{i}": random_bits(ml_dtypes.bfloat16, (8, 4), i) for i in range(5)}
    specs = [TensorSpec(n, t.dtype, t.shape) for n, t in tensors.items()]
    asked: list[str] = []

    def get(name: str) -> np.ndarray:
        asked.append(name)
        return tensors[name]

    names = write_sharded(tmp_path, specs, get, max_shard_size=128, stem="master")
    assert asked == list(tensors)
    assert names == [
        "master-00001-of-00003.safetensors",
        "master-00002-of-00003.safetensors",
        "master-00003-of-00003.safetensors",
        "master.safetensors.index.json",
    ]
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"]["total_size"] == 5 * 64
    for name, tensor in tensors.items():
        stored = dict(safetensors.deserialize((tmp_path / index["weight_map"][name]).read_bytes()))
        assert bytes(stored[name]["data"]) == tensor.tobytes()


def stream(path: Path, tensors: dict[str, np.ndarray], **options: Any) -> int:
    """As a checkpoint writes: names come with their arrays."""
    with synced_file(path) as file:
        writer = SafetensorsWriter(file, **options)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.finish()


def test_the_library_reads_a_stream(tmp_path: Path) -> None:
    """All dtypes and shapes, unaligned ones too, in the order in which they came."""
    tensors = all_tensors() | {"flags": np.array([True, False, True])}
    size = stream(tmp_path / "a.safetensors", tensors)
    data = (tmp_path / "a.safetensors").read_bytes()
    assert size == len(data) == HEADER_ROOM + sum(t.nbytes for t in tensors.values())
    read = {
        name: (e["dtype"], tuple(e["shape"]), bytes(e["data"]))
        for name, e in safetensors.deserialize(data)
    }
    assert read == {
        n: (n.split("[")[0].replace("flags", "BOOL"), t.shape, t.tobytes())
        for n, t in tensors.items()
    }
    assert list(SafetensorsFile(tmp_path / "a.safetensors").specs) == list(tensors)


def test_views_are_the_bytes_and_cannot_be_written(tmp_path: Path) -> None:
    tensors = all_tensors()
    stream(tmp_path / "a.safetensors", tensors)
    views = SafetensorsFile(tmp_path / "a.safetensors").views()
    assert views.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert views[name].dtype == tensor.dtype and views[name].shape == tensor.shape
        assert views[name].tobytes() == tensor.tobytes()
        assert not views[name].flags.writeable


def test_strided_arrays_are_written_row_major(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    stream(tmp_path / "x", {"t": array.T, "s": array[::2, ::3]})
    views = SafetensorsFile(tmp_path / "x").views()
    assert np.array_equal(views["t"], array.T) and np.array_equal(views["s"], array[::2, ::3])


@settings(max_examples=30, deadline=None)
@given(names=st.lists(st.text(max_size=60), unique=True, max_size=40))
def test_a_header_that_fits_is_never_overrun(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    path = tmp_path_factory.mktemp("names") / "x"
    names = [name for name in names if name != "__metadata__"]
    array, kept = np.arange(3, dtype=np.float32), []
    with synced_file(path) as file:
        writer = SafetensorsWriter(file, room=1024)
        for name in names:
            if writer.fits(TensorSpec(name, array.dtype, array.shape)):
                writer.add(name, array)
                kept.append(name)
        writer.finish()
    views = SafetensorsFile(path).views()
    assert list(views) == kept
    assert all(np.array_equal(views[name], array) for name in kept)
    data = path.read_bytes()
    assert len(data) == 1024 + 12 * len(kept)
    # what did not fit: 12 bytes a character at most (two escapes), and under 70 of its own
    assert len(kept) == len(names) or len(data[8:1024].rstrip()) > 1016 - 12 * 60 - 70


def test_a_full_header_and_a_repeated_name_are_refused(tmp_path: Path) -> None:
    with synced_file(tmp_path / "x") as file:
        writer = SafetensorsWriter(file, metadata={}, room=128)
        writer.add("a", np.zeros(1))
        with pytest.raises(ValueError, match="two tensors named 'a'"):
            writer.add("a", np.zeros(1))
        with pytest.raises(ValueError, match="no room for 'b"):
            writer.add("b" * 60, np.zeros(1))


@pytest.mark.parametrize("array", [np.zeros(2, ">f4"), np.zeros(2, complex), np.array(["a"])])
def test_dtypes_that_the_format_has_not_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="safetensors has no dtype"):
        stream(tmp_path / "x", {"a": array})
    with pytest.raises(ValueError, match="safetensors has no dtype"):
        write(tmp_path / "y", {"a": array})
    assert not (tmp_path / "y").exists()


def test_an_unfinished_stream_is_refused(tmp_path: Path) -> None:
    with synced_file(tmp_path / "x") as file:
        SafetensorsWriter(file).add("a", np.zeros(4))
    assert (tmp_path / "x").stat().st_size == HEADER_ROOM + 32
    with pytest.raises(UserError, match="unreadable safetensors header"):
        SafetensorsFile(tmp_path / "x")
