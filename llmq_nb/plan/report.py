"""What `llmq-nb plan` says: which bytes go where, whether they fit, how fast the run will be.

Our allocation is the plan that the engine executes, to the byte. What is not ours (the CUDA
context, kernels, graphs) is a reserve, named apart. Host memory beside the pinned input slots, and
all times, are estimates.
"""

import dataclasses

from llmq_nb.config import Config
from llmq_nb.core.arena import aligned
from llmq_nb.core.dtype import DType
from llmq_nb.core.sizes import format_bytes, parse_bytes
from llmq_nb.model.config import ModelConfig
from llmq_nb.plan.buffers import Group, Plan, has_master
from llmq_nb.plan.cost import Part, by_part, micro_step_work, optimizer_work
from llmq_nb.plan.fit import Choice, Kind, Search, run_plan, setting_of
from llmq_nb.plan.limits import CONTEXT, DISPLAY, RESERVE, WSL_PINNED, WSL_SHARE, device_limit
from llmq_nb.plan.rates import CARDS, Rates

RING_SLOTS = 3
"""Pinned copies of a micro-batch's inputs: one being filled, one being copied, one spare."""
PYTHON = 1 << 30
"""Interpreter, libraries and driver in host memory [bytes]; an estimate."""
BATCH_BYTES = 16
"""Of a token in a step's batch: token, target, segment start, order; two steps are in memory."""
FASTER = 1.02
"""A setting is worth naming beside one that fits if it is this many times as fast."""
SOLD = tuple(n << 30 for n in (8, 12, 16, 24, 32, 48, 80, 96))
"""What cards are sold with; CUDA shows less [bytes]."""

NOTES: dict[Group, str] = {
    "weights": "what the products read",
    "quants": "codes of the weights",
    "master": "the optimizer's own weights",
    "m": "Adam's first moment",
    "v": "Adam's second moment",
    "gradients": "summed over micro-batches",
    "activations": "kept for backward",
    "scratch": "temporaries",
    "workspace": "of kernels and cuBLASLt, tables",
    "inputs": "the tokens of a micro-batch",
    "results": "losses and norms",
}
PLAIN: tuple[Group, ...] = ("scratch", "workspace", "inputs", "results")
"""Groups whose formats say nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """nbytes of one category at one place. ours: part of our one allocation, exact."""

    place: str
    category: str
    nbytes: int
    note: str = ""
    ours: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """The prediction for one setting [s]."""

    tokens_per_second: float
    step_seconds: float
    parts: dict[Part, float]
    """Seconds of an optimizer step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What a plan is made for. device_memory: of the card, or for "cpu" the host's [bytes].

    source: where the memory is, such as "on the card". rates: None: no speed is predicted.
    wsl: Linux inside Windows.
    """

    kind: Kind
    device_memory: int
    host_memory: int | None
    source: str
    rates: Rates | None
    wsl: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """asked: the config as it came. config: as planned, resolved where policy = "auto". limit: of
    our allocation; reserve: what else there must be. free: negative where it is short."""

    asked: Config
    config: Config
    model: ModelConfig
    machine: Machine
    plan: Plan
    lines: tuple[Line, ...]
    limit: int
    reserve: int
    free: int
    speed: Speed | None
    better: Choice | None
    """A setting that fits where this one does not, or that is faster."""
    least: Choice | None
    """Where nothing fits: the setting that takes the least."""
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.free >= 0


def make_report(config: Config, model: ModelConfig, machine: Machine, search: Search) -> Report:
    """Plan a run on a machine. search: over the same config, for what else would fit."""
    asked, reserve = config, reserve_of(config, machine)
    limit = usable(config, machine) - reserve
    chosen = least = better = None
    if config.memory.policy == "auto":
        chosen = search.choose(limit) or search.smallest()
        config = chosen.setting.applied(config)
    plan = run_plan(config, model, machine.kind)
    free = limit - plan.total
    if chosen is None:
        better = search.choose(limit)
    if free < 0 and better is None:
        least = chosen or search.smallest()
    speed = None if machine.rates is None else predict(config, model, machine.rates)
    if better is not None and free >= 0:
        own = search.seconds(setting_of(config))
        better = better if own > FASTER * better.seconds else None
    found = Report(
        asked=asked,
        config=config,
        model=model,
        machine=machine,
        plan=plan,
        lines=tuple(_lines(config, plan, machine.kind)),
        limit=limit,
        reserve=reserve,
        free=free,
        speed=speed,
        better=better,
        least=least,
        warnings=(),
    )
    return dataclasses.replace(found, warnings=tuple(_warnings(found)))


def usable(config: Config, machine: Machine) -> int:
    """Bytes that the process may take of the device, or of the host on the cpu engine."""
    if machine.kind == "cpu":
        return machine.device_memory
    memory = int(machine.device_memory * (WSL_SHARE if machine.wsl else 1))
    limit = device_limit(config)
    return memory if limit is None else min(memory, limit)


def reserve_of(config: Config, machine: Machine) -> int:
    """Bytes of it that are not for our allocation."""
    return CONTEXT + RESERVE if machine.kind == "cuda" else PYTHON + _batch_bytes(config)


def predict(config: Config, model: ModelConfig, rates: Rates) -> Speed:
    """Time of an optimizer step, and where it goes."""
    parts: dict[Part, float] = {
        part: config.batch.grad_accumulation * seconds
        for part, seconds in by_part(micro_step_work(config, model, rates)).items()
    }
    for part, seconds in by_part(optimizer_work(config, model, rates)).items():
        parts[part] = parts.get(part, 0.0) + seconds
    seconds = sum(parts.values())
    return Speed(config.tokens_per_step(world_size=1) / seconds, seconds, parts)


def pinned_bytes(plan: Plan) -> int:
    """The ring of input slots."""
    inputs = (aligned(b.nbytes) for b in plan.buffers if b.group == "inputs")
    return RING_SLOTS * sum(inputs)


def checkpoint_tensor_bytes(config: Config, plan: Plan) -> int:
    """Tensors of one checkpoint: master weights and both moments."""
    groups = ("master" if has_master(config) else "weights", "m", "v")
    return sum(b.nbytes for b in plan.buffers if b.group in groups)


def _batch_bytes(config: Config) -> int:
    """The step's batch in host memory, and the next one."""
    return 2 * BATCH_BYTES * config.tokens_per_step(world_size=1)


def _lines(config: Config, plan: Plan, kind: Kind) -> list[Line]:
    place = "GPU" if kind == "cuda" else "host"
    groups = plan.group_bytes()
    out = []
    for group in NOTES:
        if groups.get(group):
            out.append(Line(place, group, groups[group], _note(config, plan, group), ours=True))
    out += [Line(place, g, n, ours=True) for g, n in groups.items() if g not in NOTES and n]
    largest = max(b.nbytes for b in plan.buffers if b.group in ("master", "m", "v", "weights"))
    if kind == "cuda":
        out += [
            Line("GPU reserve", "CUDA context", CONTEXT, "beside it; an estimate"),
            Line("GPU reserve", "kernels, graphs", RESERVE, "beside it; an estimate"),
            Line("pinned host", "input slots", pinned_bytes(plan), "tokens on their way"),
        ]
    out += [
        Line("host", "batches", _batch_bytes(config), "of this step and the next"),
        Line("host", "Python", PYTHON, "and libraries; an estimate"),
    ]
    if kind == "cuda":
        out.append(Line("host", "one tensor", largest, "at a time, for a checkpoint"))
    checkpoint = checkpoint_tensor_bytes(config, plan)
    keep = config.checkpoint.keep
    kept = f"{keep} kept, one more meanwhile" if keep else "all are kept"
    out.append(Line("disk", "a checkpoint", checkpoint, kept))
    return out


def _note(config: Config, plan: Plan, group: Group) -> str:
    """What the category is, and the formats of most of it."""
    note = NOTES[group]
    if group == "weights" and not has_master(config):
        note = "the optimizer updates them"
    if group == "scratch":
        largest = max((b for b in plan.buffers if b.lifetime), key=lambda b: b.nbytes)
        name = largest.name.partition("/")[2]
        return f"{note}; {name}: {format_bytes(largest.nbytes)}"
    if group in PLAIN:
        return note
    formats: dict[DType, int] = {}
    for b in plan.buffers:
        if b.group == group:
            formats[b.dtype] = formats.get(b.dtype, 0) + b.nbytes
    most = sum(formats.values()) / 20
    shown = [str(dtype) for dtype, nbytes in formats.items() if nbytes > most]
    return f"{', '.join(shown)}: {note}"


def _warnings(r: Report) -> list[str]:
    """What may still go wrong on this kind of machine."""
    out = []
    m, gpu = r.machine, r.machine.kind == "cuda"
    if gpu and m.wsl:
        out.append(f"WSL2: Windows keeps part of the card; planned with {WSL_SHARE:.0%} of it")
        pinned = pinned_bytes(r.plan)
        if pinned > WSL_PINNED:
            out.append(f"WSL2: {format_bytes(pinned)} of pinned memory may be more than it gives")
    if gpu and m.device_memory in SOLD and r.config.memory.device_limit is None:
        gib = m.device_memory >> 30
        out.append(f"a card sold with {gib} GB shows 2 to 4 % less than {gib} GiB")
    if gpu and 0 <= r.free < DISPLAY:
        out.append("tight: a GPU that drives a display has 0.35 to 1.2 GiB less than it shows")
    card = CARDS.get(m.rates.card) if m.rates else None
    if gpu and card is not None and card.build == "unified":
        out.append(f"{m.rates.card if m.rates else ''}: GPU and host share this memory")
    host = sum(line.nbytes for line in r.lines if line.place.startswith("host") and not line.ours)
    if gpu and m.host_memory is not None and host > m.host_memory:
        needs, has = format_bytes(host), format_bytes(m.host_memory)
        out.append(f"host memory is short: needs {needs}, has {has}")
    text = r.config.memory.host_limit
    if gpu and text is not None:
        pinned = pinned_bytes(r.plan)
        if pinned > parse_bytes(text, where="memory.host_limit"):
            out.append(f"memory.host_limit = {text!r} is below the pinned {format_bytes(pinned)}")
    return out
