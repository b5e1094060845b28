"""Arena offsets: properties of every placement, not one placement."""

from hypothesis import given, settings
from hypothesis import strategies as st

from llmq_nb.core.arena import ALIGNMENT, Slot, aligned, assign_offsets

TICKS = 12


@st.composite
def slots(draw) -> Slot:
    nbytes = draw(st.integers(0, 5000))
    if draw(st.booleans()):
        return Slot(nbytes)
    first = draw(st.integers(0, TICKS - 1))
    return Slot(nbytes, (first, draw(st.integers(first, TICKS - 1))))


def alive(slot: Slot, tick: int) -> bool:
    return slot.lifetime is None or slot.lifetime[0] <= tick <= slot.lifetime[1]


@given(st.lists(slots(), max_size=25))
@settings(max_examples=300, deadline=None)
def test_no_byte_has_two_owners_at_a_tick(requests):
    offsets, total = assign_offsets(requests)
    fullest = 0
    for tick in range(TICKS):
        spans = sorted(
            (offset, offset + slot.nbytes)
            for slot, offset in zip(requests, offsets, strict=True)
            if alive(slot, tick) and slot.nbytes
        )
        for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
            assert end <= start
        fullest = max(fullest, sum(aligned(s.nbytes) for s in requests if alive(s, tick)))
    assert all(offset % ALIGNMENT == 0 and offset >= 0 for offset in offsets)
    assert all(o + s.nbytes <= total for s, o in zip(requests, offsets, strict=True))
    assert fullest <= total <= sum(aligned(s.nbytes) for s in requests)
    assert assign_offsets(requests) == (offsets, total)


@given(st.lists(st.integers(0, 5000), max_size=20), st.lists(st.integers(1, 5000), max_size=20))
@settings(max_examples=100, deadline=None)
def test_what_never_meets_shares_and_what_always_lives_does_not(always, one_tick_each):
    requests = [Slot(n) for n in always]
    requests += [Slot(n, (t, t)) for t, n in enumerate(one_tick_each)]
    _, total = assign_offsets(requests)
    assert total == sum(aligned(n) for n in always) + max(map(aligned, one_tick_each), default=0)


def test_lifetimes_meet_at_a_common_tick():
    assert Slot(1, (0, 3)).meets(Slot(1, (3, 5))) and Slot(1, (3, 5)).meets(Slot(1, (0, 3)))
    assert not Slot(1, (0, 2)).meets(Slot(1, (3, 5)))
    assert Slot(1).meets(Slot(1, (3, 5))) and Slot(1, (3, 5)).meets(Slot(1))
