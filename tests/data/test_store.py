"""Token stores against the lists of documents they were written from."""

import errno
import json
import os
import re
from itertools import pairwise

import numpy as np
import pytest
from zarr.storage import _local as local

from llmq_nb.core.errors import MachineError, UserError
from llmq_nb.data.store import (
    ConcatStore,
    TokenStore,
    check_tokenizer,
    check_vocabulary,
    open_stores,
)
from llmq_nb.data.store_writer import StoreWriter


def edit_attributes(path, **changes):
    file = path / "zarr.json"
    record = json.loads(file.read_text())
    record["attributes"] |= changes
    file.write_text(json.dumps(record))


# 259: uint16; 65536: its largest id is also zarr's fill value; 65537 and 2^17: uint32.
@pytest.mark.parametrize("vocab_size", [259, 65536, 65537, 2**17])
def test_reads_what_was_written(tmp_path, write_store, random_documents, vocab_size):
    documents = random_documents(1, vocab_size=vocab_size)
    documents[3][:] = vocab_size - 1
    store = write_store(tmp_path / "s.zarr", documents, vocab_size=vocab_size)
    expected = np.concatenate(documents)
    tokens = store.read(0, len(store))
    assert tokens.dtype == (np.uint16 if vocab_size <= 65536 else np.uint32)
    np.testing.assert_array_equal(tokens, expected)
    starts = [0]
    for document in documents[:-1]:
        starts.append(starts[-1] + len(document))
    assert store.document_starts.tolist() == starts
    # 63, 64, 65: a chunk's border; 255 to 257: a shard's.
    for start, stop in [(0, 0), (63, 65), (255, 257), (64, 256), (100, 1000)]:
        np.testing.assert_array_equal(store.read(start, stop), expected[start:stop])


def test_masks_and_counts(tmp_path, write_store, random_documents):
    documents = random_documents(2)
    rng = np.random.default_rng(3)
    masks = [rng.random(len(document)) < 0.3 for document in documents]
    store = write_store(tmp_path / "s.zarr", documents, masks)
    np.testing.assert_array_equal(store.read_mask(0, len(store)), np.concatenate(masks))
    assert store.supervised == sum(int(mask[1:].sum()) for mask in masks)
    assert store.attributes["documents"] == len(documents)
    plain = write_store(tmp_path / "p.zarr", documents)
    assert plain.read_mask(0, 10) is None
    assert plain.supervised == sum(len(document) - 1 for document in documents)


@pytest.mark.parametrize("supervised", [False, True])
def test_shards_of_one_value_are_files_like_any(tmp_path, write_store, supervised):
    """zarr leaves out chunks of fill value, unless told, and to us a missing file is an error."""
    documents = [np.zeros(300, int)] * 4
    store = write_store(tmp_path / "s.zarr", documents, [np.full(300, supervised)] * 4)
    assert store.read_mask(0, 1200).tolist() == [supervised] * 1200
    assert len(list((store.path / "loss_mask" / "c").iterdir())) == 5


def test_a_document_in_parts_is_the_document(tmp_path, tokenizer_record, random_documents):
    documents = random_documents(4, longest=900)
    with StoreWriter(tmp_path / "s.zarr", tokenizer_record(), chunk=64, shard=256) as writer:
        for document in documents:
            for part in np.array_split(document, 4):
                writer.append_part(part)
            writer.end_document()
        writer.append([])
    store = TokenStore(tmp_path / "s.zarr")
    np.testing.assert_array_equal(store.read(0, len(store)), np.concatenate(documents))
    assert len(store.document_starts) == len(documents)
    assert store.attributes["appended"] == len(documents) + 1
    assert store.supervised == len(store) - len(documents)


def test_a_token_beyond_the_vocabulary_is_refused_with_its_position(
    tmp_path, tokenizer_record, write_store, random_documents
):
    writer = StoreWriter(tmp_path / "w.zarr", tokenizer_record(), chunk=64, shard=256)
    writer.append([1, 2, 3])
    with pytest.raises(UserError, match="token id 259 at position 4 .* 259") as error:
        writer.append([5, 259, 7])
    assert str(tmp_path / "w.zarr") in str(error.value)
    with pytest.raises(UserError, match="token id -1 at position 3"):
        writer.append([-1])

    documents = random_documents(5)
    documents[2][4] = 258
    path = write_store(tmp_path / "r.zarr", documents).path
    edit_attributes(path, vocab_size=200)
    stream = np.concatenate(documents)
    at = int(np.flatnonzero(stream >= 200)[0])
    with pytest.raises(UserError, match=f"token id {stream[at]} at position {at} ") as error:
        TokenStore(path).read(0, len(stream))
    assert str(path) in str(error.value)


def test_misuse_of_the_writer_raises(tmp_path, tokenizer_record):
    writer = StoreWriter(tmp_path / "s.zarr", tokenizer_record(), with_mask=True)
    for tokens, mask in [([1, 2], None), ([[1]], [[True]]), ([1.0], [True]), ([1, 2], [True])]:
        with pytest.raises(ValueError):
            writer.append(tokens, mask)
    writer.append_part([1], [True])
    with pytest.raises(ValueError, match="inside a document"):
        writer.commit()


def test_what_is_no_store_is_refused(tmp_path, tokenizer_record):
    with pytest.raises(UserError, match="no such token store"):
        TokenStore(tmp_path / "none.zarr")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("folder", "file"):
        with pytest.raises(UserError, match="not a token store"):
            TokenStore(tmp_path / name)
        with pytest.raises(UserError, match="not a token store"):
            StoreWriter(tmp_path / name, tokenizer_record())
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "precious"
    with pytest.raises(UserError, match="cannot create a token store"):
        StoreWriter(tmp_path / "file" / "s.zarr", tokenizer_record())


def test_an_unclosed_store_is_refused_and_continued(tmp_path, tokenizer_record, random_documents):
    documents, path = random_documents(6), tmp_path / "s.zarr"
    writer = StoreWriter(path, tokenizer_record(), chunk=64, shard=256)
    for document in documents[:20]:
        writer.append(document)
    with pytest.raises(UserError, match="another process"):
        StoreWriter(path, tokenizer_record())
    writer.release()
    with pytest.raises(UserError, match=r"unclosed token store .*resumes"):
        TokenStore(path)
    again = StoreWriter(path, tokenizer_record(), chunk=64, shard=256)
    # Committed with every shard: what is lost since then is less than a shard and a document.
    assert 0 < again.appended <= 20
    lost = sum(len(document) for document in documents[again.appended : 20])
    assert lost < 256 + 300
    for document in documents[again.appended :]:
        again.append(document)
    again.close()
    store = TokenStore(path)
    np.testing.assert_array_equal(store.read(0, len(store)), np.concatenate(documents))
    with pytest.raises(UserError, match="is complete"):
        StoreWriter(path, tokenizer_record())


def test_what_lies_beyond_the_last_commit_is_cut_off(tmp_path, tokenizer_record):
    path = tmp_path / "s.zarr"
    writer = StoreWriter(path, tokenizer_record(), chunk=64, shard=256)
    writer.append([1, 2, 3])
    writer.commit()
    writer.append_part(np.full(1000, 7))  # full shards are written, the document never ends
    writer.release()
    with StoreWriter(path, tokenizer_record(), chunk=64, shard=256) as again:
        again.append([4, 5])
    store = TokenStore(path)
    assert store.read(0, len(store)).tolist() == [1, 2, 3, 4, 5]
    assert store.document_starts.tolist() == [0, 3]


def test_a_full_disk_loses_nothing_committed(tmp_path, tokenizer_record, monkeypatch):
    """A write that fails in the middle of a commit, by whichever of its files."""
    path = tmp_path / "s.zarr"
    documents = [np.full(300, i) for i in range(8)]
    put, left = local._put, 0

    def failing(*arguments, **options):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(*arguments, **options)

    monkeypatch.setattr(local, "_put", failing)
    left = 10**6
    StoreWriter(path, tokenizer_record(), chunk=64, shard=256).release()
    for left in range(1, 12):  # noqa: B007 (read by `failing`)
        with (
            pytest.raises(MachineError, match="cannot write .*No space left"),
            StoreWriter(path, tokenizer_record(), chunk=64, shard=256) as writer,
        ):
            for document in documents[writer.appended :]:
                writer.append(document)
    left = 10**6
    with StoreWriter(path, tokenizer_record(), chunk=64, shard=256) as writer:
        assert writer.appended > 0
        for document in documents[writer.appended :]:
            writer.append(document)
    store = TokenStore(path)
    np.testing.assert_array_equal(store.read(0, len(store)), np.concatenate(documents))


def test_an_unclosed_store_of_another_identity_is_not_continued(tmp_path, tokenizer_record):
    path = tmp_path / "s.zarr"
    StoreWriter(path, tokenizer_record(), sources={"fingerprint": "a", "x": 1}).release()
    for record, mask, source, key in [
        (tokenizer_record(sha256="cd" * 32), False, "a", "tokenizer"),
        (tokenizer_record(), True, "a", "with_mask"),
        (tokenizer_record(), False, "b", "sources"),
    ]:
        with pytest.raises(UserError, match=f"unfinished token store with other {key}"):
            StoreWriter(path, record, mask, sources={"fingerprint": source})
    StoreWriter(path, tokenizer_record(), sources={"fingerprint": "a", "x": 2}).release()


def test_discard_deletes_an_open_store_alone(tmp_path, tokenizer_record, write_store):
    writer = StoreWriter(tmp_path / "s.zarr", tokenizer_record())
    writer.append([1, 2])
    writer.discard()
    assert list(tmp_path.iterdir()) == []
    closed = StoreWriter(tmp_path / "c.zarr", tokenizer_record())
    closed.append([1, 2])
    closed.close()
    closed.discard()
    assert len(TokenStore(tmp_path / "c.zarr")) == 2


def test_a_damaged_store_is_refused(tmp_path, write_store, random_documents):
    path = write_store(tmp_path / "s.zarr", random_documents(7)).path
    shard = path / "tokens" / "c" / "1"
    whole = shard.read_bytes()
    # The first byte of the first chunk: its CRC does not agree any more.
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(UserError, match="damaged token store"):
        TokenStore(path).read(256, 512)
    shard.unlink()
    with pytest.raises(UserError, match=f"missing shard .*{re.escape(str(shard))}"):
        TokenStore(path)
    shard.write_bytes(whole)
    TokenStore(path).read(256, 512)
    edit_attributes(path, tokens=10)
    with pytest.raises(UserError, match="10 were recorded"):
        TokenStore(path)
    edit_attributes(path, format_version=99)
    with pytest.raises(UserError, match="format version 99"):
        TokenStore(path)


def test_concatenation_is_the_stores_in_a_row(tmp_path, write_store, random_documents):
    documents = [random_documents(seed, count=10) for seed in (8, 9, 10)]
    stores = [write_store(tmp_path / f"{i}.zarr", d) for i, d in enumerate(documents)]
    both = open_stores([store.path for store in stores])
    assert isinstance(both, ConcatStore)
    flat = [document for part in documents for document in part]
    stream = np.concatenate(flat)
    assert len(both) == len(stream)
    assert both.supervised == len(stream) - len(flat)
    np.testing.assert_array_equal(
        both.document_starts, np.cumsum([0] + [len(d) for d in flat[:-1]])
    )
    edges = np.cumsum([0] + [len(s) for s in stores])
    for a, b in [*pairwise(edges), (0, len(stream)), (edges[1] - 1, edges[2] + 1), (5, 5)]:
        np.testing.assert_array_equal(both.read(int(a), int(b)), stream[a:b])
    with pytest.raises(ValueError):
        both.stores[0].read(0, len(stream))


def test_concatenation_with_masks(tmp_path, write_store, random_documents):
    documents = random_documents(11, count=6)
    masks = [np.arange(len(document)) % 3 == 0 for document in documents]
    a = write_store(tmp_path / "a.zarr", documents[:3], masks[:3])
    b = write_store(tmp_path / "b.zarr", documents[3:], masks[3:])
    plain = write_store(tmp_path / "c.zarr", documents[3:])
    both = ConcatStore([a, b])
    np.testing.assert_array_equal(both.read_mask(0, len(both)), np.concatenate(masks))
    with pytest.raises(UserError, match="no loss mask"):
        ConcatStore([a, plain])


def test_another_tokenizer_or_a_larger_vocabulary_is_refused(tmp_path, write_store):
    documents = [np.arange(10)]
    store = write_store(tmp_path / "a.zarr", documents)
    other = write_store(tmp_path / "b.zarr", documents, sha256="cd" * 32)
    check_vocabulary(store, 259)
    check_vocabulary(store, 512)
    with pytest.raises(UserError, match="vocabulary of 259 ids, the model has 258"):
        check_vocabulary(store, 258)
    check_tokenizer(store, store)
    with pytest.raises(UserError, match="made with tokenizer"):
        check_tokenizer(store, other)
    with pytest.raises(UserError, match="made with tokenizer"):
        check_tokenizer(store, other.tokenizer)
    with pytest.raises(UserError, match="made with tokenizer"):
        ConcatStore([store, other])
