"""FP8 health: what the scales of a step's products lost, from the slots that both engines keep.

A slot is four words a tensor: scale, absmax, and two counts that an engine adds to in the last
micro-step of a step that is to be reported (for a weight: after its update). Reading them is the
only thing that a report adds to the host's work.
"""

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import Config
from llmq_nb.core.dtype import DType
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.fp8 import (
    ABSMAX,
    PRODUCTS,
    SATURATED,
    UNDERFLOWED,
    fp8_layers,
    fp8_weights,
    gradient_format,
    slot_names,
    widths,
)
from llmq_nb.report.metrics import TensorHealth

FP8_SLOTS = "fp8/slots"
"""The plan's buffer of all slots; a config without FP8 products has none."""


def is_due(config: Config, step: int, total_steps: int) -> bool:
    """Whether step `step` (the first is 1) is to be reported: each n-th, and the last."""
    every = config.log.health_every
    return bool(every) and (step % every == 0 or step == total_steps)


def tensor_health(
    config: Config, model: ModelConfig, slots: NDArray[np.float32]
) -> tuple[TensorHealth, ...]:
    """The health of every tensor that enters an FP8 product, layer by layer.

    slots: the content of the plan's buffer, (tensors, 4) float32, the counts being uint32 bits.
    """
    counts = np.ascontiguousarray(slots).view(np.uint32)
    index = {name: i for i, name in enumerate(slot_names(config, model))}
    out = []
    for name, slot, layer, dtype, size in _tensors(config, model):
        i = index[slot]
        health = TensorHealth(
            name=name,
            layer=layer,
            format=str(dtype),
            absmax=float(slots[i, ABSMAX]),
            underflowed=int(counts[i, UNDERFLOWED]) / size,
            saturated=int(counts[i, SATURATED]) / size,
        )
        out.append(health)
    return tuple(out)


def _tensors(config: Config, model: ModelConfig) -> list[tuple[str, str, int, DType, int]]:
    """(name, its slot's name, layer, format, elements) in the order of the forward pass."""
    rows, sizes = config.batch.micro_batch * config.batch.seq_len, widths(model)
    own = {(p.layer, p.field): f"weights/{p.name}" for p in fp8_weights(config, model)}
    out = []
    for layer in fp8_layers(config, model):
        for p in PRODUCTS:
            outputs, inputs = sizes[p.weight]
            weight, x, dy = own[layer, p.weight], f"block/{p.x}.{layer}", f"g/{p.dy}.{layer}"
            out += [
                (f"{p.weight}.input", x, layer, DType.E4M3, rows * inputs),
                (f"{p.weight}.weight", weight, layer, DType.E4M3, outputs * inputs),
                (f"{p.weight}.gradient", dy, layer, gradient_format(config), rows * outputs),
            ]
    return out
