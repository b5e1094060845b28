"""Which items the blocks of the persistent sm_90 attention kernels take (even_swath).

Oracle: a plain count of what each block gets, item by item, from the order that the docstrings of
next_work and block_order give.
"""

import pytest

from llmq_nb.kernels.attention_hopper_tiles import ITEM_ROWS, MOST_SWATH_BYTES, even_swath
from llmq_nb.kernels.attention_tiles import Problem


def work(p: Problem, rows: int, blocks: int, swath: int) -> list[int]:
    """Rows of keys that each block goes through."""
    heads, total, item = p.B * p.H, [0] * blocks, 0
    for first in range(0, heads, swath):
        for length in range(p.T, 0, -rows):  # longest tiles first
            for _ in range(first, min(first + swath, heads)):
                turn, place = divmod(item, blocks)
                total[place if turn % 2 == 0 else blocks - 1 - place] += length + ITEM_ROWS
                item += 1
    return total


SHAPES = [
    (8, 1024, 12, 2, 128, 128),
    (8, 2048, 12, 2, 128, 128),
    (8, 4096, 12, 2, 128, 128),
    (8, 2048, 12, 12, 128, 128),
    (8, 4096, 12, 12, 128, 128),
    (32, 1024, 14, 2, 64, 192),
    (3, 2500, 16, 16, 64, 192),
]


@pytest.mark.parametrize("blocks", [132, 114])
@pytest.mark.parametrize(("B", "T", "H", "G", "D", "rows"), SHAPES)
def test_blocks_get_even_work(B, T, H, G, D, rows, blocks) -> None:
    """At most the mean and one of the longest items on top, and nobody's swath is more even by more
    than the 0.5 % that are given for a smaller one; it fits the cache."""
    p = Problem(B, T, H, G, D, 0, 0, 0)
    swath = even_swath(p, rows, blocks)
    most = H // G * (MOST_SWATH_BYTES // (2 * T * D * 2))
    span = {s: max(work(p, rows, blocks, s)) for s in (swath, most // 3, most // 2, most)}
    assert span[swath] <= 1.005 * min(span.values())
    assert span[swath] < sum(work(p, rows, blocks, swath)) / blocks + T + ITEM_ROWS
    assert 1 <= swath <= min(most, B * H)


@pytest.mark.parametrize("blocks", [1, 132])
@pytest.mark.parametrize(("B", "T", "H", "G"), [(1, 1, 1, 1), (1, 65536, 2, 1), (2, 129, 7, 1)])
def test_small_and_long(B: int, T: int, H: int, G: int, blocks: int) -> None:
    """One head, a head larger than the cache, fewer items than blocks."""
    assert 1 <= even_swath(Problem(B, T, H, G, 128, 0, 0, 0), 128, blocks) <= B * H


def test_ungrouped_heads_of_2048() -> None:
    """The order that cost 13 % (17 heads: 127 key tiles where 110.5 are the mean)."""
    p = Problem(8, 2048, 12, 12, 128, 0, 0, 0)
    assert max(work(p, 128, 132, 17)) == 127 * 128
    assert max(work(p, 128, 132, even_swath(p, 128, 132))) == 112 * 128
