"""What several ranks hold together, from every rank's tensors of the plan: only `train` wires.

A rank's own states are shards; what a checkpoint, an export or a test sees is a `Spread`, a tensor
that knows its parts. Ranks are numbered over machines. Each process wires its own, and knows of the
others' tensors what the plan says (`elsewhere`): enough to send what they pull and to name a part.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.comm.collectives import all_gather, rows
from llmq_nb.comm.exchange import Exchange, Seat
from llmq_nb.comm.gradients import End, GradientReduction, Run, sums_of
from llmq_nb.comm.link import Link, Pull
from llmq_nb.comm.wire import NoWire, Phase, Wire, split
from llmq_nb.config import Config
from llmq_nb.core.dtype import M_GROUP
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.ops import Ops
from llmq_nb.model.parameters import Parameter, model_parameters, tensor_ids
from llmq_nb.model.weights import Unit, unit_of
from llmq_nb.plan.buffers import Plan
from llmq_nb.plan.places import STAGES, has_master, shards_gradients
from llmq_nb.plan.shards import elements, shard_range, shards_weight
from llmq_nb.train.host_stores import full_gradient

Tensors = dict[str, Tensor]
RECODE = 256
"""Elements of a row of a shard that is quantised: matrices have multiples of it."""


@dataclasses.dataclass(slots=True)
class Seats:
    """All ranks' tensors by the plan's names, in the order of the ranks, and of the ranks `local`
    of this machine the operations and links.

    Each of a rank's LINKS has a queue of its own. activate: makes a rank's device current. wire: to
    the other machines.
    """

    tensors: list[Tensors]
    ops: list[Ops]
    links: list[tuple[Link, ...]]
    activate: list[Callable[[], None]]
    local: range
    wire: Wire = dataclasses.field(default_factory=NoWire)


def elsewhere(plan: Plan) -> Tensors:
    """The tensors of a rank on another machine: their addresses mean nothing here."""
    return {b.name: Tensor(b.name, b.shape, b.dtype, 0) for b in plan.buffers}


def all_tensors(plan: Plan, local: Sequence[Tensors], ranks: range, world: int) -> list[Tensors]:
    """Those of all ranks, of which `ranks` are here and have `local`."""
    return [local[r - ranks.start] if r in ranks else elsewhere(plan) for r in range(world)]


@dataclasses.dataclass(slots=True)
class Group:
    """The ranks' common work. norms, slots, weights: what all pull in a phase."""

    exchange: Exchange
    reduction: GradientReduction
    norms: Phase
    slots: Phase
    weights: Phase

    def share(self, phase: Phase) -> None:
        """All ranks pull; nobody goes on before all have what they lacked."""
        if phase:
            self.exchange.share(phase)


@dataclasses.dataclass(slots=True)
class Member:
    """One rank's seat. index: its number. place: among the ranks of this machine."""

    index: int
    place: int
    seats: Seats
    group: Group

    @property
    def ranks(self) -> int:
        """Their number."""
        return len(self.seats.tensors)

    def pull_shards(self, here: Tensor, name: str) -> list[Pull]:
        """Copies of a tensor's shards of all ranks into one place."""
        return all_gather(here, [tensors[name] for tensors in self.seats.tensors])


def make_group(config: Config, model: ModelConfig, seats: Seats) -> Group:
    """Wire the ranks to each other."""
    parameters, ranks, local = model_parameters(model), len(seats.tensors), seats.local
    ids = tensor_ids(parameters)
    every = shards_gradients(config)
    runs: list[dict[Unit, list[Run]]] = []
    for rank in range(ranks):
        own: dict[Unit, list[Run]] = {}
        for p in parameters:
            own.setdefault(unit_of(p), []).extend(_runs(config, p, ids[p.name], seats, rank, model))
        runs.append(own)
    ends = [
        End(links[1], _accumulate(ops, links[1]), activate)
        for ops, links, activate in zip(seats.ops, seats.links, seats.activate, strict=True)
    ]
    turns = {layer: layer % STAGES for layer in range(model.L)} if every else {}
    exchange = Exchange(
        [Seat(links[2], go) for links, go in zip(seats.links, seats.activate, strict=True)],
        seats.wire,
    )
    replicated = [p for p in parameters if not shards_weight(config, p)]
    weights: list[list[Pull]] = []
    for rank, tensors in enumerate(seats.tensors):
        pulls: list[Pull] = []
        for p in replicated:
            name, n = f"weights/{p.name}", elements(p)
            parts = [
                _flat(other[name]).rows(*shard_range(n, ranks, r))
                for r, other in enumerate(seats.tensors)
            ]
            pulls += [x for x in all_gather(_flat(tensors[name]), parts) if x.rank != rank]
        weights.append(pulls)
    norms = _rows(seats, "norm/norms", "ranks/norms")
    slots: list[list[Pull]] = [[] for _ in seats.tensors]
    if "ranks/slots" in seats.tensors[0]:
        slots = _rows(seats, "fp8/slots", "ranks/slots")
    sums = sums_of(runs, local)
    reduction = GradientReduction(ends, sums, turns, every=every, wire=seats.wire)
    return Group(exchange, reduction, *(split(x, local) for x in (norms, slots, weights)))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.size)


def _rows(seats: Seats, source: str, target: str) -> list[list[Pull]]:
    """Each rank's `source`, as much of it as a row of `target` holds, into a row of all others'."""
    sources = [_flat(tensors[source]) for tensors in seats.tensors]
    out = []
    for tensors in seats.tensors:
        place = tensors[target]
        out.append(rows(place, sources, first=0, count=place.size // place.shape[0]))
    return out


def _accumulate(ops: Ops, link: Link) -> Callable[[Run, bool], None]:
    def add(run: Run, start: bool) -> None:
        ops.accumulate(
            run.shard,
            run.received,
            tensor_id=run.tensor_id,
            first_element=run.first,
            start=start,
            queue=link.queue,
        )

    return add


def gradient_shard(config: Config, p: Parameter, tensors: Tensors, rank: int) -> Tensor:
    """A rank's shard of a parameter's summed gradient, flat."""
    n, ranks = elements(p), config.world_size
    start, stop = shard_range(n, ranks, rank)
    own = _flat(tensors[f"gradients/{p.name}"])
    return own.rows(0, stop - start) if shards_gradients(config) else own.rows(start, stop)


def _runs(
    config: Config, p: Parameter, tensor_id: int, seats: Seats, rank: int, model: ModelConfig
) -> list[Run]:
    n, ranks = elements(p), len(seats.tensors)
    start, stop = shard_range(n, ranks, rank)
    received = seats.tensors[rank]["ranks/gradients"]
    at_once = received.shape[1]
    shard = gradient_shard(config, p, seats.tensors[rank], rank)
    sources = [_flat(full_gradient(config, model, t, p)) for t in seats.tensors]
    out = []
    for first in range(start, stop, at_once):
        count = min(at_once, stop - first)
        pulls = tuple(rows(received, sources, first=first, count=count))
        run = shard.rows(first - start, first - start + count)
        out.append(Run(pulls, received, run, tensor_id, first))
    return out


# ---- whole tensors out of parts ----------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A flat run of a tensor on a rank, from its element `first` on. shared: other machines lack
    it."""

    rank: int
    first: int
    tensor: Tensor
    shared: bool = True


class Spread(Tensor):
    """A tensor whose parts lie on several ranks; where each has all of it, all are alike.

    Engines read and write it as a whole. `data` is the tuple of parts.
    """

    __slots__ = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """In the order of the ranks."""
        return self.data

    @property
    def address(self) -> int:
        """Of no use: it has many."""
        raise TypeError(f"{self.name} lies on several ranks")

    def rows(self, start: int, stop: int) -> "Spread":
        """Rows start .. stop - 1, sharing the memory."""
        width = self.size // self.shape[0]
        begin, end = start * width, stop * width
        parts = []
        for part in self.parts:
            low, high = max(part.first, begin), min(part.first + part.tensor.size, end)
            if low < high:
                own = part.tensor.rows(low - part.first, high - part.first)
                parts.append(Part(part.rank, low - begin, own, part.shared))
        return Spread(self.name, (stop - start, *self.shape[1:]), self.dtype, tuple(parts))

    def view(self, *shape: int) -> "Spread":
        """The same parts under another shape."""
        return Spread(self.name, shape, self.dtype, self.data)


def sharded(p: Parameter, parts: Sequence[Tensor]) -> Spread:
    """A tensor of a parameter's shape from every rank's shard."""
    n, ranks = elements(p), len(parts)
    own = [Part(r, shard_range(n, ranks, r)[0], _flat(t)) for r, t in enumerate(parts) if t.size]
    return Spread(parts[0].name, p.shape, parts[0].dtype, tuple(own))


def sharded_scales(p: Parameter, parts: Sequence[Tensor]) -> Spread:
    """The scales of an e4m3 first moment."""
    n, ranks = elements(p), len(parts)
    starts = [shard_range(n, ranks, r)[0] // M_GROUP for r in range(ranks)]
    own = [Part(r, s, t) for r, (s, t) in enumerate(zip(starts, parts, strict=True)) if t.size]
    return Spread(parts[0].name, (-(-n // M_GROUP),), parts[0].dtype, tuple(own))


def replicated(whole: Sequence[Tensor], local: range) -> Spread:
    """A tensor that every rank has; its parts are those of this machine."""
    first = whole[0]
    own = tuple(Part(r, 0, _flat(whole[r]), shared=False) for r in local)
    return Spread(first.name, first.shape, first.dtype, own)


def parts_of(tensor: Tensor, local: range) -> tuple[Part, ...]:
    """The parts of any tensor on the ranks `local`: one on the first of what has no others."""
    if not isinstance(tensor, Spread):
        return (Part(local.start, 0, tensor),)
    return tuple(part for part in tensor.parts if part.rank in local)


def read_spread(tensor: Spread, read: Callable[[Part], NDArray[Any]]) -> NDArray[Any]:
    """The whole content. read: a part, of whatever rank."""
    out, end = np.empty(tensor.size, tensor.dtype.numpy), 0
    for part in tensor.parts:
        if part.first + part.tensor.size > end:  # else it is a copy of what was read
            out[part.first : part.first + part.tensor.size] = read(part)
            end = part.first + part.tensor.size
    return out.reshape(tensor.shape)


def write_spread(
    tensor: Spread, array: NDArray[Any], write: Callable[[Part, NDArray[Any]], None]
) -> None:
    """Set the whole content, every copy of it. write: to a part, of whatever rank."""
    flat = np.ascontiguousarray(array).reshape(-1)
    for part in tensor.parts:
        write(part, flat[part.first : part.first + part.tensor.size])


def spread_states(
    config: Config, model: ModelConfig, tensors: Sequence[Tensors], local: range
) -> list[dict[str, Any]]:
    """The fields of each parameter's state over all ranks, in forward order. local: those here."""
    out, ranks = [], len(tensors)

    def own(group: str, p: Parameter) -> list[Tensor]:
        n = elements(p)
        found = []
        for r, t in enumerate(tensors):
            start, stop = shard_range(n, ranks, r)
            found.append(t[f"{group}/{p.name}"].rows(0, stop - start))
        return found

    parameters = model_parameters(model)
    ids = tensor_ids(parameters)
    for p in parameters:
        if shards_weight(config, p):
            weight = sharded(p, own("weights", p))
        else:
            weight = replicated([t[f"weights/{p.name}"] for t in tensors], local)
        shards = [gradient_shard(config, p, t, r) for r, t in enumerate(tensors)]
        scales = None
        if f"m_scale/{p.name}" in tensors[0]:
            groups = [-(-x.size // M_GROUP) for x in shards]
            own_scales = [
                t[f"m_scale/{p.name}"].rows(0, g) for t, g in zip(tensors, groups, strict=True)
            ]
            scales = sharded_scales(p, own_scales)
        out.append(
            {
                "parameter": p,
                "tensor_id": ids[p.name],
                "weight": weight,
                "master": sharded(p, own("master", p)) if has_master(config) else weight,
                "m": sharded(p, own("m", p)),
                "m_scale": scales,
                "v": sharded(p, own("v", p)),
                "gradient": sharded(p, shards),
            }
        )
    return out
