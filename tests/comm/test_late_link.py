"""The links that look for missing orders find them, and nothing where there are none."""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from llmq_nb.comm.collectives import rows
from llmq_nb.comm.link import Pull
from llmq_nb.core.dtype import DType
from llmq_nb.core.tensor import Tensor
from tests.comm.late_link import LateLink, LateRanks, early, late, late_links, mixed, on_queue

WHEN = [late, early, mixed(1), mixed(2)]


def pull(target: np.ndarray, source: np.ndarray, rank: int) -> Pull:
    return Pull(target.ctypes.data, source.ctypes.data, target.nbytes, rank)


def all_reduce(when, ranks: int, rounds: int, leave_out: str = "") -> np.ndarray:
    """Rounds of: every rank writes its vector, takes all others', adds them to its sum.

    leave_out: which of the orders is missing.
    """
    links = late_links(ranks, when)
    own = np.zeros((ranks, 8), np.float32)
    received = np.zeros((ranks, ranks, 8), np.float32)
    sums = np.zeros((ranks, 8), np.float32)
    written, taken = ([link.mark() for link in links] for _ in range(2))
    tensors = [Tensor(str(r), (8,), DType.FP32, own[r]) for r in range(ranks)]

    def step(n: int) -> None:
        for r, link in enumerate(links):
            if n and leave_out != "taken":
                for mark in taken:
                    link.wait(mark)
            own[r] = 100 * n + r
            link.record(written[r])
        for r, link in enumerate(links):
            place = Tensor("received", (ranks, 8), DType.FP32, received[r])
            marks = () if leave_out == "written" else written
            link.pull(rows(place, tensors, first=0, count=8), done=taken[r], after=marks)
        for r, link in enumerate(links):
            if leave_out != "here":
                link.wait(taken[r])
            for row in received[r]:
                sums[r] += row

    for n in range(rounds):
        step(n)
    for link in links:
        link.join()
        link.reset()
    return sums


def expected(ranks: int, rounds: int) -> np.ndarray:
    one = sum(100.0 * n + r for n in range(rounds) for r in range(ranks))
    return np.full((ranks, 8), one, np.float32)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("when", WHEN)
def test_what_is_ordered_is_right_at_any_time(when, ranks: int) -> None:
    np.testing.assert_array_equal(all_reduce(when, ranks, 4), expected(ranks, 4))


@pytest.mark.parametrize("leave_out", ["here", "taken", "written"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_missing_order_is_found(leave_out: str, ranks: int) -> None:
    """Though each rank's compute is late enough for the others by chance."""
    try:
        found = all_reduce(late, ranks, 4, leave_out)
    except AssertionError as error:
        assert "race" in str(error)
    else:
        assert leave_out == "here" and np.isnan(found).all()


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("leave_out", ["taken", "written"])
def test_races_of_ranks_are_found_at_any_time(when, leave_out: str) -> None:
    with pytest.raises(AssertionError, match="race"):
        all_reduce(when, 2, 4, leave_out)


def test_a_source_that_is_written_again_too_early_is_found() -> None:
    for wait in (True, False):
        links = late_links(2)
        source, target = np.full(4, 3.0, np.float32), np.zeros(4, np.float32)
        done = links[0].mark()
        links[0].pull([pull(target, source, 1)], done=done)
        if wait:
            links[1].wait(done)
        source[:] = 4.0
        if wait:
            links[0].join()
            assert (target == 3.0).all()
        else:
            with pytest.raises(AssertionError, match="race"):
                links[0].join()


def test_a_copy_before_its_source_is_written_is_found() -> None:
    """Rank 0 takes before rank 1 has written, in the order of the calls."""
    for when in WHEN:
        links = late_links(2, when)
        source, target = np.zeros(4, np.float32), np.zeros(4, np.float32)
        done = links[0].mark()
        links[0].pull([pull(target, source, 1)], done=done)
        source[:] = 5.0
        with pytest.raises(AssertionError, match="race"):
            links[0].wait(done)
            links[1].record(links[1].mark())


def test_a_reader_that_goes_on_for_too_long_is_found() -> None:
    """The buffer is given to the next copy while its values are still needed."""
    for when in WHEN:
        (link,) = late_links(1, when)
        source, buffer = np.full(4, 3.0, np.float32), np.zeros(4, np.float32)
        for wait in (True, False):
            done = link.mark()
            link.pull([pull(buffer, source, 0)], done=done)
            if wait:
                link.wait(done)
                assert (buffer == 3.0).all()
                source[:] = 4.0
        assert not (buffer == 3.0).any()  # 4 or NaN


def test_a_mark_that_was_never_set_is_found() -> None:
    a, b = late_links(2)
    with pytest.raises(AssertionError, match="never set"):
        a.wait(b.mark())
    with pytest.raises(AssertionError, match="never set"):
        a.pull([], done=None, after=[b.mark()])


def test_copies_that_are_left_over_are_found() -> None:
    (link,) = late_links(1)
    x = np.zeros(4, np.float32)
    link.pull([pull(x, x, 0)], done=None)
    with pytest.raises(AssertionError, match="in flight"):
        link.reset()
    link.join()
    link.reset()


def test_a_mark_holds_what_it_was_set_to_when_it_is_set_again() -> None:
    a, b = late_links(2)
    x, y, z = (np.full(4, v, np.float32) for v in (1.0, 2.0, 3.0))
    mark = a.mark()
    a.pull([pull(y, x, 0)], done=mark)
    b.pull([pull(z, y, 0)], done=None, after=[mark])  # after the first copy
    source = np.full(4, 9.0, np.float32)
    a.pull([pull(x, source, 0)], done=mark)
    b.join()
    assert (z == 1.0).all()
    assert (x != 9.0).all(), "nobody asked for the second copy"


@pytest.mark.parametrize("when", WHEN)
def test_kernels_on_the_queue_follow_the_copies(when) -> None:
    class Ops:
        def accumulate(self, shard: np.ndarray, contributions: np.ndarray) -> None:
            shard += contributions.sum(axis=0)

    ops, (link,) = Ops(), late_links(1, when)
    on_queue(ops)
    accumulate: Callable[..., None] = ops.accumulate
    shard, received = np.zeros(4, np.float32), np.zeros((2, 4), np.float32)
    parts = [np.full((2, 4), v, np.float32) for v in (1.0, 10.0, 100.0)]
    for part in parts:  # one receive buffer
        link.pull([pull(received, part, 0)], done=None)
        accumulate(shard, received, queue=link.queue)
    accumulate(np.zeros((1, 4)), received)  # at once
    assert isinstance(link, LateLink)
    link.join()
    np.testing.assert_array_equal(shard, np.full(4, 222.0))


@pytest.mark.parametrize("when", WHEN)
def test_set_is_behind_the_queue_and_other_marks(when) -> None:
    a, b = late_links(2, when)
    x, y = np.full(4, 1.0, np.float32), np.zeros(4, np.float32)
    z = np.zeros(4, np.float32)
    first, both = a.mark(), b.mark()
    a.pull([pull(y, x, 0)], done=first)
    b.pull([pull(z, x, 0)])
    b.set(both, after=[first])
    a.wait(both)
    assert (y == 1.0).all() and (z == 1.0).all()


@pytest.mark.parametrize("when", WHEN)
def test_links_of_one_rank_know_of_each_other(when) -> None:
    """What rank 1's compute waited for on one link counts for what it sends on another."""
    ranks = LateRanks(when)
    (a0, a1), (b0, _) = ranks(2), ranks(2)
    source, target = np.zeros(4, np.float32), np.zeros(4, np.float32)
    for n in range(3):
        source[:] = n
        written, taken = a1.mark(), b0.mark()
        a1.record(written)
        b0.pull([pull(target, source, 1)], done=taken, after=[written])
        a1.wait(taken)
        a0.wait(taken)
        assert (target == n).all()


@pytest.mark.parametrize("when", WHEN)
def test_a_chain_of_copies_needs_its_marks(when) -> None:
    """Rank 0 takes what rank 1's queue brought from rank 2."""
    for ordered in (True, False):
        a, b, c = late_links(3, when)
        first, second, third = (np.zeros(4, np.float32) for _ in range(3))
        found = []
        with contextlib.nullcontext() if ordered else pytest.raises(AssertionError, match="race"):
            for n in range(1, 4):
                written, done, end = c.mark(), b.mark(), a.mark()
                first[:] = n
                c.record(written)
                b.pull([pull(second, first, 2)], done=done, after=[written])
                a.pull([pull(third, second, 1)], done=end, after=[done] if ordered else [])
                for link in (a, b, c):
                    link.wait(end)
                    link.wait(done)
                found.append(third[0])
        if ordered:
            assert found == [1, 2, 3]


def test_what_the_host_writes_between_steps_is_no_race() -> None:
    a, b = late_links(2)
    source, target = np.zeros(4, np.float32), np.zeros(4, np.float32)
    for n in range(3):
        source[:] = n
        a.reset()
        b.reset()
        a.pull([pull(target, source, 1)])
        a.join()
        assert (target == n).all()
