"""bench.bench_attention's JSON lines as the tables of bench/README.md, in Markdown.

python -m bench.bench_attention --tiles --compile > lines; python -m bench.attention_table lines
"""

import json
import sys
from collections.abc import Iterable

COLUMNS = ("default", "mma.sync", "torch flash", "torch cuDNN")
PASSES = ("forward", "backward")


def read(lines: Iterable[str]) -> dict[tuple[str, str, str], dict[str, float]]:
    """By case, kernel, what: tflop_per_s and us; lines that are no figure are passed over."""
    found = {}
    for line in lines:
        if line.startswith("{"):
            row = json.loads(line)
            if "tflop_per_s" in row:
                found[row["case"], row["kernel"], row["what"]] = row
    return found


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main_table(found: dict[tuple[str, str, str], dict[str, float]]) -> str:
    """TFLOP/s of both passes, and the default's share of cuDNN."""

    def cells(case: str, kernel: str) -> list[str]:
        rates = [found.get((case, kernel, what), {}).get("tflop_per_s") for what in COLUMNS]
        ours, yardstick = rates[0], rates[-1]
        share = f"{100 * ours / yardstick:.0f} %" if ours and yardstick else ""
        return [" / ".join("-" if rate is None else f"{rate:.0f}" for rate in rates), share]

    head = ["case"]
    for kernel in PASSES:
        head += [f"{kernel}: default / mma.sync / flash / cuDNN", "of cuDNN"]
    cases = dict.fromkeys(case for case, _, _ in found)
    return table(head, [[case, *(c for k in PASSES for c in cells(case, k))] for case in cases])


def candidate_table(found: dict[tuple[str, str, str], dict[str, float]]) -> str:
    """Microseconds of each kernel by what ran, the default's first."""
    rows: dict[tuple[str, str], list[str]] = {}
    for (case, kernel, what), row in found.items():
        if not what.startswith("torch") and kernel != "statistics":
            rows.setdefault((case, kernel), []).append(f"{what} {row['us']:.0f}")
    return table(["case", "kernel", "us"], [[*key, "; ".join(us)] for key, us in rows.items()])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as lines:
        figures = read(lines)
    print(main_table(figures), candidate_table(figures), sep="\n\n")
