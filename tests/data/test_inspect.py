"""inspect_store against a count in plain Python over lists; samples against the documents."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from llmq_nb.core.errors import UserError
from llmq_nb.data import inspect
from llmq_nb.data.byte_tokenizer import ByteTokenizer
from llmq_nb.data.inspect import inspect_store
from llmq_nb.data.samples import draw_samples, find_tokenizer, printable, render
from llmq_nb.data.store import TokenizerInfo, TokenStore
from llmq_nb.data.store_writer import StoreWriter
from llmq_nb.data.tokenize import tokenize
from llmq_nb.data.tokenizer import load_tokenizer
from tests.e2e.runs import ROOT, Cli

BOS, EOS, TURN, VOCAB = 1, 2, 3, 40
INFO = TokenizerInfo(
    name="made up", sha256="cd" * 32, vocab_size=VOCAB, eos_id=EOS, bos_id=BOS,
    special_ids={"<s>": BOS, "<eos>": EOS, "<|im_end|>": TURN, "<|im_start|>": 4},
)  # fmt: skip
Documents = list[tuple[list[int], list[bool] | None]]


def write(path: Path, documents: Documents, *, vocab_size: int = VOCAB) -> TokenStore:
    masked = documents[0][1] is not None
    with StoreWriter(path, INFO, masked, vocab_size, chunk=64, shard=256) as writer:
        for ids, mask in documents:
            writer.append(np.array(ids, np.int64), mask)
    return TokenStore(path)


def random_documents(seed: int, *, masked: bool, vocab_size: int) -> Documents:
    """Few ids and short documents, so that every fault is there many times."""
    rng = np.random.default_rng(seed)
    documents: Documents = []
    for _ in range(300):
        ids = rng.integers(0, rng.choice([5, 9, vocab_size]), rng.integers(1, 9)).tolist()
        mask = (rng.random(len(ids)) < rng.choice([0.1, 0.6])).tolist() if masked else None
        documents.append((ids, mask))
    return documents


def faults_of(ids: list[int], mask: list[bool] | None, seq_len: int) -> set[str]:
    trained = [i > 0 and (mask is None or mask[i]) for i in range(len(ids))]
    ends, found = (EOS, TURN), set()
    if not any(trained):
        found.add("untrained")
    if all(i in (BOS, EOS, TURN, 4) for i in ids):
        found.add("empty")
    if any(trained):
        last = max(i for i, t in enumerate(trained) if t)
        if not any(i in ends for i in ids[last:]):
            found.add("truncated")
    for i in range(1, len(ids)):
        if ids[i] in ends and trained[i - 1] and not trained[i]:
            found.add("untrained_eos")
        if ids[i] == ids[i - 1] == BOS:
            found.add("double_bos")
    if any(i >= VOCAB for i in ids):
        found.add("out_of_vocabulary")
    if len(ids) > seq_len:
        found.add("long")
    return found


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**20])
@pytest.mark.parametrize("masked", [False, True])
def test_counts_are_those_of_a_plain_loop(
    masked: bool, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "CHUNK", chunk)
    documents = random_documents(0, masked=masked, vocab_size=VOCAB + 5)
    found = inspect_store(write(tmp_path / "s", documents, vocab_size=VOCAB + 5), seq_len=6)
    wanted: dict[str, list[int]] = {key: [] for key in inspect.FAULTS}
    seen: Counter[tuple[int, ...]] = Counter()
    again = 0
    for number, (ids, mask) in enumerate(documents):
        for fault in faults_of(ids, mask, 6):
            wanted[fault].append(number)
        if seen[tuple(ids)]:
            wanted["duplicate"].append(number)
            again += len(ids)
        seen[tuple(ids)] += 1
    if not masked:
        assert not wanted["untrained_eos"], "every token but the first is trained"
    assert all(len(wanted[key]) > 10 for key in wanted if masked or key != "untrained_eos")
    got = {key: (f.documents, list(f.examples)) for key, f in found.faults.items()}
    assert got == {key: (len(numbers), numbers[:5]) for key, numbers in wanted.items()}
    assert found.duplicate_tokens == again and found.most_copies == max(seen.values())
    trained = sum(sum(m[1:]) if m else len(ids) - 1 for ids, m in documents)
    assert found.supervised == trained == TokenStore(tmp_path / "s").supervised
    assert found.out_of_vocabulary == sum(i >= VOCAB for ids, _ in documents for i in ids)
    assert found.largest_id == max(i for ids, _ in documents for i in ids)
    lengths = [len(ids) for ids, _ in documents]
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))
    assert found.median == np.median(lengths) and found.tokens == sum(lengths)


def test_documents_that_differ_in_one_place_are_not_equal(tmp_path: Path) -> None:
    """Same ids in another order, one id changed, one more: the hash tells them apart."""
    base = np.random.default_rng(0).integers(5, VOCAB, 50).tolist()
    others = [base[::-1], [*base[1:], base[0]], [*base, 0], base[:-1]]
    others += [[*base[:i], (base[i] + 1) % VOCAB, *base[i + 1 :]] for i in range(50)]
    found = inspect_store(write(tmp_path / "s", [(ids, None) for ids in (base, *others, base)]))
    assert found.faults["duplicate"].examples == (len(others) + 1,)
    assert found.faults["duplicate"].documents == 1


def test_the_largest_uint16_vocabulary(tmp_path: Path) -> None:
    info = TokenizerInfo(name="x", sha256="ab" * 32, vocab_size=2**16, eos_id=2**16 - 1)
    with StoreWriter(tmp_path / "s", info) as writer:
        writer.append(np.array([0, 2**16 - 2, 2**16 - 1]))
    found = inspect_store(TokenStore(tmp_path / "s"))
    assert (found.largest_id, found.out_of_vocabulary) == (2**16 - 1, 0)
    assert found.faults["truncated"].documents == 0


def test_empty_documents_that_tokenizing_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "ab"}\n{"text": ""}\n')
    tokenize([str(tmp_path / "a.jsonl")], tmp_path / "s", load_tokenizer("bytes"))
    found = inspect_store(TokenStore(tmp_path / "s"))
    assert (found.documents, found.dropped) == (1, 2)


def test_damaged_document_starts(tmp_path: Path) -> None:
    write(tmp_path / "s", [([5, 6], None), ([7, 8], None)])
    group: Any = zarr.open_group(tmp_path / "s", mode="r+")
    group["document_starts"][:] = [0, 9]
    with pytest.raises(UserError, match="document starts"):
        inspect_store(TokenStore(tmp_path / "s"))


@pytest.mark.parametrize("seed", range(3))
def test_samples_show_the_store(seed: int, tmp_path: Path) -> None:
    """The ids, marks and numbers of the pieces, put together, are those of the documents."""
    documents = random_documents(seed, masked=True, vocab_size=VOCAB)
    documents[7] = (list(range(5, 40)) * 4, [i % 3 > 0 for i in range(140)])
    store = write(tmp_path / "s", documents)
    samples = draw_samples(store, None, count=300, tokens=30, seed=seed)
    assert len(samples) == 300, "each document begins one"
    for number, sample in enumerate(samples):
        assert sample[0].document == number
        assert sample[0].offset == 0 or number == 7
        at = sample[0].offset
        shown = 0
        for piece in sample:
            if piece.document != number:
                number, at = number + 1, 0
            assert (piece.document, piece.offset) == (number, at)
            ids, mask = documents[number]
            assert mask is not None
            end = at + len(piece.ids)
            assert list(piece.ids) == ids[at:end]
            assert {piece.trained} == {bool(i and mask[i]) for i in range(at, end)}
            assert {piece.special} == {i in (1, 2, 3, 4) for i in piece.ids}
            at, shown = end, shown + len(piece.ids)
        assert shown == 30 or number == 299
    assert samples == draw_samples(store, None, count=300, tokens=30, seed=seed)
    some = draw_samples(store, None, count=4, tokens=30, seed=seed)
    assert len(some) == 4 and some != draw_samples(store, None, count=4, tokens=30, seed=seed + 9)


def chats(folder: Path, tokenizer: str, name: str = "s.zarr") -> TokenStore:
    turns = [
        ("user", "Grüße an den König!"),
        ("assistant", "the quick brown über fox, 你好"),
        ("user", "x"),
    ]
    messages = [{"role": role, "content": text} for role, text in turns]
    lines = [
        {"messages": messages},
        {"messages": [*messages, {"role": "assistant", "content": "ja"}]},
    ]
    (folder / "c.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tokenize([str(folder / "c.jsonl")], folder / name, load_tokenizer(tokenizer), "chat")
    return TokenStore(folder / name)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_decoded_text_is_the_conversation(kind: str, tmp_path: Path, bpe_folder: Path) -> None:
    """Characters of several tokens, a border inside a word: nothing is lost between two pieces."""
    name = "bytes" if kind == "bytes" else str(bpe_folder)
    store = chats(tmp_path, name)
    tokenizer = find_tokenizer(store, None)
    assert tokenizer is not None and tokenizer.sha256 == store.tokenizer.sha256
    first, second = draw_samples(store, tokenizer, count=2, tokens=10**4, seed=0)
    text = "".join(piece.text for piece in second)
    assert text == (
        "<|im_start|>user\nGrüße an den König!<|im_end|>\n"
        "<|im_start|>assistant\nthe quick brown über fox, 你好<|im_end|>\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nja<|im_end|>\n"
    )
    trained = [piece.text for piece in second if piece.trained]
    assert "".join(trained) == "the quick brown über fox, 你好<|im_end|>ja<|im_end|>"
    plain = "\n".join(line.plain for line in render(first, colour=False))
    assert plain.count("── document") == 2
    assert "assistant\n⟦the quick brown über fox, 你好<|im_end|>⟧\n<|im_start|>user" in plain
    coloured = list(render(first, colour=True))
    greens = [
        line.plain[span.start : span.end]
        for line in coloured
        for span in line.spans
        if "green" in str(span.style)
    ]
    assert greens == [piece.text for piece in first if piece.trained]
    assert "⟦" not in "".join(line.plain for line in coloured)


def test_without_its_tokenizer_ids_are_shown(tmp_path: Path, bpe_folder: Path) -> None:
    store = chats(tmp_path, str(bpe_folder))
    attributes = json.loads((store.path / "zarr.json").read_text())
    attributes["attributes"]["sources"]["tokenizer"] = str(tmp_path / "gone")
    (store.path / "zarr.json").write_text(json.dumps(attributes))
    store = TokenStore(store.path)
    assert find_tokenizer(store, None) is None
    found = find_tokenizer(store, str(bpe_folder))
    assert found is not None and found.sha256 == store.tokenizer.sha256
    with pytest.raises(UserError, match="made with tokenizer"):
        find_tokenizer(store, "bytes")
    pieces = draw_samples(store, None, count=1, tokens=9, seed=0)[0]
    plain = [piece for piece in pieces if not piece.special]
    assert [piece.text.split() for piece in plain] == [[str(i) for i in p.ids] for p in plain]


def test_text_cannot_steer_the_terminal() -> None:
    assert (
        printable("a\x1b[2J\x07\tä\n\r\x9b\u202e\u00a0")
        == "a\\x1b[2J\\x07\tä\n\\r\\x9b\\u202e\u00a0"
    )


MASKED: Documents = [([5, 6, 7, EOS], [False] * 4), ([5, 6], [True, False])]


def test_all_masked_data_is_refused(tmp_path: Path, cli: Cli) -> None:
    """By inspect and by train, before anything is written."""
    write(tmp_path / "m.zarr", MASKED)
    result = cli("inspect", "m.zarr", cwd=tmp_path)
    assert result.code == 2 and result.out == ""
    assert "all-masked" in result.error and "m.zarr" in result.error
    tokenizer = ByteTokenizer()
    info = TokenizerInfo(
        name="bytes", sha256=tokenizer.sha256, vocab_size=259, eos_id=256,
        special_ids=tokenizer.special_ids,
    )  # fmt: skip
    with StoreWriter(tmp_path / "t.zarr", info, True) as writer:
        writer.append(np.arange(100), np.arange(100) == 0)  # a first token is nobody's target
    text = '[model]\npath = "quickstart"\n[data]\ntrain = "t.zarr"\n[batch]\nseq_len = 8\n'
    (tmp_path / "c.toml").write_text(text)
    before = sorted(tmp_path.rglob("*"))
    result = cli("train", "c.toml", cwd=tmp_path)
    assert result.code == 2 and "all-masked" in result.error and "t.zarr" in result.error
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command(tmp_path: Path, cli: Cli) -> None:
    chats(tmp_path, "bytes")
    plain = cli("inspect", "s.zarr", "--samples", "1", "--seq-len", "99", cwd=tmp_path)
    assert plain.code == 0 and plain.err == ""
    assert "⟦the quick brown" in plain.out and "\x1b" not in plain.out
    assert "2 documents" in plain.out and "none found: untrained, empty" in plain.out
    asked = ("inspect", "s.zarr", "--json", "--samples", "2", "--seed", "5")
    answer = json.loads(cli(*asked, cwd=tmp_path).out)
    assert answer["decoded"] and len(answer["samples"]) == 2
    assert answer["supervised"] == TokenStore(tmp_path / "s.zarr").supervised
    assert answer["faults"]["duplicate"] == {"documents": 0, "examples": []}
    refused = cli("inspect", "no.zarr", cwd=tmp_path)
    assert refused.code == 2 and "no.zarr" in refused.error


def test_memory_is_bounded(tmp_path: Path) -> None:
    """16 M tokens would be 128 MiB as int64; a chunk's arrays and the imports are below that."""
    info = TokenizerInfo(name="x", sha256="ab" * 32, vocab_size=50_000, eos_id=0)
    with StoreWriter(tmp_path / "s", info) as writer:
        ids = np.random.default_rng(0).integers(0, 50_000, 2**20)
        for _ in range(16):
            writer.append(ids)
    code = (
        "import resource, sys\nfrom llmq_nb.data.inspect import inspect_store\n"
        "from llmq_nb.data.store import TokenStore\n"
        "store = TokenStore(sys.argv[1])\nstore.read_any(0, 2**20)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(inspect_store(store).faults['duplicate'].documents)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    duplicates, grown = map(int, done.stdout.split())
    assert duplicates == 15
    assert grown < 110 * 1024, f"{grown} KiB"
