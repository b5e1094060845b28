"""The loader against uninterrupted runs, the set of all windows, and itself split otherwise."""

import gc
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq_nb.core.errors import UserError
from llmq_nb.data import order, packing
from llmq_nb.data.loader import Loader, Position, eval_batches, stable_order
from llmq_nb.data.packing import Packing

T = 8
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several windows a block, several blocks a run and several runs an epoch."""
    monkeypatch.setattr(packing, "BLOCK_TOKENS", 40)
    monkeypatch.setattr(order, "SHUFFLE_BLOCKS", 3)


@pytest.fixture(scope="module")
def store(memory_store):
    """Token i has the id i, so that a window is known by its content."""
    lengths = np.random.default_rng(1).integers(1, 50, 40)
    edges = np.cumsum([0, *lengths])
    return memory_store([np.arange(a, b) for a, b in zip(edges[:-1], edges[1:], strict=True)])


def rows(store, steps, **options: Any):
    """The windows of `steps` steps in order, as (tokens, targets, segment_start) rows of a list."""
    options = {"seq_len": T, "seed": 7, **options}
    with Loader(store, **options) as loader:
        batches = [loader.next_step() for _ in range(steps)]
    return [
        (a.tolist(), b.tolist(), c.tolist())
        for batch in batches
        for a, b, c in zip(
            batch.tokens.reshape(-1, T),
            batch.targets.reshape(-1, T),
            batch.segment_start.reshape(-1, T),
            strict=True,
        )
    ]


@pytest.mark.parametrize("mode", ["stream", "pack"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_every_window_once(store, mode, shuffle):
    plan = Packing(store, T, mode)
    everything = [
        (a.tolist(), b.tolist(), c.tolist())
        for block in map(plan.read, range(plan.blocks))
        for a, b, c in zip(block.tokens, block.targets, block.segment_start, strict=True)
    ]
    n = len(everything)
    options: Any = {"micro_batch": 1, "grad_accumulation": 1, "packing": mode, "shuffle": shuffle}
    got = rows(store, 3 * n, **options)
    epochs = [got[:n], got[n : 2 * n], got[2 * n :]]
    for epoch in epochs:
        assert Counter(map(str, epoch)) == Counter(map(str, everything))
    if shuffle:
        assert epochs[0] != everything and epochs[0] != epochs[1] != epochs[2]
        assert rows(store, n, **options, seed=8) != epochs[0]
    else:
        assert epochs[0] == epochs[1] == everything


def test_shuffling_moves_windows_far(store):
    """Both levels work: neighbours are parted, and windows leave their run of blocks."""
    n = len(Packing(store, T))
    got = rows(store, n, micro_batch=1, grad_accumulation=1)
    numbers = np.array([row[0][0] // T for row in got])
    assert np.mean(np.abs(np.diff(numbers)) == 1) < 0.2
    assert np.mean(np.abs(numbers - np.arange(n)) > 15) > 0.5  # a run has 15 windows


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_q3_resume_anywhere_gives_the_uninterrupted_run(store, data):
    """Q3: at any step, over epoch borders, into any split of the windows, from a fresh loader."""
    draw = data.draw
    mode = draw(st.sampled_from(["stream", "pack"]))
    shape: Any = {
        "micro_batch": draw(st.integers(1, 5)),
        "grad_accumulation": draw(st.integers(1, 3)),
        "world_size": draw(st.integers(1, 3)),
    }
    total = shape["micro_batch"] * shape["grad_accumulation"] * shape["world_size"]
    n = len(Packing(store, T, mode))
    steps = 2 * n // total + 2  # beyond the second epoch's begin
    reference = rows(store, steps * total, micro_batch=1, grad_accumulation=1, packing=mode)
    stop = draw(st.integers(0, steps - 1))
    with Loader(store, seq_len=T, seed=7, packing=mode, **shape) as loader:
        for _ in range(stop):
            loader.next_step()
        position = loader.position
    done = stop * total
    assert position.epoch * n + position.window == done
    other = {"micro_batch": draw(st.integers(1, 5)), "grad_accumulation": draw(st.integers(1, 3))}
    other_total = other["micro_batch"] * other["grad_accumulation"]
    more = (steps * total - done) // other_total
    got = rows(store, more, position=position, packing=mode, **other)
    assert got == reference[done : done + more * other_total]


def test_position_at_the_end_of_an_epoch_and_at_the_begin_of_the_next_are_one(store):
    n = len(Packing(store, T))
    options: Any = {"micro_batch": 2, "grad_accumulation": 1}
    a = rows(store, 5, position=Position(0, n), **options)
    b = rows(store, 5, position=Position(1, 0), **options)
    assert a == b
    with pytest.raises(ValueError, match="in an epoch of"):
        Loader(store, seq_len=T, seed=7, position=Position(0, n + 1), **options)


def test_window_i_is_at_micro_step_rank_row(store):
    flat = rows(store, 24, micro_batch=1, grad_accumulation=1)
    with Loader(
        store, seq_len=T, seed=7, micro_batch=4, grad_accumulation=3, world_size=2
    ) as loader:
        batch = loader.next_step()
    assert batch.tokens.shape == (3, 2, 4, T)
    for array in (batch.tokens, batch.targets, batch.segment_start):
        assert array.dtype == np.int32
    for m, r, b in np.ndindex(3, 2, 4):
        tokens, targets, segment_start = flat[(m * 2 + r) * 4 + b]
        assert batch.tokens[m, r, b].tolist() == tokens
        assert batch.targets[m, r, b].tolist() == targets
        assert batch.segment_start[m, r, b].tolist() == segment_start


def test_supervised_counts_the_targets_of_the_step(memory_store):
    """Q13: the count that the loss is divided by is that of the trained targets, not of tokens."""
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 99, 30) for _ in range(20)]
    masks = [rng.random(30) < 0.2 for _ in documents]
    store = memory_store(documents, masks)
    n = len(Packing(store, T))
    with Loader(store, seq_len=T, seed=0, micro_batch=n, grad_accumulation=1) as loader:
        batch = loader.next_step()
    assert batch.supervised == sum(int(mask[1:].sum()) for mask in masks)
    assert batch.position == Position(0, n)


@pytest.mark.parametrize("vocab_size", [100, 2**16, 2**16 + 50, 2**31 - 1])
def test_token_order_is_the_stable_argsort(vocab_size):
    tokens = np.random.default_rng(3).integers(0, vocab_size, 5000).astype(np.int32)
    tokens[100:400] = vocab_size - 1
    expected = sorted(range(5000), key=lambda i: (tokens[i], i))
    got = stable_order(tokens)
    assert got.dtype == np.int32
    assert got.tolist() == expected


@pytest.mark.parametrize("token_order", [False, True])
def test_token_order_of_a_batch(store, token_order):
    with Loader(
        store,
        seq_len=T,
        seed=0,
        micro_batch=3,
        grad_accumulation=2,
        world_size=2,
        token_order=token_order,
    ) as loader:
        batch = loader.next_step()
    for m, r in np.ndindex(2, 2):
        flat = batch.tokens[m, r].ravel().tolist()
        assert batch.token_order(m, r).tolist() == sorted(range(24), key=lambda i: (flat[i], i))
        assert batch.token_order(m, r) is batch.token_order(m, r)


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "llmq-nb loader"]


def test_an_error_of_reading_reaches_the_caller(store, monkeypatch):
    read, calls = type(store).read, []

    def failing(self, start, stop):
        calls.append(start)
        if len(calls) == 4:
            raise UserError("bad shard")
        return read(self, start, stop)

    monkeypatch.setattr(type(store), "read", failing)
    with Loader(store, seq_len=T, seed=0, micro_batch=5, grad_accumulation=1) as loader:
        for _ in range(2):  # and stays
            with pytest.raises(UserError, match="bad shard"):
                while True:
                    loader.next_step()
    assert loader_threads() == []


def test_no_thread_is_left(store):
    options: Any = {"seq_len": T, "seed": 0, "micro_batch": 1, "grad_accumulation": 1}
    loader = Loader(store, **options)
    loader.next_step()
    assert len(loader_threads()) == 1
    loader.close()
    loader.close()
    assert loader_threads() == []
    with pytest.raises(ValueError, match="closed"):
        loader.next_step()
    dropped = Loader(store, **options)
    dropped.next_step()
    del dropped
    gc.collect()
    assert loader_threads() == []


def test_a_program_ends_although_its_loader_was_not_closed(tmp_path, write_store):
    path = write_store(tmp_path / "s.zarr", [np.arange(200)] * 20).path
    program = f"""
from llmq_nb.data.loader import Loader
from llmq_nb.data.store import TokenStore
loader = Loader(TokenStore({str(path)!r}), seq_len=8, seed=0, micro_batch=2, grad_accumulation=1)
print(loader.next_step().tokens.size)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "16\n", "")


def test_loading_from_disk_is_loading_from_memory(tmp_path, write_store, memory_store):
    rng = np.random.default_rng(4)
    documents = [rng.integers(0, 259, n) for n in rng.integers(1, 200, 30)]
    masks = [rng.random(len(document)) < 0.5 for document in documents]
    on_disk = write_store(tmp_path / "s.zarr", documents, masks)
    options = {"micro_batch": 4, "grad_accumulation": 2, "packing": "pack"}
    assert rows(on_disk, 60, **options) == rows(memory_store(documents, masks), 60, **options)


@pytest.mark.parametrize("mode", ["stream", "pack"])
@pytest.mark.parametrize("micro_batch", [1, 7, 1000])
def test_evaluation_sees_each_window_once(store, mode, micro_batch):
    plan = Packing(store, T, mode)
    batches = list(eval_batches(store, micro_batch, T, packing=mode))
    assert len(batches) == -(-len(plan) // micro_batch)
    assert all(batch.tokens.shape == (micro_batch, T) for batch in batches)
    blocks = [plan.read(block) for block in range(plan.blocks)]
    for name in ("tokens", "targets", "segment_start"):
        rows_ = np.concatenate([getattr(batch, name) for batch in batches])
        expected = np.concatenate([getattr(block, name) for block in blocks])
        np.testing.assert_array_equal(rows_[: len(plan)], expected)
    last = np.concatenate([batch.targets for batch in batches])[len(plan) :]
    assert (last == -100).all()
    assert sum(batch.supervised for batch in batches) == store.supervised


def test_a_limited_evaluation_is_a_fixed_sample_from_all_of_the_store(store):
    whole = [row.tobytes() for b in eval_batches(store, 1, T) for row in b.tokens]
    part = [row.tobytes() for b in eval_batches(store, 1, T, limit=5) for row in b.tokens]
    again = [row.tobytes() for b in eval_batches(store, 1, T, limit=5) for row in b.tokens]
    assert part == again and len(part) == 5
    places = [whole.index(row) for row in part]
    assert len(set(places)) == 5 and max(places) >= len(whole) // 2
