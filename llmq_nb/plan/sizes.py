"""Bytes of a plan without its buffers' names: what a search over settings asks thousands of times.

The same buffers as `make_plan` counts: those of parameters are summed once for each offload set,
and only what has a lifetime goes through the arena. A test holds both to each other.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from llmq_nb.config import Config
from llmq_nb.core.arena import Slot, aligned, assign_offsets
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.fp8 import keeps_quants
from llmq_nb.plan.buffers import (
    Buffer,
    Plan,
    activation_buffers,
    kept_quants,
    make_plan,
    parameter_buffers,
)

Kind = Literal["cpu", "cuda"]
PARAMETERS = ("m", "v", "master", "gradients")
"""Levers that move buffers of parameters."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bytes:
    """total: our allocation on the device, scratch: the temporaries in it, host_total: pinned."""

    total: int
    scratch: int
    host_total: int


def run_plan(config: Config, model: ModelConfig, kind: Kind) -> Plan:
    """The plan that the engine of this kind allocates."""
    if kind == "cpu":
        return make_plan(config, model)
    return make_plan(config, model, extra=_workspace()(config, model))


def _workspace() -> Callable[..., list[Buffer]]:
    from llmq_nb.plan.workspace import workspace_buffers  # it asks the kernels: half a second

    return workspace_buffers


class Sizes:
    """The sizes of one run's plans while its memory levers and micro-batch change."""

    def __init__(self, model: ModelConfig, kind: Kind) -> None:
        self.model, self.kind = model, kind
        self._lasting: dict[tuple[object, ...], tuple[int, int]] = {}

    def lasting(self, config: Config) -> tuple[int, int]:
        """(device, host) bytes of parameters, optimizer states and kept codes."""
        moved = config.memory.offload
        key = (*(name in moved for name in PARAMETERS), *self._codes(config))
        if key not in self._lasting:
            buffers = parameter_buffers(config, self.model)
            if self.kind == "cuda" and keeps_quants(config):
                buffers += kept_quants(config, self.model)
            self._lasting[key] = _sum(buffers)
        return self._lasting[key]

    def of(self, config: Config) -> Bytes:
        """As the plan of this config has them."""
        device, host = self.lasting(config)
        buffers = activation_buffers(config, self.model)
        if self.kind == "cuda":
            extra = _workspace()(config, self.model)
            buffers += [b for b in extra if b.group != "quants"]
        _, scratch = assign_offsets([Slot(b.nbytes, b.lifetime) for b in buffers if b.lifetime])
        more_device, more_host = _sum([b for b in buffers if b.lifetime is None])
        return Bytes(device + more_device + scratch, scratch, host + more_host)

    def _codes(self, config: Config) -> tuple[bool, bool]:
        kept = self.kind == "cuda" and keeps_quants(config)
        return kept, kept and "quants" in config.memory.offload


def _sum(buffers: list[Buffer]) -> tuple[int, int]:
    sizes = {"device": 0, "host": 0, "disk": 0}
    for b in buffers:
        sizes[b.place] += aligned(b.nbytes)
    return sizes["device"], sizes["host"]
