"""`llmq-nb plan`: does a run fit, and how fast will it be? Needs no GPU."""

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from llmq_nb.config import Config
from llmq_nb.core.errors import UserError

if TYPE_CHECKING:  # imported when it runs: --help waits for nothing
    from llmq_nb.plan.report import Machine

DEFAULT_CARD = "H200"
"""Where this machine has no GPU and none is named: the one whose rates were measured."""


@click.command("plan", short_help="Does a run fit, and how fast will it be?")
@click.argument("config", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="section.key=value", help="Override.")
@click.option(
    "--card", help='The GPU to plan for, such as "RTX 4090"; else the one of this machine.'
)
@click.option(
    "--device-memory", metavar="SIZE", help="Of the GPU, such as 15.5GiB; else the card's."
)
@click.option("--host-memory", metavar="SIZE", help="Of the machine, such as 64GiB.")
@click.option(
    "--gpus",
    type=click.IntRange(1),
    help="GPUs of the run, a rank each.  [default: parallel.devices, or one]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def command(
    config: str,
    overrides: tuple[str, ...],
    card: str | None,
    device_memory: str | None,
    host_memory: str | None,
    gpus: int | None,
    as_json: bool,
) -> None:
    """Does the run of CONFIG fit, and how fast will it be? Says where every byte goes, and what
    would make it fit. Reads no data and needs no GPU."""
    from rich.console import Console

    from llmq_nb.config_file import load_config
    from llmq_nb.plan.rates import H200
    from llmq_nb.plan.render import print_report, to_json
    from llmq_nb.plan.report import make_report
    from llmq_nb.plan.search import Search
    from llmq_nb.train.setup import Device, check_supported, resolve_model

    parsed = _with_ranks(load_config(config, overrides), gpus)
    console = Console(width=None, highlight=False, markup=False, emoji=False)
    quiet = Console(quiet=True)
    out = quiet if as_json else console
    model = resolve_model(parsed, out.print).model
    machine, reason = _machine(parsed, model.D, card, device_memory, host_memory)
    check_supported(parsed, Device(machine.kind, reason))
    _check_offload(parsed, machine)
    parsed = _with_fp8_units(parsed, machine)
    search = Search(parsed, model, machine.rates or H200, kind=machine.kind)
    report = make_report(parsed, model, machine, search)
    if as_json:
        click.echo(json.dumps(to_json(report), indent=2))
        return
    out.print(reason)
    print_report(report, out)


def _with_ranks(config: Config, gpus: int | None) -> Config:
    """The config with a rank on each of so many GPUs; None: as it says, or one."""
    devices = tuple(range(gpus)) if gpus is not None else config.parallel.devices or (0,)
    parallel = dataclasses.replace(config.parallel, devices=devices)
    return dataclasses.replace(config, parallel=parallel)


def _check_offload(config: Config, machine: "Machine") -> None:
    """Refuse what the engine of this machine will refuse."""
    from llmq_nb.plan.rates import is_unified

    what = f"offload = {list(config.memory.offload)}"
    if config.memory.offload and machine.rates is not None and is_unified(machine.rates):
        what = f"{what}: {machine.rates.card} shares the host's memory"
        raise UserError(what, where="memory.offload", mend="leave it out, it would free nothing")


def _machine(
    config: Config, head_dim: int, card: str | None, device: str | None, host: str | None
) -> "tuple[Machine, str]":
    """What to plan for, and a line that says so."""
    from llmq_nb.core.host import available_bytes, pinnable_bytes
    from llmq_nb.core.sizes import parse_bytes
    from llmq_nb.plan.limits import under_wsl
    from llmq_nb.plan.measured import with_measured_link
    from llmq_nb.plan.rates import CARDS, rates_of
    from llmq_nb.plan.report import Machine
    from llmq_nb.train.setup import CUDA_HEAD_DIMS

    memory = None if host is None else parse_bytes(host, where="--host-memory")
    given = None if device is None else parse_bytes(device, where="--device-memory")
    if config.run.device == "cpu" or (
        config.run.device == "auto" and head_dim not in CUDA_HEAD_DIMS
    ):
        why = "as run.device says" if config.run.device == "cpu" else f"head_dim {head_dim}"
        has = memory if memory is not None else available_bytes() or 0
        source = "on this machine" if memory is None else "by --host-memory"
        return Machine("cpu", has, memory, source, None), f"planned for the cpu engine ({why})"
    if head_dim not in CUDA_HEAD_DIMS:
        mend = f"the GPU's attention has {' and '.join(map(str, CUDA_HEAD_DIMS))}"
        raise UserError(f"head_dim {head_dim}", where="run.device", mend=mend)
    name, why, here = (card, "as asked", False) if card else _local_card()
    rates, host_source = rates_of(name), "by --host-memory"
    if here:
        rates = with_measured_link(rates, name)
    if memory is None and here:
        memory, host_source = pinnable_bytes(), "available"
    total = CARDS[rates.card].mib << 20 if given is None else given
    wsl = under_wsl() and given is None and card is None
    source = "on the card" if given is None else "by --device-memory"
    machine = Machine("cuda", total, memory, source, rates, wsl, host_source)
    return machine, f"planned for {rates.card} ({why})"


def _local_card() -> tuple[str, str, bool]:
    """The GPU of this machine if its rates are known, else the measured one; why; whether it is
    here."""
    from llmq_nb.core.driver import find_driver
    from llmq_nb.plan.rates import rates_of

    driver = find_driver()
    if driver is None:
        return DEFAULT_CARD, "no GPU here; --card names another", False
    try:
        rates_of(driver.devices[0])
    except UserError:
        why = f"{driver.devices[0]} is not in the table; --card names another"
        return DEFAULT_CARD, why, False
    return driver.devices[0], "the GPU of this machine", True


def _with_fp8_units(config: Config, machine: "Machine") -> Config:
    """FP8 products on a card without FP8 units are emulated, which takes memory."""
    p = config.precision
    none = machine.kind == "cuda" and machine.rates is not None and machine.rates.fp8 is None
    if p.matmul != "e4m3" or not none:
        return config
    if p.fp8_units == "hardware":
        what = f"{machine.rates.card if machine.rates else ''} has no FP8 units"
        raise UserError(what, where="precision.fp8_units", mend="set it to auto or emulate")
    emulated = dataclasses.replace(p, fp8_units="emulate")
    return dataclasses.replace(config, precision=emulated)
