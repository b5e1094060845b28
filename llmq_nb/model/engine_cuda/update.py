"""The optimizer's operations on one GPU, and what several ranks add up: a part of `CudaOps`."""

from typing import Any

from llmq_nb.config import Config, OptimizerConfig
from llmq_nb.core.tensor import Tensor
from llmq_nb.kernels import accumulate, adamw, combine, global_norm
from llmq_nb.model.engine_cuda.fp8 import Fp8Products
from llmq_nb.model.fp8 import ABSMAX


def absmax_of(tensor: Tensor) -> int:
    """Where a kernel leaves the absmax of its output; 0: nowhere."""
    return tensor.fp8.absmax if tensor.fp8 is not None else 0


class UpdateOps:
    """Methods of `Ops`; what they are bound to is `CudaOps`'."""

    config: Config
    optimizer: OptimizerConfig
    stream: int
    fp8: Fp8Products
    _chunks: tuple[Tensor, Tensor]
    _scratch: int
    _scalars: Tensor
    _scalar: dict[str, int]

    # ---- optimizer -----------------------------------------------------------------------------
    def global_norm(self, norms: Tensor, total: Tensor, grads: list[Tensor]) -> None:
        chunks, first = self._chunks
        global_norm.global_norm_launch(
            norms.data, total.data, chunks.data, first.data, scratch=self._scratch,
            n_chunks=chunks.shape[0], tensors=len(grads), max_norm=self.optimizer.max_grad_norm,
            dtype=grads[0].dtype, stream=self.stream,
        )  # fmt: skip

    def adamw(
        self,
        master: Tensor,
        weight: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        total: Tensor,
        *,
        tensor_id: int,
        decayed: bool,
        m_scale: Tensor | None = None,
        first: int = 0,
    ) -> None:
        o = self.optimizer
        adamw.adamw_launch(
            master.data, 0 if weight is master else weight.data, m.data, v.data, grad.data,
            n=master.size, first=first, scalars=self._scalars.data, total=total.data,
            m_scale=m_scale.data if m_scale is not None else 0, beta1=o.beta1, beta2=o.beta2,
            epsilon=o.epsilon, decay=o.weight_decay if decayed else 0.0,
            seed=self.config.run.seed, tensor=tensor_id, master_dtype=master.dtype,
            m_dtype=m.dtype, v_dtype=v.dtype, grad_dtype=grad.dtype, absmax=absmax_of(weight),
            stream=self.stream,
        )  # fmt: skip
        self.fp8.update_weight(weight)

    # ---- several ranks -------------------------------------------------------------------------
    def accumulate(
        self,
        shard: Tensor,
        contributions: Tensor,
        *,
        tensor_id: int,
        first_element: int,
        start: bool,
        queue: Any = None,
    ) -> None:
        ranks = contributions.shape[0]
        accumulate.accumulate_launch(
            shard.data, contributions.data, ranks=ranks, stride=contributions.nbytes // ranks,
            n=shard.size, first=first_element, start=start, counter=self._scalar["update"],
            seed=self.config.run.seed, tensor=tensor_id, dtype=shard.dtype,
            stream=self.stream if queue is None else queue,
        )  # fmt: skip

    def combine_norms(self, norms: Tensor, total: Tensor, gathered: Tensor) -> None:
        ranks, tensors = gathered.shape
        combine.combine_norms_launch(
            norms.data, total.data, gathered.data, tensors=tensors, ranks=ranks,
            max_norm=self.optimizer.max_grad_norm, stream=self.stream,
        )  # fmt: skip

    def combine_absmax(self, slots: Tensor, gathered: Tensor) -> None:
        ranks, n, _ = gathered.shape
        absmax = slots.dtype.itemsize * ABSMAX
        combine.combine_absmax_launch(
            slots.data + absmax, gathered.data + absmax, n=n, ranks=ranks,
            spacing=slots.nbytes // slots.shape[0], stride=gathered.nbytes // ranks,
            stream=self.stream,
        )  # fmt: skip
