"""Every buffer of a run, from the two configs alone: name, shape, format, group, lifetime.

The plan is a value. The engines allocate it and build their tensors from it; nothing is allocated
after step 0. Scratch has a lifetime in ticks of a micro-step, so that an arena can overlap what is
not alive together; what lives for the whole run has none. What `memory.offload` moves
(`plan.places`) lies in a second allocation, of pinned host memory.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, get_args

from llmq_nb.config import Config
from llmq_nb.core.arena import Slot, aligned, assign_offsets
from llmq_nb.core.dtype import M_GROUP, DType
from llmq_nb.model.config import ALIGNMENT, ModelConfig
from llmq_nb.model.fp8 import (
    BY_INPUT,
    SLOT_WORDS,
    fp8_layers,
    fp8_weights,
    keeps_codes,
    padded_rows,
    slot_names,
)
from llmq_nb.model.parameters import Parameter, model_parameters
from llmq_nb.model.recompute import dropped_activations
from llmq_nb.plan.places import (
    DISK_STAGES,
    STAGES,
    Layout,
    Place,
    disk_bytes,
    disk_records,
    disk_stage_bytes,
    gradient_layout,
    has_master,
    kept_residuals,
    offloads_quants,
    place_of,
    quant_layout,
    shards_gradients,
    slice_elements,
    staged_quants,
    staged_weights,
    stages_gradients,
    streamed_states,
    weight_layout,
)
from llmq_nb.plan.shards import (
    elements,
    received_elements,
    shard_elements,
    shards_quants,
    shards_weight,
)

Group = Literal[
    "weights",
    "quants",
    "master",
    "m",
    "v",
    "gradients",
    "activations",
    "scratch",
    "inputs",
    "results",
    "workspace",
    "staging",
]
HEAD, BACKWARD, UPDATE = 9, 12, 21
"""Ticks: a block's forward takes 0 to 8, the head 9 to 11, recomputation and backward 12 to 20, the
optimizer step 21."""
CHUNK = 2 << 30
"""Most bytes that are pinned at once: a buffer lies in one chunk."""


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """lifetime: first and last tick of a micro-step in which the content matters; None: the run."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    group: Group
    lifetime: tuple[int, int] | None = None
    place: Place = "device"

    @property
    def nbytes(self) -> int:
        """Bytes of the content, without padding between buffers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The buffers of one rank and their offsets in the allocation of their place.

    All ranks have the same: a short shard has a place as long as the others'.
    """

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    total: int
    """Bytes of the device's allocation."""
    host_total: int = 0
    """Bytes of pinned host memory."""
    disk_total: int = 0
    """Bytes of the file with what is on the disk."""

    def group_bytes(self, place: Place = "device") -> dict[Group, int]:
        """Bytes by group; scratch counts what its arena takes, not the sum of its buffers."""
        out: dict[Group, int] = {}
        for buffer in self.buffers:
            if buffer.lifetime is None and buffer.place == place:
                out[buffer.group] = out.get(buffer.group, 0) + aligned(buffer.nbytes)
        if place == "device":
            out["scratch"] = self.total - sum(out.values())
        return out

    def host_chunks(self, limit: int = CHUNK) -> list[tuple[int, int]]:
        """(start, end) of each piece to pin: at most `limit` bytes, or one larger buffer."""
        spans = [
            (offset, offset + aligned(buffer.nbytes))
            for buffer, offset in zip(self.buffers, self.offsets, strict=True)
            if buffer.place == "host"
        ]
        out: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if out and end - out[-1][0] <= limit:
                out[-1] = (out[-1][0], end)
            else:
                out.append((start, end))
        return out


TRAINING: frozenset[Group] = frozenset(get_args(Group))
INFERENCE = TRAINING - {"quants", "master", "m", "v", "gradients", "staging"}


def make_plan(
    config: Config,
    model: ModelConfig,
    groups: frozenset[Group] = TRAINING,
    extra: Sequence[Buffer] = (),
) -> Plan:
    """Plan one rank that holds its part of everything in `groups`. extra: what an engine needs
    besides."""
    buffers = parameter_buffers(config, model) + activation_buffers(config, model)
    buffers = [b for b in buffers if b.group in groups] + list(extra)
    device = [b for b in buffers if b.place == "device"]
    # by group: a block's tensors of one group lie together, as in a staging buffer
    host = sorted((b for b in buffers if b.place == "host"), key=lambda b: b.group)
    disk = [b for b in buffers if b.place == "disk"]
    offsets, total = assign_offsets([Slot(b.nbytes, b.lifetime) for b in device])
    host_offsets, host_total = assign_offsets([Slot(b.nbytes, b.lifetime) for b in host])
    return Plan(
        (*device, *host, *disk),
        (*offsets, *host_offsets, *(0 for _ in disk)),  # the records say where in the file
        total,
        host_total,
        disk_bytes(disk_records(config, model)) if disk else 0,
    )


def parameter_buffers(config: Config, model: ModelConfig) -> list[Buffer]:
    """Weights, their gradients and the optimizer's states.

    Where master weights have the weights' format they are the same memory: no `master` buffer.
    """
    dtype = DType(config.precision.dtype)
    grad_dtype = DType(config.precision.gradient_accumulation or dtype)
    o, ranks = config.optimizer, config.world_size
    out: list[Buffer] = []
    for p in model_parameters(model):
        n = shard_elements(elements(p), ranks)
        own = p.shape if ranks == 1 else (n,)

        def add(
            name: str, group: Group, dtype: DType, shape: tuple[int, ...], p: Parameter = p
        ) -> None:
            place = place_of(config, group, p)
            out.append(Buffer(f"{name}/{p.name}", shape, dtype, group, place=place))

        add("weights", "weights", dtype, own if shards_weight(config, p) else p.shape)
        add("gradients", "gradients", grad_dtype, own if shards_gradients(config) else p.shape)
        if has_master(config):
            add("master", "master", DType(o.master), own)
        add("m", "m", DType(o.m), own)
        if o.m == "e4m3":
            add("m_scale", "m", DType.FP32, (-(-n // M_GROUP),))
        add("v", "v", DType(o.v), own)
    return out


def kept_quants(config: Config, model: ModelConfig) -> list[Buffer]:
    """The codes that live from one optimizer step to the next."""
    weights, ranks = tuple(fp8_weights(config, model)), config.world_size
    cut = ranks if shards_quants(config) else 1
    return list(_kept_quants(weights, offloads_quants(config), cut))


@functools.cache
def _kept_quants(weights: tuple[Parameter, ...], host: bool, ranks: int) -> tuple[Buffer, ...]:
    """Both layouts, or the row-major one where it is on the host or in shards."""
    out: list[Buffer] = []
    for p in weights:
        place = "host" if host else "device"
        shape = p.shape if ranks == 1 else (shard_elements(elements(p), ranks),)
        out.append(Buffer(f"quants/{p.name}", shape, DType.E4M3, "quants", place=place))
        if not host and ranks == 1:
            out.append(Buffer(f"quants_t/{p.name}", p.shape[::-1], DType.E4M3, "quants"))
    return tuple(out)


def activation_buffers(config: Config, model: ModelConfig) -> list[Buffer]:
    """Inputs, activations, their gradients and the results of a micro-step."""
    B, T = config.batch.micro_batch, config.batch.seq_len
    N = B * T
    dtype = DType(config.precision.dtype)
    C, F, attn = model.C, model.F, model.attention_columns
    out = [
        Buffer(f"inputs/{name}", (B, T), DType.INT32, "inputs")
        for name in ("tokens", "targets", "segment_start")
    ]
    out.append(Buffer("inputs/order", (N,), DType.INT32, "inputs"))
    out += block_buffers(config, model)
    if slots := slot_names(config, model):
        out.append(Buffer("fp8/slots", (len(slots), SLOT_WORDS), DType.FP32, "workspace"))
    logits = (head_rows(config), model.padded_vocab)
    out += [
        Buffer("head/residual", (N, C), dtype, "scratch", (HEAD, HEAD + 2)),
        Buffer("head/rstd", (N,), DType.FP32, "scratch", (HEAD, HEAD + 2)),
        Buffer("head/head_in", (N, C), dtype, "scratch", (HEAD, HEAD + 1)),
        Buffer("head/logits", logits, dtype, "scratch", (HEAD, HEAD + 1)),
        Buffer("head/loss", (N,), DType.FP32, "results"),
        Buffer("head/lse", (N,), DType.FP32, "results"),
        Buffer("head/total", (2,), DType.FP32, "results"),
        Buffer("norm/norms", (len(model_parameters(model)),), DType.FP32, "results"),
        Buffer("norm/total", (3,), DType.FP32, "results"),
    ]
    end = BACKWARD + 8
    gradients: list[tuple[str, int, tuple[int, int]]] = [
        ("residual", C, (HEAD + 2, end)),
        ("norm_in", C, (HEAD + 1, end)),
        ("act", F, (BACKWARD + 2, BACKWARD + 2)),
        ("gate_up", 2 * F, (BACKWARD + 2, BACKWARD + 3)),
        ("attn", attn, (BACKWARD + 5, BACKWARD + 6)),
        ("heads", model.qkv_rows, (BACKWARD + 6, BACKWARD + 7)),
    ]
    if model.qk_norm:
        gradients.append(("qkv", model.qkv_rows, (BACKWARD + 7, BACKWARD + 7)))
    out += [Buffer(f"g/{name}", (N, w), dtype, "scratch", life) for name, w, life in gradients]
    return out + staging_buffers(config, model)


def staging_buffers(config: Config, model: ModelConfig) -> list[Buffer]:
    """What stands on the device for what lives on the host: two of a kind, used by turns."""
    out: list[Buffer] = []

    def stage(name: str, size: int, dtype: DType, first: int, last: int) -> None:
        out.extend(
            Buffer(f"stage/{name}.{i}", (size,), dtype, "scratch", (first, last))
            for i in range(STAGES)
        )

    def block(name: str, layout: Layout, first: int) -> None:
        stage(name, layout.size, layout.dtype, first, BACKWARD + 8)

    if staged_weights(config, model):
        block("weights", weight_layout(config, model), 0)
    if staged_quants(config, model):
        block("quants", quant_layout(model), 0)
    if stages_gradients(config):  # what was accumulated comes back during the head
        block("gradients", gradient_layout(config, model), HEAD)
    out += _rank_buffers(config, model)
    o, size = config.optimizer, slice_elements(model)
    for state in streamed_states(config):
        stage(state, size, DType(getattr(o, state)), UPDATE, UPDATE)
        if state == "m" and o.m == "e4m3":
            stage("m_scale", -(-size // M_GROUP), DType.FP32, UPDATE, UPDATE)
    nbytes = disk_stage_bytes(disk_records(config, model))
    if nbytes:
        out.extend(
            Buffer(f"stage/disk.{i}", (nbytes // 4,), DType.INT32, "staging", place="host")
            for i in range(DISK_STAGES)
        )
    return out


def _rank_buffers(config: Config, model: ModelConfig) -> list[Buffer]:
    """What several ranks pass to each other: gradients, and small vectors at the update."""
    ranks, parameters = config.world_size, model_parameters(model)
    if ranks == 1:
        return []
    p = config.precision
    dtype = DType(p.gradient_accumulation or p.dtype)
    at_once = received_elements(max(elements(p) for p in parameters), ranks)
    weights = len(fp8_weights(config, model))
    out = [
        Buffer("ranks/gradients", (ranks, at_once), dtype, "scratch", (HEAD, BACKWARD + 8)),
        Buffer("ranks/norms", (ranks, len(parameters)), DType.FP32, "scratch", (UPDATE, UPDATE)),
    ]
    if weights:
        shape, lifetime = (ranks, weights, SLOT_WORDS), (UPDATE, UPDATE)
        out.append(Buffer("ranks/slots", shape, DType.FP32, "scratch", lifetime))
    if shards_gradients(config):
        out += [
            Buffer(f"full/gradients/{p.name}", p.shape, dtype, "scratch", (HEAD, BACKWARD + 8))
            for p in parameters
            if p.layer is None
        ]
    return out


def block_buffers(config: Config, model: ModelConfig) -> list[Buffer]:
    """A block's activations: one per layer where backward reads them, else one for all.

    A dropped activation is alive from its writing in forward to its last reading in backward: it is
    written twice, and one place serves both.
    """
    B, T = config.batch.micro_batch, config.batch.seq_len
    N, C, F = B * T, model.C, model.F
    dtype, fp32 = DType(config.precision.dtype), DType.FP32
    heads = model.qkv_rows
    fields: dict[str, tuple[tuple[int, ...], DType, tuple[int, int]]] = {
        "residual": ((N, C), dtype, (0, BACKWARD + 8)),
        "attn_rstd": ((N,), fp32, (0, BACKWARD + 8)),
        "attn_in": ((N, C), dtype, (0, BACKWARD + 8)),
        "qkv": ((N, heads), dtype, (1, BACKWARD + 7)),
        "lse": ((B, model.H, T), fp32, (2, BACKWARD + 6)),
        "attn": ((N, model.attention_columns), dtype, (2, BACKWARD + 6)),
        "residual_mid": ((N, C), dtype, (0, BACKWARD + 4)),  # read by the next block's first norm
        "mlp_rstd": ((N,), fp32, (4, BACKWARD + 4)),
        "mlp_in": ((N, C), dtype, (4, BACKWARD + 3)),
        "gate_up": ((N, 2 * F), dtype, (5, BACKWARD + 2)),
        "act": ((N, F), dtype, (5, BACKWARD + 1)),  # one kernel may write both
    }
    if model.qk_norm:
        fields["qk_rstd"] = ((N, model.H + model.G), fp32, (1, BACKWARD + 7))
        fields["heads"] = ((N, heads), dtype, (1, BACKWARD + 6))
    dropped = dropped_activations(config.memory.recompute)
    quantised = fp8_layers(config, model)
    rows = padded_rows(config)
    out = []
    if "residual" in config.memory.offload:
        shape, field_dtype, lifetime = fields.pop("residual")
        out += [
            Buffer(f"stage/residual.{i}", shape, field_dtype, "scratch", lifetime)
            for i in range(min(STAGES, model.L))
        ]
        out += [
            Buffer(f"block/residual.{layer}", shape, field_dtype, "activations", place="host")
            for layer in kept_residuals(config, model)
        ]
    for name, (shape, field_dtype, lifetime) in fields.items():
        layers = list(range(model.L))
        if name in dropped:
            out.append(Buffer(f"block/{name}", shape, field_dtype, "scratch", lifetime))
            continue
        if quantised and keeps_codes(config, name):
            read = (lifetime[0], BY_INPUT[name].forward)
            out.append(Buffer(f"block/{name}", shape, field_dtype, "scratch", read))
            out += [
                Buffer(f"fp8/{name}_t.{layer}", (shape[1], rows), DType.E4M3, "activations")
                for layer in quantised
            ]
            layers = [layer for layer in layers if layer not in quantised]
        out += [
            Buffer(f"block/{name}.{layer}", shape, field_dtype, "activations") for layer in layers
        ]
    out.append(Buffer("block/attn_out", (N, C), dtype, "scratch", (3, BACKWARD)))
    out.append(Buffer("block/down", (N, C), dtype, "scratch", (0, HEAD)))
    return out


def head_rows(config: Config) -> int:
    """Rows of one chunk of the LM head."""
    rows = -(-config.batch.micro_batch * config.batch.seq_len // config.memory.head_chunks)
    return -(-rows // ALIGNMENT) * ALIGNMENT
