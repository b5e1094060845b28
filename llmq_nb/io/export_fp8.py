"""FP8 weights in an export: the codes and scales that FP8 products use, as transformers reads them.

    <name>.weight             e4m3 codes: of the BF16 value, by the absmax of the fused parameter
    <name>.weight_scale_inv   float32 scalar, weight ~= codes * scale (the name is DeepSeek's; it is
                              not inverted)
    config.json               quantization_config, quant_method "fp8" without blocks

q, k and v have one scale, gate and up another: a training step in FP8 multiplies these very codes.
Embedding, LM head, norms, biases and layers that the run kept in BF16 are stored as they are.
transformers multiplies codes on a GPU with FP8 units and turns them into BF16 elsewhere (it needs
`accelerate` for both).

Source   integrations/finegrained_fp8.py and FineGrainedFP8Config of transformers 5.24.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmq_nb.core.dtype import DType
from llmq_nb.core.rounding import absmax, quantize, scales
from llmq_nb.model.config import ModelConfig
from llmq_nb.model.fp8 import BY_WEIGHT
from llmq_nb.model.parameters import Parameter, model_parameters

Array = NDArray[Any]


def find_absmax(
    model: ModelConfig, read: Callable[[Parameter], Array], bf16_layers: Collection[int] = ()
) -> dict[str, np.float32]:
    """Absmax, of the BF16 values, of each parameter whose products run in FP8, by its name.

    bf16_layers: as `precision.bf16_layers`.
    """
    exact = {layer % model.L for layer in bf16_layers}
    return {
        p.name: absmax(read(p).astype(ml_dtypes.bfloat16))
        for p in model_parameters(model)
        if p.layer is not None and p.layer not in exact and p.field in BY_WEIGHT
    }


def fp8_codes(array: Array, largest: np.float32) -> Array:
    """The e4m3 codes of a parameter by its absmax."""
    return quantize(array.astype(ml_dtypes.bfloat16), DType.E4M3, largest)[0]


def fp8_scale(largest: np.float32) -> Array:
    """Their scale, float32 of shape ()."""
    return np.array(scales(largest, DType.E4M3)[0], np.float32)


def quantization_json(model: ModelConfig, fp8: Mapping[str, np.float32]) -> dict[str, Any]:
    """config.json's quantization_config. fp8: the parameters that are stored as codes."""
    kept = [
        view.hf_name.removesuffix(".weight")
        for p in model_parameters(model)
        if p.layer is not None and p.field in BY_WEIGHT and p.name not in fp8
        for view in p.views
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": None,
        "modules_to_not_convert": ["lm_head", *kept],
    }
