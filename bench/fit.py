"""What issue "Fit" promises, measured: one JSON line a figure.

    python -m bench.fit preset NAME [NAME ...] [--beside]   configs of configs/ within their limits
    python -m bench.fit pretrained                          7B from safetensors, by `llmq-nb train`
    python -m bench.fit exact                               twelve configs, planned against measured
    python -m bench.fit flat                                500 steps whose memory must not grow
    python -m bench.fit auto --model M --limit 15GiB        auto's choice against 24 settings
    python -m bench.fit disk [NAME]                         m and v on the disk, or pinned

Each run is a child of its own under its `memory.device_limit`; its memory is sampled from outside
as nvidia-smi counts it (`fit_watch`). --beside adds the same run with everything on the device.
"""

import argparse
import json
import shutil
from pathlib import Path

from bench import fit_auto, fit_disk, fit_exact, fit_pretrained, fit_runs

PRESETS = ("qwen2.5-7b-1x16gb-64gb-host", "qwen2.5-14b-1x24gb", "qwen2.5-0.5b-1x4gb")
PRETRAINED = "qwen2.5-7b-1x16gb-64gb-host"
ON_DISK = "qwen2.5-0.5b-1x4gb"


def presets(args: argparse.Namespace) -> None:
    """Each config, and beside it the same with nothing moved."""
    for name in args.names or PRESETS:
        try:
            config, model = fit_runs.load(name, args.accumulation, args.set)
            moved = plain = None
            if not args.only_beside:
                moved = fit_runs.measured(name, config, model, args.steps)
                print(json.dumps(moved), flush=True)
            if args.beside or args.only_beside:
                plain = fit_runs.uncapped(config)
                plain = fit_runs.measured(f"{name}, all on the device", plain, model, args.steps)
                print(json.dumps(plain), flush=True)
            if moved is not None and plain is not None:
                print(json.dumps(fit_runs.hidden(moved, plain)), flush=True)
        except RuntimeError as error:
            print(json.dumps({"run": name, "failed": str(error)}), flush=True)


def pretrained(args: argparse.Namespace) -> None:
    name = args.names[0] if args.names else PRETRAINED
    _, model = fit_runs.load(name, None)
    fit_pretrained.run(
        name, model, accumulation=args.accumulation or 2, steps=args.steps, work=args.work
    )


def disk(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    name = args.names[0] if args.names else ON_DISK
    for row in fit_disk.run(name, args.work, args.accumulation or 4, args.steps):
        print(json.dumps(row), flush=True)


def flat(args: argparse.Namespace) -> None:
    work = args.work / "flat"
    try:
        fit_exact.run_flat(work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"preset": presets, "pretrained": pretrained, "flat": flat, "disk": disk}
    parser.add_argument("part", choices=(*parts, "exact", "auto"))
    parser.add_argument("names", nargs="*", help="configs, without .toml")
    parser.add_argument("--accumulation", type=int, help="micro-batches a step, in place of theirs")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--only-beside", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--work", type=Path, default=Path("/tmp/llmq-nb-fit"), help="for files")
    parser.add_argument("--seconds", type=float, default=150.0, help="of exact and auto")
    parser.add_argument("--model", action="append")
    parser.add_argument("--limit", action="append")
    parser.add_argument("--done", type=Path, help="auto: lines of an earlier run")
    args = parser.parse_args()
    if args.part == "exact":
        fit_exact.run_cases(args.seconds)
    elif args.part == "auto":
        models = args.model or ["qwen2.5-0.5b", "qwen2.5-1.5b"]
        limits = args.limit or ["7.5GiB", "15GiB", "23GiB", "80GiB"]
        fit_auto.run(models, limits, args.seconds, args.done)
    else:
        parts[args.part](args)


if __name__ == "__main__":
    main()
