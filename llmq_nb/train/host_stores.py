"""Stores for what `memory.offload` moves or several ranks share, from the plan's tensors: only
`train` wires.

The model sees weights and gradients by unit and residuals by layer; the optimizer step goes over
states. Each store copies on streams of its own.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from llmq_nb.comm.gradients import SharedGradients
from llmq_nb.comm.link import LinkTransfer
from llmq_nb.config import Config
from llmq_nb.core.dtype import M_GROUP, DType
from llmq_nb.core.files import BLOCK
from llmq_nb.core.tensor import Fp8Slot, Tensor
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import Parameter, layer_parameters, model_parameters
from llmq_nb.model.weights import Unit, Weights, WeightStore, unit_of
from llmq_nb.offload.disk import OnDisk, ScratchFile
from llmq_nb.offload.disk_states import DiskSlice, DiskStates, Fence
from llmq_nb.offload.host_gradients import HostGradients
from llmq_nb.offload.host_residuals import HostResiduals
from llmq_nb.offload.host_weights import HostWeights, Staged
from llmq_nb.offload.optimizer_state import Slice, StreamedStates
from llmq_nb.offload.transfer import Transfer, copies_of
from llmq_nb.plan.places import (
    DISK_STAGES,
    STAGES,
    STREAMED,
    Layout,
    Record,
    disk_bytes,
    disk_records,
    gradient_layout,
    kept_residuals,
    quant_layout,
    shards_gradients,
    slice_elements,
    staged_quants,
    staged_weights,
    streamed_states,
    weight_layout,
)

Tensors = dict[str, Tensor]
MakeTransfer = Callable[[], Transfer]
StateT = TypeVar("StateT")


class Member(Protocol):
    """One rank among several, as the stores need it (`train.sharding`)."""

    @property
    def place(self) -> int: ...

    @property
    def seats(self) -> Any: ...

    @property
    def group(self) -> Any: ...

    def pull_shards(self, here: Tensor, name: str) -> Iterable[Any]: ...


def gathered_weights(
    config: Config,
    model: ModelConfig,
    tensors: Tensors,
    resident: WeightStore,
    make: MakeTransfer,
    member: Member | None = None,
) -> HostWeights[Weights] | None:
    """The blocks whose weights (or codes) products read from the host or from all ranks' shards.

    None: there are none.
    """
    staged: dict[Unit, Staged[Weights]] = {}

    def copies(pairs: list[tuple[Tensor, str]]) -> tuple[Any, ...]:
        if member is None:
            return copies_of((here, tensors[name]) for here, name in pairs)
        return tuple(pull for here, name in pairs for pull in member.pull_shards(here, name))

    for layer in staged_weights(config, model):
        turn = layer % STAGES
        staging, layout = tensors[f"stage/weights.{turn}"], weight_layout(config, model)
        weights, pairs = copy.copy(resident.get(layer)), []
        for p in _laid_out(model, layer, layout):
            own = tensors[f"weights/{p.name}"]
            here = dataclasses.replace(_place(staging, layout, p), name=own.name, fp8=own.fp8)
            setattr(weights, p.field, here)
            pairs.append((here, own.name))
        staged[layer] = Staged(weights, turn, staging, copies(pairs))
    for layer in staged_quants(config, model):
        turn = layer % STAGES
        staging, layout = tensors[f"stage/quants.{turn}"], quant_layout(model)
        weights, pairs = copy.copy(resident.get(layer)), []
        for p in _laid_out(model, layer, layout):
            own = tensors[f"weights/{p.name}"]
            here = _place(staging, layout, p)
            slot: Fp8Slot = dataclasses.replace(_slot(own), codes=here)
            # a shard's values are not read: only the codes of all shards are
            setattr(weights, p.field, dataclasses.replace(own, shape=p.shape, fp8=slot))
            pairs.append((here, f"quants/{p.name}"))
        staged[layer] = Staged(weights, turn, staging, copies(pairs))
    if not staged:
        return None
    transfer = make() if member is None else LinkTransfer(member.seats.links[member.place][0])
    return HostWeights(resident, staged, transfer)


def shared_gradients(
    config: Config, model: ModelConfig, tensors: Tensors, member: Member
) -> SharedGradients[Weights]:
    """Gradients that are summed over ranks when their unit is released."""
    units: dict[Unit, Weights] = {}
    for p in model_parameters(model):
        weights = units.setdefault(unit_of(p), Weights())
        field = "table" if p.kind == "embedding" else p.field
        setattr(weights, field, full_gradient(config, model, tensors, p))
    if model.tied:
        units["head"].table = units["embedding"].table
    return SharedGradients(member.group.reduction, member.place, units)


def full_gradient(config: Config, model: ModelConfig, tensors: Tensors, p: Parameter) -> Tensor:
    """Where backward writes a parameter's gradient, before it is summed over ranks."""
    if not shards_gradients(config):
        return tensors[f"gradients/{p.name}"]
    if p.layer is None:
        return tensors[f"full/gradients/{p.name}"]
    staging = tensors[f"stage/gradients.{p.layer % STAGES}"]
    return _place(staging, gradient_layout(config, model), p)


def host_gradients(
    config: Config, model: ModelConfig, tensors: Tensors, resident: WeightStore, make: MakeTransfer
) -> HostGradients[Weights]:
    """The gradients of all blocks."""
    layout = gradient_layout(config, model)
    staged: dict[Unit, Staged[Weights]] = {}
    for layer in range(model.L):
        turn = layer % STAGES
        staging, weights, pairs = tensors[f"stage/gradients.{turn}"], Weights(), []
        for p in _laid_out(model, layer, layout):
            here = _place(staging, layout, p)
            setattr(weights, p.field, here)
            pairs.append((here, tensors[f"gradients/{p.name}"]))
        staged[layer] = Staged(weights, turn, staging, copies_of(pairs))
    return HostGradients(resident, staged, make())


def host_residuals(
    config: Config, model: ModelConfig, tensors: Tensors, make: MakeTransfer
) -> HostResiduals:
    """The inputs of all blocks."""
    staging = [tensors[f"stage/residual.{i}"] for i in range(min(STAGES, model.L))]
    copies = {
        layer: copies_of([(staging[layer % STAGES], tensors[f"block/residual.{layer}"])])
        for layer in kept_residuals(config, model)
    }
    return HostResiduals(staging, copies, make())


def streamed(
    config: Config, model: ModelConfig, tensors: Tensors, states: Sequence[Any], make: MakeTransfer
) -> StreamedStates[Any]:
    """The optimizer's states in slices, those on the host through staging buffers."""
    names = streamed_states(config)
    if "m" in names and config.optimizer.m == "e4m3":
        names.append("m_scale")
    staging = [[tensors[f"stage/{name}.{turn}"] for name in names] for turn in range(STAGES)]
    slices: list[Slice[Any]] = []
    turn = 0
    for state in states:
        moved = [n for n in names if (t := getattr(state, n)) is not None and t.host]
        if state.master.size < STREAMED or not moved:
            slices.append(Slice(state))
            continue
        for start in range(0, state.master.size, slice_elements(model)):
            stop = min(start + slice_elements(model), state.master.size)
            part, pairs = _cut(state, start, stop), []
            for name in moved:
                host = getattr(part, name)
                here = tensors[f"stage/{name}.{turn}"].rows(0, host.size)
                pairs.append((here, host))
                here = dataclasses.replace(here, fp8=host.fp8)
                if name == "master" and state.weight is state.master:
                    part = dataclasses.replace(part, weight=here)
                part = dataclasses.replace(part, **{name: here})
            slices.append(Slice(part, turn, copies_of(pairs)))
            turn = (turn + 1) % STAGES
    return StreamedStates(slices, staging, make())


def on_disk(
    config: Config, model: ModelConfig, tensors: Tensors, announce: Callable[[str], None]
) -> ScratchFile | None:
    """The file of `memory.disk`, and its tensors' data in it; None: nothing is on the disk.
    UserError."""
    records = disk_records(config, model)
    if not records:
        return None
    file = ScratchFile(Path(config.out_dir), disk_bytes(records), announce=announce)
    pieces: dict[str, list[tuple[int, int]]] = {}
    for record in records:
        for name, (first, count, dtype) in record.parts.items():
            piece = record.offset + first, count * dtype.itemsize
            pieces.setdefault(f"{name}/{record.parameter.name}", []).append(piece)
    for name, where in pieces.items():
        tensors[name].data = OnDisk(file, where)
    return file


def disk_states(
    config: Config,
    model: ModelConfig,
    tensors: Tensors,
    states: Sequence[Any],
    file: ScratchFile | None,
    fence: Fence,
) -> DiskStates[Any]:
    """The optimizer's states, those on the disk in slices through pinned buffers."""
    records: dict[str, list[Record]] = {}
    for record in disk_records(config, model):
        records.setdefault(record.parameter.name, []).append(record)
    slices: list[DiskSlice[Any]] = []
    turn = 0
    for state in states:
        for record in records.get(state.parameter.name, ()):
            staging = tensors[f"stage/disk.{turn}"]
            start = -staging.address % BLOCK
            part = _cut(state, record.start, record.stop, without=record.parts)
            here = {
                name: _bytes_as(staging, start + first, count, dtype, getattr(state, name).name)
                for name, (first, count, dtype) in record.parts.items()
            }
            part = dataclasses.replace(part, **here)
            where = staging.address + start, record.nbytes, record.offset
            slices.append(DiskSlice(part, turn, *where))
            turn = (turn + 1) % DISK_STAGES
        if state.parameter.name not in records:
            slices.append(DiskSlice(state))
    return DiskStates(slices, file, fence, DISK_STAGES)


def _bytes_as(staging: Tensor, start: int, count: int, dtype: DType, name: str) -> Tensor:
    """`count` elements from byte `start` of a buffer on."""
    if isinstance(staging.data, int):
        data: Any = staging.data + start
    else:
        raw = staging.data.reshape(-1).view(np.uint8)
        data = raw[start : start + count * dtype.itemsize].view(dtype.numpy)
    return Tensor(name, (count,), dtype, data, host=True)


def _cut(state: StateT, start: int, stop: int, without: Iterable[str] = ()) -> StateT:
    """Elements start .. stop - 1 of a state's tensors; kept codes are left for later.

    without: names of tensors that come from elsewhere and stay as they are.
    """

    def flat(tensor: Tensor, first: int, last: int) -> Tensor:
        out = tensor.view(tensor.size).rows(first, last)
        if tensor.fp8 is None:
            return out
        slot = dataclasses.replace(tensor.fp8, kept=False)
        return dataclasses.replace(out, fp8=slot)

    whole: Any = state
    parts: dict[str, Any] = {
        name: flat(getattr(whole, name), start, stop)
        for name in ("weight", "master", "m", "v", "gradient")
        if name not in without
    }
    if whole.weight is whole.master:
        parts["master"] = parts["weight"]
    if whole.m_scale is not None and "m_scale" not in without:
        parts["m_scale"] = flat(whole.m_scale, start // M_GROUP, -(-stop // M_GROUP))
    return dataclasses.replace(whole, first=whole.first + start, whole=False, **parts)


def _laid_out(model: ModelConfig, layer: int, layout: Layout) -> Iterable[Parameter]:
    return [p for p in layer_parameters(model, layer) if p.field in layout.fields]


def _place(staging: Tensor, layout: Layout, p: Parameter) -> Tensor:
    """A parameter's part of a staging buffer."""
    start, shape = layout.fields[p.field]
    size = 1
    for extent in shape:
        size *= extent
    return staging.rows(start, start + size).view(*shape)


def _slot(tensor: Tensor) -> Fp8Slot:
    assert tensor.fp8 is not None, f"{tensor.name} has codes and no FP8 slot"
    return tensor.fp8
