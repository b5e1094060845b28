"""What `llmq-nb plan` says: which bytes go where, whether they fit, how fast the run will be.

Our allocations, on the GPU and of pinned host memory, are the plan that the engine executes, to the
byte. What is not ours (the CUDA context, kernels, graphs) is a reserve, named apart. Other host
memory and all times are estimates.
"""

import dataclasses
import math
from pathlib import Path

from llmq_nb.config import Config
from llmq_nb.core.arena import aligned
from llmq_nb.core.dtype import M_GROUP, DType
from llmq_nb.core.files import free_bytes
from llmq_nb.core.sizes import format_bytes
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import model_parameters
from llmq_nb.plan.buffers import Group, Plan, has_master
from llmq_nb.plan.cost import LAUNCH, Part, by_part, micro_step_work, optimizer_work
from llmq_nb.plan.fit import Choice, setting_of
from llmq_nb.plan.limits import (
    CONTEXT,
    DISPLAY,
    LIMIT_RESERVE,
    PYTHON,
    RESERVE,
    RING_SLOTS,
    WSL_PINNED,
    WSL_SHARE,
    device_limit,
    host_room,
)
from llmq_nb.plan.offload_cost import DISK
from llmq_nb.plan.places import Place
from llmq_nb.plan.rates import CARDS, Rates
from llmq_nb.plan.search import Search
from llmq_nb.plan.shards import LINKS, STAGING_BYTES
from llmq_nb.plan.sizes import Kind, run_plan

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
    "staging": "slices from and to the disk",
    "activations": "kept for backward",
    "scratch": "temporaries",
    "workspace": "of kernels and cuBLASLt, tables",
    "inputs": "the tokens of a micro-batch",
    "results": "losses and norms",
}
PLAIN: tuple[Group, ...] = ("scratch", "workspace", "inputs", "results", "staging")
"""Groups whose formats say nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """nbytes of one category at one place. ours: part of our allocation there, exact."""

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

    host_memory: for everything on the host; None: not known. source, host_source: where the memory
    is, such as "on the card". rates: None: no speed is predicted. wsl: Linux inside Windows.
    """

    kind: Kind
    device_memory: int
    host_memory: int | None
    source: str
    rates: Rates | None
    wsl: bool = False
    host_source: str = "by --host-memory"


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """asked: the config as it came. config: as planned, resolved where policy = "auto". limit: of
    a rank's allocation; reserve: what else there must be. free: negative where it is short.

    host_limit, host_free: the same of all ranks' buffers in pinned host memory; None: not known, no
    limit. plan: a rank's. lines: of each rank; what is on the host and the disk, of all.
    """

    asked: Config
    config: Config
    model: ModelConfig
    machine: Machine
    plan: Plan
    lines: tuple[Line, ...]
    limit: int
    reserve: int
    free: int
    host_limit: int | None
    host_free: int | None
    speed: Speed | None
    better: Choice | None
    """A setting that fits where this one does not, or that is faster."""
    least: Choice | None
    """Where nothing fits: the setting that takes the least."""
    warnings: tuple[str, ...]

    @property
    def pinned(self) -> int:
        """Bytes of offloaded buffers in pinned host memory, of all ranks."""
        return self.config.ranks_each * self.plan.host_total

    @property
    def fits(self) -> bool:
        return self.free >= 0 and not self.host_short

    @property
    def host_short(self) -> bool:
        """Whether the host has too little for what is offloaded."""
        return self.plan.host_total > 0 and self.host_free is not None and self.host_free < 0


def make_report(config: Config, model: ModelConfig, machine: Machine, search: Search) -> Report:
    """Plan a run on a machine. search: over the same config, for what else would fit."""
    asked, reserve = config, reserve_of(config, machine)
    limit = (usable(config, machine) - reserve) // config.ranks_per_device
    host = room_on_host(config, model, machine)
    surely = min(WSL_PINNED, WSL_PINNED if host is None else host) if machine.wsl else host
    if surely is not None:
        surely //= config.ranks_each
    chosen = least = better = None
    if config.memory.policy == "auto":
        chosen = search.choose(limit, surely) or search.smallest(surely)
        config = chosen.setting.applied(config)
    plan = run_plan(config, model, machine.kind)
    pinned = config.ranks_each * plan.host_total
    free, host_free = limit - plan.total, None if host is None else host - pinned
    if machine.kind == "cpu":  # one memory
        free, host_free = free - plan.host_total, None
    fits = free >= 0 and (plan.host_total == 0 or host_free is None or host_free >= 0)
    if chosen is None:
        better = search.choose(limit, surely)
    if not fits and better is None:
        least = chosen or search.smallest(surely)
    speed = None if machine.rates is None else predict(config, model, machine.rates)
    if better is not None and fits:
        own = search.seconds(setting_of(config))
        better = better if own > FASTER * better.seconds else None
    found = Report(
        asked=asked,
        config=config,
        model=model,
        machine=machine,
        plan=plan,
        lines=tuple(_lines(config, model, plan, machine.kind)),
        limit=limit,
        reserve=reserve,
        free=free,
        host_limit=host,
        host_free=host_free,
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
    return LIMIT_RESERVE if machine.kind == "cuda" else PYTHON + _batch_bytes(config)


def room_on_host(config: Config, model: ModelConfig, machine: Machine) -> int | None:
    """Bytes for buffers in pinned host memory; None: not known, no limit."""
    if machine.kind == "cpu":
        return 0
    memory = machine.host_memory
    return host_room(config, None if memory is None else memory - pageable_bytes(config, model))


def pageable_bytes(config: Config, model: ModelConfig) -> int:
    """What a run on a GPU takes of the host beside pinned buffers."""
    return PYTHON + _batch_bytes(config) + _largest_tensor(config, model)


def predict(config: Config, model: ModelConfig, rates: Rates) -> Speed:
    """Time of an optimizer step, and where it goes."""
    parts: dict[Part, float] = {
        part: config.batch.grad_accumulation * seconds
        for part, seconds in by_part(micro_step_work(config, model, rates, LAUNCH)).items()
    }
    for part, seconds in by_part(optimizer_work(config, model, rates)).items():
        parts[part] = parts.get(part, 0.0) + seconds
    seconds = sum(parts.values())
    return Speed(config.tokens_per_step / seconds, seconds, parts)


def pinned_bytes(plan: Plan) -> int:
    """The ring of input slots."""
    inputs = (aligned(b.nbytes) for b in plan.buffers if b.group == "inputs")
    return RING_SLOTS * sum(inputs)


def checkpoint_tensor_bytes(config: Config, model: ModelConfig) -> int:
    """Tensors of one checkpoint: master weights and both moments."""
    o, total = config.optimizer, 0
    for p in model_parameters(model):
        n = math.prod(p.shape)
        total += n * sum(DType(name).itemsize for name in (o.master, o.m, o.v))
        if o.m == "e4m3":
            total += -(-n // M_GROUP) * DType.FP32.itemsize
    return total


def _batch_bytes(config: Config) -> int:
    """The step's batch in host memory, and the next one."""
    return 2 * BATCH_BYTES * config.tokens_per_step


def _lines(config: Config, model: ModelConfig, plan: Plan, kind: Kind) -> list[Line]:
    ranks = config.ranks_each
    where = "host" if kind == "cpu" else "GPU" if config.world_size == 1 else "each rank"
    out = _ours(config, plan, "device", where, ranks if kind == "cpu" else 1)
    if kind == "cuda":
        out += [
            Line("GPU reserve", "CUDA context", CONTEXT, "beside it; an estimate"),
            Line("GPU reserve", "kernels, graphs", RESERVE, "beside it; an estimate"),
            *_ours(config, plan, "host", "pinned host", ranks),
            Line("pinned host", "input slots", ranks * pinned_bytes(plan), "tokens on their way"),
        ]
        if ranks > 1:
            staging = LINKS * ranks * (ranks - 1) * STAGING_BYTES
            note = "where GPUs cannot copy from each other; else none"
            out.append(Line("pinned host", "between GPUs", staging, note))
    else:
        out += _ours(config, plan, "host", "host", ranks)
    out += [
        Line("host", "batches", _batch_bytes(config), "of this step and the next"),
        Line("host", "Python", PYTHON, "and libraries; an estimate"),
    ]
    if kind == "cuda":
        largest = _largest_tensor(config, model)
        out.append(Line("host", "one tensor", largest, "at a time, for a checkpoint"))
    out += _ours(config, plan, "disk", "disk")
    checkpoint = checkpoint_tensor_bytes(config, model)
    keep = config.checkpoint.keep
    kept = f"{keep} kept, one more meanwhile" if keep else "all are kept"
    out.append(Line("disk", "a checkpoint", checkpoint, kept))
    return out


def _ours(config: Config, plan: Plan, place: Place, where: str, ranks: int = 1) -> list[Line]:
    """Our allocation at one place, for so many ranks."""
    out = []
    for group, nbytes in plan.group_bytes(place).items():
        if nbytes:
            note = _note(config, plan, group, place)
            out.append(Line(where, group, ranks * nbytes, note, ours=True))
    order: list[str] = list(NOTES)
    return sorted(out, key=lambda line: order.index(line.category))


def _largest_tensor(config: Config, model: ModelConfig) -> int:
    o = config.optimizer
    width = max(DType(name).itemsize for name in (config.precision.dtype, o.master, o.m, o.v))
    return width * max(math.prod(p.shape) for p in model_parameters(model))


def _note(config: Config, plan: Plan, group: Group, place: Place) -> str:
    """What the category is, and the formats of most of it."""
    note = NOTES[group]
    if group == "weights" and not has_master(config):
        note = "the optimizer updates them"
    if group == "activations" and place == "host":
        note = "inputs of blocks, for backward"
    if group == "scratch":
        largest = max((b for b in plan.buffers if b.lifetime), key=lambda b: b.nbytes)
        name = largest.name.partition("/")[2]
        stages = (b for b in plan.buffers if b.lifetime and b.name.startswith("stage/"))
        staging = sum(b.nbytes for b in stages)
        more = f"; to and from the host: {format_bytes(staging)}" if staging else ""
        return f"{note}; {name}: {format_bytes(largest.nbytes)}{more}"
    if group in PLAIN:
        return note
    formats: dict[DType, int] = {}
    for b in plan.buffers:
        if b.group == group and b.place == place:
            formats[b.dtype] = formats.get(b.dtype, 0) + b.nbytes
    most = sum(formats.values()) / 20
    shown = [str(dtype) for dtype, nbytes in formats.items() if nbytes > most]
    return f"{', '.join(shown)}: {note}"


def _warnings(r: Report) -> list[str]:
    """What may still go wrong on this kind of machine."""
    out = []
    if r.plan.disk_total:
        out.append(_disk_warning(r))
    m, gpu = r.machine, r.machine.kind == "cuda"
    if gpu and m.wsl:
        out.append(f"WSL2: Windows keeps part of the card; planned with {WSL_SHARE:.0%} of it")
        pinned = r.config.ranks_each * pinned_bytes(r.plan) + r.pinned
        if pinned > WSL_PINNED:
            out.append(f"WSL2: {format_bytes(pinned)} of pinned memory may be more than it gives")
    if gpu and m.device_memory in SOLD and r.config.memory.device_limit is None:
        gib = m.device_memory >> 30
        out.append(f"a card sold with {gib} GB shows 2 to 4 % less than {gib} GiB")
    if gpu and 0 <= r.free < DISPLAY:
        out.append("tight: a GPU that drives a display has 0.35 to 1.2 GiB less than it shows")
    p = r.config.precision
    if gpu and m.rates and m.rates.fp8 is None and p.matmul == "e4m3":
        units = "no FP8 units: the products are BF16 ones of the codes"
        out.append(f"{m.rates.card} has {units}; precision.matmul = 'bf16' may be faster")
    card = CARDS.get(m.rates.card) if m.rates else None
    if gpu and card is not None and card.build == "unified":
        out.append(f"{m.rates.card if m.rates else ''}: GPU and host share this memory")
    host = sum(line.nbytes for line in r.lines if line.place == "host")
    if gpu and not r.plan.host_total and m.host_memory is not None and host > m.host_memory:
        needs, has = format_bytes(host), format_bytes(m.host_memory)
        out.append(f"host memory is short: needs {needs}, has {has}")
    return out


def _disk_warning(r: Report) -> str:
    """Of what `memory.disk` takes where this runs, which may not be where the run will."""
    needs, has = r.plan.disk_total, free_bytes(Path(r.config.out_dir))
    states, sizes = " and ".join(r.config.memory.disk), f"{format_bytes(needs)}"
    if needs > has:
        return f"too little disk here: {sizes} for {states}, {format_bytes(has)} are free"
    slow = f"each update reads and writes it, predicted at {DISK:g} GB/s, a guess"
    return f"disk: {sizes} for {states} of the {format_bytes(has)} that are free here; {slow}"
