"""safetensors_file against the safetensors package, both ways, and against hand-made bytes."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq_nb.core.errors import UserError
from llmq_nb.core.safetensors_file import (
    DTYPES,
    HEADER_ROOM,
    SafetensorsWriter,
    open_safetensors,
    write_safetensors,
)

# empty, one element, no axis, odd sizes that unalign what follows, more than one axis
SHAPES = [(0,), (1,), (), (3,), (5, 7), (2, 0, 3), (4, 1, 2)]
PACKAGE_DTYPES = ["F64", "F32", "F16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"]


def random_array(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes, so that NaN payloads and subnormals are among them."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = rng.integers(0, 2 if dtype == np.bool_ else 256, size, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def header(path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def test_round_trip_of_every_dtype_and_shape(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {
        f"{code} {shape}": random_array(rng, dtype, shape)
        for code, dtype in DTYPES.items()
        for shape in SHAPES
    }
    write_safetensors(tmp_path / "x", tensors.items())
    read = open_safetensors(tmp_path / "x")
    assert list(read) == list(tensors)
    assert all(same_bits(read[name], tensors[name]) for name in tensors)
    assert not any(array.flags.writeable for array in read.values())


def test_the_package_reads_ours(tmp_path):
    rng = np.random.default_rng(2)
    tensors = {c: random_array(rng, DTYPES[c], (3, 5)) for c in PACKAGE_DTYPES}
    write_safetensors(tmp_path / "x", tensors.items(), metadata={"format": "pt"})
    read = safetensors.numpy.load_file(tmp_path / "x")
    assert all(same_bits(read[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(tmp_path / "x", framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_the_packages(tmp_path):
    rng = np.random.default_rng(3)
    tensors = {c: random_array(rng, DTYPES[c], (2, 9)) for c in PACKAGE_DTYPES}
    safetensors.numpy.save_file(tensors, tmp_path / "x", metadata={"a": "b"})
    read = open_safetensors(tmp_path / "x")
    assert read.keys() == tensors.keys()
    assert all(same_bits(read[name], tensors[name]) for name in tensors)


def test_bfloat16_and_fp8_have_the_formats_names(tmp_path):
    """The names are the format description's."""
    arrays = [np.zeros(2, t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)]
    write_safetensors(tmp_path / "x", zip("ab", arrays, strict=True))
    entries = header(tmp_path / "x")
    assert (entries["a"]["dtype"], entries["b"]["dtype"]) == ("BF16", "F8_E4M3")


def test_strided_arrays_are_written_row_major(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    write_safetensors(tmp_path / "x", [("t", array.T), ("s", array[::2, ::3])])
    read = open_safetensors(tmp_path / "x")
    assert np.array_equal(read["t"], array.T) and np.array_equal(read["s"], array[::2, ::3])


def test_long_arrays_take_several_system_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("llmq_nb.core.safetensors_file.WRITE_BYTES", 7)
    array = np.random.default_rng(4).integers(0, 256, 1000, dtype=np.uint8)
    write_safetensors(tmp_path / "x", [("a", array)])
    assert np.array_equal(open_safetensors(tmp_path / "x")["a"], array)


@settings(max_examples=30, deadline=None)
@given(names=st.lists(st.text(max_size=60), unique=True, max_size=40))
def test_a_header_that_fits_is_never_overrun(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("names") / "x"
    names = [name for name in names if name != "__metadata__"]
    array = np.arange(3, dtype=np.float32)
    with SafetensorsWriter(path, room=1024) as writer:
        kept = [name for name in names if writer.fits(name, array) and not writer.add(name, array)]
        writer.finish()
    read = open_safetensors(path)
    assert list(read) == kept
    assert all(np.array_equal(read[name], array) for name in kept)
    assert path.stat().st_size == 1024 + 12 * len(kept)
    assert len(kept) == len(names) or len(json.dumps(header(path), separators=(",", ":"))) > 500


def test_a_full_header_and_a_repeated_name_are_refused(tmp_path):
    with SafetensorsWriter(tmp_path / "x", room=128) as writer:
        writer.add("a", np.zeros(1))
        with pytest.raises(ValueError, match="two tensors named 'a'"):
            writer.add("a", np.zeros(1))
        with pytest.raises(ValueError, match="no room for 'b"):
            writer.add("b" * 60, np.zeros(1))


@pytest.mark.parametrize("array", [np.zeros(2, ">f4"), np.zeros(2, complex), np.array(["a"])])
def test_dtypes_that_the_format_has_not_are_refused(tmp_path, array):
    with pytest.raises(ValueError, match="safetensors has no dtype"):
        write_safetensors(tmp_path / "x", [("a", array)])


def test_a_file_cut_anywhere_is_refused(tmp_path):
    write_safetensors(tmp_path / "x", [("a", np.arange(6, dtype=np.float32))], room=128)
    data = (tmp_path / "x").read_bytes()
    assert len(data) == 128 + 24
    for size in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        with pytest.raises(UserError, match="not a complete safetensors file"):
            open_safetensors(tmp_path / "cut")


def test_an_unfinished_file_is_refused(tmp_path):
    with SafetensorsWriter(tmp_path / "x") as writer:
        writer.add("a", np.zeros(4))
    assert (tmp_path / "x").stat().st_size == HEADER_ROOM + 32
    with pytest.raises(UserError, match="not a complete safetensors file"):
        open_safetensors(tmp_path / "x")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "data_offsets": [0, 8]},
        ["F32"],
        None,
    ],
)
def test_wrong_entries_are_refused(tmp_path, entry):
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(UserError, match="'a'"):
        open_safetensors(tmp_path / "x")


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff\xff"])
def test_headers_that_are_no_object_are_refused(tmp_path, text):
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(UserError, match="header"):
        open_safetensors(tmp_path / "x")


def test_no_such_file(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        open_safetensors(tmp_path / "none")
    with pytest.raises(UserError, match="cannot read"):
        open_safetensors(tmp_path)
