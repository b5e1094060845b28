"""What FP8 products need in memory: slots, kept codes and scratch.

    product   input x     gradient dy     weight
    qkv       attn_in     qkv             qkv
    out       attn        residual_mid    out
    gate_up   mlp_in      gate_up         gate_up
    down      act         residual        down

An input that backward reads for its product alone (attn_in, mlp_in, act) is not kept in BF16:
forward quantises it in both layouts and keeps the transposed codes, half the bytes. It stays in
BF16 where it is computed again (then nothing is kept) or where another recomputation reads it.
Gradients and what is not kept are quantised where they are used, into scratch.
"""

import dataclasses
import math

from llmq_nb.config import Config
from llmq_nb.core.dtype import DType
from llmq_nb.model.config import ALIGNMENT, ModelConfig
from llmq_nb.model.parameters import Parameter, model_parameters
from llmq_nb.model.recompute import dropped_activations

SLOT_WORDS = 4
"""32-bit words of a slot: scale, absmax, and the health's two counts. 16 bytes: cuBLASLt reads a
scale at such an address only."""
SCALE, ABSMAX, UNDERFLOWED, SATURATED = range(SLOT_WORDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A block's product by its weight's field. x, dy: fields of BlockActivations and Gradients.

    forward, backward: its ticks (`plan.buffers`).
    """

    weight: str
    x: str
    dy: str
    forward: int
    backward: int


PRODUCTS = (
    Product("qkv", "attn_in", "qkv", 1, 19),
    Product("out", "attn", "residual_mid", 3, 17),
    Product("gate_up", "mlp_in", "gate_up", 5, 15),
    Product("down", "act", "residual", 7, 13),
)
BY_WEIGHT = {product.weight: product for product in PRODUCTS}
BY_INPUT = {product.x: product for product in PRODUCTS}
READ_AGAIN = {"attn_in": "qkv", "mlp_in": "gate_up"}
"""Inputs that a recomputation reads, by what is computed from them."""


def fp8_layers(config: Config, model: ModelConfig) -> list[int]:
    """The layers whose products are FP8."""
    if config.precision.matmul != "e4m3":
        return []
    exact = {layer % model.L for layer in config.precision.bf16_layers}
    return [layer for layer in range(model.L) if layer not in exact]


def fp8_weights(config: Config, model: ModelConfig) -> list[Parameter]:
    """The weights of FP8 products."""
    layers = set(fp8_layers(config, model))
    return [p for p in model_parameters(model) if p.layer in layers and p.field in BY_WEIGHT]


def keeps_codes(config: Config, field: str) -> bool:
    """Whether an FP8 layer keeps an input's transposed codes instead of its BF16 values."""
    dropped = dropped_activations(config.memory.recompute)
    if field not in BY_INPUT or field == "attn" or field in dropped:
        return False
    return READ_AGAIN.get(field) not in dropped


def keeps_quants(config: Config) -> bool:
    """Whether the weights' codes live from one optimizer step to the next."""
    return config.precision.matmul == "e4m3" and config.memory.keep_quants


def slot_names(config: Config, model: ModelConfig) -> list[str]:
    """Every slot in its order: the weights' first, they are cleared apart from the others."""
    names = [f"weights/{p.name}" for p in fp8_weights(config, model)]
    for layer in fp8_layers(config, model):
        for product in PRODUCTS:
            names += [f"block/{product.x}.{layer}", f"g/{product.dy}.{layer}"]
    return names


def padded_rows(config: Config) -> int:
    """Rows of a micro-batch as a contracted dimension: a multiple of 16."""
    rows = config.batch.micro_batch * config.batch.seq_len
    return -(-rows // ALIGNMENT) * ALIGNMENT


def widths(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs M, inputs K) of each product."""
    C, attn = model.C, model.attention_columns
    return {
        "qkv": (model.qkv_rows, C),
        "out": (C, attn),
        "gate_up": (2 * model.F, C),
        "down": (C, model.F),
    }


def recomputes_products(config: Config) -> bool:
    """Whether backward computes a product's output again."""
    dropped = dropped_activations(config.memory.recompute)
    return bool(dropped & {"qkv", "gate_up", "residual_mid"})


def largest_operand(config: Config, model: ModelConfig) -> int:
    """Elements of the largest operand of an FP8 product, in any layout."""
    rows = padded_rows(config)
    return max(max(rows * m, rows * k, m * k) for m, k in widths(model).values())


def weight_scratch(model: ModelConfig) -> int:
    """Elements of the largest weight of a product."""
    return max(math.prod(shape) for shape in widths(model).values())


def gradient_format(config: Config) -> DType:
    """Format of activation gradients in FP8 products."""
    return DType(config.precision.gradient)
