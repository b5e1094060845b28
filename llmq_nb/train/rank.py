"""One rank: the plan's buffers as tensors, the model that uses them and the optimizer's states.

Only `train` wires: the model sees weights through a protocol, and here that protocol's resident
store is built from the plan. An engine gives memory (`allocate`) and operations; the rest is the
same for all.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from llmq_nb.config import Config
from llmq_nb.core.dtype import DType
from llmq_nb.core.host import check_host_memory
from llmq_nb.core.tensor import Fp8Slot, Tensor
from llmq_nb.model.activations import BlockActivations, Gradients, HeadActivations
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.ops import Inputs, Ops
from llmq_nb.model.parameters import Parameter, model_parameters, tensor_ids
from llmq_nb.model.recompute import dropped_activations
from llmq_nb.model.transformer import Transformer
from llmq_nb.model.weights import ResidentStore
from llmq_nb.plan.buffers import Plan, has_master

FP8_WEIGHTS = ("qkv", "out", "gate_up", "down")
FP8_ACTIVATIONS = ("attn_in", "attn", "mlp_in", "act")
FP8_GRADIENTS = ("residual", "qkv", "gate_up")


@dataclasses.dataclass(slots=True)
class State:
    """What the optimizer keeps for one parameter. master is weight where their formats are one."""

    parameter: Parameter
    tensor_id: int
    weight: Tensor
    master: Tensor
    m: Tensor
    m_scale: Tensor | None
    v: Tensor
    gradient: Tensor


@dataclasses.dataclass(slots=True)
class Rank:
    """A model, its states and the buffers of its results."""

    model: Transformer
    states: list[State]
    norms: Tensor
    norm_total: Tensor

    @property
    def ops(self) -> Ops:
        return self.model.ops


def allocate(plan: Plan) -> dict[str, Tensor]:
    """The plan in host memory: one allocation, every buffer a view of it, all zeros. UserError."""
    check_host_memory(plan.total)  # the zeros are taken page by page, without a refusal
    memory = np.zeros(plan.total, np.uint8)
    tensors = {}
    for buffer, offset in zip(plan.buffers, plan.offsets, strict=True):
        data = memory[offset : offset + buffer.nbytes].view(buffer.dtype.numpy)
        tensors[buffer.name] = Tensor(
            buffer.name, buffer.shape, buffer.dtype, data.reshape(buffer.shape)
        )
    return tensors


def make_rank(config: Config, model: ModelConfig, tensors: dict[str, Tensor], ops: Ops) -> Rank:
    """Wire a rank that holds everything; an inference plan gives one without gradients."""
    if config.precision.matmul == "e4m3":
        _add_fp8_slots(config, model, tensors)
    parameters = model_parameters(model)
    training = f"gradients/{parameters[0].name}" in tensors
    blocks = [_block(tensors, model, layer) for layer in range(model.L)]
    head = HeadActivations(*(tensors[f"head/{f}"] for f in _fields(HeadActivations)))
    gradients = {f: tensors[f"g/{f}"] for f in _fields(Gradients) if f"g/{f}" in tensors}
    gradients.setdefault("qkv", gradients["heads"])
    transformer = Transformer(
        config=model,
        ops=ops,
        inputs=Inputs(*(tensors[f"inputs/{f}"] for f in _fields(Inputs))),
        weights=_store(model, parameters, tensors, "weights"),
        gradients=_store(model, parameters, tensors, "gradients" if training else "weights"),
        blocks=blocks,
        head=head,
        g=Gradients(**gradients),
        dropped=dropped_activations(config.memory.recompute),
    )
    ids = tensor_ids(parameters)
    optimized = f"m/{parameters[0].name}" in tensors
    states = [_state(config, p, ids[p.name], tensors) for p in parameters if optimized]
    return Rank(transformer, states, tensors["norm/norms"], tensors["norm/total"])


def _fields(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _store(
    model: ModelConfig, parameters: list[Parameter], tensors: dict[str, Tensor], group: str
) -> ResidentStore:
    own = {p.name: tensors[f"{group}/{p.name}"] for p in parameters}
    return ResidentStore(model, parameters, own)


def _block(tensors: dict[str, Tensor], model: ModelConfig, layer: int) -> BlockActivations:
    """A layer's activations: its own buffer, or the one that all layers share."""

    def find(field: str) -> Tensor | None:
        return tensors.get(f"block/{field}.{layer}", tensors.get(f"block/{field}"))

    found: dict[str, Any] = {field: find(field) for field in _fields(BlockActivations)}
    if not model.qk_norm:
        found["heads"] = found["qkv"]
    return BlockActivations(**found)


def _state(config: Config, p: Parameter, tensor_id: int, tensors: dict[str, Tensor]) -> State:
    weight = tensors[f"weights/{p.name}"]
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


def _add_fp8_slots(config: Config, model: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Mark the inputs of FP8 products. A product is FP8 if its weight has a slot."""
    exact = {layer % model.L for layer in config.precision.bf16_layers}
    gradient = DType(config.precision.gradient)
    for p in model_parameters(model):
        if p.layer is not None and p.layer not in exact and p.field in FP8_WEIGHTS:
            tensors[f"weights/{p.name}"].fp8 = _slot(DType.E4M3)
    for name, tensor in tensors.items():
        group, _, field = name.partition("/")
        if group == "block" and field.partition(".")[0] in FP8_ACTIVATIONS:
            tensor.fp8 = _slot(DType.E4M3)
        elif group == "g" and (field in FP8_GRADIENTS or field == "heads" and not model.qk_norm):
            tensor.fp8 = _slot(gradient)


def _slot(dtype: DType) -> Fp8Slot:
    return Fp8Slot(dtype, np.full(1, math.nan, np.float32))
