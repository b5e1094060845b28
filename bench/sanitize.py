"""compute-sanitizer over the kernel tests: memcheck and racecheck, one line a part.

    python -m bench.sanitize [--tool memcheck racecheck] [--part attention ...] [--workers 8]

A part is a test file and a choice of small shapes that ends within LIMIT seconds (the tools slow
kernels down 10 to 50 times). cuBLASLt's products are left out. memcheck runs
with --report-api-errors no: while cuda-python loads the driver it asks for entry points that a
driver need not have, and the tool counts each answer "not found" as an error. `--api-errors` runs
one part with them reported and lists what they are. Exit code 1 if anything was found, failed, or
did not end.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

LIMIT = 100.0
"""Seconds of a part."""
API_ERROR = re.compile(r"Program hit (\S+) \(error \d+\).* on CUDA API call to (\w+)")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")
PASSED = re.compile(r"\d+ (?:passed|failed|error).*? in ")


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    file: str
    tests: str
    """pytest's -k."""


def _attention() -> list[Part]:
    found, file = [], "test_attention_gpu"
    small = "(1-1-1 or 2-17 or 1-65 or 1-129 or 2-200)"
    for kernels in ("mma.sync", "wgmma"):
        for D in (64, 128):
            both = f"(test_forward or test_backward) and {D}-{kernels}]"
            found.append(Part(f"attention {kernels} {D}", file, f"{both} and {small}"))
    found.append(Part("attention wgmma, items", file, "8-257-14 and wgmma and test_forward"))
    found.append(Part("attention wgmma, dq items", file, "8-257-14 and wgmma and test_backward"))
    found.append(Part("attention dkdv items", file, "other_dkdv and 24-140-12-6"))
    found += [Part(f"attention tiles {D}", file, f"every_tile and 131-None-{D}") for D in (64, 128)]
    found.append(Part("attention fp32", file, "test_fp32 or large_scores"))
    return found


PARTS = [
    Part("accumulate", "test_accumulate", "not host"),
    Part("adamw", "test_adamw", "4101 or not_finite"),
    Part("bias", "test_bias", "not 32768"),
    Part("combine", "test_combine", "test_combine or test_flags"),
    Part(
        "cross_entropy",
        "test_cross_entropy",
        "300-257 or 3-1-16 or values or (bf16 and 5-151936-151936)",
    ),
    Part("elementwise", "test_elementwise", "not 33554431"),
    Part("embedding", "test_embedding", "1-8-1 or 1001-896"),
    Part("fp8_health", "test_fp8_health", "72- or 8216 or 448.0"),
    Part("global_norm", "test_global_norm", "sizes0 or sizes1 or flags"),
    Part("qk_norm", "test_qk_norm", "1-1-1-8 or 5-3-1 or 777"),
    Part("matmul_swiglu", "test_matmul_swiglu", "1-16-16 or 130-48 or 513-272"),
    Part("matmul_swiglu_backward", "test_matmul_swiglu_backward", "1-16-16 or 130-48 or 513-272"),
    Part("quantize", "test_quantize", "inputs or special or decode or 15-48 or 144-272 or user"),
    Part("random", "test_random", "known or rounding"),
    Part("reduce_loss", "test_reduce_loss", "not 131071"),
    Part("rmsnorm", "test_rmsnorm", "3-264 or 257-2048 or 33-5120 or repeats"),
    Part("rope", "test_rope", "1-1-1-1-16 or 100-40-8"),
    Part("sums, mma, ldmatrix", "test_sim", "sums or mma or ldmatrix"),
    Part("swiglu", "test_swiglu", "3.0-bf16-1-8 or 3.0-bf16-77 or 17-48 or in_place or 1-16"),
    Part("transpose", "test_transpose", "8-8 or 64-64 or 72-136 or user"),
    Part("transpose_bytes", "test_transpose_bytes", "16-16 or 130-144 or user"),
    *_attention(),
]


def run(tool: str, part: Part, *options: str) -> tuple[str, str]:
    """(pytest's and the tool's last words, everything that was printed)."""
    command = [
        "compute-sanitizer", "--tool", tool, "--target-processes", "application-only",
        *options, sys.executable, "-m", "pytest", "-m", "gpu", "-q",
        "-p", "no:cacheprovider", f"tests/kernels/{part.file}.py", "-k", part.tests,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=environment
        )
    except subprocess.TimeoutExpired as error:
        return f"did not end in {LIMIT:.0f} s", str(error.stdout)
    text = done.stdout + done.stderr
    passed, summary = PASSED.search(text), SUMMARY.search(text)
    words = [passed[0].removesuffix(" in ") if passed else f"no test ran (exit {done.returncode})"]
    return ", ".join([*words, summary[1] if summary else "no summary"]), text


def clean(words: str) -> bool:
    """Whether tests passed and the tool found nothing."""
    found_nothing = re.search(r"\b0 (errors|hazards)", words)
    return bool(found_nothing) and "passed" in words and "failed" not in words


def check(job: tuple[str, Part]) -> bool:
    """One part under one tool; prints its line, and the tool's report if there is one."""
    tool, part = job
    start = time.monotonic()
    options = ["--print-limit", "20"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]
    words, text = run(tool, part, *options)
    print(f"{tool}  {part.name}: {words} ({time.monotonic() - start:.0f} s)", flush=True)
    if not clean(words):
        report = [line for line in text.splitlines() if line.startswith("=====")]
        tail = report[:60] or text.splitlines()[-30:]
        print("\n".join(f"    {line[:200]}" for line in tail), flush=True)
    return clean(words)


def list_api_errors() -> None:
    words, text = run("memcheck", PARTS[1], "--report-api-errors", "all", "--print-limit", "1000")
    counts = collections.Counter(f"{call} {error}" for error, call in API_ERROR.findall(text))
    print(f"memcheck with API errors, {PARTS[1].name}: {words}")
    for what, count in counts.most_common():
        print(f"    {count} x {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", nargs="*", default=["memcheck", "racecheck"])
    parser.add_argument("--part", nargs="*", help="parts whose names start so")
    parser.add_argument("--workers", type=int, default=8, help="processes at once")
    parser.add_argument("--api-errors", action="store_true")
    arguments = parser.parse_args()
    if arguments.api_errors:
        list_api_errors()
    prefixes = tuple(arguments.part or [""])
    jobs = [(tool, p) for tool in arguments.tool for p in PARTS if p.name.startswith(prefixes)]
    with ThreadPoolExecutor(arguments.workers) as pool:
        results = list(pool.map(check, jobs))
    print(f"{sum(results)} of {len(results)} parts clean")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
