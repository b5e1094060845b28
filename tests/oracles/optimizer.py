"""AdamW and the gradient norm in float64. Shares nothing with llmq_nb."""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike

from tests.oracles.layers import Array, f64


def adamw(
    weight: ArrayLike,
    m: ArrayLike,
    v: ArrayLike,
    gradient: ArrayLike,
    *,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> tuple[Array, Array, Array]:
    """(weight, m, v) after one update; step counts from 1. Any shape, elementwise.

        m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
        weight -= learning_rate (m_hat / (sqrt(v_hat) + epsilon) + weight_decay weight)

    with m_hat = m / (1 - beta1^step) and v_hat likewise. Source: Loshchilov & Hutter 2019,
    algorithm 2, with the learning rate as its schedule multiplier and alpha.
    """
    weight, g = f64(weight), f64(gradient)
    m = beta1 * f64(m) + (1.0 - beta1) * g
    v = beta2 * f64(v) + (1.0 - beta2) * g * g
    m_hat, v_hat = m / (1.0 - beta1**step), v / (1.0 - beta2**step)
    update = m_hat / (np.sqrt(v_hat) + epsilon) + weight_decay * weight
    return weight - learning_rate * update, m, v


def global_norm(gradients: Mapping[str, ArrayLike] | Iterable[ArrayLike]) -> float:
    """Square root of the sum of squares of all elements of all tensors."""
    tensors = gradients.values() if isinstance(gradients, Mapping) else gradients
    return float(np.sqrt(sum(float(np.sum(f64(g) ** 2)) for g in tensors)))


def clip_factor(norm: float, limit: float) -> float:
    """What the gradients are multiplied by: min(1, limit / norm); 1 for a norm of zero."""
    return 1.0 if norm <= limit else limit / norm
