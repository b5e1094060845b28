"""Ranks that share a run's weights where those live on the host: the bits of resident weights."""

import numpy as np
import pytest

from llmq_nb.offload.transfer import ImmediateTransfer
from llmq_nb.train.generation import Generator, Sampling
from llmq_nb.train.gradients import loss_and_gradients
from llmq_nb.train.inference import Inference
from tests.model.harness import bits, random_batch
from tests.offload.harness import LEVERS, MODEL, STORAGE, T, config_of, engine_of


def found(storage, offload):
    """Loss and gradients of a batch of another shape; logits of another rank; text of two more."""
    config = config_of(storage, offload=offload)
    engine = engine_of(config, ImmediateTransfer)
    batch = random_batch(np.random.default_rng(3), 3, T - 4, MODEL.V)
    loss, gradients = loss_and_gradients(
        config, MODEL, engine, batch.tokens[0], batch.targets[0], None, batch.segment_start[0]
    )
    weights = {s.parameter.name: s.weight for s in engine.states}
    inference = Inference(MODEL, micro_batch=1, seq_len=9, base=config, weights=weights)
    logits = [bits(inference.logits(np.arange(1, n, dtype=np.int32))) for n in (4, 9)]
    settings = {"rows": 2, "length": 12, "prompt": 5, "base": config, "weights": weights}
    with Generator(MODEL, **settings) as generator:
        greedy = Sampling(temperature=0.0)
        text = list(generator.generate([[1, 2, 3, 4, 5], [6]], 9, greedy, stop_ids=()))
    return loss, {name: bits(g) for name, g in gradients.items()}, logits, text


@pytest.mark.parametrize("storage", STORAGE)
def test_gradients_and_text_have_the_bits_of_resident_weights(storage):
    want = found(storage, ())
    assert found(storage, ("master",)) == want
    assert found(storage, LEVERS) == want
