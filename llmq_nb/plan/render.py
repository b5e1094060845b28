"""A plan's report as text for people and as JSON."""

import dataclasses
import json
import shlex
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from llmq_nb.config import Config
from llmq_nb.core.sizes import format_bytes
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import parameter_count
from llmq_nb.plan.buffers import Group
from llmq_nb.plan.cost import optimizer_work, tokens_per_second, total
from llmq_nb.plan.fit import LEVERS, Choice, changes, setting_of
from llmq_nb.plan.limits import device_limit, host_limit
from llmq_nb.plan.measured import SAID
from llmq_nb.plan.report import Report
from llmq_nb.plan.sizes import run_plan

SHORT_STEP = 0.01
"""Below it a step waits for Python and the loader [s]."""
STATES_BF16 = ["optimizer.master=bf16", "optimizer.m=bf16", "optimizer.v=bf16"]
STATES: tuple[Group, ...] = ("weights", "gradients", "master", "m", "v")


def print_report(report: Report, console: Console) -> None:
    """The table, the verdict, the speed and the warnings."""
    console.print(_table(report))
    for line in [*_verdict(report), *_speed(report)]:
        console.print(line, soft_wrap=True)
    for warning in report.warnings:
        console.print(f"note: {warning}", soft_wrap=True)


def to_json(report: Report) -> dict[str, Any]:
    """Bytes, seconds and settings; `free` is negative where the plan is short."""
    r, machine = report, report.machine
    return {
        "kind": machine.kind,
        "card": None if machine.rates is None else machine.rates.card,
        "parameters": parameter_count(r.model),
        "setting": _setting_json(r.config),
        "lines": [dataclasses.asdict(line) for line in r.lines],
        "allocation": r.plan.total,
        "limit": r.limit,
        "reserve": r.reserve,
        "free": r.free,
        "pinned": r.pinned,
        "disk": r.plan.disk_total,
        "host_limit": r.host_limit,
        "host_free": r.host_free,
        "fits": r.fits,
        "suggestion": _choice_json(r, r.better),
        "least": _choice_json(r, r.least),
        "speed": None if r.speed is None else dataclasses.asdict(r.speed),
        "warnings": list(r.warnings),
    }


def _setting_json(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{key}": getattr(getattr(config, section), key)
        for section, keys in LEVERS.items()
        for key in keys
    }


def _choice_json(r: Report, choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {
        "setting": _setting_json(choice.setting.applied(r.config)),
        "allocation": choice.total,
        "pinned": r.config.ranks_each * choice.host_total,
        "tokens_per_second": _rate(r, choice),
    }


def _rate(r: Report, choice: Choice) -> float | None:
    """Predicted tokens/s."""
    rates = r.machine.rates
    if rates is None:
        return None
    return tokens_per_second(choice.setting.applied(r.config), r.model, rates)


def _table(r: Report) -> Table:
    table = Table("where", "what", title=_title(r), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("size", justify="right")
    table.add_column("which is")
    previous = None
    for line in r.lines:
        if previous is not None and previous.ours and not line.ours:
            size, note = r.plan.total, "one allocation, exact to the byte"
            if previous.place == "pinned host":
                size, note = r.pinned, "exact to the byte"
            elif previous.place == "disk":
                size, note = r.plan.disk_total, "one file of whole blocks, gone with the run"
            elif r.machine.kind == "cpu":
                size += r.plan.host_total
            table.add_row("", "all of it", format_bytes(size), note, style="bold")
        same = previous is not None and previous.place == line.place
        where = "" if same else line.place
        table.add_row(where, line.category, format_bytes(line.nbytes), line.note)
        previous = line
    return table


def _title(r: Report) -> str:
    b, p = r.config.batch, r.config.precision
    n = parameter_count(r.model)
    size = f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.3g} million"
    count = b.grad_accumulation * r.config.world_size
    times = f"{count} micro-batches" if count > 1 else "1 micro-batch"
    if r.config.world_size > 1:
        times += f" on {r.config.world_size} ranks"
    emulated = p.matmul == "e4m3" and p.fp8_units == "emulate" and r.machine.kind == "cuda"
    products = f"{p.matmul or p.dtype}{', emulated' if emulated else ''}"
    return (
        f"{r.config.model.path}: {size} parameters, products in {products}\n"
        f"a step: {times} of {b.micro_batch} x {b.seq_len} tokens"
    )


def _verdict(r: Report) -> list[str]:
    limit, needed = r.limit + r.reserve, format_bytes(r.plan.total + r.reserve)
    capped = r.machine.kind == "cuda" and device_limit(r.config) == limit
    has = f"{format_bytes(limit)} {'by memory.device_limit' if capped else r.machine.source}"
    lines = []
    if r.asked.memory.policy == "auto":
        chosen = changes(r.asked, setting_of(r.config))
        lines.append(f"memory.policy = auto chose: {_list(chosen) or 'the setting as it is'}")
    if r.fits:
        lines.append(f"fits: {needed} of the {has}, {format_bytes(r.free)} free")
        lines += _host_verdict(r)
        if r.better is not None:
            lines.append(f"faster, and fits: {_proposal(r, r.better)}")
        return lines
    if r.free < 0:
        lines.append(f"short by {format_bytes(-r.free)}: needs {needed}, there are {has}")
    lines += _host_verdict(r)
    if r.better is not None:
        return [*lines, f"cheapest way to fit: {_proposal(r, r.better)}"]
    assert r.least is not None
    least = format_bytes(r.least.total + r.reserve)
    lines.append(
        f"no setting of the memory levers makes it fit; the least is {least}{_pinned(r, r.least)}:"
        f" {_list(changes(r.asked, r.least.setting))}"
    )
    last = "else: a smaller model, or more memory on the card or the host"
    return [*lines, *_states(r), *_disk(r), last]


def _host_verdict(r: Report) -> list[str]:
    """Of what is offloaded, if anything is."""
    if not r.plan.host_total or r.machine.kind == "cpu":
        return []
    needs = format_bytes(r.pinned)
    if r.host_limit is None or r.host_free is None:
        return [f"pinned host memory: {needs}; --host-memory says whether there is as much"]
    capped = host_limit(r.config) == r.host_limit
    where = "by memory.host_limit" if capped else f"{r.machine.host_source}, less what is not ours"
    has = f"{format_bytes(r.host_limit)} {where}"
    if r.host_short:
        short = format_bytes(-r.host_free)
        return [f"short by {short} of pinned host memory: needs {needs}, there are {has}"]
    return [f"pinned host memory: {needs} of the {has}, {format_bytes(r.host_free)} free"]


def _pinned(r: Report, choice: Choice) -> str:
    if not choice.host_total:
        return ""
    return f" with {format_bytes(r.config.ranks_each * choice.host_total)} of pinned host memory"


def _states(r: Report) -> list[str]:
    """Where nothing fits: what is left is how much each parameter takes."""
    o = r.config.optimizer
    if (o.master, o.m, o.v) == ("bf16", "bf16", "bf16"):
        return []
    small = dataclasses.replace(o, master="bf16", m="bf16", v="bf16")
    config = dataclasses.replace(r.config, optimizer=small)
    sizes = [_states_bytes(c, r.model, r) for c in (r.config, config)]
    own, less = (format_bytes(size) for size in sizes)
    return [
        f"of it weights, gradients and optimizer states: {own}; {less} with {_list(STATES_BF16)}"
        " (stochastically rounded; the run's numbers change)"
    ]


def _disk(r: Report) -> list[str]:
    """Where nothing fits: moments that could leave every memory."""
    if {"m", "v"} == set(r.config.memory.disk) or r.config.world_size > 1:
        return []
    groups = [r.plan.group_bytes("device"), r.plan.group_bytes("host")]
    moved = sum(found.get("m", 0) + found.get("v", 0) for found in groups)
    kept = json.dumps([name for name in r.config.memory.offload if name not in ("m", "v")])
    settings = ['memory.disk=["m", "v"]', f"memory.offload={kept}"]
    return [
        f"to the disk: {_list(settings)} moves {format_bytes(moved)} of it; every update then waits"
        " for the disk"
    ]


def _states_bytes(config: Config, model: ModelConfig, r: Report) -> int:
    plan = run_plan(config, model, r.machine.kind)
    groups = [plan.group_bytes("device"), plan.group_bytes("host")]
    return sum(found.get(name, 0) for found in groups for name in STATES)


def _list(settings: list[str]) -> str:
    return " ".join(f"--set {shlex.quote(s)}" for s in settings)


def _proposal(r: Report, choice: Choice) -> str:
    """The settings to change, what they take, and their speed beside this plan's."""
    needs = f"{format_bytes(choice.total + r.reserve)}{_pinned(r, choice)}"
    text = f"{_list(changes(r.config, choice.setting))} ({needs}"
    rate = _rate(r, choice)
    return f"{text})" if rate is None else f"{text}, {_round(rate)} tokens/s)"


def _speed(r: Report) -> list[str]:
    if r.speed is None or r.machine.rates is None or r.better is not None and not r.fits:
        return []  # of a plan that does not fit, the proposal's speed matters
    s, rates = r.speed, r.machine.rates
    step = r.config.tokens_per_step
    why = "from rates measured on one" if rates.measured else "from its data sheet, to some 20 %"
    if rates.host_link.measured and r.config.memory.offload:
        why += f"; the host link {SAID}"
    speed = "speed" if r.fits else "speed, if it did fit"
    ranks = r.config.world_size
    on = f"one {rates.card}"
    if ranks > 1:
        on, why = f"{ranks} ranks of {rates.card}", why + "; copies between them not counted"
    lines = [
        f"{speed}: about {_round(s.tokens_per_second)} tokens/s on {on} ({why}),"
        f" {_seconds(s.step_seconds)} for a step of {step:,} tokens"
    ]
    shares = sorted(s.parts.items(), key=lambda item: -item[1])
    named = ", ".join(f"{n} {100 * t / s.step_seconds:.0f} %" for n, t in shares if t)
    lines.append(f"of it: {named}")
    if r.config.schedule.steps is not None:
        run = r.config.schedule.steps * s.step_seconds
        lines.append(f"{r.config.schedule.steps:,} steps: {_seconds(run)} without evaluations")
    if r.config.precision.dtype == "fp32":
        lines.append("note: FP32 is for tests; its speed is a guess")
    update = total(optimizer_work(r.config, r.model, rates)) / s.step_seconds
    if r.fits and s.step_seconds >= SHORT_STEP and update > 0.5:
        mend = "a larger batch.grad_accumulation has fewer updates (the run's numbers change)"
        lines.append(f"note: {update:.0%} of a step is its update: {mend}")
    if s.step_seconds < SHORT_STEP:
        lines.append("note: this is the GPU's time; for so short a step the host needs longer")
    return lines


def _round(rate: float) -> str:
    """Three digits."""
    return f"{float(f'{rate:.3g}'):,.0f}"


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
