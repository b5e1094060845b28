"""One rank: the plan's buffers as tensors, the model that uses them and the optimizer's states.

Only `train` wires: the model sees weights through a protocol, and here that protocol's resident
store is built from the plan. An engine gives memory (`allocate`) and operations; the rest is the
same for all.
"""

import dataclasses
from typing import Any

import numpy as np

from llmq_nb.config import Config
from llmq_nb.core.host import check_host_memory
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.activations import BlockActivations, Gradients, HeadActivations
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.ops import Inputs, Ops
from llmq_nb.model.parameters import Parameter, model_parameters, tensor_ids
from llmq_nb.model.recompute import dropped_activations
from llmq_nb.model.transformer import Transformer
from llmq_nb.model.weights import ResidentStore
from llmq_nb.plan.buffers import Plan, has_master
from llmq_nb.train.fp8_slots import Fp8Slots


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
    def fp8_weights(self) -> list[Tensor]:
        """The weights of FP8 products, in forward order."""
        units = (self.model.weights.get(layer) for layer in range(self.model.config.L))
        fields = (w for unit in units for w in (unit.qkv, unit.out, unit.gate_up, unit.down))
        return [w for w in fields if w.fp8 is not None]

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
    tensors = dict(tensors)
    slots = Fp8Slots(config, model, tensors)
    slots.give_weights()
    parameters = model_parameters(model)
    training = f"gradients/{parameters[0].name}" in tensors
    blocks = [_block(tensors, model, layer) for layer in range(model.L)]
    for layer, block in enumerate(blocks):
        slots.give_activations(block, layer)
    head = HeadActivations(*(tensors[f"head/{f}"] for f in _fields(HeadActivations)))
    transformer = Transformer(
        config=model,
        ops=ops,
        inputs=Inputs(*(tensors[f"inputs/{f}"] for f in _fields(Inputs))),
        weights=_store(model, parameters, tensors, "weights"),
        gradients=_store(model, parameters, tensors, "gradients" if training else "weights"),
        blocks=blocks,
        head=head,
        g=_gradients(tensors, model, slots),
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
