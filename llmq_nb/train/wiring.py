"""Ranks from the plan's buffers: tensors, the model that uses them and the optimizer's states.

Only `train` wires: the model sees weights through a protocol, and here its stores are built from
the plan: resident, of what lies on the host (`train.host_stores`), or of what all ranks hold
together (`train.sharding`). An engine gives memory (`allocate`), operations and copies; the rest is
the same for all.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmq_nb.config import Config
from llmq_nb.core.dtype import M_GROUP
from llmq_nb.core.host import check_host_memory
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.activations import BlockActivations, Gradients, HeadActivations
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.ops import Inputs, Ops
from llmq_nb.model.parameters import Parameter, model_parameters, tensor_ids
from llmq_nb.model.recompute import dropped_activations
from llmq_nb.model.transformer import Transformer
from llmq_nb.model.weights import ResidentResiduals, ResidentStore
from llmq_nb.offload.disk import ScratchFile
from llmq_nb.offload.disk_states import DiskStates, Done, Fence
from llmq_nb.offload.optimizer_state import StreamedStates
from llmq_nb.offload.transfer import ImmediateTransfer
from llmq_nb.plan.buffers import Plan
from llmq_nb.plan.places import STAGES, has_master, shards_gradients, streamed_states
from llmq_nb.plan.shards import (
    elements,
    shard_range,
    shards_quants,
    shards_weight,
)
from llmq_nb.train.fp8_slots import Fp8Slots
from llmq_nb.train.host_stores import (
    MakeTransfer,
    disk_states,
    gathered_weights,
    host_gradients,
    host_residuals,
    shared_gradients,
    streamed,
)
from llmq_nb.train.rank import Rank, State
from llmq_nb.train.sharding import (
    RECODE,
    Member,
    Seats,
    gradient_shard,
    make_group,
    spread_states,
)

Disk = tuple[ScratchFile | None, Fence]
NO_DISK: Disk = (None, Done())


def allocate(plan: Plan) -> dict[str, Tensor]:
    """The plan in host memory: an allocation a place, every buffer a view, all zeros. UserError.

    What is on the disk has no data yet.
    """
    # the zeros are taken page by page, without a refusal
    check_host_memory(plan.total + plan.host_total)
    memory = {
        "device": np.zeros(plan.total, np.uint8),
        "host": np.zeros(plan.host_total, np.uint8),
    }
    tensors = {}
    for buffer, offset in zip(plan.buffers, plan.offsets, strict=True):
        if buffer.place == "disk":
            tensors[buffer.name] = Tensor(buffer.name, buffer.shape, buffer.dtype, None)
            continue
        data = memory[buffer.place][offset : offset + buffer.nbytes].view(buffer.dtype.numpy)
        tensors[buffer.name] = Tensor(
            buffer.name,
            buffer.shape,
            buffer.dtype,
            data.reshape(buffer.shape),
            host=buffer.place == "host",
        )
    return tensors


def make_ranks(
    config: Config,
    model: ModelConfig,
    seats: Seats,
    transfers: Sequence[MakeTransfer],
    disk: Disk = NO_DISK,
) -> list[Rank]:
    """Wire this machine's ranks of a run. transfers: of each. disk: as in `make_rank`; several
    ranks have none."""
    if len(seats.tensors) == 1:
        tensors, ops = seats.tensors[0], seats.ops[0]
        return [make_rank(config, model, tensors, ops, transfers[0], disk=disk)]
    group, out = make_group(config, model, seats), []
    for place, (index, ops, transfer) in enumerate(
        zip(seats.local, seats.ops, transfers, strict=True)
    ):
        seats.activate[place]()
        member = Member(index, place, seats, group)
        out.append(make_rank(config, model, seats.tensors[index], ops, transfer, member))
    return out


def run_states(
    config: Config, model: ModelConfig, ranks: Sequence[Rank], seats: Seats
) -> list[State]:
    """Each parameter's state as a whole, over however many ranks and machines."""
    if len(seats.tensors) == 1:
        return ranks[0].states
    states = spread_states(config, model, seats.tensors, seats.local)
    return [State(**fields) for fields in states]


def make_rank(
    config: Config,
    model: ModelConfig,
    tensors: dict[str, Tensor],
    ops: Ops,
    transfer: MakeTransfer = ImmediateTransfer,
    member: Member | None = None,
    disk: Disk = NO_DISK,
) -> Rank:
    """Wire a rank; an inference plan gives one without gradients.

    transfer: makes the copies of one store between device and host. member: its seat among several;
    None: it holds everything. disk: the file of `memory.disk`, None where steps are only prepared,
    and how to wait for an update.
    """
    tensors = dict(tensors)
    slots = Fp8Slots(config, model, tensors)
    slots.give_weights()
    parameters = model_parameters(model)
    training = f"gradients/{parameters[0].name}" in tensors
    blocks = [_block(tensors, model, layer) for layer in range(model.L)]
    for layer, block in enumerate(blocks):
        slots.give_activations(block, layer)
    head = HeadActivations(*(tensors[f"head/{f}"] for f in _fields(HeadActivations)))
    host_stores: list[Any] = []
    weights: Any = _store(model, parameters, tensors, "weights")
    if store := gathered_weights(config, model, tensors, weights, transfer, member):
        weights = store
        host_stores.append(store)
    gradients: Any = _store(model, parameters, tensors, "gradients" if training else "weights")
    if member is not None:
        gradients = shared_gradients(config, model, tensors, member)
    elif training and "gradients" in config.memory.offload:
        gradients = host_gradients(config, model, tensors, gradients, transfer)
        host_stores.append(gradients)
    residuals: Any = ResidentResiduals()
    if "residual" in config.memory.offload:
        residuals = host_residuals(config, model, tensors, transfer)
        host_stores.append(residuals)
    transformer = Transformer(
        config=model,
        ops=ops,
        inputs=Inputs(*(tensors[f"inputs/{f}"] for f in _fields(Inputs))),
        weights=weights,
        gradients=gradients,
        blocks=blocks,
        head=head,
        g=_gradients(tensors, model, slots),
        dropped=dropped_activations(config.memory.recompute),
        residuals=residuals,
        adds_up=not shards_gradients(config),
        caches=[tensors[cache_name(layer)] for layer in range(model.L)]
        if cache_name(0) in tensors
        else None,
    )
    ids = tensor_ids(parameters)
    optimized = f"m/{parameters[0].name}" in tensors
    states = [_state(config, p, ids[p.name], tensors, member) for p in parameters if optimized]
    states = [state for state in states if state.master.size]
    updates: Any = states
    if states and config.memory.disk:
        updates = disk_states(config, model, tensors, states, *disk)
        host_stores.append(updates)
    elif states and streamed_states(config):
        updates = streamed(config, model, tensors, states, transfer)
        host_stores.append(updates)
    rank = Rank(
        transformer,
        states,
        tensors["norm/norms"],
        tensors["norm/total"],
        updates=updates,
        host_stores=host_stores,
    )
    quantised = [tensors[f"weights/{p.name}"] for p in parameters]
    rank.fp8_weights = [w for w in quantised if w.fp8 is not None]
    if member is None:
        rank.gradients = [s.gradient for s in states]
        parts = updates.items if isinstance(updates, StreamedStates | DiskStates) else updates
        sliced = {s.parameter.name for s in parts if not s.whole}
        rank.recoded = [s.weight for s in states if s.parameter.name in sliced]
        return rank
    rank.gradients = [gradient_shard(config, p, tensors, member.index) for p in parameters]
    own = [
        _own_codes(config, w, p, member)
        for w, p in zip(quantised, parameters, strict=True)
        if w.fp8 is not None
    ]
    rank.fp8_weights = rank.recoded = [w for w in own if w.size]
    rank.group, rank.activate = member.group, member.seats.activate[member.place]
    rank.all_norms = tensors["ranks/norms"]
    if own:
        rank.all_slots = tensors["ranks/slots"]
        rank.slots = tensors["fp8/slots"].rows(0, rank.all_slots.shape[1])
    return rank


def _own_codes(config: Config, weight: Tensor, p: Parameter, member: Member) -> Tensor:
    """A weight as this rank quantises it: whole, or its shard as rows of a matrix."""
    if not shards_weight(config, p) and not shards_quants(config):
        return weight
    start, stop = shard_range(elements(p), member.ranks, member.index)
    first = 0 if shards_weight(config, p) else start
    rows = weight.view(weight.size).rows(first, first + stop - start)
    slot = None if weight.fp8 is None else dataclasses.replace(weight.fp8, shared=True)
    return dataclasses.replace(rows.view((stop - start) // RECODE, RECODE), fp8=slot)


def cache_name(layer: int) -> str:
    """Name of the buffer of a layer's cached keys and values."""
    return f"cache/kv.{layer}"


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _store(
    model: ModelConfig, parameters: list[Parameter], tensors: dict[str, Tensor], group: str
) -> ResidentStore:
    own = {p.name: tensors[f"{group}/{p.name}"] for p in parameters}
    return ResidentStore(model, parameters, own)


def _block(tensors: dict[str, Tensor], model: ModelConfig, layer: int) -> BlockActivations:
    """A layer's activations: its own buffer, or the one that all layers (or each second) share."""

    def find(field: str) -> Tensor | None:
        if field == "residual" and "stage/residual.0" in tensors:
            return tensors[f"stage/residual.{layer % STAGES}"]
        return tensors.get(f"block/{field}.{layer}", tensors.get(f"block/{field}"))

    found: dict[str, Any] = {field: find(field) for field in _fields(BlockActivations)}
    if not model.qk_norm:
        found["heads"] = found["qkv"]
    return BlockActivations(**found)


def _gradients(tensors: dict[str, Tensor], model: ModelConfig, slots: Fp8Slots) -> list[Gradients]:
    """Each layer's gradients: one memory, and a layer's own slots."""
    residual, heads = tensors["g/residual"], tensors["g/heads"]
    shared = {name: tensors[f"g/{name}"] for name in ("norm_in", "attn", "gate_up", "act")}
    qkv = tensors.get("g/qkv", heads)
    out: list[Gradients] = []
    for layer in range(model.L):
        below = out[-1].residual if out else residual
        g = Gradients(
            residual=residual, residual_mid=residual, residual_in=below, heads=heads, qkv=qkv,
            **shared,
        )  # fmt: skip
        slots.give_gradients(g, layer)
        out.append(g)
    return out


def _state(
    config: Config,
    p: Parameter,
    tensor_id: int,
    tensors: dict[str, Tensor],
    member: Member | None,
) -> State:
    weight = tensors[f"weights/{p.name}"]
    if member is None:
        return State(
            parameter=p,
            tensor_id=tensor_id,
            weight=weight,
            master=tensors[f"master/{p.name}"] if has_master(config) else weight,
            m=tensors[f"m/{p.name}"],
            m_scale=tensors.get(f"m_scale/{p.name}"),
            v=tensors[f"v/{p.name}"],
            gradient=tensors[f"gradients/{p.name}"],
        )
    start, stop = shard_range(elements(p), member.ranks, member.index)
    scales = tensors.get(f"m_scale/{p.name}")

    def own(group: str) -> Tensor:
        return tensors[f"{group}/{p.name}"].rows(0, stop - start)

    if shards_weight(config, p):
        part = own("weights")
    else:
        part = weight.view(weight.size).rows(start, stop)
    if weight.fp8 is not None:  # codes are made when all shards are updated
        part.fp8 = dataclasses.replace(weight.fp8, kept=False)
    return State(
        parameter=p,
        tensor_id=tensor_id,
        weight=part,
        master=own("master") if has_master(config) else part,
        m=own("m"),
        m_scale=None if scales is None else scales.rows(0, -(-(stop - start) // M_GROUP)),
        v=own("v"),
        gradient=gradient_shard(config, p, tensors, member.index),
        first=start,
        whole=False,
    )
