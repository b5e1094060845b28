"""Weights (and gradients) of a model behind gather, get and release.

A unit is what is made resident at once: the embedding, one block, or the head. The model asks for
units and never knows where they live: resident, sharded over ranks and host-backed stores satisfy
one protocol.
"""

from typing import Literal, Protocol

from llmq_nb.core.tensor import Tensor
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.parameters import Parameter

Unit = int | Literal["embedding", "head"]
"""A block's index, or the embedding, or the head (final norm and LM head)."""


class Weights:
    """The tensors of one unit.

    A block has all but `table` and `final_norm`; the optional ones are None where the family has
    none. `table`: (V, C), the embedding or the LM head.
    """

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    table: Tensor
    final_norm: Tensor


class WeightStore(Protocol):
    """Weights or gradients by unit."""

    def gather(self, unit: Unit) -> None:
        """Start making the unit resident; a prefetch, may be called early and more than once.

        Gradients are gathered only where they add up: else `get` gives memory to be written.
        """
        ...

    def get(self, unit: Unit) -> Weights:
        """Wait until the unit is resident and use it; valid until `release`."""
        ...

    def release(self, unit: Unit) -> None:
        """Done with the unit: it may be evicted; a gradient may be reduced or sent to the host."""
        ...


def unit_of(parameter: Parameter) -> Unit:
    """The unit that a parameter belongs to."""
    if parameter.layer is not None:
        return parameter.layer
    return "embedding" if parameter.field == "embedding" else "head"


class ResidentStore:
    """Everything stays on the device: gather and release have nothing to do."""

    def __init__(
        self, config: ModelConfig, parameters: list[Parameter], tensors: dict[str, Tensor]
    ) -> None:
        self._units: dict[Unit, Weights] = {}
        for parameter in parameters:
            weights = self._units.setdefault(unit_of(parameter), Weights())
            field = "table" if parameter.kind == "embedding" else parameter.field
            setattr(weights, field, tensors[parameter.name])
        if config.tied:
            self._units["head"].table = self._units["embedding"].table

    def gather(self, unit: Unit) -> None:
        pass

    def get(self, unit: Unit) -> Weights:
        return self._units[unit]

    def release(self, unit: Unit) -> None:
        pass


class ResidualStore(Protocol):
    """The residual of each block's input, from forward to backward."""

    def write(self, layer: int) -> None:
        """Forward is about to write it: wait until it may."""
        ...

    def keep(self, layer: int) -> None:
        """Forward has read it for the last time; backward will need it."""
        ...

    def gather(self, layer: int) -> None:
        """Start making it resident again; a prefetch."""
        ...

    def get(self, layer: int) -> None:
        """Wait until it is resident; it stays so until `release`."""
        ...

    def release(self, layer: int) -> None:
        """Backward has read it for the last time."""
        ...


class ResidentResiduals:
    """Every layer's residual stays on the device."""

    def write(self, layer: int) -> None:
        pass

    def keep(self, layer: int) -> None:
        pass

    def gather(self, layer: int) -> None:
        pass

    def get(self, layer: int) -> None:
        pass

    def release(self, layer: int) -> None:
        pass
