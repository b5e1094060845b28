"""The bench runs and counts what it says; how fast is for people to read, not for a test."""

from llmq_nb.data.bench import run


def test_bench_reports_each_way_of_reading(tmp_path):
    figures = run(tokens=100_000, seq_len=64, repeats=1, folder=tmp_path)
    for table in ("tokens_per_s", "cpu_ns_per_token"):
        assert set(figures[table]) == {"write", "stream", "pack", "eval"}
        assert all(value > 0 for value in figures[table].values())
    # ids = floor(259 u^2), u uniform: log2(259) + 1 - 1 / ln 2 = 7.57 bits; uncompressed, 16.
    assert 7.57 / 8 < figures["bytes_per_token"] < 2
    assert list(tmp_path.iterdir()) == []
