"""AdamW with stochastic rounding, and the global norm, on NumPy arrays.

    g = clip grad;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    master -= learning_rate (m / correction1 / (sqrt(v / correction2) + epsilon) + decay master)

Source   Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2, with the learning rate on the
decay.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import OptimizerConfig
from llmq_nb.core.dtype import M_GROUP, DType
from llmq_nb.core.rng import Purpose, bits16
from llmq_nb.core.rounding import scales, stochastic_bf16, stochastic_e4m3, to_float32
from llmq_nb.core.tensor import Tensor
from llmq_nb.model.engine_cpu.rows import each_rows
from llmq_nb.model.ops import Scalars

Float = NDArray[Any]  # float32: NumPy's own types widen it to float64


def squared_norm(grad: NDArray[Any]) -> np.float32:
    """Sum of squares in float32 over rows of 1024, the rows in float64: a fixed order."""
    flat = to_float32(grad.reshape(-1))
    whole = flat.size // 1024 * 1024
    rows = flat[:whole].reshape(-1, 1024)
    total = np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64)
    tail = flat[whole:]
    with np.errstate(over="ignore"):
        return np.float32(total + np.float64(np.dot(tail, tail)))


def adamw(
    master: Tensor,
    weight: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    config: OptimizerConfig,
    scalars: Scalars,
    clip: np.float32,
    seed: int,
    tensor_id: int,
    decayed: bool,
    m_scale: Tensor | None,
    first: int = 0,
) -> None:
    """One update of a tensor or of a slice; see `Ops.adamw`."""
    beta1, beta2 = np.float32(config.beta1), np.float32(config.beta2)
    one, epsilon = np.float32(1.0), np.float32(config.epsilon)
    rate = np.float32(scalars.learning_rate)
    decay = np.float32(config.weight_decay if decayed else 0.0)
    correction1, correction2 = np.float32(scalars.correction1), np.float32(scalars.correction2)
    flat = [t.data.reshape(-1) for t in (master, weight, m, v, grad)]
    scale = None if m_scale is None else m_scale.data

    def random(purpose: Purpose, first: int, count: int) -> NDArray[np.uint16]:
        return bits16(
            first, count, seed=seed, purpose=purpose, tensor_id=tensor_id, update=scalars.update
        )

    def work(rows: slice) -> None:
        p_out, w_out, m_out, v_out, g_in = (f[rows] for f in flat)
        g = to_float32(g_in) * clip
        old_m = to_float32(m_out) if scale is None else _unscaled(m_out, scale, rows.start)
        new_m = beta1 * old_m + (one - beta1) * g
        new_v = beta2 * to_float32(v_out) + (one - beta2) * g * g
        p = to_float32(p_out)
        update = (new_m / correction1) / (np.sqrt(new_v / correction2) + epsilon)
        new_p = p - rate * (update + decay * p)
        place = (first + rows.start, new_p.size)
        if scale is None:
            _store(m_out, new_m, lambda: random(Purpose.M, *place))
        else:
            _store_e4m3(m_out, scale, new_m, rows.start, random(Purpose.M, *place))
        _store(v_out, new_v, lambda: random(Purpose.V, *place))
        _store(p_out, new_p, lambda: random(Purpose.MASTER, *place))
        if weight.data is not master.data:
            # of the stored master, so that a resumed run has it too; nearest: errors do not add up
            w_out[...] = to_float32(p_out)

    each_rows(work, flat[0].size, 1)


def accumulate(
    shard: Tensor,
    contributions: Tensor,
    *,
    seed: int,
    update: int,
    tensor_id: int,
    first: int,
    start: bool,
) -> None:
    """shard (+)= the sum of the contributions; see `Ops.accumulate`."""
    flat = shard.data.reshape(-1)

    def work(rows: slice) -> None:
        total = to_float32(contributions.data[0, rows])
        for other in contributions.data[1:, rows]:
            total = total + to_float32(other)
        if not start:
            total = to_float32(flat[rows]) + total
        place = (first + rows.start, total.size)

        def bits() -> NDArray[np.uint16]:
            purpose = Purpose.GRADIENT
            return bits16(*place, seed=seed, purpose=purpose, tensor_id=tensor_id, update=update)

        _store(flat[rows], total, bits)

    each_rows(work, flat.size, 1)


def _store(out: NDArray[Any], value: Float, bits: Any) -> None:
    if out.dtype == DType.BF16.numpy:
        out[...] = stochastic_bf16(value, bits())
    else:
        out[...] = value


def _groups(value: Float) -> Float:
    """Rows of M_GROUP, the last one padded with zeros."""
    padded = np.zeros(-(-value.size // M_GROUP) * M_GROUP, np.float32)
    padded[: value.size] = value
    return padded.reshape(-1, M_GROUP)


def _unscaled(codes: NDArray[Any], scale: Float, first: int) -> Float:
    groups = _groups(to_float32(codes))
    own = scale[first // M_GROUP : first // M_GROUP + groups.shape[0]]
    return (groups * own[:, None]).reshape(-1)[: codes.size]


def _store_e4m3(
    codes: NDArray[Any], scale: Float, value: Float, first: int, bits: NDArray[np.uint16]
) -> None:
    groups = _groups(value)
    own, inverse = scales(np.abs(groups).max(axis=1), DType.E4M3)
    scale[first // M_GROUP : first // M_GROUP + groups.shape[0]] = own
    scaled = (groups * inverse[:, None]).reshape(-1)[: codes.size]
    codes[...] = stochastic_e4m3(scaled, bits)
