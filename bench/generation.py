"""Tokens per second of generation with cached keys and values.

    python -m bench.generation [--model qwen2.5-0.5b] [--rows 1 8 32] [--prompt 512] [--tokens 128]
        [--device cuda]

Random weights, greedy, no end of text. Of each number of rows a JSON line: seconds of the prompts
(`prompt` tokens a row), tokens/s after them over all rows, and the weights' bytes read per second
(a token a row reads every weight of a block and the LM head once).
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import Config, DataConfig, ModelSection
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.families import preset
from llmq_nb.model.parameters import Parameter, model_parameters
from llmq_nb.train.generation import Generator, Sampling


def random_weights(model: ModelConfig) -> Iterator[tuple[Parameter, NDArray[Any]]]:
    rng = np.random.default_rng(0)
    for p in model_parameters(model):
        if len(p.shape) == 1:
            yield p, np.ones(p.shape, ml_dtypes.bfloat16)
            continue
        row = (0.02 * rng.standard_normal(1 << 20, np.float32)).astype(ml_dtypes.bfloat16)
        yield p, np.resize(row, p.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    a = parser.parse_args()
    if a.device == "cuda":
        from llmq_nb.core.device import open_device

        open_device(0).make_current()
    model = preset(a.model)
    base = Config(model=ModelSection(path=a.model), data=DataConfig(train="none"))
    read = 2 * sum(math.prod(p.shape) for p in model_parameters(model) if p.field != "embedding")
    read += 2 * model.V * model.C if model.tied else 0
    for rows in a.rows:
        with Generator(
            model, rows=rows, length=a.prompt + a.tokens + 8, prompt=a.prompt, base=base,
            arrays=random_weights(model), kind=a.device,
        ) as generator:  # fmt: skip
            rng = np.random.default_rng(1)
            prompts = [rng.integers(0, model.V, a.prompt) for _ in range(rows)]
            for _ in generator.generate(prompts, 3, Sampling(0.0), stop_ids=()):
                pass  # kernels compile, the step is recorded
            begin = time.perf_counter()
            made = generator.generate(prompts, a.tokens, Sampling(0.0), stop_ids=())
            for _ in range(rows):
                next(made)
            first = time.perf_counter()
            count = sum(1 for _ in made)
            seconds = time.perf_counter() - first
        facts = {"model": a.model, "rows": rows, "prompt": a.prompt, "tokens": count // rows}
        facts |= {"prompt_seconds": round(first - begin, 4)}
        facts |= {"tokens_per_second": round(count / seconds, 1)}
        facts |= {"weights_gb_per_second": round(read * count / rows / seconds / 1e9, 1)}
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
