"""`memory.policy = "auto"`: the fastest setting of the memory levers that fits.

    micro_batch    every divisor of an optimizer step's sequences, whose number stays
    recompute      the 19 subsets that differ in what they drop
    head_chunks    powers of two
    keep_quants    with FP8 products
    offload        the optimizer's states in the order of what a byte costs on the link (`STATES`);
                   residual and quants, which hide behind the blocks' work, with each of them
    transfer       the faster one by the link's rates

None of them changes what is computed: micro-batches and chunks change the order of sums, the others
not a bit. Memory comes from the plan itself, to the byte; time from `plan.cost`.

The search takes settings of one chunk in order of their time, and gives each the fewest chunks that
fit. It ends when no other can be faster. Memory rises with micro_batch and falls with chunks, but
for the gaps in the arena of temporaries (`GAPS`).
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args

from llmq_nb.config import Config, Offload, Recompute
from llmq_nb.model.recompute import dropped_activations
from llmq_nb.plan.shards import crosses

Transfer = Literal["auto", "copy", "zero_copy"]
LEVERS = {
    "batch": ("micro_batch", "grad_accumulation"),
    "memory": ("recompute", "head_chunks", "keep_quants", "offload", "transfer"),
}
STATES: tuple[tuple[Offload, ...], ...] = (
    (),
    ("m",),
    ("m", "v"),
    ("m", "v", "gradients"),
    ("m", "v", "master"),
    ("m", "v", "master", "gradients"),
)
"""m and v cross the link once each way at the same time; gradients are read twice; masters are read
once more, for the codes, or in each micro-step where codes are not kept."""
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
LEAST_ROWS = 256
"""Of a chunk of the LM head: with fewer, its product reads the table for too little work."""

MOST_SEQUENCES = 4096
"""Of a micro-batch."""
GAPS = 1 / 8
"""Of the temporaries: more than the arena's gaps ever made a smaller setting larger."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One value for each lever."""

    micro_batch: int
    grad_accumulation: int
    recompute: tuple[Recompute, ...] = ()
    head_chunks: int = 1
    keep_quants: bool = True
    offload: tuple[Offload, ...] = ()
    transfer: Transfer = "auto"

    def applied(self, config: Config) -> Config:
        """The config with these values in place of its own, and policy = "manual".

        An evaluation keeps its number of sequences, rounded up to whole micro-batches.
        """
        b, sequences = config.batch, config.eval.steps * config.batch.micro_batch
        return dataclasses.replace(
            config,
            batch=dataclasses.replace(
                b, micro_batch=self.micro_batch, grad_accumulation=self.grad_accumulation
            ),
            memory=dataclasses.replace(
                config.memory,
                policy="manual",
                recompute=self.recompute,
                head_chunks=self.head_chunks,
                keep_quants=self.keep_quants,
                offload=self.offload,
                transfer=self.transfer,
            ),
            eval=dataclasses.replace(config.eval, steps=-(-sequences // self.micro_batch)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A setting with its allocations [bytes] and the predicted time of an optimizer step [s]."""

    setting: Setting
    total: int
    host_total: int
    seconds: float


def setting_of(config: Config) -> Setting:
    """The levers as a config has them."""
    b, m = config.batch, config.memory
    return Setting(
        b.micro_batch,
        b.grad_accumulation,
        m.recompute,
        m.head_chunks,
        m.keep_quants,
        m.offload,
        m.transfer,
    )


def changes(config: Config, setting: Setting) -> list[str]:
    """A setting as `section.key=value`, where it differs from the config's."""
    new, out = setting.applied(config), []
    for section, keys in LEVERS.items():
        for key in keys:
            old, value = (getattr(getattr(c, section), key) for c in (config, new))
            if old != value:
                out.append(f"{section}.{key}={_toml(value)}")
    return out


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings(config: Config, offload: bool = True) -> Iterator[Setting]:
    """Every setting that `auto` may choose, but for `transfer`. offload: whether it is of use."""
    for lever in levers(config, offload):
        for chunks in chunk_counts(config, lever.micro_batch):
            yield dataclasses.replace(lever, head_chunks=chunks)


def micro_batches(sequences: int) -> list[int]:
    """The ways to cut a step's sequences into equal micro-batches, rising."""
    return [n for n in range(1, min(sequences, MOST_SEQUENCES) + 1) if sequences % n == 0]


def chunk_counts(config: Config, micro_batch: int) -> list[int]:
    """Numbers of chunks worth trying, rising."""
    rows = micro_batch * config.batch.seq_len
    return [c for c in CHUNKS if c == 1 or rows >= c * LEAST_ROWS]


def levers(config: Config, offload: bool = True) -> Iterator[Setting]:
    """Settings with one chunk."""
    sequences = config.batch.micro_batch * config.batch.grad_accumulation
    fp8, transfer = config.precision.matmul == "e4m3", config.memory.transfer
    quants = (True, False) if fp8 else (config.memory.keep_quants,)
    several = config.parallel.machines > 1
    for size, recompute, keep in itertools.product(
        micro_batches(sequences), recompute_subsets(), quants
    ):
        disk = config.memory.disk
        for moved in offload_sets(fp8 and keep, disk) if offload else [()]:
            setting = Setting(size, sequences // size, recompute, 1, keep, moved, transfer)
            if several and crosses(setting.applied(config)):
                continue
            yield setting


def offload_sets(quants: bool, disk: tuple[Offload, ...] = ()) -> list[tuple[Offload, ...]]:
    """What may be moved to the host together. quants: whether codes are kept. disk: what is on the
    disk."""
    hidden: list[tuple[Offload, ...]] = [(), ("residual",)]
    if quants:
        hidden += [("quants",), ("quants", "residual")]
    left: list[tuple[Offload, ...]] = [tuple(s for s in t if s not in disk) for t in STATES]
    return [states + more for states in dict.fromkeys(left) for more in hidden]


def recompute_subsets() -> list[tuple[Recompute, ...]]:
    """One for each set of dropped activations: the shortest name of it."""
    choices = get_args(Recompute)
    found: dict[frozenset[str], tuple[Recompute, ...]] = {}
    for count in range(len(choices) + 1):
        for subset in itertools.combinations(choices, count):
            found.setdefault(dropped_activations(subset), subset)
    return list(found.values())
