"""Loss and gradients of one batch of any shape, eagerly, with a run's weights."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmq_nb.config import Config, MemoryConfig
from llmq_nb.core.rounding import to_float32
from llmq_nb.data.packing import IGNORE
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.ops import Scalars
from llmq_nb.plan.buffers import TRAINING, Group
from llmq_nb.train.eager import make_eager, shared_weights, weight_arrays
from llmq_nb.train.engine import Engine, load_with_order
from llmq_nb.train.step import micro_step

STATES: frozenset[Group] = frozenset({"master", "m", "v"})
GROUPS = TRAINING - STATES - {"weights"}


def loss_and_gradients(
    config: Config,
    model: ModelConfig,
    engine: Engine,
    tokens: ArrayLike,
    targets: ArrayLike,
    mask: ArrayLike | None = None,
    segment_start: ArrayLike | None = None,
) -> tuple[float, dict[str, NDArray[np.float32]]]:
    """(mean loss over the supervised tokens, gradients by Hugging Face name as float32).

    tokens, targets: (B, T) integers, target -100 = not trained. mask: (B, T), true where the
    target counts. segment_start: (B, T), index in the row of the first token of each token's
    document; None: one document a row.
    Raises ValueError for shapes that differ, ids outside the vocabulary, or nothing supervised.
    """
    inputs = np.asarray(tokens, np.int32)
    labels = np.asarray(targets, np.int32)
    if mask is not None:
        labels = np.where(np.asarray(mask, bool), labels, IGNORE).astype(np.int32)
    starts = np.zeros_like(inputs) if segment_start is None else np.asarray(segment_start, np.int32)
    _check(model, inputs, labels, starts)
    B, T = inputs.shape
    shaped = dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, micro_batch=B, seq_len=T, grad_accumulation=1),
        memory=MemoryConfig(),
    )
    whole = shared_weights(engine)
    groups = TRAINING - STATES if whole is None else GROUPS
    weights = {f"weights/{name}": weight for name, weight in (whole or {}).items()}
    with make_eager(engine.kind, shaped, model, groups, weights) as eager:
        rank, ops = eager.rank, eager.rank.ops
        for parameter, array in weight_arrays(engine) if whole is None else ():
            ops.write(eager.tensors[f"weights/{parameter.name}"], array)
        supervised = int(np.count_nonzero(labels != IGNORE))
        ops.set_scalars(Scalars(inv_supervised=1.0 / supervised))
        load_with_order(rank, inputs, labels, starts)
        micro_step([rank], first=True)
        gradients = {}
        for state in engine.states:
            p = state.parameter
            array = to_float32(ops.read(eager.tensors[f"gradients/{p.name}"]))
            gradients |= {view.hf_name: array[view.start : view.stop] for view in p.views}
        return float(ops.read(rank.model.head.total)[0]), gradients


def _check(model: ModelConfig, tokens: NDArray, targets: NDArray, starts: NDArray) -> None:
    if tokens.ndim != 2 or not tokens.shape == targets.shape == starts.shape:
        raise ValueError(f"tokens {tokens.shape}, targets {targets.shape}: both must be (B, T)")
    if tokens.min() < 0 or tokens.max() >= model.V:
        raise ValueError(f"token ids must be in 0 .. {model.V - 1}")
    kept = targets[targets != IGNORE]
    if kept.size == 0:
        raise ValueError("no supervised token: every target is -100")
    if kept.min() < 0 or kept.max() >= model.V:
        raise ValueError(f"targets must be -100 or in 0 .. {model.V - 1}")
