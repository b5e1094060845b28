"""What `memory.offload` moves to pinned host memory, and how a block lies in a staging buffer.

    m, v, master   the optimizer's states. Where master weights have the weights' format, `master`
                   moves the weights of the blocks' matrices instead: they are one memory
    quants         the row-major codes of FP8 weights; transposed ones are made where they are read
    gradients      those of the blocks
    residual       the input of each block, from its last use in forward to backward

What products read or write on the host goes through one of two staging buffers on the device, by
turns. A block's tensors lie in it as they lie on the host, so a block is one copy. Weights that
products read as codes alone are not staged: only the optimizer touches their values.

`memory.disk` moves m or v into a file instead. An update takes it in slices; a slice of all states
that are there is one record of the file, of whole blocks, and passes through pinned buffers.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from llmq_nb.config import Config
from llmq_nb.core.arena import aligned
from llmq_nb.core.dtype import M_GROUP, DType
from llmq_nb.core.files import BLOCK, in_blocks
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.fp8 import BY_WEIGHT, fp8_layers, keeps_quants
from llmq_nb.model.parameters import Parameter, layer_parameters, model_parameters

Place = Literal["device", "host", "disk"]
STAGES = 2
"""Staging buffers of a kind: one is used while the other one is filled or emptied."""
SLICE = 16 << 20
"""Elements of an optimizer state that are staged at once: 32 MiB of BF16, 0.7 ms at 50 GB/s."""
STREAMED = 1 << 16
"""Elements from which a state is worth copies of its own; smaller ones are read in place, and are
never on the disk."""
DISK_STAGES = 3
"""Records in memory: one is read, one is updated, one is written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A block in a staging buffer of `size` elements: (first element, shape) of each field."""

    dtype: DType
    size: int
    fields: dict[str, tuple[int, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Elements start .. stop - 1 of a parameter's states in the file, from byte `offset` on.

    parts: (first byte in the record, elements, format) of m, m_scale and v, those that are there.
    """

    parameter: Parameter
    start: int
    stop: int
    offset: int
    nbytes: int
    parts: dict[str, tuple[int, int, DType]]


def has_master(config: Config) -> bool:
    """Whether the optimizer updates a copy apart from the weights that products read."""
    return config.optimizer.master != config.precision.dtype


def place_of(config: Config, group: str, parameter: Parameter) -> Place:
    """Where a parameter's weights, gradients, master, m or v live."""
    moved = config.memory.offload
    if group == "weights":
        host = "master" in moved and not has_master(config) and parameter.kind == "matrix"
    elif group == "gradients":
        host = "gradients" in moved and parameter.layer is not None
    elif group in config.memory.disk and _size(parameter.shape) >= STREAMED:
        return "disk"
    else:
        host = group in moved
    return "host" if host else "device"


def offloads_quants(config: Config) -> bool:
    """Whether there are kept codes and the host keeps them."""
    return keeps_quants(config) and "quants" in config.memory.offload


def cuts_weights(config: Config) -> bool:
    """Whether each of several ranks holds a part of the blocks' matrices only. What lives on the
    host is always cut: one copy for all ranks."""
    host = "master" in config.memory.offload and not has_master(config)
    return config.world_size > 1 and (config.parallel.shard_weights or host)


def staged_weights(config: Config, model: ModelConfig) -> list[int]:
    """Layers whose products read the values of weights that live on the host, or in shards."""
    host = "master" in config.memory.offload and not has_master(config)
    if not host and not cuts_weights(config):
        return []
    codes = set(fp8_layers(config, model)) if keeps_quants(config) else set()
    return [layer for layer in range(model.L) if layer not in codes]


def staged_quants(config: Config, model: ModelConfig) -> list[int]:
    """Layers whose codes are brought from the host, or from shards."""
    shards = cuts_weights(config) and keeps_quants(config)
    return fp8_layers(config, model) if shards or offloads_quants(config) else []


def weight_layout(config: Config, model: ModelConfig) -> Layout:
    """A block's matrices."""
    return _layout(_matrices(model), DType(config.precision.dtype))


def quant_layout(model: ModelConfig) -> Layout:
    """The codes of a block's matrices."""
    return _layout(_matrices(model), DType.E4M3)


def shards_gradients(config: Config) -> bool:
    """Whether each micro-step's gradients are added to shards."""
    return config.world_size > 1 and config.parallel.shard_gradients


def stages_gradients(config: Config) -> bool:
    """Whether backward writes a block's gradients into a staging buffer, from where they go to the
    host or are added to shards."""
    return shards_gradients(config) or "gradients" in config.memory.offload


def gradient_layout(config: Config, model: ModelConfig) -> Layout:
    """All gradients of a block."""
    p = config.precision
    return _layout(layer_parameters(model, 0), DType(p.gradient_accumulation or p.dtype))


def kept_residuals(config: Config, model: ModelConfig) -> list[int]:
    """Layers whose residual goes to the host; the last ones stay in the staging buffers."""
    return list(range(max(0, model.L - STAGES))) if "residual" in config.memory.offload else []


def streamed_states(config: Config) -> list[str]:
    """States that the optimizer step copies in slices, with `memory.transfer = "copy"`. None beside
    states on the disk: that is what the step waits for."""
    if config.memory.transfer != "copy" or config.memory.disk:
        return []
    return [state for state in ("master", "m", "v") if state in config.memory.offload]


def slice_elements(model: ModelConfig) -> int:
    """Elements of a staging buffer for states: one slice, or the largest parameter's."""
    return min(SLICE, max(_size(p.shape) for p in model_parameters(model)))


def disk_records(config: Config, model: ModelConfig) -> list[Record]:
    """What the file holds, in the order of the parameters."""
    o, out, offset = config.optimizer, list[Record](), 0
    formats = {state: DType(getattr(o, state)) for state in ("m", "v")}
    for p in model_parameters(model) if config.memory.disk else ():
        there = [state for state in formats if place_of(config, state, p) == "disk"]
        size, step = _size(p.shape), slice_elements(model)
        for start in range(0, size, step) if there else ():
            stop, end = min(start + step, size), 0
            parts: dict[str, tuple[int, int, DType]] = {}
            for state in there:
                held = {state: (stop - start, formats[state])}
                if formats[state] == DType.E4M3:
                    held["m_scale"] = (-(-stop // M_GROUP) - start // M_GROUP, DType.FP32)
                for name, (count, dtype) in held.items():
                    parts[name] = (end, count, dtype)
                    end += in_blocks(count * dtype.itemsize)
            out.append(Record(p, start, stop, offset, end, parts))
            offset += end
    return out


def disk_bytes(records: Iterable[Record]) -> int:
    """Of the file."""
    return sum(record.nbytes for record in records)


def disk_stage_bytes(records: Iterable[Record]) -> int:
    """Of a pinned buffer that holds one record at an aligned address."""
    return max((record.nbytes for record in records), default=-BLOCK) + BLOCK


def _matrices(model: ModelConfig) -> list[Parameter]:
    return [p for p in layer_parameters(model, 0) if p.field in BY_WEIGHT]


def _layout(parameters: Iterable[Parameter], dtype: DType) -> Layout:
    fields, end = {}, 0
    for p in parameters:
        fields[p.field] = (end // dtype.itemsize, p.shape)
        end += aligned(_size(p.shape) * dtype.itemsize)
    return Layout(dtype, end // dtype.itemsize, fields)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
