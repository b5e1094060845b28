"""Every buffer of a run, from the two configs alone: name, shape, format, group, lifetime.

The plan is a value. The engines allocate it and build their tensors from it; nothing is allocated
after step 0. Scratch has a lifetime in ticks of a micro-step, so that an arena can overlap what is
not alive together; what lives for the whole run has none.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, get_args

from llmq_nb.config import Config
from llmq_nb.core.arena import Slot, aligned, assign_offsets
from llmq_nb.core.dtype import M_GROUP, DType
from llmq_nb.model.config import ALIGNMENT, ModelConfig
from llmq_nb.model.fp8 import BY_INPUT, SLOT_WORDS, fp8_layers, keeps_codes, padded_rows, slot_names
from llmq_nb.model.parameters import Parameter, model_parameters
from llmq_nb.model.recompute import dropped_activations

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
]
HEAD, BACKWARD = 9, 12
"""Ticks: a block's forward takes 0 to 8, the head 9 to 11, recomputation and backward 12 to 20."""


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """lifetime: first and last tick of a micro-step in which the content matters; None: the run."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    group: Group
    lifetime: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the content, without padding between buffers."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The buffers of one rank and their offsets in its one allocation."""

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    total: int
    """Bytes of the allocation."""

    def group_bytes(self) -> dict[Group, int]:
        """Bytes by group; scratch counts what its arena takes, not the sum of its buffers."""
        out: dict[Group, int] = {}
        for buffer in self.buffers:
            if buffer.lifetime is None:
                out[buffer.group] = out.get(buffer.group, 0) + aligned(buffer.nbytes)
        out["scratch"] = self.total - sum(out.values())
        return out


TRAINING: frozenset[Group] = frozenset(get_args(Group))
INFERENCE = TRAINING - {"quants", "master", "m", "v", "gradients"}


def make_plan(
    config: Config,
    model: ModelConfig,
    groups: frozenset[Group] = TRAINING,
    extra: Sequence[Buffer] = (),
) -> Plan:
    """Plan one rank that holds everything in `groups`. extra: what an engine needs besides."""
    buffers = parameter_buffers(config, model) + activation_buffers(config, model)
    buffers = [b for b in buffers if b.group in groups] + list(extra)
    offsets, total = assign_offsets([Slot(b.nbytes, b.lifetime) for b in buffers])
    return Plan(tuple(buffers), tuple(offsets), total)


def parameter_buffers(config: Config, model: ModelConfig) -> list[Buffer]:
    """Weights, their gradients and the optimizer's states.

    Where master weights have the weights' format they are the same memory: no `master` buffer.
    """
    dtype = DType(config.precision.dtype)
    grad_dtype = DType(config.precision.gradient_accumulation or dtype)
    o = config.optimizer
    out: list[Buffer] = []
    for p in model_parameters(model):
        out.append(Buffer(f"weights/{p.name}", p.shape, dtype, "weights"))
        out.append(Buffer(f"gradients/{p.name}", p.shape, grad_dtype, "gradients"))
        if has_master(config):
            out.append(Buffer(f"master/{p.name}", p.shape, DType(o.master), "master"))
        out.append(Buffer(f"m/{p.name}", p.shape, DType(o.m), "m"))
        if o.m == "e4m3":
            out.append(Buffer(f"m_scale/{p.name}", (scale_count(p),), DType.FP32, "m"))
        out.append(Buffer(f"v/{p.name}", p.shape, DType(o.v), "v"))
    return out


def has_master(config: Config) -> bool:
    """Whether the optimizer updates a copy apart from the weights that products read."""
    return config.optimizer.master != config.precision.dtype


def scale_count(parameter: Parameter) -> int:
    """Scales of an e4m3 first moment."""
    return -(-math.prod(parameter.shape) // M_GROUP)


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
        ("act", F, (BACKWARD + 1, BACKWARD + 2)),
        ("gate_up", 2 * F, (BACKWARD + 2, BACKWARD + 3)),
        ("attn", attn, (BACKWARD + 5, BACKWARD + 6)),
        ("heads", model.qkv_rows, (BACKWARD + 6, BACKWARD + 7)),
    ]
    if model.qk_norm:
        gradients.append(("qkv", model.qkv_rows, (BACKWARD + 7, BACKWARD + 7)))
    out += [Buffer(f"g/{name}", (N, w), dtype, "scratch", life) for name, w, life in gradients]
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
        "act": ((N, F), dtype, (6, BACKWARD + 1)),
    }
    if model.qk_norm:
        fields["qk_rstd"] = ((N, model.H + model.G), fp32, (1, BACKWARD + 7))
        fields["heads"] = ((N, heads), dtype, (1, BACKWARD + 6))
    dropped = dropped_activations(config.memory.recompute)
    quantised = fp8_layers(config, model)
    rows = padded_rows(config)
    out = []
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
