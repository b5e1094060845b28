"""Layers in float64: embedding, RMSNorm, linear, SwiGLU, cross entropy, forward and backward.

Written from the equations with NumPy alone, sharing nothing with llmq_nb. Every function takes
arrays of any real dtype, computes in float64 and returns new arrays. "..." is any leading shape;
gradients of weights are summed over it. dy means d loss / d y.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
IGNORE = -100


def f64(x: ArrayLike) -> Array:
    """x in float64; ml_dtypes arrays included."""
    return np.asarray(x).astype(np.float64)


def embedding(tokens: ArrayLike, table: ArrayLike) -> Array:
    """x[..., c] = table[tokens[...], c]. tokens: int [...]; table: [V, C]."""
    return f64(table)[np.asarray(tokens)]


def embedding_backward(dx: ArrayLike, tokens: ArrayLike, V: int) -> Array:
    """dtable [V, C]: row v is the sum of dx over the places where v stood. dx: [..., C]."""
    dx = f64(dx)
    dtable = np.zeros((V, dx.shape[-1]))
    for token, row in zip(np.ravel(tokens), dx.reshape(-1, dx.shape[-1]), strict=True):
        dtable[token] += row
    return dtable


def rmsnorm(x: ArrayLike, weight: ArrayLike, *, eps: float) -> tuple[Array, Array]:
    """(y, rstd): rstd = (mean_c x^2 + eps)^(-1/2), y = x rstd weight. x: [..., C]; rstd: [...].

    Source: Zhang & Sennrich 2019, eq. 4.
    """
    x = f64(x)
    rstd = (np.mean(x * x, axis=-1) + eps) ** -0.5
    return x * rstd[..., None] * f64(weight), rstd


def rmsnorm_backward(
    dy: ArrayLike, x: ArrayLike, weight: ArrayLike, *, eps: float
) -> tuple[Array, Array]:
    """(dx [..., C], dweight [C]).

    d rstd / d x_c = -rstd^3 x_c / C, hence with g = dy weight
    dx = rstd g - x rstd^3 / C sum_c(g x) and dweight = sum over rows of dy x rstd.
    """
    dy, x, weight = f64(dy), f64(x), f64(weight)
    C = x.shape[-1]
    rstd = rmsnorm(x, weight, eps=eps)[1][..., None]
    g = dy * weight
    dx = rstd * g - x * rstd**3 / C * np.sum(g * x, axis=-1, keepdims=True)
    return dx, (dy * x * rstd).reshape(-1, C).sum(axis=0)


def residual_rmsnorm(
    residual: ArrayLike, x: ArrayLike, weight: ArrayLike, *, eps: float
) -> tuple[Array, Array, Array]:
    """(residual + x, its rmsnorm y, rstd)."""
    total = f64(residual) + f64(x)
    return (total, *rmsnorm(total, weight, eps=eps))


def residual_rmsnorm_backward(
    dy: ArrayLike, dtotal: ArrayLike, total: ArrayLike, weight: ArrayLike, *, eps: float
) -> tuple[Array, Array]:
    """(gradient of residual and equally of x, dweight); dtotal comes past the norm."""
    dx, dweight = rmsnorm_backward(dy, total, weight, eps=eps)
    return dx + f64(dtotal), dweight


def linear(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> Array:
    """y = x weight^T + bias. x: [..., K]; weight: [N, K]; bias: [N]; y: [..., N]."""
    y = f64(x) @ f64(weight).T
    return y if bias is None else y + f64(bias)


def linear_backward(dy: ArrayLike, x: ArrayLike, weight: ArrayLike) -> tuple[Array, Array, Array]:
    """(dx [..., K], dweight [N, K], dbias [N])."""
    dy, x, weight = f64(dy), f64(x), f64(weight)
    rows_dy, rows_x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return dy @ weight, rows_dy.T @ rows_x, rows_dy.sum(axis=0)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), without overflow: e^min(x, 0) / (1 + e^-|x|)."""
    return np.exp(np.minimum(x, 0.0)) / (1.0 + np.exp(-np.abs(x)))


def swiglu(gate: ArrayLike, up: ArrayLike) -> Array:
    """silu(gate) up = gate sigmoid(gate) up, elementwise. Source: Shazeer 2020, eq. 5."""
    gate = f64(gate)
    return gate * sigmoid(gate) * f64(up)


def swiglu_backward(dy: ArrayLike, gate: ArrayLike, up: ArrayLike) -> tuple[Array, Array]:
    """(dgate, dup); silu'(g) = s + g s (1 - s) with s = sigmoid(g)."""
    dy, gate, up = f64(dy), f64(gate), f64(up)
    s = sigmoid(gate)
    return dy * up * (s + gate * s * (1.0 - s)), dy * gate * s


def cross_entropy_rows(
    logits: ArrayLike, targets: ArrayLike, *, z_loss: float = 0.0
) -> tuple[Array, Array]:
    """(row_loss [N], lse [N]): lse - logits[target] + z_loss lse^2; 0 where target is -100.

    logits: [N, V]; targets: int [N]. lse is given for every row.
    """
    logits, targets = f64(logits), np.asarray(targets)
    top = logits.max(axis=-1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
    trained = targets != IGNORE
    picked = logits[np.arange(len(targets)), np.where(trained, targets, 0)]
    return np.where(trained, lse - picked + z_loss * lse**2, 0.0), lse


def cross_entropy(
    logits: ArrayLike, targets: ArrayLike, *, z_loss: float = 0.0, supervised: int | None = None
) -> float:
    """Sum of the row losses / supervised (default: the number of targets that are not -100).

    0.0 when nothing is supervised. z_loss: Chowdhery et al. 2022 (PaLM), section 5.
    """
    row_loss, _ = cross_entropy_rows(logits, targets, z_loss=z_loss)
    count = int(np.sum(np.asarray(targets) != IGNORE)) if supervised is None else supervised
    return float(row_loss.sum() / max(count, 1))


def cross_entropy_backward(
    logits: ArrayLike, targets: ArrayLike, *, z_loss: float = 0.0, supervised: int | None = None
) -> Array:
    """dlogits [N, V] = (softmax (1 + 2 z_loss lse) - onehot(target)) / supervised.

    Rows whose target is -100 get zeros.
    """
    logits, targets = f64(logits), np.asarray(targets)
    _, lse = cross_entropy_rows(logits, targets)
    trained = targets != IGNORE
    dlogits = np.exp(logits - lse[:, None]) * (1.0 + 2.0 * z_loss * lse[:, None])
    dlogits[np.arange(len(targets)), np.where(trained, targets, 0)] -= 1.0
    count = int(trained.sum()) if supervised is None else supervised
    return np.where(trained[:, None], dlogits, 0.0) / max(count, 1)
