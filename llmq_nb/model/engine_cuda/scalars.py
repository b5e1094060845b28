"""The layout of `inputs/scalars`: what a graph reads instead of Python's values."""

import numpy as np
from numpy.typing import NDArray

from llmq_nb.model.ops import Scalars

SCALAR_WORDS = 8
"""32-bit words of the buffer; the last ones are not used."""
SCALARS = ("learning_rate", "inv_supervised", "correction1", "correction2", "update")
"""Words of inputs/scalars: float32, but for `update`."""


def pack_scalars(scalars: Scalars) -> NDArray[np.uint32]:
    """A step's scalars as the device reads them."""
    words = np.zeros(SCALAR_WORDS, np.uint32)
    floats = words.view(np.float32)
    for i, name in enumerate(SCALARS[:4]):
        floats[i] = getattr(scalars, name)
    words[4] = scalars.update & 0xFFFFFFFF
    return words
