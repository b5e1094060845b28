"""Inputs to stores, by files whose tokens are written down beside them."""

import glob
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.data import sources
from llmq_nb.data import tokenize as tokenize_module
from llmq_nb.data.bin_formats import write_llmq_bin
from llmq_nb.data.sources import resolve
from llmq_nb.data.store import TokenStore
from llmq_nb.data.tokenize import tokenize, tokenize_split
from llmq_nb.data.tokenizer import ByteTokenizer, FileTokenizer

BYTES = ByteTokenizer()
EOS = BYTES.eos_id
ROOT = Path(__file__).parents[2]


def documents_of(path):
    store = TokenStore(path)
    tokens = store.read(0, len(store)).tolist()
    edges = [*store.document_starts.tolist(), len(tokens)]
    return [tokens[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]


@pytest.fixture
def texts(tmp_path):
    """Files a.txt to e.txt, one empty, one in a folder below; returns folder and contents."""
    contents = {"b.txt": "bee", "a.txt": "é1\n", "d/e.txt": "deep", "c.txt": ""}
    for name, content in contents.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode())
    return tmp_path / "in", contents


def test_texts_in_sorted_order_with_eos(texts, tmp_path):
    folder, contents = texts
    made = tokenize([f"{folder}/**/*.txt", f"{folder}/b.txt"], tmp_path / "s.zarr", BYTES)
    expected = [[*contents[name].encode(), EOS] for name in ("a.txt", "b.txt", "d/e.txt")]
    assert documents_of(tmp_path / "s.zarr") == expected
    total = sum(map(len, expected))
    assert (made.documents, made.tokens, made.skipped, made.reused) == (3, total, 0, False)
    store = TokenStore(tmp_path / "s.zarr")
    assert store.tokenizer.sha256 == BYTES.sha256
    assert not store.has_mask
    tokenize([f"{folder}/a.txt"], tmp_path / "n.zarr", BYTES, append_eos=False)
    assert documents_of(tmp_path / "n.zarr") == [list("é1\n".encode())]


def test_every_format_in_one_store(tmp_path, memory_store):
    """Text beside masked data is supervised whole; a chat gets no EOS; token files stay."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"text": "json"}\n{"text": ""}\n{"text": "lines"}\n')
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat}))
    masked = memory_store([np.array([1, 2, EOS])], [np.array([False, True, True])], 259)
    write_llmq_bin(tmp_path / "d.bin", masked)
    write_llmq_bin(tmp_path / "e.bin", memory_store([np.array([3, EOS]), np.array([4])], None, 259))
    tokenize([f"{tmp_path}/*.*"], tmp_path / "s.zarr", BYTES)
    rendered = [257, *b"user\nq", 258, 10, 257, *b"assistant\nr", 258, 10]
    assert documents_of(tmp_path / "s.zarr") == [
        [*b"text", EOS],
        [*b"json", EOS],
        [*b"lines", EOS],
        rendered,
        [1, 2, EOS],
        [3, EOS],
        [4],
    ]
    store = TokenStore(tmp_path / "s.zarr")
    mask = store.read_mask(0, len(store))
    said = [token in (258,) or token == ord("r") for token in rendered]
    said[: rendered.index(10, 8)] = [False] * rendered.index(10, 8)  # the user's turn
    said[rendered.index(257, 1) : rendered.index(257, 1) + 11] = [False] * 11  # the header
    assert mask is not None
    assert mask.tolist() == [True] * 16 + said + [False, True, True] + [True] * 3


def test_a_file_tokenizer_encodes_batches(tmp_path, bpe_folder, monkeypatch):
    monkeypatch.setattr(tokenize_module, "PIECE", 50)  # several batches
    tokenizer = FileTokenizer(bpe_folder)
    texts = [f"the quick fox {i} <|im_end|>" for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenize([f"{tmp_path}/a.jsonl"], tmp_path / "s.zarr", tokenizer)
    expected = [[*tokenizer.encode(text).tolist(), tokenizer.eos_id] for text in texts]
    assert documents_of(tmp_path / "s.zarr") == expected


def test_progress_reaches_the_total(texts, tmp_path):
    folder, contents = texts
    seen = []
    tokenize([f"{folder}/**/*.txt"], tmp_path / "s.zarr", BYTES, progress=lambda *a: seen.append(a))
    total = sum(len(content.encode()) for content in contents.values())
    assert seen[-1] == (total, total)
    assert all(a[0] <= b[0] <= total for a, b in zip(seen[:-1], seen[1:], strict=True))


def test_an_existing_store_is_reused_or_refused(texts, tmp_path):
    folder, _ = texts
    inputs, out = [f"{folder}/*.txt"], tmp_path / "s.zarr"
    tokenize(inputs, out, BYTES)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    shutil.copytree(folder, tmp_path / "moved")
    for same in (inputs, [f"{tmp_path}/moved/*.txt"]):
        assert tokenize(same, out, BYTES).reused
    for change in (
        lambda: tokenize(inputs, out, BYTES, append_eos=False),
        lambda: tokenize([f"{folder}/**/*.txt"], out, BYTES),
        lambda: tokenize_split(inputs, out, tmp_path / "v.zarr", BYTES),
    ):
        with pytest.raises(UserError, match=f"other sources or options in {out}: .*or delete it"):
            change()
    (folder / "a.txt").write_bytes("é2\n".encode())  # as long as before
    with pytest.raises(UserError, match="other sources or options"):
        tokenize(inputs, out, BYTES)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    assert not (tmp_path / "v.zarr").exists()


def test_a_store_of_another_tokenizer_is_refused(texts, tmp_path, bpe_folder):
    inputs, out = [f"{texts[0]}/*.txt"], tmp_path / "s.zarr"
    tokenize(inputs, out, BYTES)
    with pytest.raises(UserError, match="token store of tokenizer bytes, not bpe"):
        tokenize(inputs, out, FileTokenizer(bpe_folder))


def test_a_large_file_is_fingerprinted_at_begin_middle_and_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SAMPLE", 8)
    path = tmp_path / "a.txt"
    prints = set()
    for at in (None, 0, 50, 99):
        data = bytearray(b"x" * 100)
        if at is not None:
            data[at] = ord("y")
        path.write_bytes(data)
        prints.add(sources.fingerprint(resolve([str(path)]), {}))
    assert len(prints) == 4


def test_bad_inputs_leave_nothing_behind(texts, tmp_path, monkeypatch):
    folder, _ = texts
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    (folder / "empty.txt").write_text("")
    cases = [
        ([f"{folder}/*.md"], "no file matches in .*md"),
        ([f"{folder}/none.txt"], "no such file"),
        ([str(folder)], "a folder in .*name its files"),
        (["${home}/x"], r"unknown variable \$\{home\}"),
        ([], "no input files"),
        ([f"{folder}/latin.txt"], "not UTF-8 text in .*latin.txt:1"),
        ([f"{folder}/bad.jsonl"], "bad.jsonl:2"),
        ([f"{folder}/empty.txt"], r"no text in the input files in .*empty\.txt: "),
    ]
    for inputs, what in cases:
        with pytest.raises(UserError, match=what):
            tokenize(inputs, tmp_path / "s.zarr", BYTES)
        assert [p.name for p in tmp_path.iterdir()] == ["in"]
    with pytest.raises(UserError, match="unknown format 'x'"):
        tokenize([f"{folder}/a.txt"], tmp_path / "s.zarr", BYTES, format="x")
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="too little disk"):
        tokenize([f"{folder}/a.txt"], tmp_path / "s.zarr", BYTES)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_text_of_a_glob_that_is_not_utf8_is_skipped_and_counted(texts, tmp_path):
    folder, contents = texts
    (folder / "aa.txt").write_bytes(b"caf\xe9")
    made = tokenize([f"{folder}/*.txt"], tmp_path / "s.zarr", BYTES)
    assert made.skipped == 1
    assert documents_of(tmp_path / "s.zarr") == [
        [*contents[name].encode(), EOS] for name in ("a.txt", "b.txt")
    ]


def test_home_and_stdlib_are_expanded(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(texts[0]))
    assert [s.key for s in resolve(["~/a.txt", "~/*/e.txt"])] == ["a.txt", "d/e.txt"]
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found = resolve(["${stdlib}/**/*.py"])
    expected = {
        path
        for path in map(Path, glob.glob(f"{stdlib}/**/*.py", recursive=True))
        if not {"site-packages", "dist-packages", "__pycache__"}
        & set(path.parts[len(stdlib.parts) :])
    }
    assert {source.path for source in found} == expected
    keys = {source.key for source in found}
    assert {"os.py", "json/decoder.py"} <= keys
    assert {s.key for s in resolve(["${stdlib}/json/*.py"])} <= keys


def test_split_is_a_partition_that_does_not_depend_on_the_place(tmp_path):
    for place in ("x", "y/z"):
        (tmp_path / place).mkdir(parents=True)
        for i in range(60):
            (tmp_path / place / f"{i}.txt").write_text(f"text {i}")
        lines = "\n".join(json.dumps({"text": f"line {i}"}) for i in range(200))
        (tmp_path / place / "lines.jsonl").write_text(lines)
    parts = []
    for place in ("x", "y/z"):
        outs = (tmp_path / f"{place[0]}-t.zarr", tmp_path / f"{place[0]}-v.zarr")
        made = tokenize_split([f"{tmp_path}/{place}/*"], *outs, BYTES, 0.2)
        parts.append([documents_of(out) for out in outs])
        assert [m.documents for m in made] == [len(part) for part in parts[-1]]
    assert parts[0] == parts[1]
    train, validation = parts[0]
    # 260 documents at 0.2: mean 52, standard deviation 6.4.
    assert 52 - 26 < len(validation) < 52 + 26
    everything = [f"text {i}" for i in range(60)] + [f"line {i}" for i in range(200)]
    expected = sorted([*text.encode(), EOS] for text in everything)
    assert sorted(train + validation) == expected
    again = tokenize_split(
        [f"{tmp_path}/x/*"], tmp_path / "x-t.zarr", tmp_path / "x-v.zarr", BYTES, 0.2
    )
    assert all(made.reused for made in again)


def test_a_single_text_is_split_at_a_line_end(tmp_path):
    lines = [f"line number {i} é\n" for i in range(50_000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    outs = (tmp_path / "t.zarr", tmp_path / "v.zarr")
    tokenize_split([f"{tmp_path}/a.txt"], *outs, BYTES, 0.1)
    (train,), (validation,) = map(documents_of, outs)
    data = "".join(lines).encode()
    assert bytes(train[:-1]) + bytes(validation[:-1]) == data
    assert train[-1] == validation[-1] == EOS
    assert train[-2] == 10  # a line end
    assert 0 <= len(train) - 1 - 0.9 * len(data) < 30


def test_a_part_without_documents_is_refused(texts, tmp_path):
    outs = (tmp_path / "t.zarr", tmp_path / "v.zarr")
    with pytest.raises(UserError, match="no document fell into this part in .*v.zarr"):
        tokenize_split([f"{texts[0]}/*.txt"], *outs, BYTES, 1e-9)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    (texts[0] / "empty.txt").write_text("")  # nothing fell anywhere: no matter of parts
    with pytest.raises(UserError, match=r"no text in the input files in .*empty\.txt"):
        tokenize_split([f"{texts[0]}/empty.txt"], *outs, BYTES)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    with pytest.raises(UserError, match="not between 0 and 1"):
        tokenize_split([f"{texts[0]}/*.txt"], *outs, BYTES, 1.0)


def test_an_interruption_is_continued(texts, tmp_path):
    folder, _ = texts
    inputs, out = [f"{folder}/**/*.txt"], tmp_path / "s.zarr"

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(inputs, out, BYTES, progress=interrupt)
    with pytest.raises(UserError, match="unclosed"):
        TokenStore(out)
    assert tokenize(inputs, out, BYTES).documents == 3


def test_memory_stays_bounded(tmp_path):
    """A text of 48 MiB in one document: far below what holding its ids at once would take."""
    program = f"""
import resource
from llmq_nb.data.tokenize import tokenize
from llmq_nb.data.tokenizer import ByteTokenizer
tokenize([{str(tmp_path / "small.txt")!r}], {str(tmp_path / "small.zarr")!r}, ByteTokenizer())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenize([{str(tmp_path / "a.txt")!r}], {str(tmp_path / "a.zarr")!r}, ByteTokenizer())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    line = b"the quick brown fox jumps over the lazy dog, and then it sleeps\n"
    (tmp_path / "small.txt").write_bytes(line)
    (tmp_path / "a.txt").write_bytes(line * (48 * 2**20 // len(line)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    grown = int(result.stdout) / 1024  # MiB; ids alone, int32, would be 192
    assert grown < 140
