"""`Ops` on one GPU: each method is a launch or two on one stream, from addresses that never change.

So a recorded step is a list of these launches. What changes from step to step is read from
`inputs/scalars` on the device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import Config
from llmq_nb.core.device import Device, check, driver, synchronize_stream
from llmq_nb.core.tensor import Tensor
from llmq_nb.kernels import (
    attention,
    attention_cached,
    bias,
    cross_entropy,
    elementwise,
    embedding,
    embedding_backward,
    global_norm,
    qk_norm,
    reduce_loss,
    rmsnorm,
    rmsnorm_backward,
    rope,
    swiglu,
)
from llmq_nb.kernels.attention_choice import AttentionShape, chosen_tiles
from llmq_nb.kernels.matmul import Shape
from llmq_nb.kernels.matmul_swiglu import has_kernel
from llmq_nb.kernels.matmul_swiglu_backward import has_backward_kernel
from llmq_nb.kernels.products import Products
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu.attention import rope_tables
from llmq_nb.model.engine_cuda.fp8 import Fp8Products
from llmq_nb.model.engine_cuda.scalars import SCALARS, pack_scalars
from llmq_nb.model.engine_cuda.update import UpdateOps, absmax_of
from llmq_nb.model.ops import Scalars


class CudaOps(UpdateOps):
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
        measures_weights: bool = False,
    ) -> None:
        """measures_weights: of `Fp8Products`, for a rank whose weights another one may change."""
        self.config, self.model, self.optimizer = config, model, config.optimizer
        self.device, self.stream = device, stream
        self.B, self.T = config.batch.micro_batch, config.batch.seq_len
        self._chunks = (tensors["engine/norm_chunks"], tensors["engine/norm_first"])
        self._cos, self._sin = tensors["engine/cos"], tensors["engine/sin"]
        self._scratch = tensors["engine/scratch"].data
        self._scalars = tensors["inputs/scalars"]
        base = self._scalars.data
        self._scalar = {name: base + 4 * i for i, name in enumerate(SCALARS)}
        self.products = Products(
            device=device.ordinal, workspace=tensors["engine/workspace"].data, choices=tuning
        )
        shape = AttentionShape(self.B, self.T, model.H, model.G, model.D)
        self.tiles = chosen_tiles(self.products.choices, shape, device.cc, device.multiprocessors)
        self.fp8 = Fp8Products(
            config, model, tensors, self.products, stream=stream, measures_weights=measures_weights
        )

    def set_scalars(self, scalars: Scalars) -> None:
        self.write(self._scalars, pack_scalars(scalars).view(np.int32))

    def write_tables(self, gradients: Sequence[Tensor] = ()) -> None:
        """Fill the rotation tables and the norm's; once, after the memory was cleared.

        gradients: what `global_norm` will be given, one for each parameter.
        """
        if gradients:
            pairs = [(g.data, g.size) for g in gradients]
            chunks, first = global_norm.chunk_table(pairs, itemsize=gradients[0].dtype.itemsize)
            table = np.zeros((self._chunks[0].shape[0], 2), np.int64)  # a short shard has fewer
            table[: len(chunks)] = chunks
            self.write(self._chunks[0], table.view(np.int32))
            self.write(self._chunks[1], first)
        for tensor, table in zip(
            (self._cos, self._sin), rope_tables(self.model, self._cos.shape[0]), strict=True
        ):
            self.write(tensor, table)

    def clear_absmax(self) -> None:
        self.fp8.clear(weights=False)

    def clear_weight_absmax(self) -> None:
        self.fp8.clear(weights=True)

    def refresh_weights(self, weights: list[Tensor]) -> None:
        self.fp8.clear(weights=True)
        for weight in weights:
            self.fp8.measure(weight)
            self.fp8.update_weight(weight)

    def update_weight(self, weight: Tensor) -> None:
        self.fp8.update_weight(weight)

    def updated(self, weight: Tensor) -> None:
        """Nothing to do: the update found it."""

    # ---- embedding, norms ----------------------------------------------------------------------
    def embedding(self, x: Tensor, tokens: Tensor, table: Tensor) -> None:
        embedding.embedding_forward_launch(
            x.data, tokens.data, table.data, rows=x.shape[0], C=x.shape[1], V=table.shape[0],
            **self._common(x),
        )  # fmt: skip

    def embedding_backward(
        self, dtable: Tensor, dx: Tensor, tokens: Tensor, order: Tensor, *, accumulate: bool
    ) -> None:
        rows, C = dx.shape
        embedding_backward.embedding_backward_launch(
            dtable.data, dx.data, tokens.data, order.data, scratch=self._scratch, rows=rows, C=C,
            V=dtable.shape[0], accumulate=accumulate, grad_dtype=dtable.dtype, **self._common(dx),
        )  # fmt: skip

    def rmsnorm(self, y: Tensor, rstd: Tensor, x: Tensor, weight: Tensor) -> None:
        rows, C = x.shape
        rmsnorm.rmsnorm_forward_launch(
            y.data, rstd.data, x.data, weight.data, rows=rows, C=C, eps=self.model.norm_eps,
            absmax=absmax_of(y), **self._common(x),
        )  # fmt: skip

    def residual_rmsnorm(
        self,
        residual_out: Tensor,
        y: Tensor,
        rstd: Tensor,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
    ) -> None:
        rows, C = x.shape
        rmsnorm.residual_rmsnorm_forward_launch(
            residual_out.data, y.data, rstd.data, residual.data, x.data, weight.data,
            rows=rows, C=C, eps=self.model.norm_eps, absmax=absmax_of(y), **self._common(x),
        )  # fmt: skip

    def rmsnorm_backward(
        self,
        dx: Tensor,
        dweight: Tensor,
        dy: Tensor,
        dresidual: Tensor | None,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        rows, C = x.shape
        rmsnorm_backward.rmsnorm_backward_launch(
            dx.data, dweight.data, dy.data, dresidual.data if dresidual else 0, x.data,
            weight.data, rstd.data, scratch=self._scratch, rows=rows, C=C, accumulate=accumulate,
            grad_dtype=dweight.dtype, absmax=absmax_of(dx), **self._common(x),
        )  # fmt: skip

    def qk_norm(
        self, heads: Tensor, rstd: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor
    ) -> None:
        qk_norm.qk_norm_forward_launch(
            heads.data, rstd.data, qkv.data, q_weight.data, k_weight.data, rows=qkv.shape[0],
            eps=self.model.norm_eps, **self._heads(), **self._common(qkv),
        )  # fmt: skip

    def qk_norm_backward(
        self,
        dqkv: Tensor,
        dq_weight: Tensor,
        dk_weight: Tensor,
        dheads: Tensor,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        rstd: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        qk_norm.qk_norm_backward_launch(
            dqkv.data, dq_weight.data, dk_weight.data, dheads.data, qkv.data, q_weight.data,
            k_weight.data, rstd.data, scratch=self._scratch, rows=qkv.shape[0],
            accumulate=accumulate, grad_dtype=dq_weight.dtype, absmax=absmax_of(dqkv),
            **self._heads(), **self._common(qkv),
        )  # fmt: skip

    # ---- attention -----------------------------------------------------------------------------
    def rope(self, heads: Tensor, segment_start: Tensor) -> None:
        rope.rope_forward_launch(
            heads.data, self._cos.data, self._sin.data, segment_start.data, rows=heads.shape[0],
            T=self.T, **self._heads(), **self._common(heads),
        )  # fmt: skip

    def rope_backward(self, dheads: Tensor, segment_start: Tensor) -> None:
        rope.rope_backward_launch(
            dheads.data, self._cos.data, self._sin.data, segment_start.data, rows=dheads.shape[0],
            T=self.T, absmax=absmax_of(dheads), **self._heads(), **self._common(dheads),
        )  # fmt: skip

    def attention(self, out: Tensor, lse: Tensor, heads: Tensor, segment_start: Tensor) -> None:
        attention.attention_launch(
            out.data, lse.data, heads.data, segment_start.data, B=self.B, T=self.T,
            tiles=self.tiles, **self._heads(), **self._common(heads),
        )  # fmt: skip
        self.fp8.measure(out)

    def cached_attention(
        self, out: Tensor, heads: Tensor, cache: Tensor, segment_start: Tensor
    ) -> None:
        attention_cached.attention_cached_launch(
            out.data, cache.data, heads.data, segment_start.data, B=self.B, T=self.T,
            S=cache.shape[1], **self._heads(), **self._common(heads),
        )  # fmt: skip

    def attention_backward(
        self,
        dheads: Tensor,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        heads: Tensor,
        segment_start: Tensor,
    ) -> None:
        attention.attention_backward_launch(
            dheads.data, self._scratch, dout.data, out.data, lse.data, heads.data,
            segment_start.data, B=self.B, T=self.T, tiles=self.tiles, **self._heads(),
            **self._common(heads),
        )  # fmt: skip

    # ---- products ------------------------------------------------------------------------------
    def linear(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.fp8 is not None:
            self.fp8.linear(y, x, weight, bias)
            return
        N, M, K = x.shape[0], *weight.shape
        shape = Shape("forward", N, M, K, x.dtype, y.dtype, bias=bias is not None)
        address = bias.data if bias is not None else 0
        self.products(shape, y.data, x.data, weight.data, stream=self.stream, bias=address)

    def linear_backward(
        self,
        dx: Tensor,
        dweight: Tensor,
        dbias: Tensor | None,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        N, M, K = x.shape[0], *weight.shape
        if weight.fp8 is not None:
            self.fp8.linear_backward(dx, dweight, dy, x, weight, accumulate=accumulate)
        else:
            shape = Shape("wgrad", N, M, K, x.dtype, dweight.dtype, accumulate=accumulate)
            self.products(shape, dweight.data, dy.data, x.data, stream=self.stream)
            shape = Shape("dgrad", N, M, K, x.dtype, dx.dtype)
            self.products(shape, dx.data, dy.data, weight.data, stream=self.stream)
        if dbias is not None:
            bias.bias_backward_launch(
                dbias.data, dy.data, scratch=self._scratch, rows=N, M=M, accumulate=accumulate,
                grad_dtype=dbias.dtype, **self._common(dy),
            )  # fmt: skip

    def linear_swiglu(self, y: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor) -> None:
        self._linear_swiglu(y, gate_up, x, weight, again=False)

    def linear_swiglu_again(self, y: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor) -> None:
        self._linear_swiglu(y, gate_up, x, weight, again=True)

    def _linear_swiglu(
        self, y: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor, *, again: bool
    ) -> None:
        """One kernel where the GPU has it and tuning chose it. A repeat takes the same path: the
        two need not round alike."""
        N, M, K = x.shape[0], *weight.shape
        codes_only = again and y.fp8 is not None and y.fp8.made_again
        shape = Shape("forward", N, M, K, x.dtype, gate_up.dtype, swiglu=True)
        if weight.fp8 is not None:
            shape = self.fp8.forward_shape(N, weight, gate_up, swiglu=True)
        if not has_kernel(self.device.cc, shape):
            self.linear(gate_up, x, weight)
            (self.swiglu_again if again else self.swiglu)(y, gate_up)
            return
        operands, scales = (x.data, weight.data), ()
        if weight.fp8 is not None:
            operands, scales = self.fp8.forward_operands(x, weight)
        self.products.with_swiglu(
            shape, 0 if codes_only else y.data, gate_up.data, *operands, absmax=absmax_of(y),
            scales=scales, stream=self.stream,
        )  # fmt: skip
        if codes_only:
            self.fp8.swiglu_codes(y, gate_up)

    def swiglu(self, y: Tensor, gate_up: Tensor) -> None:
        rows, F = y.shape
        swiglu.swiglu_forward_launch(
            y.data, gate_up.data, rows=rows, F=F, absmax=absmax_of(y), **self._common(y)
        )

    def swiglu_again(self, y: Tensor, gate_up: Tensor) -> None:
        if y.fp8 is not None and y.fp8.made_again:
            self.fp8.swiglu_codes(y, gate_up)
        else:
            self.swiglu(y, gate_up)

    def linear_swiglu_backward(
        self,
        dgate_up: Tensor,
        dact: Tensor,
        dweight: Tensor,
        dy: Tensor,
        act: Tensor,
        weight: Tensor,
        gate_up: Tensor,
        *,
        accumulate: bool,
    ) -> None:
        N, M, K = act.shape[0], *weight.shape
        shape = Shape("dgrad", N, M, K, act.dtype, dact.dtype, swiglu=True)
        if weight.fp8 is not None:
            shape = self.fp8.data_gradient_shape(N, weight, dy, dact, swiglu=True)
        if not has_backward_kernel(self.device.cc, shape):
            self.linear_backward(dact, dweight, None, dy, act, weight, accumulate=accumulate)
            self.swiglu_backward(dgate_up, dact, gate_up)
            return
        operands, scales = (dy.data, weight.data), ()
        if weight.fp8 is not None:
            self.fp8.weight_gradient(dweight, dy, act, weight, accumulate=accumulate)
            operands, scales = self.fp8.data_gradient_operands(dy, weight)
        else:
            wgrad = Shape("wgrad", N, M, K, act.dtype, dweight.dtype, accumulate=accumulate)
            self.products(wgrad, dweight.data, dy.data, act.data, stream=self.stream)
        self.products.with_swiglu_backward(
            shape, dgate_up.data, dact.data, *operands, gate_up.data, absmax=absmax_of(dgate_up),
            scales=scales, stream=self.stream,
        )  # fmt: skip

    def swiglu_backward(self, dgate_up: Tensor, dy: Tensor, gate_up: Tensor) -> None:
        rows, F = dy.shape
        swiglu.swiglu_backward_launch(
            dgate_up.data, dy.data, gate_up.data, rows=rows, F=F, absmax=absmax_of(dgate_up),
            **self._common(dy),
        )  # fmt: skip

    # ---- loss ----------------------------------------------------------------------------------
    def cross_entropy(
        self, logits: Tensor, loss: Tensor, lse: Tensor, targets: Tensor, *, gradient: bool
    ) -> None:
        rows, Vp = logits.shape
        cross_entropy.cross_entropy_launch(
            logits.data, loss.data, lse.data, targets.data, self._scalar["inv_supervised"],
            rows=rows, V=self.model.V, Vp=Vp, gradient=gradient,
            z_loss=self.optimizer.z_loss if gradient else 0.0, **self._common(logits),
        )  # fmt: skip

    def reduce_loss(self, total: Tensor, loss: Tensor, lse: Tensor, *, accumulate: bool) -> None:
        reduce_loss.reduce_loss_launch(
            total.data, loss.data, lse.data, self._scalar["inv_supervised"], rows=loss.shape[0],
            accumulate=accumulate, stream=self.stream,
        )  # fmt: skip

    # ---- memory --------------------------------------------------------------------------------
    def fill_normal(self, x: Tensor, *, std: float, tensor_id: int, first: int = 0) -> None:
        elementwise.fill_normal_launch(
            x.data, n=x.size, start=first, seed=self.config.run.seed, tensor=tensor_id, std=std,
            **self._common(x),
        )  # fmt: skip

    def fill_memory(self, address: int, nbytes: int) -> None:
        """Random values of any format, what products are timed on: BF16 of magnitude below 2, and
        FP8 codes of which none is NaN or infinite (a product of NaN draws less power)."""
        elementwise.fill_normal_launch(
            address, n=nbytes // 32 * 16, seed=0, tensor=0, std=1.0, dtype="bf16",
            stream=self.stream,
        )  # fmt: skip
        elementwise.mask_launch(
            address, nbytes=nbytes // 32 * 32, mask=elementwise.FINITE_BYTES, stream=self.stream
        )

    def read(self, tensor: Tensor) -> NDArray[Any]:
        host = np.empty(tensor.shape, tensor.dtype.numpy)
        synchronize_stream(self.stream)
        check(
            driver().cuMemcpyDtoH(host.ctypes.data, tensor.data, tensor.nbytes),
            f"reading {tensor.name}",
        )
        return host

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        host = np.ascontiguousarray(
            np.broadcast_to(array, tensor.shape).astype(tensor.dtype.numpy, copy=False)
        )
        synchronize_stream(self.stream)
        check(
            driver().cuMemcpyHtoD(tensor.data, host.ctypes.data, host.nbytes),
            f"writing {tensor.name}",
        )
        check(driver().cuCtxSynchronize(), f"writing {tensor.name}")

    def _common(self, tensor: Tensor) -> dict[str, Any]:
        return {"dtype": tensor.dtype, "stream": self.stream}

    def _heads(self) -> dict[str, int]:
        return {"H": self.model.H, "G": self.model.G, "D": self.model.D}
