"""Pulls against brute force in NumPy: any number of ranks, short and empty shards."""

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import pytest

from llmq_nb.comm.collectives import all_gather, rows
from llmq_nb.comm.link import ImmediateLink, Pull, immediate_links
from llmq_nb.core.dtype import DType
from llmq_nb.core.tensor import Tensor

UNIT = 1024
"""Elements that a shard is cut at."""


def tensor(array: np.ndarray, dtype: DType = DType.FP32, *, host: bool = False) -> Tensor:
    return Tensor("x", array.shape, dtype, array, host=host)


def shards(n: int, ranks: int) -> list[tuple[int, int]]:
    """Equal runs of whole units, the last ones short or empty."""
    each = math.ceil(math.ceil(n / UNIT) / ranks) * UNIT
    return [(min(n, r * each), min(n, (r + 1) * each)) for r in range(ranks)]


def apply(pulls: Sequence[Pull]) -> None:
    ImmediateLink().pull(pulls, done=None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [8, 1024, 1032, 5000, 7 * 1024, 20_001])
def test_all_gather_puts_the_shards_together(n: int, ranks: int) -> None:
    whole = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    cuts = shards(n, ranks)
    own = [whole[a:b].copy() for a, b in cuts]
    target = np.full(n, np.nan, np.float32)
    pulls = all_gather(tensor(target), [tensor(x) for x in own])
    assert [p.rank for p in pulls] == [r for r, (a, b) in enumerate(cuts) if b > a]
    apply(pulls)
    np.testing.assert_array_equal(target, whole)


def test_all_gather_takes_of_padded_shards_what_belongs_to_the_tensor() -> None:
    """Shards of the same room each: what is behind the tensor's end is left out."""
    whole = np.arange(5000, dtype=np.float32)
    own = [np.full(2048, -1.0, np.float32) for _ in range(4)]
    for r in range(3):
        part = whole[2048 * r : 2048 * (r + 1)]
        own[r][: part.size] = part
    target = np.full(5008, 7.0, np.float32)
    apply(all_gather(tensor(target[:5000]), [tensor(x) for x in own]))
    np.testing.assert_array_equal(target[:5000], whole)
    assert (target[5000:] == 7.0).all()


def test_pulls_know_where_a_source_lies() -> None:
    array = np.zeros(2048, np.float32)
    halves = [tensor(array[:1024].copy(), host=True), tensor(array[1024:].copy())]
    assert [p.host for p in all_gather(tensor(array), halves)] == [True, False]
    two = rows(tensor(np.zeros((2, 8), np.float32)), halves, first=0, count=8)
    assert [p.host for p in two] == [True, False]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_and_a_sum_are_a_reduce_scatter(ranks: int) -> None:
    """In runs of a receive buffer that is shorter than a shard and divides nothing."""
    n, width = 9 * UNIT + 16, 1000
    rng = np.random.default_rng(ranks)
    whole = [rng.integers(-99, 99, n).astype(np.float32) for _ in range(ranks)]
    found = np.full(n, np.nan, np.float32)
    for a, b in shards(n, ranks):
        received = np.empty((ranks, width), np.float32)
        for first in range(a, b, width):
            count = min(width, b - first)
            received[...] = np.nan
            sources = [tensor(x) for x in whole]
            apply(rows(tensor(received), sources, first=first, count=count))
            assert np.isnan(received[:, count:]).all()
            found[first : first + count] = received[:, :count].sum(axis=0)
    np.testing.assert_array_equal(found, sum(whole))


def test_rows_take_whole_vectors_of_any_format() -> None:
    vectors = [np.arange(24, dtype=np.uint8) + r for r in range(3)]
    target = np.zeros((3, 16), np.uint8)
    sources = [tensor(v, DType.E4M3) for v in vectors]
    apply(rows(tensor(target, DType.E4M3), sources, first=0, count=16))
    np.testing.assert_array_equal(target, np.stack(vectors)[:, :16])


def test_nothing_makes_no_copies() -> None:
    empty, target = tensor(np.zeros(0, np.float32)), tensor(np.zeros((2, 8), np.float32))
    assert all_gather(empty, [empty, empty]) == []
    assert rows(target, [empty, empty], first=0, count=0) == []
    with pytest.raises(AssertionError):
        rows(target, [target, target], first=0, count=9)


def test_immediate_links_copy_at_the_call() -> None:
    a, b = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    first, second = immediate_links(2)
    mark = first.mark()
    first.record(mark)
    second.pull([Pull(b.ctypes.data, a.ctypes.data, 5, 0)], done=mark, after=[mark])
    np.testing.assert_array_equal(b, [0, 1, 2, 3, 4, 0, 0, 0])
    assert ctypes.string_at(a.ctypes.data, 8) == bytes(range(8))
