"""What the cuda engine needs beside the model's own buffers: tables, scalars, scratch, workspace.

Scratch is one buffer: the operations that use it run one after the other on one stream. Its size
comes from the kernels' own constants, never from the number of multiprocessors.
"""

import dataclasses
import functools

from llmq_nb.config import Config
from llmq_nb.core.dtype import DType
from llmq_nb.kernels.attention import attention_scratch_bytes
from llmq_nb.kernels.bias import bias_backward_scratch
from llmq_nb.kernels.embedding_backward import embedding_backward_scratch
from llmq_nb.kernels.global_norm import CHUNK
from llmq_nb.kernels.matmul import WORKSPACE_BYTES
from llmq_nb.kernels.qk_norm import qk_norm_backward_scratch
from llmq_nb.kernels.rmsnorm_backward import rmsnorm_backward_scratch
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cuda.scalars import SCALAR_WORDS
from llmq_nb.model.fp8 import (
    PRODUCTS,
    fp8_weights,
    gradient_format,
    keeps_codes,
    keeps_quants,
    largest_operand,
    padded_rows,
    recomputes_products,
    weight_scratch,
    widths,
)
from llmq_nb.model.parameters import model_parameters
from llmq_nb.plan.buffers import BACKWARD, Buffer, kept_quants
from llmq_nb.plan.places import offloads_quants
from llmq_nb.plan.shards import elements, shard_elements, shards_quants


def workspace_buffers(
    config: Config, model: ModelConfig, *, quants: bool = True, positions: int | None = None
) -> list[Buffer]:
    """The engine's own buffers. quants: keep the FP8 weights' codes if the config says so.

    positions: that the rotation tables have; None: those of a sequence.
    """
    T, half = positions or config.batch.seq_len, model.D // 2
    chunks = norm_chunks(model, config.world_size)
    words = -(-scratch_bytes(config, model) // 4)
    return [
        Buffer("inputs/scalars", (SCALAR_WORDS,), DType.INT32, "inputs"),
        Buffer("engine/cos", (T, half), DType.FP32, "workspace"),
        Buffer("engine/sin", (T, half), DType.FP32, "workspace"),
        Buffer("engine/norm_chunks", (sum(chunks), 4), DType.INT32, "workspace"),
        Buffer("engine/norm_first", (len(chunks) + 1,), DType.INT32, "workspace"),
        Buffer("engine/scratch", (words,), DType.INT32, "workspace"),
        Buffer("engine/workspace", (WORKSPACE_BYTES // 4,), DType.INT32, "workspace"),
        *fp8_buffers(config, model, quants=quants and keeps_quants(config)),
    ]


def fp8_buffers(config: Config, model: ModelConfig, *, quants: bool) -> list[Buffer]:
    """Codes: the weights' in both layouts where they are kept, and scratch for all others.

    Where the host keeps them it has the row-major ones only, and `weight` is what backward
    transposes them into.

    Scratch is named after the product that uses it: x is an input's codes in forward, x_t, dy and
    dy_t are backward's, weight and weight_t are a weight's that is not kept.
    """
    weights = fp8_weights(config, model)
    if not weights:
        return []
    out: list[Buffer] = []
    rows, gradient = padded_rows(config), gradient_format(config)
    again = recomputes_products(config)
    whole = (1, BACKWARD + 8)

    def scratch(name: str, shape: tuple[int, ...], dtype: DType, first: int, last: int) -> None:
        out.append(Buffer(f"fp8/{name}", shape, dtype, "scratch", (first, last)))

    if quants:
        out += kept_quants(config, model)
    if not quants or offloads_quants(config) or shards_quants(config):
        scratch("weight", (weight_scratch(model),), DType.E4M3, *whole)
    for product in PRODUCTS:
        M, K = widths(model)[product.weight]
        name, now = product.weight, product.backward
        scratch(f"x.{name}", (rows, K), DType.E4M3, product.forward, product.forward)
        if again:  # the same place serves the recomputation
            out[-1] = dataclasses.replace(out[-1], lifetime=(product.forward, BACKWARD))
        if not keeps_codes(config, product.x):
            made_again = product.x == "act"  # recomputation writes its codes, see swiglu_again
            first = BACKWARD if made_again else now
            scratch(f"x_t.{name}", (K, rows), DType.E4M3, first, now)
        # down's data gradient and SwiGLU backward may be one kernel, behind the weight gradient
        last = now + 1 if name == "down" else now
        scratch(f"dy.{name}", (rows, M), gradient, now, last)
        scratch(f"dy_t.{name}", (M, rows), gradient, now, now)
    if config.precision.fp8_units == "emulate":
        operands = (2, largest_operand(config, model))
        scratch("decoded", operands, DType.BF16, *whole)
        out.append(Buffer("fp8/alpha", (4,), DType.FP32, "workspace"))
    return out


def scratch_bytes(config: Config, model: ModelConfig) -> int:
    """The most that any operation needs."""
    B, T = config.batch.micro_batch, config.batch.seq_len
    sizes = [
        attention_scratch_bytes(B, T, model.H),
        embedding_backward_scratch(B * T, model.C),
        rmsnorm_backward_scratch(model.C),
        bias_backward_scratch(model.qkv_rows),
        4 * sum(norm_chunks(model, config.world_size)),
    ]
    if model.qk_norm:
        sizes.append(qk_norm_backward_scratch(model.D))
    return max(sizes)


@functools.cache
def norm_chunks(model: ModelConfig, ranks: int = 1) -> tuple[int, ...]:
    """Chunks that the global norm cuts each gradient, or a rank's shard of it, into."""
    sizes = [shard_elements(elements(p), ranks) for p in model_parameters(model)]
    return tuple(-(-size // CHUNK) for size in sizes)
