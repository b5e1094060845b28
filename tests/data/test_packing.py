"""Windows against the documents they were cut from, token by token.

In these stores token i of the stream has the id i, so an id says which token it is; the expected
target of each is written down from the definition (`expected_targets`), one Python loop.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq_nb.core.errors import UserError
from llmq_nb.data import packing
from llmq_nb.data.packing import Mode, Packing

MODES: list[Mode] = ["stream", "pack"]
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def make(memory_store, lengths, mask_seed=None):
    edges = np.cumsum([0, *lengths])
    documents = [np.arange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    if mask_seed is None:
        return memory_store(documents)
    rng = np.random.default_rng(mask_seed)
    return memory_store(documents, [rng.random(n) < 0.6 for n in lengths])


def expected_targets(store):
    document_of = np.searchsorted(store.document_starts, np.arange(len(store)), side="right")
    targets = []
    for i in range(len(store)):
        trains = (
            i + 1 < len(store)
            and document_of[i] == document_of[i + 1]
            and (store.mask is None or store.mask[i + 1])
        )
        targets.append(i + 1 if trains else -100)
    return np.array(targets)


def all_windows(plan):
    blocks = [plan.read(block) for block in range(plan.blocks)]
    return [np.concatenate([getattr(b, k) for b in blocks]) for k in ("tokens", "targets")] + [
        np.concatenate([b.segment_start for b in blocks])
    ]


def segments(row_tokens, row_targets, row_segment):
    """The runs of equal segment start of one window: (start, tokens, targets)."""
    cuts = np.flatnonzero(np.diff(row_segment)) + 1
    for a, b in zip([0, *cuts], [*cuts, len(row_segment)], strict=True):
        assert row_segment[a] == a, "a segment starts where it says"
        yield a, row_tokens[a:b], row_targets[a:b]


def usable(store, T):
    return len(store) >= T + 1 and store.supervised > 0


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 50), st.sampled_from([1, 40, 2**18]), st.none() | st.integers(0, 99))
def test_stream_windows_are_the_stream(memory_store, lengths, T, block_tokens, mask_seed):
    store = make(memory_store, lengths, mask_seed)
    if not usable(store, T):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_TOKENS", block_tokens)
        plan = Packing(store, T, "stream")
        tokens, targets, segment_start = all_windows(plan)
    N, expected = len(store), expected_targets(store)
    assert tokens.shape == targets.shape == segment_start.shape == (len(plan), T)
    # Every token but possibly the last, which nothing follows, is at its place.
    used = min(N, len(plan) * T)
    assert used >= N - 1
    np.testing.assert_array_equal(tokens.ravel()[:used], np.arange(used))
    np.testing.assert_array_equal(targets.ravel()[:used], expected[:used])
    assert (targets.ravel()[used:] == -100).all()
    for i in range(used):
        window, t = divmod(i, T)
        start = store.document_starts[np.searchsorted(store.document_starts, i, "right") - 1]
        assert segment_start[window, t] == max(start - window * T, 0)
    # Padding is a segment of its own.
    assert (segment_start.ravel()[used:] == used % T).all()


@settings(max_examples=150, deadline=None)
@given(LENGTHS, st.integers(1, 50), st.sampled_from([1, 2**18]), st.none() | st.integers(0, 99))
def test_packed_windows_hold_whole_documents(memory_store, lengths, T, block_tokens, mask_seed):
    store = make(memory_store, lengths, mask_seed)
    if not usable(store, T):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_TOKENS", block_tokens)
        plan = Packing(store, T, "pack")
        windows = all_windows(plan)
    expected = expected_targets(store)
    starts = set(store.document_starts.tolist())
    ends = {s for s in starts if s} | {len(store)}
    seen = np.zeros(len(store), int)
    for row in zip(*windows, strict=True):
        padded = False
        for start, tokens, targets in segments(*row):
            assert not padded, "nothing comes after padding"
            if start and not tokens.any():  # token 0 is the stream's first, at a window's begin
                padded = True
                assert (targets == -100).all()
                continue
            begin, end = int(tokens[0]), int(tokens[-1]) + 1
            np.testing.assert_array_equal(tokens[: end - begin], np.arange(begin, end))
            np.testing.assert_array_equal(targets, expected[begin:end])
            seen[begin:end] += 1
            whole = begin in starts and end in ends
            document = max(s for s in starts if s <= begin)
            length = lengths[sorted(starts).index(document)]
            assert whole if length <= T else (end - begin == T or end in ends)
    assert (seen == 1).all(), "each token once"


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 50), st.sampled_from(MODES), st.none() | st.integers(0, 99))
def test_as_many_supervised_tokens_after_packing_as_before(
    memory_store, lengths, T, mode, mask_seed
):
    store = make(memory_store, lengths, mask_seed)
    if usable(store, T):
        targets = all_windows(Packing(store, T, mode))[1]
        assert np.count_nonzero(targets != -100) == store.supervised


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 50))
def test_pack_is_first_fit(memory_store, lengths, T):
    store = make(memory_store, lengths)
    if not usable(store, T):
        return
    windows: list[list[int]] = []
    first = 0
    for length in lengths:
        for begin in range(first, first + length, T):
            piece = list(range(begin, min(begin + T, first + length)))
            home = next((w for w in windows if len(w) + len(piece) <= T), None)
            if home is None:
                windows.append(home := [])
            home += piece
        first += length
    tokens = all_windows(Packing(store, T, "pack"))[0]
    np.testing.assert_array_equal(tokens, [w + [0] * (T - len(w)) for w in windows])


@pytest.mark.parametrize("mode", MODES)
def test_q14_nothing_leaks_across_documents(memory_store, mode):
    """Q14: every target, and every token that attention may see, is of the token's own document."""
    lengths = np.random.default_rng(0).integers(1, 60, 200).tolist()
    store = make(memory_store, lengths)
    tokens, targets, segment_start = all_windows(Packing(store, 32, mode))
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    checked = 0
    for row, target, start in zip(tokens, targets, segment_start, strict=True):
        for t in range(32):
            if target[t] != -100:
                assert document_of[target[t]] == document_of[row[t]]
                visible = row[start[t] : t + 1]  # what causal attention within the segment sees
                assert (document_of[visible] == document_of[row[t]]).all()
                checked += 1
    assert checked == store.supervised


def test_q2_a_response_is_trained_from_its_first_token_to_its_eos(memory_store):
    """Q2: prompt of 5, response of 3 and EOS, masked so: exactly R, R, R, EOS are targets."""
    prompt, response, eos = [11, 12, 13, 14, 15], [21, 22, 23], [2]
    document = np.array(prompt + response + eos)
    mask = np.array([False] * 5 + [True] * 4)
    store = memory_store([document, document], [mask, mask])
    cases: list[tuple[Mode, int]] = [("stream", 17), ("pack", 9), ("pack", 12), ("stream", 9)]
    for mode, T in cases:
        _, targets, _ = all_windows(Packing(store, T, mode))
        assert targets[targets != -100].tolist() == (response + eos) * 2
    tokens, targets, _ = all_windows(Packing(store, 9, "pack"))
    assert tokens[0, targets[0] != -100].tolist() == [15, 21, 22, 23]


def test_data_that_cannot_train_is_refused(memory_store):
    store = memory_store([np.arange(8)])
    for mode in MODES:
        assert len(Packing(store, 7, mode)) > 0
        with pytest.raises(UserError, match="8 tokens are fewer than seq_len \\+ 1 = 9"):
            Packing(store, 8, mode)
        # The mask is on the document's first token alone, which nothing predicts.
        masked = memory_store([np.arange(8)], [np.arange(8) == 0])
        with pytest.raises(UserError, match="all-masked data"):
            Packing(masked, 4, mode)
    with pytest.raises(ValueError, match="neither"):
        Packing(store, 4, "spiral")  # type: ignore[arg-type]
