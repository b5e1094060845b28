"""FP8 slots on a rank's tensors: which tensors enter FP8 products, and where their codes lie.

A tensor that all layers share gets a copy for each FP8 layer: the same memory, its own slot.
"""

import dataclasses

from llmq_nb.config import Config
from llmq_nb.core.dtype import DType
from llmq_nb.core.tensor import Fp8Slot, Tensor
from llmq_nb.model.activations import BlockActivations, Gradients
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.fp8 import (
    ABSMAX,
    PRODUCTS,
    SATURATED,
    SCALE,
    SLOT_WORDS,
    UNDERFLOWED,
    Product,
    fp8_layers,
    fp8_weights,
    gradient_format,
    keeps_codes,
    slot_names,
)

Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Slots:
    """The slots of one rank. tensors: the plan's, by name."""

    config: Config
    model: ModelConfig
    tensors: Tensors

    def give_weights(self) -> None:
        """Slots for the weights of FP8 products."""
        for p in fp8_weights(self.config, self.model):
            own, kept = f"weights/{p.name}", f"quants/{p.name}" in self.tensors
            codes = self.tensors.get(f"quants/{p.name}" if kept else "fp8/weight")
            derived = kept and f"quants_t/{p.name}" not in self.tensors
            codes_t = self.tensors.get(
                f"quants_t/{p.name}" if kept and not derived else "fp8/weight"
            )
            slot = self._slot(own, DType.E4M3, codes, codes_t, kept=kept)
            slot.derived = derived
            # a copy: the tensor may be shared with another rank, which has its own slots
            self.tensors[own] = dataclasses.replace(self.tensors[own], fp8=slot)

    def give_activations(self, a: BlockActivations, layer: int) -> None:
        """Slots for the inputs of a block's products."""
        if layer not in fp8_layers(self.config, self.model):
            return
        for product in PRODUCTS:
            kept = keeps_codes(self.config, product.x)
            codes = self.tensors.get(f"fp8/x.{product.weight}")
            transposed = f"fp8/{product.x}_t.{layer}" if kept else f"fp8/x_t.{product.weight}"
            codes_t = self.tensors.get(transposed)
            slot = self._slot(f"block/{product.x}.{layer}", DType.E4M3, codes, codes_t, kept=kept)
            slot.made_again = product.x == "act" and not kept
            setattr(a, product.x, dataclasses.replace(getattr(a, product.x), fp8=slot))

    def give_gradients(self, g: Gradients, layer: int) -> None:
        """Slots for the gradients that enter a block's products."""
        if layer not in fp8_layers(self.config, self.model):
            return
        for product in PRODUCTS:
            setattr(g, product.dy, self._gradient(getattr(g, product.dy), product, layer))
        if not self.model.qk_norm:
            g.heads = g.qkv

    def _gradient(self, tensor: Tensor, product: Product, layer: int) -> Tensor:
        codes = self.tensors.get(f"fp8/dy.{product.weight}")
        codes_t = self.tensors.get(f"fp8/dy_t.{product.weight}")
        dtype = gradient_format(self.config)
        slot = self._slot(f"g/{product.dy}.{layer}", dtype, codes, codes_t)
        return dataclasses.replace(tensor, fp8=slot)

    def _slot(
        self,
        name: str,
        dtype: DType,
        codes: Tensor | None,
        codes_t: Tensor | None,
        *,
        kept: bool = False,
    ) -> Fp8Slot:
        index = slot_names(self.config, self.model).index(name)
        words = self.tensors["fp8/slots"].rows(index, index + 1).view(SLOT_WORDS)
        scale, absmax = words.rows(SCALE, SCALE + 1), words.rows(ABSMAX, ABSMAX + 1)
        counts = words.rows(UNDERFLOWED, SATURATED + 1)
        return Fp8Slot(dtype, absmax.data, scale.data, counts.data, codes, codes_t, kept)
