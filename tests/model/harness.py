"""Small tensors, engines and whole ranks for the tests of the model and its engine."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from llmq_nb.config import (
    BatchConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelSection,
    OptimizerConfig,
    PrecisionConfig,
)
from llmq_nb.core.dtype import DType
from llmq_nb.core.tensor import Fp8Slot, Tensor
from llmq_nb.io.hf_config import read_model_config
from llmq_nb.io.weights import load_weights
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.engine_cpu import CpuOps
from llmq_nb.model.ops import Scalars
from llmq_nb.model.parameters import Parameter
from llmq_nb.plan.buffers import make_plan
from llmq_nb.train.rank import Rank
from llmq_nb.train.step import micro_step
from llmq_nb.train.wiring import allocate, make_rank

FIXTURES = Path(__file__).parents[1] / "fixtures" / "transformers"
CASES = sorted(folder.name for folder in FIXTURES.iterdir() if folder.is_dir())
U = 2.0**-24
"""Unit roundoff of float32."""
Array = NDArray[Any]


def tensor(array: Any, dtype: DType = DType.FP32, fp8: DType | None = None) -> Tensor:
    """A tensor of its own memory; fp8: the format in which it enters FP8 products."""
    data = np.array(np.asarray(array, np.float64), order="C").astype(dtype.numpy)
    slot = None if fp8 is None else Fp8Slot(fp8, np.full(1, np.nan, np.float32))
    return Tensor("t", data.shape, dtype, data, slot)


def garbage(*shape: int, dtype: DType = DType.FP32) -> Tensor:
    """An output: full of NaN, so that what is not written shows."""
    return tensor(np.full(shape, np.nan), dtype)


def ints(array: Any) -> Tensor:
    data = np.ascontiguousarray(array, np.int32)
    return Tensor("t", data.shape, DType.INT32, data)


def f64(t: Tensor) -> NDArray[np.float64]:
    return t.data.astype(np.float64)


def half_ulp(x: Array) -> Array:
    """Half of the distance of BF16 neighbours at |x|: the rounding of one store."""
    return np.exp2(np.maximum(np.frexp(np.abs(x))[1] - 1, -126) - 8.0)


def assert_within(got: Tensor, want: Array, bound: Any) -> None:
    """|got - want| <= bound, and the rounding of got's storage. bound: of the float32 value."""
    want, bound = np.asarray(want, np.float64), np.asarray(bound, np.float64)
    if got.dtype is DType.BF16:
        bound = bound + half_ulp(np.abs(want) + bound)
    error = np.abs(f64(got).reshape(want.shape) - want)
    assert np.isfinite(f64(got)).all()
    worst = np.unravel_index(int(np.argmax(error - bound)), error.shape)
    assert (error <= bound).all(), (worst, error[worst], np.broadcast_to(bound, error.shape)[worst])


def small_model(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = dict(
        family="llama", C=32, F=48, L=2, H=4, G=2, D=16, V=37, tied=False, norm_eps=1e-5
    )
    return ModelConfig(**(fields | changes))


def make_ops(
    model: ModelConfig | None = None, *, seq_len: int = 512, seed: int = 1, **optimizer: Any
) -> CpuOps:
    config = OptimizerConfig(**optimizer)
    return CpuOps(model or small_model(), config, seq_len=seq_len, seed=seed)


def expected(case: str) -> dict[str, Array]:
    """What transformers gave: tokens, targets, segment_start, loss, grad.<name>, ..."""
    return load_file(FIXTURES / case / "expected.safetensors")


@dataclasses.dataclass(frozen=True)
class Batch:
    """A whole step: (accumulation, B, T) int32 each."""

    tokens: Array
    targets: Array
    segment_start: Array

    @property
    def supervised(self) -> int:
        return int((self.targets != -100).sum())

    def split(self, micro_batch: int) -> "Batch":
        """The same sequences in micro-batches of another size."""
        parts = (self.tokens, self.targets, self.segment_start)
        return Batch(*(p.reshape(-1, micro_batch, p.shape[-1]) for p in parts))


def recorded_batch(case: str) -> Batch:
    e = expected(case)
    return Batch(*(e[key][None] for key in ("tokens", "targets", "segment_start")))


def random_batch(rng: np.random.Generator, sequences: int, T: int, V: int) -> Batch:
    """Ragged documents and masks: each sequence has its own share of supervised targets."""
    tokens = rng.integers(0, V, (1, sequences, T))
    first = rng.random((1, sequences, T)) < 0.15
    first[..., 0] = True
    starts = np.maximum.accumulate(np.where(first, np.arange(T), 0), axis=-1)
    share = rng.uniform(0.1, 0.9, (1, sequences, 1))
    targets = np.where(rng.random(tokens.shape) < share, rng.integers(0, V, tokens.shape), -100)
    return Batch(*(a.astype(np.int32) for a in (tokens, targets, starts)))


def make_config(
    *,
    micro_batch: int,
    seq_len: int,
    precision: str = "fp32",
    recompute: Sequence[str] = (),
    head_chunks: int = 1,
    accumulation: str | None = None,
    gradient: str = "e4m3",
    **optimizer: Any,
) -> Config:
    """precision: fp32, bf16, or e4m3 (BF16 storage, FP8 products)."""
    dtype: Any = "fp32" if precision == "fp32" else "bf16"
    matmul: Any = "e4m3" if precision == "e4m3" else None
    options: Any = {"gradient": gradient, "gradient_accumulation": accumulation}
    levers: Any = {"recompute": tuple(recompute), "head_chunks": head_chunks}
    return Config(
        model=ModelSection(path="x"),
        data=DataConfig(train="x"),
        batch=BatchConfig(micro_batch=micro_batch, seq_len=seq_len),
        precision=PrecisionConfig(dtype=dtype, matmul=matmul, **options),
        memory=MemoryConfig(**levers),
        optimizer=OptimizerConfig(**optimizer),
    )


def make(config: Config, model: ModelConfig, *, seed: int = 1) -> Rank:
    """A rank from the plan of a config, weights zero."""
    ops = CpuOps(model, config.optimizer, seq_len=config.batch.seq_len, seed=seed)
    return make_rank(config, model, allocate(make_plan(config, model)), ops)


def set_weights(rank: Rank, arrays: Any) -> None:
    """Masters and weights from (parameter, array) pairs, rounded to nearest."""
    by_name: dict[str, Array] = {p.name: array for p, array in arrays}
    for state in rank.states:
        state.master.data[...] = by_name[state.parameter.name]
        state.weight.data[...] = state.master.data


def recorded_rank(
    case: str, *, json_name: str = "config.json", micro_batch: int = 2, **options: Any
) -> Rank:
    """A rank that holds the weights of a recorded model. options: of make_config."""
    model = read_model_config(FIXTURES / case / json_name)
    seq_len = expected(case)["tokens"].shape[1]
    rank = make(make_config(micro_batch=micro_batch, seq_len=seq_len, **options), model)
    set_weights(rank, load_weights(FIXTURES / case, model))
    return rank


def random_weights(model: ModelConfig, parameters: Sequence[Parameter], seed: int) -> list[Any]:
    """Weights under which no parameter is neutral; padded rows zero."""
    rng = np.random.default_rng(seed)
    out = []
    for p in parameters:
        value = rng.standard_normal(p.shape)
        value = value / np.sqrt(p.shape[1]) if len(p.shape) == 2 else 0.2 * value
        value = value + 1.0 if p.kind == "norm" else value
        value[p.views[-1].stop :] = 0
        out.append((p, value.astype(np.float32)))
    return out


def load_micro_batch(rank: Rank, batch: Batch, m: int) -> None:
    inputs = rank.model.inputs
    inputs.tokens.data[...] = batch.tokens[m]
    inputs.targets.data[...] = batch.targets[m]
    inputs.segment_start.data[...] = batch.segment_start[m]
    inputs.order.data[...] = np.argsort(batch.tokens[m].reshape(-1), kind="stable")


def run_micro_steps(rank: Rank, batch: Batch, *, before: Any = lambda m: None) -> float:
    """Loss of the whole step, gradients left in the rank. before: called before each one."""
    rank.ops.set_scalars(Scalars(inv_supervised=1.0 / batch.supervised))
    for m in range(batch.tokens.shape[0]):
        before(m)
        load_micro_batch(rank, batch, m)
        micro_step([rank], first=m == 0)
    return float(rank.model.head.total.data[0])


def gradients(rank: Rank) -> dict[str, Array]:
    """Copies under Hugging Face names, in the stored format."""
    return {
        view.hf_name: np.array(s.gradient.data[view.start : view.stop])
        for s in rank.states
        for view in s.parameter.views
    }


def relative_l2(got: Array, want: Array) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def bits(array: Array) -> bytes:
    """For comparisons that hold for NaN and tell -0 from 0."""
    return np.ascontiguousarray(array).tobytes()


def bf16(array: Any) -> Array:
    return np.asarray(array).astype(ml_dtypes.bfloat16)
