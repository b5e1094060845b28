"""What the cuda engine needs beside the model's own buffers: tables, scalars, scratch, workspace.

Scratch is one buffer: the operations that use it run one after the other on one stream. Its size
comes from the kernels' own constants, never from the number of multiprocessors.
"""

import math

from llmq_nb.config import Config
from llmq_nb.core.dtype import DType
from llmq_nb.kernels.attention import attention_scratch_bytes
from llmq_nb.kernels.bias import bias_backward_scratch
from llmq_nb.kernels.global_norm import CHUNK
from llmq_nb.kernels.matmul import WORKSPACE_BYTES
from llmq_nb.kernels.qk_norm import qk_norm_backward_scratch
from llmq_nb.kernels.rmsnorm_backward import rmsnorm_backward_scratch
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cuda.scalars import SCALAR_WORDS
from llmq_nb.model.parameters import model_parameters
from llmq_nb.plan.buffers import Buffer


def workspace_buffers(config: Config, model: ModelConfig) -> list[Buffer]:
    """Buffers that live for the whole run."""
    T, half = config.batch.seq_len, model.D // 2
    chunks = norm_chunks(model)
    words = -(-scratch_bytes(config, model) // 4)
    return [
        Buffer("inputs/scalars", (SCALAR_WORDS,), DType.INT32, "inputs"),
        Buffer("engine/cos", (T, half), DType.FP32, "workspace"),
        Buffer("engine/sin", (T, half), DType.FP32, "workspace"),
        Buffer("engine/norm_chunks", (sum(chunks), 4), DType.INT32, "workspace"),
        Buffer("engine/norm_first", (len(chunks) + 1,), DType.INT32, "workspace"),
        Buffer("engine/scratch", (words,), DType.INT32, "workspace"),
        Buffer("engine/workspace", (WORKSPACE_BYTES // 4,), DType.INT32, "workspace"),
    ]


def scratch_bytes(config: Config, model: ModelConfig) -> int:
    """The most that any operation needs."""
    B, T = config.batch.micro_batch, config.batch.seq_len
    sizes = [
        attention_scratch_bytes(B, T, model.H),
        rmsnorm_backward_scratch(model.C),
        bias_backward_scratch(model.qkv_rows),
        4 * sum(norm_chunks(model)),
    ]
    if model.qk_norm:
        sizes.append(qk_norm_backward_scratch(model.D))
    return max(sizes)


def norm_chunks(model: ModelConfig) -> list[int]:
    """Chunks that the global norm cuts each gradient into."""
    return [-(-math.prod(p.shape) // CHUNK) for p in model_parameters(model)]
