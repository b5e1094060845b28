"""The parameters of a model: names, shapes and kinds, and the Hugging Face tensors inside them.

Fused tensors are stored as rows: qkv as [q; k; v] and gate_up as [gate; up], so each Hugging Face
tensor is a view of rows. Tensor ids (for random bits) are ranks of the names in sorted order.
"""

import dataclasses
import functools
from typing import Literal

from llmq_nb.model.config import ModelConfig

Kind = Literal["embedding", "matrix", "norm", "bias"]
DECAYED: frozenset[Kind] = frozenset({"embedding", "matrix"})
"""Kinds that weight decay applies to."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowView:
    """A Hugging Face tensor: rows start .. stop - 1 of ours."""

    hf_name: str
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """name: ours. shape: as stored (vocabulary padded). views: what is in the files, in row order.

    layer: the block it belongs to, or None for embedding, final norm and LM head.
    field: the name of the tensor within its layer (`qkv`, `mlp_norm`, ...).
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    field: str
    views: tuple[RowView, ...]
    layer: int | None = None

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: to matrices and embeddings, not to norms and biases."""
        return self.kind in DECAYED


def model_parameters(config: ModelConfig) -> list[Parameter]:
    """Every parameter of the model in forward order."""
    return list(_model_parameters(config))


@functools.cache
def _model_parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    C, V, Vp = config.C, config.V, config.padded_vocab
    table = "model.embed_tokens.weight"
    parameters = [Parameter(table, (Vp, C), "embedding", "embedding", (RowView(table, 0, V),))]
    for layer in range(config.L):
        parameters += layer_parameters(config, layer)
    norm = "model.norm.weight"
    parameters.append(Parameter(norm, (C,), "norm", "final_norm", (RowView(norm, 0, C),)))
    if not config.tied:
        head = "lm_head.weight"
        parameters.append(Parameter(head, (Vp, C), "embedding", "head", (RowView(head, 0, V),)))
    return tuple(parameters)


def layer_parameters(config: ModelConfig, layer: int) -> list[Parameter]:
    """The parameters of one block in forward order."""
    C, F, D = config.C, config.F, config.D
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    q, k = config.H * D, config.G * D

    def qkv_views(suffix: str) -> tuple[RowView, ...]:
        return (
            RowView(f"{attention}.q_proj.{suffix}", 0, q),
            RowView(f"{attention}.k_proj.{suffix}", q, q + k),
            RowView(f"{attention}.v_proj.{suffix}", q + k, q + 2 * k),
        )

    def whole(name: str, shape: tuple[int, ...], kind: Kind, field: str) -> Parameter:
        return Parameter(name, shape, kind, field, (RowView(name, 0, shape[0]),), layer)

    attn_norm = f"model.layers.{layer}.input_layernorm.weight"
    mlp_norm = f"model.layers.{layer}.post_attention_layernorm.weight"
    out = [whole(attn_norm, (C,), "norm", "attn_norm")]
    qkv, rows = f"{attention}.qkv", config.qkv_rows
    out.append(Parameter(f"{qkv}.weight", (rows, C), "matrix", "qkv", qkv_views("weight"), layer))
    if config.qkv_bias:
        out.append(Parameter(f"{qkv}.bias", (rows,), "bias", "qkv_bias", qkv_views("bias"), layer))
    if config.qk_norm:
        out.append(whole(f"{attention}.q_norm.weight", (D,), "norm", "q_norm"))
        out.append(whole(f"{attention}.k_norm.weight", (D,), "norm", "k_norm"))
    o_proj = f"{attention}.o_proj.weight"
    out.append(whole(o_proj, (C, config.attention_columns), "matrix", "out"))
    out.append(whole(mlp_norm, (C,), "norm", "mlp_norm"))
    gate_up = (
        RowView(f"{mlp}.gate_proj.weight", 0, F),
        RowView(f"{mlp}.up_proj.weight", F, 2 * F),
    )
    name = f"{mlp}.gate_up.weight"
    out.append(Parameter(name, (2 * F, C), "matrix", "gate_up", gate_up, layer))
    out.append(whole(f"{mlp}.down_proj.weight", (C, F), "matrix", "down"))
    return out


def tensor_ids(parameters: list[Parameter]) -> dict[str, int]:
    """Rank of each name in sorted order: the third word of the random counter."""
    return {name: i for i, name in enumerate(sorted(p.name for p in parameters))}


def parameter_count(config: ModelConfig) -> int:
    """Parameters in the files (without padded rows)."""
    total = 0
    for p in model_parameters(config):
        rows = sum(view.stop - view.start for view in p.views)
        total += rows * (p.shape[1] if len(p.shape) == 2 else 1)
    return total
