"""Looks at every tensor that a step's operations read as weights and write, for the first bad one.

`CheckingOps` stands for an engine's operations, as long as these are launched one by one: after
each it reads what was written and asks whether all of it is finite. Once something is found it
looks no further.
"""

import dataclasses
import re
from typing import Any

import numpy as np

from llmq_nb.core.tensor import Tensor

OUTPUTS: dict[str, tuple[int, ...]] = {
    "embedding": (0,),
    "embedding_backward": (0,),
    "rmsnorm": (0, 1),
    "residual_rmsnorm": (0, 1, 2),
    "rmsnorm_backward": (0, 1),
    "qk_norm": (0, 1),
    "qk_norm_backward": (0, 1, 2),
    "rope": (0,),
    "rope_backward": (0,),
    "attention": (0, 1),
    "attention_backward": (0,),
    "linear": (0,),
    "linear_backward": (0, 1, 2),
    "linear_swiglu": (0, 1),
    "linear_swiglu_again": (0, 1),
    "swiglu_again": (0,),
    "linear_swiglu_backward": (0, 2),  # 1 is room
    "cross_entropy": (0, 1, 2),
    "reduce_loss": (0,),
    "global_norm": (0, 1),
    "adamw": (0, 1, 2, 3),
}
"""Positions of the outputs of each operation of `Ops` (they come first)."""
KINDS = {
    "weights": "weight",
    "master": "master weight",
    "m": "first moment",
    "v": "second moment",
    "m_scale": "scale of the first moment",
    "gradients": "gradient",
    "g": "gradient of an activation",
    "norm": "norm of the gradients",
}
"""What a tensor is, by the part of its name before the slash; all others are activations."""


@dataclasses.dataclass(frozen=True, slots=True)
class BadTensor:
    """The first tensor that is not finite, in the order of execution.

    tensor: its name in the plan. layer: None outside the blocks. operation: which read it, for a
    weight, or wrote it. micro_step: from 0; None in the optimizer's step. element: the index of the
    first bad value, value: that, count: how many there are of size.
    """

    tensor: str
    kind: str
    layer: int | None
    operation: str
    read: bool
    micro_step: int | None
    element: tuple[int, ...]
    value: str
    count: int
    size: int

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        when = "the optimizer step" if self.micro_step is None else f"micro-step {self.micro_step}"
        verb = "read" if self.read else "written"
        at = ", ".join(map(str, self.element))
        return (
            f"{self.kind} {self.tensor}{layer}: {self.value} at [{at}], {self.count:,} of"
            f" {self.size:,} values are not finite; first seen in {when}, {verb} by"
            f" {self.operation}"
        )


class CheckingOps:
    """Wraps the operations of one rank. found: the first bad tensor so far."""

    def __init__(self, ops: Any) -> None:
        self._ops, self.found = ops, None
        self._micro_step, self._layer = -1, None
        self._good: set[str] = set()

    found: BadTensor | None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ops, name)
        if name == "clear_absmax":
            return lambda: self._begin(method)
        if name not in OUTPUTS:
            return method

        def checked(*args: Any, **kwargs: Any) -> Any:
            tensors = [*args, *kwargs.values()]
            self._layer = _layer_of(args, OUTPUTS[name], self._layer)
            if name in ("global_norm", "adamw"):
                self._layer = None
            for x in tensors:
                if isinstance(x, Tensor) and x.name.startswith("weights/"):
                    self._look(x, name, read=True)
            out = method(*args, **kwargs)
            for x in _outputs(name, args, kwargs):
                self._look(x, name, read=False)
            return out

        return checked

    def _begin(self, method: Any) -> None:
        """Every micro-step clears the absmax of the activations before anything else."""
        self._micro_step, self._layer = self._micro_step + 1, None
        method()

    def _look(self, x: Tensor, operation: str, *, read: bool) -> None:
        """A weight that is only read changes in the optimizer's step alone: one look is enough."""
        if self.found is not None or (read and x.name in self._good):
            return
        values = self._ops.read(x)
        finite = np.isfinite(values)
        if finite.all():
            if read:
                self._good.add(x.name)
            return
        first = int(np.argmin(finite.reshape(-1)))
        prefix = x.name.split("/")[0]
        self.found = BadTensor(
            tensor=x.name,
            kind=KINDS.get(prefix, "activation"),
            layer=_layer_named(x.name) if prefix in KINDS and prefix != "g" else self._layer,
            operation=operation,
            read=read,
            micro_step=None if operation in ("global_norm", "adamw") else self._micro_step,
            element=tuple(int(i) for i in np.unravel_index(first, values.shape)),
            value=str(float(values.reshape(-1)[first])),
            count=int(values.size - np.count_nonzero(finite)),
            size=int(values.size),
        )


def _outputs(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation has written."""
    places = OUTPUTS[name]
    if name == "cross_entropy" and not kwargs["gradient"]:
        places = places[1:]  # the logits were left alone
    found = [args[i] for i in places]
    if name == "adamw":
        found.append(kwargs.get("m_scale"))
    return [x for x in found if x is not None]


def _layer_named(name: str) -> int | None:
    """The layer in a name: `block/act.3`, `weights/model.layers.3.mlp.down_proj.weight`."""
    match = re.search(r"^block/\w+\.(\d+)$|\blayers\.(\d+)\.", name)
    return None if match is None else int(match[1] or match[2])


def _layer_of(args: tuple[Any, ...], outputs: tuple[int, ...], last: int | None) -> int | None:
    """The layer that an operation belongs to: outputs say it best, then weights, then inputs.

    Buffers that layers share name none: then it is the layer of the operation before.
    """
    names = [(i not in outputs, "layers." not in x.name, i, x.name) for i, x in enumerate(args)
             if isinstance(x, Tensor)]  # fmt: skip
    for *_, name in sorted(names):
        layer = _layer_named(name)
        if layer is not None:
            return layer
        if name.startswith("head/") or name.endswith(("norm.weight", "embed_tokens.weight")):
            return None  # outside the blocks
    return last
