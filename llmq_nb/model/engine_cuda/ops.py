"""`Ops` on one GPU: each method is a launch or two on one stream, from addresses that never change.

So a recorded step is a list of these launches. What changes from step to step is read from
`inputs/scalars` on the device.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import Config
from llmq_nb.core.device import Device, check, driver, synchronize_stream
from llmq_nb.core.dtype import DType
from llmq_nb.core.tensor import Tensor
from llmq_nb.kernels import (
    adamw,
    attention,
    bias,
    cross_entropy,
    elementwise,
    embedding,
    global_norm,
    qk_norm,
    rmsnorm,
    rmsnorm_backward,
    rope,
    swiglu,
)
from llmq_nb.kernels.matmul import Products, Shape
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu.attention import rope_tables
from llmq_nb.model.ops import Scalars
from llmq_nb.model.parameters import parameter_order


class CudaOps:
    """One rank's operations, bound to its device, stream, tables and scratch."""

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        tensors: dict[str, Tensor],
        *,
        device: Device,
        stream: int,
        tuning: dict[str, int] | None = None,
    ) -> None:
        self.config, self.model, self.optimizer = config, model, config.optimizer
        self.device, self.stream = device, stream
        self.scalars = Scalars()  # the values travel in inputs/scalars
        self.B, self.T = config.batch.micro_batch, config.batch.seq_len
        self._cos, self._sin = tensors["engine/cos"], tensors["engine/sin"]
        self._scratch = tensors["engine/scratch"].data
        base = tensors["inputs/scalars"].data
        names = ("learning_rate", "inv_supervised", "correction1", "correction2", "update")
        self._scalar = {name: base + 4 * i for i, name in enumerate(names)}
        self.products = Products(
            device=device.ordinal, workspace=tensors["engine/workspace"].data, choices=tuning
        )

    def write_tables(self) -> None:
        """Fill the rotation tables; once, after the memory was cleared."""
        for tensor, table in zip(
            (self._cos, self._sin), rope_tables(self.model, self.T), strict=True
        ):
            self.write(tensor, table)
