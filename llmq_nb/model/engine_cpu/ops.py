"""`Ops` in NumPy: what runs where there is no GPU, and the yardstick of the cuda engine.

Each method is the operation's name, shapes and rounding; the arithmetic is in the files beside
this one.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import OptimizerConfig
from llmq_nb.core.rng import normal
from llmq_nb.core.rounding import to_float32
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu import attention, classifier, linear, norm, optimizer
from llmq_nb.model.engine_cpu.rows import accumulated
from llmq_nb.model.fp8 import ABSMAX
from llmq_nb.model.ops import Scalars


class CpuOps:
    """One rank's operations; bound to a model, its longest sequence, the optimizer and the seed."""

    def __init__(
        self, config: ModelConfig, optimizer_config: OptimizerConfig, *, seq_len: int, seed: int
    ) -> None:
        self.config, self.optimizer, self.seed = config, optimizer_config, seed
        self.scalars = Scalars()
        self.counts_health = False
        """Whether products count what the codes of their operands lose."""
        self.shared_slots: Tensor | None = None
        """Slots of weights whose absmax is that of all ranks' shards."""
        self._cos, self._sin = attention.rope_tables(config, seq_len)

    def set_scalars(self, scalars: Scalars) -> None:
        self.scalars = scalars

    def clear_absmax(self) -> None:
        """Nothing to do: a product finds the absmax of its operands itself."""

    def clear_weight_absmax(self) -> None:
        """Only where a rank may have no part of a weight: else who reads the absmax finds it."""
        if self.shared_slots is not None:
            self.shared_slots.data[:, ABSMAX] = 0.0

    def refresh_weights(self, weights: list[Tensor]) -> None:
        self.clear_weight_absmax()
        for weight in weights:
            linear.find_absmax(weight)
            self.update_weight(weight)

    def update_weight(self, weight: Tensor) -> None:
        """Where no codes are kept a product quantises its weight each time."""
        linear.keep_codes(weight)

    def updated(self, weight: Tensor) -> None:
        linear.find_absmax(weight)

    def embedding(self, x: Tensor, tokens: Tensor, table: Tensor) -> None:
        x.data[...] = table.data[tokens.data.reshape(-1)]

    def embedding_backward(
        self, dtable: Tensor, dx: Tensor, tokens: Tensor, order: Tensor, *, accumulate: bool
    ) -> None:
        linear.embedding_gradient(
            dtable.data, dx.data, tokens.data.reshape(-1), order.data, accumulate
        )

    def rmsnorm(self, y: Tensor, rstd: Tensor, x: Tensor, weight: Tensor) -> None:
        norm.rmsnorm(y.data, rstd.data, x.data, weight.data, self.config.norm_eps)

    def residual_rmsnorm(
        self,
        residual_out: Tensor,
        y: Tensor,
        rstd: Tensor,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
    ) -> None:
        norm.residual_rmsnorm(
            residual_out.data,
            y.data,
            rstd.data,
            residual.data,
            x.data,
            weight.data,
            self.config.norm_eps,
        )

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
        before = None if dresidual is None else dresidual.data
        grad = norm.rmsnorm_backward(dx.data, dy.data, before, x.data, weight.data, rstd.data)
        accumulated(dweight.data, grad, accumulate)

    def qk_norm(
        self, heads: Tensor, rstd: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor
    ) -> None:
        c = self.config
        norm.qk_norm(
            self._heads(heads),
            rstd.data,
            self._heads(qkv),
            self._head_weights(q_weight, k_weight),
            c.H,
            c.G,
            c.norm_eps,
        )

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
        dq, dk = norm.qk_norm_backward(
            self._heads(dqkv),
            self._heads(dheads),
            self._heads(qkv),
            self._head_weights(q_weight, k_weight),
            rstd.data,
            self.config.H,
            self.config.G,
        )
        accumulated(dq_weight.data, dq, accumulate)
        accumulated(dk_weight.data, dk, accumulate)

    def rope(self, heads: Tensor, segment_start: Tensor) -> None:
        self._rotate(heads, segment_start, 1.0)

    def rope_backward(self, dheads: Tensor, segment_start: Tensor) -> None:
        self._rotate(dheads, segment_start, -1.0)

    def attention(self, out: Tensor, lse: Tensor, heads: Tensor, segment_start: Tensor) -> None:
        starts = segment_start.data
        attention.attention(
            self._sequences(out, starts),
            lse.data,
            self._sequences(heads, starts),
            starts,
            self.config,
        )

    def cached_attention(
        self, out: Tensor, heads: Tensor, cache: Tensor, segment_start: Tensor
    ) -> None:
        starts = segment_start.data
        attention.cached_attention(
            self._sequences(out, starts),
            self._sequences(heads, starts),
            cache.data,
            starts,
            self.config,
        )

    def attention_backward(
        self,
        dheads: Tensor,
        dout: Tensor,
        out: Tensor,
        lse: Tensor,
        heads: Tensor,
        segment_start: Tensor,
    ) -> None:
        starts = segment_start.data
        attention.attention_backward(
            self._sequences(dheads, starts),
            self._sequences(dout, starts),
            self._sequences(out, starts),
            lse.data,
            self._sequences(heads, starts),
            starts,
            self.config,
        )

    def linear(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        linear.linear(y, x, weight, bias)
        if self.counts_health and x.fp8 is not None and x.fp8.forward_only:
            linear.count_health(x)

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
        linear.linear_backward(dx, dweight, dy, x, weight, accumulate=accumulate)
        if self.counts_health and weight.fp8 is not None:
            linear.count_health(dy)
            if x.fp8 is not None and not x.fp8.forward_only:
                linear.count_health(x)
        if dbias is not None:
            linear.bias_gradient(dbias.data, dy.data, accumulate=accumulate)

    def linear_swiglu(self, y: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor) -> None:
        self.linear(gate_up, x, weight)
        self.swiglu(y, gate_up)

    def linear_swiglu_again(self, y: Tensor, gate_up: Tensor, x: Tensor, weight: Tensor) -> None:
        self.linear_swiglu(y, gate_up, x, weight)

    def swiglu(self, y: Tensor, gate_up: Tensor) -> None:
        linear.swiglu(y.data, gate_up.data)

    def swiglu_again(self, y: Tensor, gate_up: Tensor) -> None:
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
        self.linear_backward(dact, dweight, None, dy, act, weight, accumulate=accumulate)
        self.swiglu_backward(dgate_up, dact, gate_up)

    def swiglu_backward(self, dgate_up: Tensor, dy: Tensor, gate_up: Tensor) -> None:
        linear.swiglu_backward(dgate_up.data, dy.data, gate_up.data)

    def cross_entropy(
        self, logits: Tensor, loss: Tensor, lse: Tensor, targets: Tensor, *, gradient: bool
    ) -> None:
        classifier.cross_entropy(
            logits.data,
            loss.data,
            lse.data,
            targets.data,
            self.config.V,
            z_loss=self.optimizer.z_loss if gradient else 0.0,
            inv_supervised=self.scalars.inv_supervised if gradient else None,
        )

    def reduce_loss(self, total: Tensor, loss: Tensor, lse: Tensor, *, accumulate: bool) -> None:
        mean = np.float32(loss.data.sum(dtype=np.float64) * self.scalars.inv_supervised)
        largest = lse.data.max(initial=-np.inf)
        if accumulate:
            mean, largest = total.data[0] + mean, np.maximum(total.data[1], largest)
        total.data[:] = (mean, largest)

    def global_norm(self, norms: Tensor, total: Tensor, grads: list[Tensor]) -> None:
        squares = np.array([optimizer.squared_norm(grad.data) for grad in grads], np.float32)
        self._norm(norms, total, squares)

    def combine_norms(self, norms: Tensor, total: Tensor, gathered: Tensor) -> None:
        with np.errstate(over="ignore"):
            self._norm(norms, total, (gathered.data * gathered.data).sum(axis=0))

    def _norm(self, norms: Tensor, total: Tensor, squares: NDArray[Any]) -> None:
        norms.data[:] = np.sqrt(squares)
        length = np.float32(np.sqrt(squares.sum(dtype=np.float64)))
        clip = min(1.0, self.optimizer.max_grad_norm / length) if length > 0 else 1.0
        total.data[:] = (length, clip, np.isfinite(norms.data).all())

    def combine_absmax(self, slots: Tensor, gathered: Tensor) -> None:
        slots.data[:, ABSMAX] = gathered.data[:, :, ABSMAX].max(axis=0)

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
        optimizer.accumulate(
            shard,
            contributions,
            seed=self.seed,
            update=self.scalars.update,
            tensor_id=tensor_id,
            first=first_element,
            start=start,
        )

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
        _, clip, finite = total.data
        if not finite:
            return
        optimizer.adamw(
            master,
            weight,
            m,
            v,
            grad,
            config=self.optimizer,
            scalars=self.scalars,
            clip=clip,
            seed=self.seed,
            tensor_id=tensor_id,
            decayed=decayed,
            m_scale=m_scale,
            first=first,
        )
        linear.keep_codes(weight)

    def fill_normal(self, x: Tensor, *, std: float, tensor_id: int, first: int = 0) -> None:
        values = normal(first, x.size, seed=self.seed, tensor_id=tensor_id)
        x.data[...] = (values * np.float32(std)).reshape(x.shape)

    def read(self, tensor: Tensor) -> NDArray[Any]:
        return np.array(tensor.data)

    def write(self, tensor: Tensor, array: NDArray[Any]) -> None:
        tensor.data[...] = array

    def _heads(self, tensor: Tensor) -> NDArray[Any]:
        """(N, heads, D)"""
        return tensor.data.reshape(tensor.shape[0], -1, self.config.D)

    def _sequences(self, tensor: Tensor, starts: NDArray[np.int32]) -> NDArray[Any]:
        """(B, T, heads, D)"""
        return tensor.data.reshape(*starts.shape, -1, self.config.D)

    def _head_weights(self, q_weight: Tensor, k_weight: Tensor) -> NDArray[np.float32]:
        """(H + G, D): the weight of each normed head."""
        q, k = to_float32(q_weight.data), to_float32(k_weight.data)
        return np.concatenate([np.tile(q, (self.config.H, 1)), np.tile(k, (self.config.G, 1))])

    def _rotate(self, heads: Tensor, segment_start: Tensor, sign: float) -> None:
        starts = segment_start.data
        positions = (np.arange(starts.shape[1]) - starts).reshape(-1)
        rotated = self._heads(heads)[:, : self.config.H + self.config.G]
        attention.rotate(rotated, positions, self._cos, self._sin, sign)
