"""A model that only runs forward: opened from disk, its loss on windows, logits of a text.

Opens a Hugging Face folder, a checkpoint or a run's folder; or shares the weights of a run.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmq_nb.config import (
    BatchConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelSection,
    PrecisionConfig,
)
from llmq_nb.config_file import parse_config
from llmq_nb.core.errors import UserError
from llmq_nb.core.rounding import to_float32
from llmq_nb.core.tensor import Tensor
from llmq_nb.data.loader import EvalBatch
from llmq_nb.io.hf_config import CONFIG_NAME, read_model_config
from llmq_nb.io.weights import WeightFiles, load_weights, read_parameter
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import Parameter, model_parameters
from llmq_nb.plan.buffers import INFERENCE
from llmq_nb.train.checkpoint import latest_checkpoint, read_checkpoint
from llmq_nb.train.eager import Kind, make_eager
from llmq_nb.train.engine import load
from llmq_nb.train.snapshot import fused, saved_model
from llmq_nb.train.step import evaluation_step

Arrays = Iterator[tuple[Parameter, NDArray[Any]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A model as it lies on disk. tokenizer: what its text was made with, as far as is known."""

    model: ModelConfig
    arrays: Arrays
    read: Callable[[Parameter], NDArray[Any]]
    """One parameter; `arrays` gives all of them in forward order."""
    tokenizer: str | None
    precision: Config
    """What it runs with: that of the run, or for a folder FP32 if its weights are."""


def open_model(path: str | Path, *, seq_len: int = 1) -> Opened:
    """A Hugging Face folder, a checkpoint, or a run's folder (its newest checkpoint).

    seq_len: the longest sequence that must fit a sliding window; a window limits the positions.
    """
    folder = Path(path).expanduser()
    if (folder / CONFIG_NAME).is_file():
        model = read_model_config(folder, seq_len=seq_len)
        tokenizer = str(folder) if (folder / "tokenizer.json").is_file() else None
        arrays, files = load_weights(folder, model), WeightFiles(folder)

        def read(p: Parameter) -> NDArray[Any]:
            return read_parameter(files, p)

        return Opened(model, arrays, read, tokenizer, _stored_precision(folder))
    place = folder if (folder / "manifest.json").is_file() else None
    place = place or latest_checkpoint(folder) or latest_checkpoint(folder / "checkpoints")
    if place is None:
        mend = "give a Hugging Face folder, a checkpoint or a run's folder"
        raise UserError(f"no model in {folder}", mend=mend)
    checkpoint = read_checkpoint(place)
    model, tensors = saved_model(checkpoint), checkpoint.tensors("master")
    config = parse_config(checkpoint.state["config"], where=str(place / "state.json"))

    def fused_of(p: Parameter) -> NDArray[Any]:
        return fused(p, tensors)

    arrays = ((p, fused_of(p)) for p in model_parameters(model))
    tokenizer = config.data.tokenizer
    if tokenizer is None:
        beside = Path(config.model.path)
        tokenizer = str(beside) if (beside / "tokenizer.json").is_file() else "bytes"
    return Opened(model, arrays, fused_of, tokenizer, config)


def _stored_precision(folder: Path) -> Config:
    files = WeightFiles(folder)  # which knows scales from weights
    wide = any(files.spec(name).dtype == np.float32 for name in files.names())
    kind = "fp32" if wide else "bf16"
    return Config(
        model=ModelSection(path=str(folder)),
        data=DataConfig(train="none"),
        precision=PrecisionConfig(dtype=kind),
    )


class Inference:
    """Forward passes of (micro_batch, seq_len) with fixed buffers."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        micro_batch: int,
        seq_len: int,
        base: Config,
        weights: Mapping[str, Tensor] | None = None,
        arrays: Arrays | None = None,
        kind: Kind = "cpu",
    ) -> None:
        """base: the config whose precision and seed are used. weights: tensors to share by name, or
        arrays: to copy. kind: the device, that of shared weights."""
        config = dataclasses.replace(
            base,
            batch=BatchConfig(micro_batch=micro_batch, seq_len=seq_len),
            # nothing is kept for a backward that never comes, and the logits never exist whole
            memory=MemoryConfig(
                recompute=("block",), head_chunks=_head_chunks(micro_batch * seq_len)
            ),
        )
        self.config, self.model = config, model
        groups = INFERENCE if weights is None else INFERENCE - {"weights"}
        shared = {f"weights/{name}": tensor for name, tensor in (weights or {}).items()}
        self.eager = make_eager(kind, config, model, groups, shared)
        self.rank, self.ops = self.eager.rank, self.eager.rank.ops
        for parameter, array in arrays or ():
            self.ops.write(self.eager.tensors[f"weights/{parameter.name}"], array)

    def loss(self, batches: Iterator[EvalBatch]) -> tuple[float, int]:
        """(mean loss over the supervised tokens, their number)."""
        sums, supervised = [], 0
        for batch, losses in self.losses(batches):
            sums.append(float(losses.sum(dtype=np.float64)))
            supervised += batch.supervised
        return (math.fsum(sums) / supervised if supervised else math.nan), supervised

    def losses(
        self, batches: Iterator[EvalBatch]
    ) -> Iterator[tuple[EvalBatch, NDArray[np.float32]]]:
        """Each batch with its targets' losses, (micro_batch, seq_len), 0 of what is masked."""
        for batch in batches:
            load(self.rank, batch.tokens, batch.targets, batch.segment_start, None)
            evaluation_step([self.rank])
            losses = self.ops.read(self.rank.model.head.loss)
            yield batch, losses.reshape(batch.targets.shape)

    def logits(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits of the token after `tokens` (at most seq_len): (V,)."""
        b = self.config.batch
        padded = np.zeros((b.micro_batch, b.seq_len), np.int32)  # later tokens change nothing
        padded[0, : tokens.size] = tokens
        load(self.rank, padded, padded, np.zeros_like(padded), None)
        model = self.rank.model
        model.embed()
        for layer in range(self.model.L):
            model.forward(layer)
        return to_float32(self.ops.read(model.logits_of(tokens.size - 1)))[0, : self.model.V]


def _head_chunks(rows: int) -> int:
    return max(1, rows // 256)
