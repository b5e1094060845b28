"""The layout of `inputs/scalars`: what a graph reads instead of Python's values."""

import numpy as np
from numpy.typing import NDArray

from llmq_nb.model.ops import Scalars

SCALAR_WORDS = 8
"""32-bit words of the buffer; the last ones are not used."""
SCALARS = ("learning_rate", "inv_correction1", "inv_correction2", "update", "inv_supervised")
"""Words of inputs/scalars: float32, but for `update`."""


def pack_scalars(scalars: Scalars) -> NDArray[np.uint32]:
    """A step's scalars as the device reads them."""
    words = np.zeros(SCALAR_WORDS, np.uint32)
    floats = words.view(np.float32)
    floats[0] = scalars.learning_rate
    floats[1] = 1.0 / scalars.correction1
    floats[2] = 1.0 / scalars.correction2
    words[3] = scalars.update & 0xFFFFFFFF
    floats[4] = scalars.inv_supervised
    return words
