"""Tensors as views of one memory, on arrays and on device addresses; formats by the oracle."""

import numpy as np
import pytest

from llmq_nb.core.dtype import FP8_MAX, DType
from llmq_nb.core.tensor import Fp8Slot, Tensor
from tests.oracles.rounding import largest


def test_formats_have_their_sizes_and_largest_values():
    assert {d: d.itemsize for d in DType} == {
        "fp32": 4,
        "bf16": 2,
        "e4m3": 1,
        "e5m2": 1,
        "int32": 4,
    }
    assert FP8_MAX == {d: largest(d.value) for d in DType if d.is_fp8}
    assert {d for d in DType if d.is_fp8} == {"e4m3", "e5m2"}


def test_rows_and_views_share_the_memory():
    slot = Fp8Slot(DType.E4M3, np.zeros(1, np.float32))
    t = Tensor("x", (4, 6), DType.FP32, np.arange(24, dtype=np.float32).reshape(4, 6), slot)
    part, flat = t.rows(1, 3), t.view(2, 12)
    assert (part.shape, part.fp8, part.nbytes) == ((2, 6), None, 48)
    assert (flat.shape, flat.fp8, flat.size) == ((2, 12), None, 24)
    part.data[0, 0], flat.data[1, 11] = -1, -2
    assert t.data[1, 0] == -1 and t.data[3, 5] == -2


@pytest.mark.parametrize("dtype", [DType.BF16, DType.E4M3])
def test_rows_of_an_address_move_by_whole_rows(dtype):
    """Beyond 2^32 bytes too: addresses are Python integers."""
    t = Tensor("x", (100_000, 151_936), dtype, 0x7F00_0000_0000)
    part = t.rows(70_000, 70_001)
    assert part.data == 0x7F00_0000_0000 + 70_000 * 151_936 * dtype.itemsize
    assert part.shape == (1, 151_936)
    assert t.view(151_936, 100_000).data == t.data


def test_what_does_not_fit_is_refused():
    t = Tensor("x", (4, 6), DType.FP32, np.zeros((4, 6), np.float32))
    for start, stop in ((0, 5), (-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="rows"):
            t.rows(start, stop)
    with pytest.raises(ValueError, match="size"):
        t.view(5, 5)
