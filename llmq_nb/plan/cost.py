"""How long a step takes, operation by operation, from the two configs and a card's rates alone.

    seconds of a product   max(2 N M K / rate, bytes / bandwidth, PRODUCT_FLOOR) + GAP
    of another kernel      max(bytes / bandwidth, FLOOR) + GAP
    of attention           2 B H T^2 D / rate forward, 2.5 times that backward

Each tensor is read once and written once where an operation must; launches are counted one an
operation, two for a product's backward. This is the budget that `bench step --breakdown` compares
with, what `plan` predicts from, and what `memory.policy = "auto"` chooses by.

What `memory.offload` moves costs time on the link to the host: see `plan.offload_cost`.

FP8 codes are written from BF16 values in one pass a tensor, or two where a layout is not kept; the
absmax is found by whoever produces the tensor.

Source   The formulas and the H200's rates are those of the project's step_budget.py (facts about
         what was measured); recomputation, the optimizer step and small shapes are added here.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Literal

from llmq_nb.config import Config
from llmq_nb.core.dtype import DType
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.fp8 import BY_WEIGHT, fp8_layers, fp8_weights, keeps_codes, widths
from llmq_nb.model.parameters import model_parameters
from llmq_nb.model.recompute import dropped_activations
from llmq_nb.plan.buffers import head_rows
from llmq_nb.plan.offload_cost import (
    alike,
    codes_traffic,
    disk_seconds,
    exposed_seconds,
    norm_traffic,
    update_seconds,
    update_traffic,
)
from llmq_nb.plan.places import offloads_quants
from llmq_nb.plan.rates import PROMOTED, Rates, at

GAP = 1e-6
"""Between two kernels of a recorded graph [s]; an estimate."""
LAUNCH = 4.5e-6
"""What stands for GAP in a prediction: what a launch takes beyond its bytes or products, with the
ramp and the last, partly filled wave [s]. Of 81 settings of 0.5B and 1.5B in FP8 on an H200, with
micro-batches of 2 to 32: the value with which the error depends least on the micro-batch."""
FLOOR, PRODUCT_FLOOR = 2e-6, 8e-6
"""Least time of a kernel and of a product, however small [s]; estimates."""
FP32_SHARE = 1 / 8
"""Rate of FP32 products over BF16 ones: no speed goal, a guess that only orders settings."""

Part = Literal[
    "products",
    "quantise",
    "attention",
    "norms",
    "SwiGLU",
    "RoPE",
    "embedding",
    "LM head",
    "classifier",
    "recomputation",
    "optimizer",
    "host link",
    "disk",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """operation: as `bench step --breakdown` names it. seconds: of a whole micro-step or step."""

    operation: str
    part: Part
    seconds: float


def micro_step_work(
    config: Config, model: ModelConfig, rates: Rates, gap: float = GAP
) -> list[Work]:
    """Forward and backward of one micro-batch, with what `memory.recompute` adds.

    gap: beside each launch; the default gives the budget.
    """
    works, forward, backward = gpu_work(config, model, rates, gap)
    seen = exposed_seconds(config, model, rates.host_link, forward, backward)
    return [*works, Work("copies", "host link", seen)] if seen else works


def gpu_work(
    config: Config, model: ModelConfig, rates: Rates, gap: float = GAP
) -> tuple[list[Work], float, float]:
    """A micro-step without its copies; seconds of one block's forward and of its backward."""
    m = _Model(config, model, rates, gap)
    forward, backward = [*_forward(m)], [*_backward(m), *_recomputation(m)]
    of_block = [
        sum(w.seconds for w in works if not w.operation.startswith("embedding")) / model.L
        for works in (forward, backward)
    ]
    return [*forward, *_head(m), *backward], of_block[0], of_block[1]


def optimizer_work(config: Config, model: ModelConfig, rates: Rates) -> list[Work]:
    """Norm of the gradients, update, and the FP8 copies of the new weights."""
    m, link = _Model(config, model, rates), rates.host_link
    norm = norm_traffic(config, model)
    updates = [(update_traffic(config, p), n) for p, n in alike(model_parameters(model))]
    works = [n * m.stream(t.device) for t, n in updates]
    waits = [n * update_seconds(config, link, t) for t, n in updates]
    out = [
        Work("global_norm", "optimizer", m.stream(norm.device)),
        Work("adamw", "optimizer", sum(works)),
    ]
    if m.fp8_layers:
        out.append(Work("clear_weight_absmax", "quantise", m.stream(0)))
        if config.memory.keep_quants:  # adamw writes the codes of what it updates
            found = alike(fp8_weights(config, model))
            codes = [(codes_traffic(config, p), n) for p, n in found]
            out.append(Work("adamw", "quantise", sum(n * m.stream(t.device) for t, n in codes)))
            works += [n * m.stream(t.device) for t, n in codes]
            waits += [n * link.kernels(t.read, t.written) for t, n in codes]
    out.append(Work("global_norm", "host link", link.kernels(norm.read, 0)))
    seen = sum(max(0.0, wait - work) for wait, work in zip(waits, works, strict=True))
    out.append(Work("adamw", "host link", seen))
    out.append(Work("adamw", "disk", max(0.0, disk_seconds(config, model) - sum(waits))))
    return [work for work in out if work.seconds]


def step_seconds(config: Config, model: ModelConfig, rates: Rates) -> float:
    """One optimizer step with all its micro-steps."""
    micro = total(micro_step_work(config, model, rates, LAUNCH))
    update = total(optimizer_work(config, model, rates))
    return config.batch.grad_accumulation * micro + update


def tokens_per_second(config: Config, model: ModelConfig, rates: Rates) -> float:
    """Of whole steps on one GPU."""
    return config.tokens_per_step / step_seconds(config, model, rates)


def total(works: Iterable[Work]) -> float:
    """Seconds of all of it."""
    return sum(work.seconds for work in works)


def by_operation(works: Iterable[Work]) -> dict[str, float]:
    """Seconds by name of the operation; a recomputed one counts with its first run."""
    out: dict[str, float] = {}
    for work in works:
        out[work.operation] = out.get(work.operation, 0.0) + work.seconds
    return out


def by_part(works: Iterable[Work]) -> dict[Part, float]:
    """Seconds by part of the step."""
    out: dict[Part, float] = {}
    for work in works:
        out[work.part] = out.get(work.part, 0.0) + work.seconds
    return out


class _Model:
    """The sizes of a micro-batch, and the time of one launch of each kind."""

    def __init__(self, config: Config, model: ModelConfig, rates: Rates, gap: float = GAP) -> None:
        self.config, self.model, self.rates, self.gap = config, model, rates, gap
        b, p = config.batch, config.precision
        self.B, self.T, self.N = b.micro_batch, b.seq_len, b.micro_batch * b.seq_len
        self.itemsize = DType(p.dtype).itemsize
        self.fp8_layers = len(fp8_layers(config, model))
        self.widths = widths(model)
        share = FP32_SHARE if p.dtype == "fp32" else 1.0
        self.bf16 = share * at(rates.bf16, model.C) * 1e12
        self.head = share * at(rates.head, model.C) * 1e12
        self.emulated = rates.fp8 is None or p.fp8_units == "emulate"
        if rates.fp8 is None or self.emulated:
            self.fp8 = self.bf16  # BF16 products of the codes
        else:
            self.fp8 = at(rates.fp8, model.C) * 1e12 * (1.0 if p.fast_accumulation else PROMOTED)
        known = rates.attention[min(rates.attention, key=lambda D: abs(D - model.D))]
        self.attention_rates = [share * at(curve, self.T) * 1e12 for curve in known]

    def stream(self, nbytes: float) -> float:
        """A kernel that moves nbytes."""
        return max(nbytes / (self.rates.bandwidth * 1e9), FLOOR) + self.gap

    def passes(self, columns: int, count: int) -> float:
        """A kernel that reads and writes `count` tensors of (N, columns) in all."""
        return self.stream(self.N * columns * count * self.itemsize)

    def product(self, rows: int, shape: tuple[int, int], rate: float, itemsize: int) -> float:
        """rows x shape[0] x shape[1] multiply-adds; every operand and the result moved once."""
        M, K = shape
        nbytes = itemsize * (rows * K + M * K) + self.itemsize * rows * M
        moved = nbytes / (self.rates.bandwidth * 1e9)
        return max(2 * rows * M * K / rate, moved, PRODUCT_FLOOR) + self.gap

    def block_product(self, weight: str) -> float:
        """One product with a block's weight, over all layers."""
        shape, rest = self.widths[weight], self.model.L - self.fp8_layers
        exact = self.product(self.N, shape, self.bf16, self.itemsize)
        return rest * exact + self.fp8_layers * self.product(self.N, shape, self.fp8, 1)

    def quantise_forward(self, weight: str) -> float:
        """The codes that a forward product reads, in all FP8 layers."""
        M, K = self.widths[weight]
        kept = keeps_codes(self.config, BY_WEIGHT[weight].x)
        seconds = self.stream(self.N * K * (2 + 1 + (1 if kept else 0)))
        return self.fp8_layers * (seconds + self._weight(weight) + self._decoded(self.N * K, M * K))

    def quantise_backward(self, weight: str) -> float:
        """The codes that the two backward products read: the gradient's, and what is not kept."""
        (M, K), N = self.widths[weight], self.N
        seconds = self.stream(N * M * (2 + 1 + 1)) + self._weight(weight)
        if offloads_quants(self.config):  # the host has one layout
            seconds += self.stream(M * K * (1 + 1))
        if not keeps_codes(self.config, BY_WEIGHT[weight].x):
            seconds += self.stream(N * K * (2 + 1))
        return self.fp8_layers * (seconds + self._decoded(N * M, N * K, N * M, M * K))

    def _weight(self, weight: str) -> float:
        """A weight's codes in one layout, where they are not kept."""
        M, K = self.widths[weight]
        return 0.0 if self.config.memory.keep_quants else self.stream(M * K * (2 + 1))

    def _decoded(self, *values: int) -> float:
        """Emulation: codes back to BF16 before each product."""
        return sum(self.stream(n * (1 + 2)) for n in values) if self.emulated else 0.0

    def attention(self, backward: bool) -> float:
        """One layer."""
        flops = 2 * self.B * self.model.H * self.T * self.T * self.model.D
        seconds = (2.5 if backward else 1.0) * flops / self.attention_rates[backward]
        return max(seconds, FLOOR) + self.gap


NAMES = {"qkv": "qkv", "out": "o_proj", "gate_up": "gate_up", "down": "down_proj"}
"""The last word of the weights' names, by field."""


def _linear(m: _Model, weight: str, part: Part | None = None, *, name: str = "") -> Iterator[Work]:
    """A block's product in all layers; part: where it counts, None: as what it is."""
    name = name or f"linear {NAMES[weight]}"
    yield Work(name, part or "products", m.block_product(weight))
    if m.fp8_layers:
        yield Work(name, part or "quantise", m.quantise_forward(weight))


def _linear_backward(m: _Model, weight: str, *, name: str = "") -> Iterator[Work]:
    name = name or f"linear_backward {NAMES[weight]}"
    yield Work(name, "products", 2 * m.block_product(weight))
    if m.fp8_layers:
        yield Work(name, "quantise", m.quantise_backward(weight))
    if weight == "qkv" and m.model.qkv_bias:
        yield Work(name, "products", m.model.L * m.passes(m.model.qkv_rows, 1))


def _heads(m: _Model, part: Part | None = None) -> Iterator[Work]:
    """Queries, keys and values in all layers."""
    L, model = m.model.L, m.model
    yield from _linear(m, "qkv", part)
    if model.qk_norm:
        yield Work("qk_norm", part or "norms", L * m.passes(model.qkv_rows, 2))
    yield Work("rope", part or "RoPE", L * m.passes((model.H + model.G) * model.D, 2))


def _forward(m: _Model) -> Iterator[Work]:
    L, C, F = m.model.L, m.model.C, m.model.F
    if m.fp8_layers:
        yield Work("clear_absmax", "quantise", m.stream(0))
    yield Work("embedding", "embedding", m.passes(C, 2))
    yield Work("rmsnorm", "norms", m.passes(C, 2))
    yield Work("residual_rmsnorm", "norms", (2 * L - 1) * m.passes(C, 4))
    yield from _heads(m)
    yield Work("attention", "attention", L * m.attention(backward=False))
    for weight in ("out", "down"):
        yield from _linear(m, weight)
    yield from _linear(m, "gate_up", name="linear_swiglu")
    yield Work("linear_swiglu", "SwiGLU", L * m.passes(F, 3))  # as if it were a kernel of its own


def _head(m: _Model) -> Iterator[Work]:
    """The final norm and the LM head, in chunks of rows."""
    rows, table = min(head_rows(m.config), m.N), (m.model.padded_vocab, m.model.C)
    chunks = -(-m.N // rows)
    name = "embed_tokens" if m.model.tied else "lm_head"
    product = chunks * m.product(rows, table, m.head, m.itemsize)
    logits = chunks * m.stream(rows * table[0] * 2 * m.itemsize)
    yield Work("residual_rmsnorm", "norms", m.passes(m.model.C, 4))
    yield Work(f"linear {name}", "LM head", product)
    yield Work("cross_entropy", "classifier", logits)
    yield Work(f"linear_backward {name}", "LM head", 2 * product)
    yield Work("reduce_loss", "classifier", m.stream(2 * 4 * m.N))
    yield Work("rmsnorm_backward", "norms", m.passes(m.model.C, 3))


def _backward(m: _Model) -> Iterator[Work]:
    L, model = m.model.L, m.model
    for weight in m.widths:
        name = "linear_swiglu_backward" if weight == "down" else ""
        yield from _linear_backward(m, weight, name=name)
    # as if it were a kernel of its own
    yield Work("linear_swiglu_backward", "SwiGLU", L * m.passes(model.F, 5))
    yield Work("rmsnorm_backward", "norms", 2 * L * m.passes(model.C, 4))
    yield Work("attention_backward", "attention", L * m.attention(backward=True))
    yield Work("rope_backward", "RoPE", L * m.passes((model.H + model.G) * model.D, 2))
    if model.qk_norm:
        yield Work("qk_norm_backward", "norms", L * m.passes(model.qkv_rows, 3))
    yield Work("embedding_backward", "embedding", m.passes(model.C, 2))


def _recomputation(m: _Model) -> Iterator[Work]:
    """What backward runs again, in the order of `model.recompute.recompute_block`."""
    dropped, part = dropped_activations(m.config.memory.recompute), "recomputation"
    L, C = m.model.L, m.model.C
    if "attn_in" in dropped:
        yield Work("rmsnorm", part, L * m.passes(C, 2))
    if "qkv" in dropped:
        yield from _heads(m, part)
    if "attn" in dropped:
        yield Work("attention", part, L * m.attention(backward=False))
    if "residual_mid" in dropped:
        yield from _linear(m, "out", part)
        yield Work("residual_rmsnorm", part, L * m.passes(C, 4))
    elif "mlp_in" in dropped:
        yield Work("rmsnorm", part, L * m.passes(C, 2))
    if "gate_up" in dropped:
        yield from _linear(m, "gate_up", part, name="linear_swiglu_again")
    if "act" in dropped:
        name = "linear_swiglu_again" if "gate_up" in dropped else "swiglu_again"
        yield Work(name, part, L * m.passes(m.model.F, 3))
