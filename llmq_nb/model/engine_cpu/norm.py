"""RMSNorm and QK norm, forward and backward, on NumPy arrays.

    rstd = 1 / sqrt(mean(x^2) + eps);  y = x rstd weight
    dx   = rstd (dy weight - x rstd^2 mean(dy weight x));  dweight = sum_n dy x rstd

Source   Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4; the gradient is its derivative.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.rounding import to_float32
from llmq_nb.model.engine_cpu.rows import each_rows

Array = NDArray[Any]
Float = NDArray[Any]  # float32: NumPy's own types widen it to float64


def normed(x: Float, weight: Float, eps: float) -> tuple[Float, Float]:
    """(y, rstd) of the last axis."""
    mean_sq = np.einsum("...c,...c->...", x, x) / np.float32(x.shape[-1])
    rstd = np.float32(1.0) / np.sqrt(mean_sq + np.float32(eps))
    return x * rstd[..., None] * weight, rstd


def normed_backward(dy: Float, x: Float, weight: Float, rstd: Float) -> tuple[Float, Float]:
    """(dx, dy * x * rstd), the second to be summed over rows into dweight."""
    x_hat = x * rstd[..., None]
    dx_hat = dy * weight
    mean = np.einsum("...c,...c->...", dx_hat, x_hat) / np.float32(x.shape[-1])
    return rstd[..., None] * (dx_hat - x_hat * mean[..., None]), dy * x_hat


def rmsnorm(y: Array, rstd: Float, x: Array, weight: Array, eps: float) -> None:
    """y and rstd of x, (N, C); weight: (C,), rstd: (N,) float32."""
    w = to_float32(weight)

    def work(rows: slice) -> None:
        y[rows], rstd[rows] = normed(to_float32(x[rows]), w, eps)

    each_rows(work, *x.shape)


def residual_rmsnorm(
    residual_out: Array, y: Array, rstd: Float, residual: Array, x: Array, weight: Array, eps: float
) -> None:
    """residual_out = residual + x, (N, C), and its norm: y and rstd."""
    w = to_float32(weight)

    def work(rows: slice) -> None:
        residual_out[rows] = to_float32(residual[rows]) + to_float32(x[rows])
        # the norm reads the rounded sum: a recomputed norm has nothing else
        y[rows], rstd[rows] = normed(to_float32(residual_out[rows]), w, eps)

    each_rows(work, *x.shape)


def rmsnorm_backward(
    dx: Array, dy: Array, dresidual: Array | None, x: Array, weight: Array, rstd: Float
) -> Float:
    """Writes dx and returns dweight."""
    w = to_float32(weight)

    def work(rows: slice) -> Float:
        grad, products = normed_backward(to_float32(dy[rows]), to_float32(x[rows]), w, rstd[rows])
        dx[rows] = grad if dresidual is None else to_float32(dresidual[rows]) + grad
        return products.sum(axis=0)

    return np.stack(each_rows(work, *x.shape)).sum(axis=0)


def qk_norm(
    heads: Array, rstd: Float, qkv: Array, weight: Array, queries: int, keys: int, eps: float
) -> None:
    """heads, qkv: (N, H + 2 G, D); weight: (H + G, D), a row for each normed head."""
    w = to_float32(weight)

    def work(rows: slice) -> None:
        normed_heads = to_float32(qkv[rows, : queries + keys])
        heads[rows, : queries + keys], rstd[rows] = normed(normed_heads, w, eps)
        heads[rows, queries + keys :] = qkv[rows, queries + keys :]

    each_rows(work, qkv.shape[0], qkv.shape[1] * qkv.shape[2])


def qk_norm_backward(
    dqkv: Array, dheads: Array, qkv: Array, weight: Array, rstd: Float, queries: int, keys: int
) -> tuple[Float, Float]:
    """Writes dqkv and returns (dq_weight, dk_weight), each (D,)."""
    w = to_float32(weight)
    n = queries + keys

    def work(rows: slice) -> Float:
        dy, x = to_float32(dheads[rows, :n]), to_float32(qkv[rows, :n])
        dqkv[rows, :n], products = normed_backward(dy, x, w, rstd[rows])
        dqkv[rows, n:] = dheads[rows, n:]
        return products.sum(axis=0)

    total = np.stack(each_rows(work, qkv.shape[0], qkv.shape[1] * qkv.shape[2])).sum(axis=0)
    return total[:queries].sum(axis=0), total[queries:].sum(axis=0)
