"""The weights that a run begins with: random, or from a Hugging Face folder.

Random: matrices and embeddings normal with the config's `init_std`; the two projections that write
to the residual stream (attention out, MLP down) are scaled by 1 / sqrt(2 L), so that its variance
does not grow with depth; norms 1, biases 0.

Source   Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import Parameter
from llmq_nb.train.engine import Engine
from llmq_nb.train.rank import State

RESIDUAL_PROJECTIONS = ("out", "down")


def set_random_weights(engine: Engine, model: ModelConfig) -> None:
    """Initialise the master weights; the bits depend on the seed and the tensor alone."""
    for state in engine.states:
        p = state.parameter
        if p.kind in ("norm", "bias"):
            value = np.float32(1.0 if p.kind == "norm" else 0.0)
            engine.write(state.master, np.full(p.shape, value))
        else:
            scale = 1.0 / math.sqrt(2.0 * model.L) if p.field in RESIDUAL_PROJECTIONS else 1.0
            rows = state.master.rows(0, p.views[-1].stop)  # padded rows of the vocabulary stay 0
            engine.fill_normal(rows, std=model.init_std * scale, tensor_id=state.tensor_id)
        copy_to_weights(engine, state)


def set_weights(engine: Engine, arrays: Iterator[tuple[Parameter, NDArray[Any]]]) -> None:
    """Set the master weights from arrays in our layout, one at a time."""
    by_name = {state.parameter.name: state for state in engine.states}
    for parameter, array in arrays:
        state = by_name[parameter.name]
        engine.write(state.master, array)
        copy_to_weights(engine, state)


def copy_to_weights(engine: Engine, state: State) -> None:
    """The working weights are the master weights, rounded to nearest."""
    if state.weight is not state.master:
        engine.write(state.weight, engine.read(state.master))
