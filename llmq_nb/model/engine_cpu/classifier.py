"""The classifier: loss, lse and the gradient of the logits, on NumPy arrays.

    lse  = log sum_v exp(logits[v]);  loss = lse - logits[target] + z lse^2
    dlogits = inv_supervised (softmax (1 + 2 z lse) - onehot(target))

A row whose target is -100 has loss 0 and an all-zero gradient, but an lse like any other.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.rounding import to_float32
from llmq_nb.model.engine_cpu.rows import each_rows

IGNORED = -100
"""The target of a token that is not trained."""


def cross_entropy(
    logits: NDArray[Any],
    loss: NDArray[np.float32],
    lse: NDArray[np.float32],
    targets: NDArray[np.int32],
    vocab: int,
    *,
    z_loss: float,
    inv_supervised: float | None,
) -> None:
    """inv_supervised: write the gradient into `logits` with this factor; None: leave them alone."""
    z = np.float32(z_loss)

    def work(rows: slice) -> None:
        x, target = to_float32(logits[rows, :vocab]), targets[rows]
        supervised = target != IGNORED
        safe = np.where(supervised, target, 0)
        top = x.max(axis=-1, keepdims=True)
        at_target = np.take_along_axis(x, safe[:, None], axis=-1)[:, 0]
        p = np.exp(x - top)
        total = p.sum(axis=-1, keepdims=True)
        row_lse = (top + np.log(total))[:, 0]
        lse[rows] = row_lse
        row_loss = row_lse - at_target + z * row_lse * row_lse
        loss[rows] = np.where(supervised, row_loss, np.float32(0.0))
        if inv_supervised is None:
            return
        factor = np.where(supervised, np.float32(inv_supervised), np.float32(0.0))
        p *= (factor * (np.float32(1.0) + np.float32(2.0) * z * row_lse))[:, None] / total
        p[np.arange(safe.size), safe] -= factor
        p[~supervised] = 0.0  # also where the logits were not finite
        logits[rows, :vocab] = p
        logits[rows, vocab:] = 0

    each_rows(work, *logits.shape)
