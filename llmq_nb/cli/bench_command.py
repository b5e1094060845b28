"""`llmq-nb bench`: measurements of this machine."""

import json
from pathlib import Path
from typing import Any, get_args

import click

from llmq_nb.config import Recompute


@click.command("bench", short_help="Measure this machine: steps, kernels, links, the loader.")
@click.argument("what", type=click.Choice(["data", "step", "kernels", "matmul", "offload", "comm"]))
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures."
)
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("qwen2.5-0.5b",),
    show_default=True,
    help="A preset (step, matmul). May be repeated.",
)
@click.option(
    "--micro-batch",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Sequences (step, matmul).",
)
@click.option(
    "--grad-accumulation",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="Micro-batches a step (step).",
)
@click.option(
    "--seq-len",
    default=1024,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens (step, matmul).",
)
@click.option(
    "--head-chunks", default=1, show_default=True, type=click.IntRange(1), help="Of logits (step)."
)
@click.option(
    "--recompute",
    multiple=True,
    type=click.Choice(get_args(Recompute)),
    help="What backward computes again (step). May be repeated.",
)
@click.option(
    "--precision",
    "matmuls",
    multiple=True,
    default=("bf16",),
    show_default=True,
    type=click.Choice(["bf16", "e4m3"]),
    help="Format of the block products (step). May be repeated.",
)
@click.option("--fast-accumulation", is_flag=True, help="Of FP8 products (step).")
@click.option(
    "--reference",
    is_flag=True,
    help="The batches of LLMQ's runs on an H200, and its tokens/s (step).",
)
@click.option(
    "--breakdown", is_flag=True, help="Milliseconds an operation, beside its budget (step)."
)
@click.option(
    "--devices",
    help="The GPU of each rank, such as 0,1 or 0,0 (comm, step); by default every GPU (comm), or"
    " the first (step).",
)
@click.option(
    "--shard",
    "shards",
    multiple=True,
    type=click.Choice(["weights", "gradients"]),
    help="Over the ranks (step). May be repeated.",
)
def command(
    what: str, json_file: Path | None, breakdown: bool, devices: str | None, **options: Any
) -> None:
    """Measure WHAT: data, the token loader; step, whole training steps on the GPU; kernels, every
    memory-bound kernel beside a copy; matmul, the products of a step of the models; offload, the
    link to pinned host memory, which `plan` and memory.policy = "auto" use from then on; comm,
    copies and collectives between ranks."""
    if json_file is not None:
        _check_place(json_file)
    if what == "data":
        figures: Any = _data()
    elif what == "kernels":
        figures = _kernels()
    elif what == "matmul":
        figures = _matmul(options["models"], options["micro_batch"] * options["seq_len"])
    elif what == "offload":
        figures = _offload()
    elif what == "comm":
        figures = _comm(devices)
    else:
        figures = _steps(breakdown, devices, **options)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _check_place(json_file: Path) -> None:
    """Raise UserError where the figures could not be written, before minutes of measuring."""
    from llmq_nb.core.errors import UserError

    if json_file.is_dir() or not json_file.absolute().parent.is_dir():
        what = "is a folder" if json_file.is_dir() else "its folder does not exist"
        raise UserError(f"cannot write {json_file} ({what})", where="--json", mend="name a file")


def _data() -> dict[str, Any]:
    from llmq_nb.data.bench import run

    figures = run()
    for key, value in figures.items():
        click.echo(f"{key}: {value}")
    return figures


def _steps(
    breakdown: bool,
    devices: str | None,
    models: tuple[str, ...],
    matmuls: tuple[str, ...],
    reference: bool,
    fast_accumulation: bool,
    shards: tuple[str, ...],
    **options: Any,
) -> list[dict[str, Any]]:
    import dataclasses

    from rich.console import Console
    from rich.table import Table

    from llmq_nb.core.errors import UserError
    from llmq_nb.train.bench_step import REFERENCE, Setting, measure, reference_setting

    table = Table(
        "model", "products", "batch", "tokens/s", "MFU %", "s/step", "GPU idle %", "device GiB",
        "first step s", *(["LLMQ", "share %"] if reference else []),
    )  # fmt: skip
    settings = [
        reference_setting(model, matmul, fast_accumulation=fast_accumulation)
        if reference
        else Setting(model=model, matmul=matmul, fast_accumulation=fast_accumulation, **options)
        for model in models
        for matmul in matmuls
    ]
    from llmq_nb.train.bench_comm import chosen_devices

    ranks = (0,) if devices is None else tuple(chosen_devices(devices))
    if breakdown and len(ranks) > 1:
        mend = "leave one of them out: operations are timed on one rank"
        raise UserError("--breakdown with several --devices", mend=mend)
    rows = []
    for one in settings:
        setting = dataclasses.replace(
            one,
            devices=ranks,
            shard_weights="weights" in shards,
            shard_gradients="gradients" in shards,
        )
        row = measure(setting, breakdown=breakdown)
        rows.append(row)
        # said at once: a later setting may fail
        said = f"{setting.model} {setting.matmul}: {row['tokens_per_second']:,} tokens/s"
        click.echo(said, err=True)
        beside = []
        if reference:
            theirs = REFERENCE[setting.model, setting.matmul][-1]
            row["llmq_tokens_per_second"] = theirs
            beside = [f"{theirs:,}", f"{100 * row['tokens_per_second'] / theirs:.0f}"]
        table.add_row(
            setting.model,
            setting.matmul + ", fast" * setting.fast_accumulation,
            f"{setting.micro_batch}x{setting.grad_accumulation}"
            + f" on {len(ranks)}" * (len(ranks) > 1),
            f"{row['tokens_per_second']:,}",
            f"{100 * row['mfu']:.1f}",
            f"{row['seconds_per_step']:.3f}",
            f"{100 * row['gpu_idle_share']:.2f}",
            f"{row['device_gib']:.1f}",
            f"{row['first_step_seconds']:.1f}",
            *beside,
        )
    Console().print(table)
    for row in rows if breakdown else ():
        _print_breakdown(f"{row['model']}, {row['matmul']}", row["breakdown"])
    return rows


def _print_breakdown(title: str, rows: list[dict[str, Any]]) -> None:
    """One micro-step and one optimizer step by operation."""
    from rich.console import Console
    from rich.table import Column, Table

    from llmq_nb.plan.budget import OVER

    numbers = [Column(name, justify="right") for name in ("ms", "budget ms", "measured / budget")]
    table = Table("operation", *numbers, title=f"{title}: one micro-step and one optimizer step")
    for row in rows:
        known = row["budget_ms"] is not None
        budget, ratio = (f"{row['budget_ms']:.3f}", f"{row['ratio']:.2f}") if known else ("-", "-")
        table.add_row(row["operation"], f"{row['ms']:.3f}", budget, ratio)
    sums = (sum(row[key] or 0.0 for row in rows) for key in ("ms", "budget_ms"))
    measured, budget = sums
    table.add_section()
    table.add_row("all", f"{measured:.3f}", f"{budget:.3f}", f"{measured / budget:.2f}")
    Console(width=100).print(table)
    over = [f"{row['operation']} ({row['ratio']:.2f})" for row in rows if row["over"]]
    click.echo(f"over {OVER} times the budget: {', '.join(over) or 'none'}")


def _kernels() -> list[dict[str, Any]]:
    """Runs bench/bench_*.py of a checkout one after the other and gathers their lines."""
    import subprocess
    import sys

    from rich.console import Console
    from rich.table import Table

    from llmq_nb.core.device import open_device
    from llmq_nb.core.errors import UserError

    open_device()
    folder = Path(__file__).resolve().parents[2] / "bench"
    if not folder.is_dir():
        mend = "run it from a checkout of the repository"
        raise UserError("the kernel benches are not installed", where="bench kernels", mend=mend)
    table = Table("kernel", "case", "us", "GB/s", "% of copy", "% of equal copy")
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.glob("bench_*.py")):
        if file.stem in ("bench_data", "bench_attention"):
            continue
        argv = [sys.executable, "-m", f"bench.{file.stem}"]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=folder.parent)
        if done.returncode:
            click.echo(f"{file.stem} failed: {done.stderr.strip().splitlines()[-1]}", err=True)
        rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    known = ("kernel", "seconds", "quartiles", "gb_per_s", "percent_of_copy", "copy_gb_per_s")
    for row in rows:
        hidden = (*known, "percent_of_equal_copy", "device", "driver", "numba_cuda", "commit")
        case = " ".join(f"{k}={v}" for k, v in row.items() if k not in hidden)
        percents = (row["percent_of_copy"], row["percent_of_equal_copy"])
        figures = (row["seconds"] * 1e6, row["gb_per_s"], *percents)
        table.add_row(row["kernel"], case, *(f"{x:.1f}" for x in figures))
    Console(width=140).print(table)
    return rows


def _matmul(models: tuple[str, ...], rows: int) -> list[dict[str, Any]]:
    from rich.console import Console
    from rich.table import Table

    from llmq_nb.model.families import preset
    from llmq_nb.train.bench_step import measure_products

    table = Table("model", "product", "shape", "TFLOP/s: heuristic's first", "best")
    out = []
    for model in models:
        for row in measure_products(preset(model), rows):
            out.append({"model": model, **row})
            rates = row["tflop_per_s"]
            figures = (f"{rates[0]:.0f}", f"{max(rates):.0f}")
            table.add_row(model, row["product"], row["shape"], *figures)
    Console(width=140).print(table)
    return out


LINK_ROWS = {
    "to_device": "copy to the device",
    "to_host": "copy to the host",
    "both_to_device": "copy to the device, the other way busy too",
    "both_to_host": "copy to the host, the other way busy too",
    "read": "kernel reads the host (zero-copy)",
    "write": "kernel writes the host",
    "update": "kernel reads and writes the host, each way",
}


def _offload() -> dict[str, Any]:
    import dataclasses

    from rich.console import Console
    from rich.table import Table

    from llmq_nb.plan.measured import keep_link
    from llmq_nb.train import bench_link

    device, link = bench_link.measure_link()
    _, combined = bench_link.measure_link(write_combined=True)
    figures, others = dataclasses.asdict(link), dataclasses.asdict(combined)
    table = Table(f"{device.name} and pinned host memory", "GB/s", "memory.write_combined")
    for key, what in LINK_ROWS.items():
        table.add_row(what, f"{figures[key]:.1f}", f"{others[key]:.1f}")
    Console(width=100).print(table)
    click.echo(f"kept in {keep_link(device.name, link)}: plan and auto use it on this machine")
    return {"device": device.name, **figures, "write_combined": others}


def _comm(devices: str | None) -> list[dict[str, Any]]:
    import dataclasses
    from importlib.util import find_spec

    from rich.console import Console
    from rich.table import Column, Table

    from llmq_nb.core.sizes import format_bytes
    from llmq_nb.train import bench_comm

    ordinals = bench_comm.chosen_devices(devices)
    measured = bench_comm.measure_comm(ordinals, announce=click.echo)
    figures = {(x.collective, x.transport, x.nbytes): x.gb_per_s for x in measured}
    for transport in dict.fromkeys(x.transport for x in measured):
        what = {"peer": "peer copies", "staged": "copies through host memory"}[transport]
        numbers = [Column(name, justify="right") for name in bench_comm.COLLECTIVES]
        title = f"GB/s a rank receives, ranks on GPUs {', '.join(map(str, ordinals))}: {what}"
        table = Table(Column("tensor", justify="right"), *numbers, title=title)
        for nbytes in dict.fromkeys(x.nbytes for x in measured):
            cells = (figures[name, transport, nbytes] for name in bench_comm.COLLECTIVES)
            table.add_row(format_bytes(nbytes), *(f"{x:.2f}" for x in cells))
        Console(width=100).print(table)
    found = find_spec("nccl") is not None
    click.echo(f"NCCL: not measured (nccl4py is {'not used yet' if found else 'not installed'})")
    return [dataclasses.asdict(x) for x in measured]
