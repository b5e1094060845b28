"""The README's tables from bench_attention's lines."""

import json

from bench.attention_table import candidate_table, main_table, read


def test_tables() -> None:
    def line(kernel: str, what: str, us: float, rate: float) -> str:
        row = {"kernel": kernel, "case": "a/1024", "what": what, "us": us, "tflop_per_s": rate}
        return json.dumps(row)

    lines = [
        "a warning",
        line("forward", "default", 100.4, 300.0),
        line("backward", "default", 250.0, 220.0),
        line("backward", "torch cuDNN", 275.0, 200.0),
        line("dkdv", "default", 150.0, 350.0),
        line("dkdv", "Wgmma(2, 64)", 170.6, 300.0),
        json.dumps({"case": "a/1024", "what": "torch flash", "error": "no"}),
    ]
    found = read(lines)
    assert main_table(found).splitlines()[2:] == [
        "| a/1024 | 300 / - / - / - |  | 220 / - / - / 200 | 110 % |"
    ]
    assert candidate_table(found).splitlines()[2:] == [
        "| a/1024 | forward | default 100 |",
        "| a/1024 | backward | default 250 |",
        "| a/1024 | dkdv | default 150; Wgmma(2, 64) 171 |",
    ]
