"""kill -9 at every file operation of a writer, and at random moments: nothing committed is lost.

The oracle is the list of documents that the driver writes, made anew here from its seed.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.data.store import TokenizerInfo, TokenStore
from llmq_nb.data.store_writer import StoreWriter
from llmq_nb.data.tokenize import tokenize_split
from llmq_nb.data.tokenizer import ByteTokenizer

DRIVER = Path(__file__).with_name("crash_driver.py")
ROOT = Path(__file__).parents[2]
RECORD = TokenizerInfo(name="test", sha256="ab" * 32, vocab_size=259, eos_id=1)


def drive(*arguments: object) -> list[int]:
    command = [sys.executable, str(DRIVER), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert result.returncode == 0, result.stderr
    return [int(line) for line in result.stdout.split()]


def documents(count):
    rng = np.random.default_rng(12)
    lengths = rng.integers(1, 200, count)
    return [(rng.integers(0, 259, n), rng.random(n) < 0.5) for n in lengths]


def assert_complete(store, expected):
    np.testing.assert_array_equal(
        store.read(0, len(store)), np.concatenate([tokens for tokens, _ in expected])
    )
    np.testing.assert_array_equal(
        store.read_mask(0, len(store)), np.concatenate([mask for _, mask in expected])
    )
    lengths = [len(tokens) for tokens, _ in expected]
    np.testing.assert_array_equal(store.document_starts, np.cumsum([0, *lengths[:-1]]))
    assert store.supervised == sum(int(mask[1:].sum()) for _, mask in expected)


def content(path):
    """What a kill left: names and bytes, zarr's half-written files under one name."""
    return frozenset(
        (re.sub(r"[0-9a-f]{32}", "", str(file.relative_to(path))), file.read_bytes())
        for file in path.rglob("*")
        if file.is_file()
    )


def finish(path, expected):
    """Refuse to read, continue, and compare."""
    with pytest.raises(UserError, match="unclosed|no such"):
        TokenStore(path)
    with StoreWriter(path, RECORD, True, chunk=64, shard=256) as writer:
        resumed_at = writer.appended
        for tokens, mask in expected[resumed_at:]:
            writer.append(tokens, mask)
    assert_complete(TokenStore(path), expected)
    assert not list(path.rglob("*.partial"))
    return resumed_at


def test_kill_at_every_file_operation(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a kill loses nothing that was written
    (operations,) = drive("steps", tmp_path)
    expected = documents(6)
    assert operations > 40  # fewer: the hook does not see what it should
    closed, resumed, states = 0, [0], set()
    for operation in range(1, operations):
        path = tmp_path / f"{operation}.zarr"
        if (state := content(path)) in states:  # many operations change nothing on the disk
            continue
        states.add(state)
        try:
            assert_complete(TokenStore(path), expected)
            closed += 1  # killed after the closing record
        except UserError:
            resumed.append(finish(path, expected))
    assert_complete(TokenStore(tmp_path / f"{operations}.zarr"), expected)
    assert len(states) > 20
    assert 0 < closed < 10
    assert max(resumed) == 6  # killed between the last commit and the closing record
    assert len(set(resumed)) > 2  # there were commits on the way


def test_kill_ten_times_at_random_moments(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    reached = drive("random", tmp_path, 5)
    assert len(reached) == 10
    resumed_at = finish(tmp_path / "s.zarr", documents(600))
    # Each round loses less than a shard of 256 tokens and a document of 200 tokens; documents have
    # 100 tokens on average, so at 10 documents lost a round at least this many stay.
    assert resumed_at > sum(reached) - 10 * 10


def test_tokenizing_continues_after_kills(tmp_path):
    rng = np.random.default_rng(13)
    (tmp_path / "text").mkdir()
    for i in range(30):
        letters = rng.integers(97, 123, int(rng.integers(0, 3000))).astype(np.uint8)
        (tmp_path / "text" / f"{i}.txt").write_bytes(letters.tobytes())
    (kills,) = drive("tokenize", tmp_path, 3)
    assert kills > 10
    inputs = [f"{tmp_path}/text/*"]
    kept = (tmp_path / "t.zarr", tmp_path / "v.zarr")
    fresh = (tmp_path / "t2.zarr", tmp_path / "v2.zarr")
    tokenize_split(inputs, *kept, ByteTokenizer(), 0.3)
    tokenize_split(inputs, *fresh, ByteTokenizer(), 0.3)
    for a, b in zip(map(TokenStore, kept), map(TokenStore, fresh), strict=True):
        np.testing.assert_array_equal(a.read(0, len(a)), b.read(0, len(b)))
        np.testing.assert_array_equal(a.document_starts, b.document_starts)
