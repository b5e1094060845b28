"""`memory.policy = "auto"`: the fastest setting of the memory levers that fits.

    micro_batch    every divisor of an optimizer step's sequences, whose number stays
    recompute      the 19 subsets that differ in what they drop
    head_chunks    powers of two
    keep_quants    with FP8 products

None of them changes what is computed: recomputation and kept codes not a bit, micro-batches and
chunks the order of sums. Memory comes from the plan itself, to the byte; time from `plan.cost`.

The search takes (micro_batch, recompute, keep_quants) in order of their time with the fewest
chunks, and gives each the fewest chunks that fit. It ends when no other can be faster. Memory rises
with micro_batch and falls with chunks, but for the gaps in the arena of temporaries (`GAPS`).
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal, get_args

from llmq_nb.config import Config, Recompute
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.recompute import dropped_activations
from llmq_nb.plan.buffers import Plan, make_plan
from llmq_nb.plan.cost import micro_step_work, optimizer_work, total
from llmq_nb.plan.rates import Rates

Kind = Literal["cpu", "cuda"]
LEVERS = {
    "batch": ("micro_batch", "grad_accumulation"),
    "memory": ("recompute", "head_chunks", "keep_quants"),
}
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
    return Setting(b.micro_batch, b.grad_accumulation, m.recompute, m.head_chunks, m.keep_quants)


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


def run_plan(config: Config, model: ModelConfig, kind: Kind) -> Plan:
    """The plan that the engine of this kind allocates."""
    if kind == "cpu":
        return make_plan(config, model)
    from llmq_nb.plan.workspace import workspace_buffers  # it asks the kernels: half a second

    return make_plan(config, model, extra=workspace_buffers(config, model))


def settings(config: Config) -> Iterator[Setting]:
    """Every setting that `auto` may choose."""
    for lever in _levers(config):
        for chunks in chunk_counts(config, lever.micro_batch):
            yield dataclasses.replace(lever, head_chunks=chunks)


def micro_batches(sequences: int) -> list[int]:
    """The ways to cut a step's sequences into equal micro-batches, rising."""
    return [n for n in range(1, min(sequences, MOST_SEQUENCES) + 1) if sequences % n == 0]


def chunk_counts(config: Config, micro_batch: int) -> list[int]:
    """Numbers of chunks worth trying, rising."""
    rows = micro_batch * config.batch.seq_len
    return [c for c in CHUNKS if c == 1 or rows >= c * LEAST_ROWS]


def _levers(config: Config) -> Iterator[Setting]:
    """Settings with one chunk. Offload, once there is one, is another factor of this product."""
    sequences = config.batch.micro_batch * config.batch.grad_accumulation
    quants = (True, False) if config.precision.matmul == "e4m3" else (config.memory.keep_quants,)
    for size, recompute, keep in itertools.product(
        micro_batches(sequences), recompute_subsets(), quants
    ):
        yield Setting(size, sequences // size, recompute, keep_quants=keep)


def recompute_subsets() -> list[tuple[Recompute, ...]]:
    """One for each set of dropped activations: the shortest name of it."""
    choices = get_args(Recompute)
    found: dict[frozenset[str], tuple[Recompute, ...]] = {}
    for count in range(len(choices) + 1):
        for subset in itertools.combinations(choices, count):
            found.setdefault(dropped_activations(subset), subset)
    return list(found.values())


class Search:
    """The settings of one run on one device; what was worked out once is kept."""

    def __init__(
        self, config: Config, model: ModelConfig, rates: Rates, *, kind: Kind = "cuda"
    ) -> None:
        self.config, self.model, self.rates = config, model, rates
        self.kind: Kind = kind
        self._updates: dict[bool, float] = {}
        self._planned: dict[Setting, tuple[int, int, int]] = {}

    def seconds(self, setting: Setting) -> float:
        """Predicted time of an optimizer step."""
        config = setting.applied(self.config)
        if setting.keep_quants not in self._updates:  # the other levers do not change an update
            update = total(optimizer_work(config, self.model, self.rates))
            self._updates[setting.keep_quants] = update
        micro = total(micro_step_work(config, self.model, self.rates))
        return setting.grad_accumulation * micro + self._updates[setting.keep_quants]

    def total(self, setting: Setting) -> int:
        """Bytes of our allocation."""
        return self._sizes(setting)[0]

    def host_total(self, setting: Setting) -> int:
        """Bytes of pinned host memory."""
        return self._sizes(setting)[2]

    def _sizes(self, setting: Setting) -> tuple[int, int, int]:
        """(our allocation, the temporaries in it, pinned host memory) [bytes]."""
        if setting not in self._planned:
            plan = run_plan(setting.applied(self.config), self.model, self.kind)
            sizes = plan.total, plan.group_bytes()["scratch"], plan.host_total
            self._planned[setting] = sizes
        return self._planned[setting]

    def choose(self, limit: int, host: int | None = None) -> Choice | None:
        """The fastest setting that takes at most `limit` bytes, and `host` bytes of pinned host
        memory (None: no limit); None if none does.

        Of equally fast ones the one with the larger micro_batch, then the fewer recomputations.
        """
        if limit < self._states():
            return None
        keyed = [(self._key(lever), lever) for lever in _levers(self.config)]
        largest: dict[tuple[tuple[Recompute, ...], bool], int] = {}
        best: tuple[tuple[float, int, int, int], Choice] | None = None
        for key, lever in sorted(keyed, key=lambda pair: pair[0]):
            if best is not None and key >= best[0]:
                break
            variant = (lever.recompute, lever.keep_quants)
            if variant not in largest:
                largest[variant] = self._largest_micro_batch(lever, limit)
            if lever.micro_batch > largest[variant]:
                continue
            if host is not None and self.host_total(lever) > host:
                continue
            found = self._fewest_chunks(lever, limit)
            if found is not None and (best is None or self._key(found) < best[0]):
                best = self._key(found), self._choice(found)
        return None if best is None else best[1]

    def smallest(self, host: int | None = None) -> Choice:
        """The setting that takes the least memory of the device."""
        ones = [s for s in settings(self.config) if s.micro_batch == 1]
        most = chunk_counts(self.config, 1)[-1]
        bound = min(self.total(s) for s in ones if s.head_chunks == most)
        near = [s for s in ones if s.head_chunks == most or self._may_fit(s, bound, most)]
        return self._choice(min(near, key=self.total))

    def _key(self, setting: Setting) -> tuple[float, int, int, int]:
        # a relative 1e-12 of time is rounding, not speed
        seconds = float(f"{self.seconds(setting):.12g}")
        return seconds, -setting.micro_batch, len(setting.recompute), setting.head_chunks

    def _choice(self, setting: Setting) -> Choice:
        total, _, host_total = self._sizes(setting)
        return Choice(setting, total, host_total, self.seconds(setting))

    def _may_fit(self, setting: Setting, limit: int, most: int) -> bool:
        """Whether some number of chunks can fit: with the most it does, or lacks no more than the
        arena's gaps."""
        total, temporaries, _ = self._sizes(dataclasses.replace(setting, head_chunks=most))
        return total - GAPS * temporaries <= limit

    def _largest_micro_batch(self, setting: Setting, limit: int) -> int:
        """The largest that may fit; 0: none."""
        sequences = setting.micro_batch * setting.grad_accumulation
        sizes = micro_batches(sequences)

        def may_fit(size: int) -> bool:
            same = dataclasses.replace(
                setting, micro_batch=size, grad_accumulation=sequences // size
            )
            return self._may_fit(same, limit, chunk_counts(self.config, size)[-1])

        if not may_fit(1):  # the usual end of a search without room
            return 0
        low, high = 1, len(sizes)  # sizes[:low] may fit, sizes[high:] do not
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if may_fit(sizes[middle]) else (low, middle)
        return sizes[low - 1]

    def _fewest_chunks(self, setting: Setting, limit: int) -> Setting | None:
        """The setting with the fewest chunks that fit; None: with none it does."""
        for chunks in chunk_counts(self.config, setting.micro_batch):
            chunked = dataclasses.replace(setting, head_chunks=chunks)
            if self.total(chunked) <= limit:
                return chunked
        return None

    def _states(self) -> int:
        """Bytes that no lever changes, at least."""
        plan = run_plan(self.config, self.model, self.kind)
        groups = plan.group_bytes()
        return sum(groups.get(g, 0) for g in ("weights", "gradients", "master", "m", "v"))
