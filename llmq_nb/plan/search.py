"""The search through the settings of `plan.fit` for the fastest one that fits, and the smallest."""

import dataclasses

from llmq_nb.config import Config, Offload
from llmq_nb.model.config import ModelConfig
from llmq_nb.plan.cost import LAUNCH, gpu_work, optimizer_work, total
from llmq_nb.plan.fit import (
    GAPS,
    Choice,
    Setting,
    Transfer,
    chunk_counts,
    levers,
    micro_batches,
    settings,
)
from llmq_nb.plan.offload_cost import exposed_seconds
from llmq_nb.plan.rates import Rates, is_unified
from llmq_nb.plan.sizes import Bytes, Kind, Sizes

Key = tuple[float, int, int, int, int]


class Search:
    """The settings of one run on one device; what was worked out once is kept."""

    def __init__(
        self, config: Config, model: ModelConfig, rates: Rates, *, kind: Kind = "cuda"
    ) -> None:
        self.model, self.rates, self.kind = model, rates, kind
        self.offload = kind == "cuda" and not is_unified(rates)
        self.config = config
        if self.offload and config.memory.transfer == "auto":
            memory = dataclasses.replace(config.memory, transfer=self._faster_transfer())
            self.config = dataclasses.replace(config, memory=memory)
        self._sizes = Sizes(model, kind)
        self._updates: dict[tuple[object, ...], float] = {}
        self._micro: dict[Setting, tuple[float, float, float]] = {}
        self._planned: dict[Setting, Bytes] = {}

    def seconds(self, setting: Setting) -> float:
        """Predicted time of an optimizer step."""
        config = setting.applied(self.config)
        key = (setting.keep_quants, setting.offload, setting.transfer)
        if key not in self._updates:  # the other levers do not change an update
            self._updates[key] = total(optimizer_work(config, self.model, self.rates))
        kept: tuple[Offload, ...] = ("quants",) if "quants" in setting.offload else ()
        alone = dataclasses.replace(setting, offload=kept, transfer="auto")
        if alone not in self._micro:
            works, *blocks = gpu_work(config, self.model, self.rates, LAUNCH)
            self._micro[alone] = total(works), blocks[0], blocks[1]
        micro, forward, backward = self._micro[alone]
        if setting.offload:
            link = self.rates.host_link
            micro += exposed_seconds(config, self.model, link, forward, backward)
        return setting.grad_accumulation * micro + self._updates[key]

    def sizes(self, setting: Setting) -> Bytes:
        """Of our allocations."""
        if setting not in self._planned:
            self._planned[setting] = self._sizes.of(setting.applied(self.config))
        return self._planned[setting]

    def choose(self, limit: int, host: int | None = None) -> Choice | None:
        """The fastest setting that takes at most `limit` bytes, and `host` bytes of pinned host
        memory (None: no limit); None if none does.

        Of equally fast ones the one with the larger micro_batch, then the fewer recomputations, the
        fewer buffers on the host.
        """
        found = self.ranked(limit, host, 1)
        return found[0] if found else None

    def ranked(self, limit: int, host: int | None, count: int) -> list[Choice]:
        """The `count` best settings in the order of `choose`, each with the fewest chunks that
        fit; fewer where fewer fit."""
        keyed = [
            (self._key(lever), lever)
            for lever in levers(self.config, self.offload)
            if self._lasting_fits(lever, limit, host)
        ]
        largest: dict[tuple[object, ...], int] = {}
        best: list[tuple[Key, Setting]] = []
        for key, lever in sorted(keyed, key=lambda pair: pair[0]):
            if len(best) == count and key >= best[-1][0]:
                break
            variant = (lever.recompute, lever.keep_quants, lever.offload)
            if variant not in largest:
                largest[variant] = self._largest_micro_batch(lever, limit)
            if lever.micro_batch > largest[variant]:
                continue
            found = self.with_fewest_chunks(lever, limit, host)
            if found is not None:
                best.append((self._key(found), found))
                best.sort(key=lambda pair: pair[0])
                del best[count:]
        return [self._choice(setting) for _, setting in best]

    def with_fewest_chunks(self, setting: Setting, limit: int, host: int | None) -> Setting | None:
        """The setting with the fewest chunks that fit; None: with none it does."""
        for chunks in chunk_counts(self.config, setting.micro_batch):
            chunked = dataclasses.replace(setting, head_chunks=chunks)
            found = self.sizes(chunked)
            if host is not None and found.host_total > host:
                return None  # chunks do not change it
            if found.total <= limit:
                return chunked
        return None

    def smallest(self, host: int | None = None) -> Choice:
        """The setting that takes the least memory of the device, with at most `host` bytes of
        pinned host memory."""
        ones = [s for s in settings(self.config, self.offload) if s.micro_batch == 1]
        best: Setting | None = None
        for setting in sorted(ones, key=self._least):
            if best is not None and self._least(setting) >= self.sizes(best).total:
                break
            if host is not None and setting.offload and not self._pins(setting, host):
                continue
            if best is None or self.sizes(setting).total < self.sizes(best).total:
                best = setting
        assert best is not None  # without offload nothing is pinned
        return self._choice(best)

    def _least(self, setting: Setting) -> int:
        """Bytes of the device that a setting takes whatever its micro-batch."""
        return self._sizes.lasting(setting.applied(self.config))[0]

    def _pins(self, setting: Setting, host: int) -> bool:
        """Whether it takes at most `host` bytes of pinned host memory."""
        lasting = self._sizes.lasting(setting.applied(self.config))[1]
        return lasting <= host and self.sizes(setting).host_total <= host

    def _lasting_fits(self, setting: Setting, limit: int, host: int | None) -> bool:
        on_device, on_host = self._sizes.lasting(setting.applied(self.config))
        return on_device <= limit and (host is None or on_host <= host)

    def _faster_transfer(self) -> Transfer:
        """Of all states; "auto" reads and writes them in place."""

        def seconds(transfer: Transfer) -> float:
            states: tuple[Offload, ...] = ("m", "v", "master")
            moved = tuple(s for s in states if s not in self.config.memory.disk)
            memory = dataclasses.replace(self.config.memory, offload=moved, transfer=transfer)
            config = dataclasses.replace(self.config, memory=memory)
            return total(optimizer_work(config, self.model, self.rates))

        return "copy" if seconds("copy") < seconds("auto") else "auto"

    def _key(self, setting: Setting) -> Key:
        # a relative 1e-12 of time is rounding, not speed
        seconds = float(f"{self.seconds(setting):.12g}")
        more = len(setting.recompute), len(setting.offload), setting.head_chunks
        return seconds, -setting.micro_batch, *more

    def _choice(self, setting: Setting) -> Choice:
        found = self.sizes(setting)
        return Choice(setting, found.total, found.host_total, self.seconds(setting))

    def _may_fit(self, setting: Setting, limit: int, most: int) -> bool:
        """Whether some number of chunks can fit: with the most it does, or lacks no more than the
        arena's gaps."""
        found = self.sizes(dataclasses.replace(setting, head_chunks=most))
        return found.total - GAPS * found.scratch <= limit

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
