"""The model families, and presets with the published shapes.

    family    architecture         QKV bias  QK norm  sliding window in its files
    qwen2     Qwen2ForCausalLM     always    no       off unless use_sliding_window
    qwen3     Qwen3ForCausalLM     no        yes      off unless use_sliding_window
    llama     LlamaForCausalLM     no        no       none (SmolLM2 is a Llama)
    mistral   MistralForCausalLM   no        no       4096 unless the key says null

transformers leaves a key out of `config.json` only where the value is the default of the config
class, so `FamilyFacts` has those defaults; no family ties its embeddings by default.

Source   Defaults: configuration_{qwen2,qwen3,llama,mistral}.py of transformers 5.24. Shapes: the
         `config.json` of the checkpoints named in the comments below.
"""

import dataclasses
import difflib
from typing import Any

from llmq_nb.core.errors import UserError
from llmq_nb.model.config import Family, Llama3Rope, ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FamilyFacts:
    """What is true of every model of a family, and what an absent key of `config.json` means."""

    architecture: str
    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    windowed: bool = False
    """A `sliding_window` is in force without `use_sliding_window`."""
    default_window: int | None = None
    default_key_value_heads: int | None = None
    """None: as many as query heads."""
    default_head_dim: int | None = None
    """None: hidden size / query heads."""
    default_max_position: int
    default_bos: int | None = None
    default_eos: int | None = None


FAMILIES: dict[Family, FamilyFacts] = {
    "qwen2": FamilyFacts(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        qkv_bias=True,
        default_window=4096,
        default_key_value_heads=32,
        default_max_position=32768,
    ),
    "qwen3": FamilyFacts(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        qk_norm=True,
        default_window=4096,
        default_key_value_heads=32,
        default_head_dim=128,
        default_max_position=32768,
    ),
    "llama": FamilyFacts(
        architecture="LlamaForCausalLM",
        model_type="llama",
        windowed=True,
        default_max_position=2048,
        default_bos=1,
        default_eos=2,
    ),
    "mistral": FamilyFacts(
        architecture="MistralForCausalLM",
        model_type="mistral",
        windowed=True,
        default_window=4096,
        default_key_value_heads=8,
        default_max_position=131072,
        default_bos=1,
        default_eos=2,
    ),
}


def _model(
    family: Family, C: int, F: int, L: int, H: int, G: int, D: int, **rest: Any
) -> ModelConfig:
    """A config of `family`: its biases and norms, and `rest` as given."""
    facts = FAMILIES[family]
    flags = {"qkv_bias": facts.qkv_bias, "qk_norm": facts.qk_norm}
    return ModelConfig(family=family, C=C, F=F, L=L, H=H, G=G, D=D, **flags, **rest)


_QWEN25: dict[str, Any] = {"rope_theta": 1e6, "bos_ids": (151643,), "eos_ids": (151643,)}
_QWEN25_SMALL = {**_QWEN25, "V": 151936, "tied": True, "max_position": 32768}
_QWEN25_LARGE = {**_QWEN25, "V": 152064, "tied": False, "max_position": 131072}
_QWEN3: dict[str, Any] = {
    "V": 151936,
    "rope_theta": 1e6,
    "max_position": 40960,
    "bos_ids": (151643,),
    "eos_ids": (151645,),
}
_LLAMA3: dict[str, Any] = {
    "V": 128256,
    "norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position": 131072,
    "bos_ids": (128000,),
    "eos_ids": (128001,),
}
_SMOLLM2: dict[str, Any] = {
    "V": 49152,
    "tied": True,
    "norm_eps": 1e-5,
    "max_position": 8192,
    "bos_ids": (0,),
    "eos_ids": (0,),
}


def _stretched(factor: float) -> Llama3Rope:
    """Llama 3.1 and 3.2 differ in the factor alone; both were first trained on 8192 positions."""
    return Llama3Rope(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )


PRESETS: dict[str, ModelConfig] = {
    # Ours: learns Python source on two CPU cores in minutes. Byte tokenizer, its end of text 256.
    "quickstart": _model(
        "qwen2", 192, 512, 4, 3, 1, 64, V=259, tied=True, max_position=1024, eos_ids=(256,)
    ),
    # Checkpoints Qwen/Qwen2.5-<size> (base). The vocabulary is padded to 151936 or 152064 there.
    "qwen2.5-0.5b": _model("qwen2", 896, 4864, 24, 14, 2, 64, **_QWEN25_SMALL),
    "qwen2.5-1.5b": _model(
        "qwen2", 1536, 8960, 28, 12, 2, 128, **{**_QWEN25_SMALL, "max_position": 131072}
    ),
    "qwen2.5-3b": _model("qwen2", 2048, 11008, 36, 16, 2, 128, **_QWEN25_SMALL),
    "qwen2.5-7b": _model("qwen2", 3584, 18944, 28, 28, 4, 128, **_QWEN25_LARGE),
    "qwen2.5-14b": _model("qwen2", 5120, 13824, 48, 40, 8, 128, norm_eps=1e-5, **_QWEN25_LARGE),
    "qwen2.5-32b": _model("qwen2", 5120, 27648, 64, 40, 8, 128, norm_eps=1e-5, **_QWEN25_LARGE),
    # Checkpoints Qwen/Qwen3-<size>. H * D is not C in 0.6B and 4B.
    "qwen3-0.6b": _model("qwen3", 1024, 3072, 28, 16, 8, 128, tied=True, **_QWEN3),
    "qwen3-1.7b": _model("qwen3", 2048, 6144, 28, 16, 8, 128, tied=True, **_QWEN3),
    "qwen3-4b": _model("qwen3", 2560, 9728, 36, 32, 8, 128, tied=True, **_QWEN3),
    "qwen3-8b": _model("qwen3", 4096, 12288, 36, 32, 8, 128, tied=False, **_QWEN3),
    # Checkpoint meta-llama/Llama-2-7b-hf.
    "llama-2-7b": _model(
        "llama",
        4096,
        11008,
        32,
        32,
        32,
        128,
        V=32000,
        tied=False,
        norm_eps=1e-5,
        max_position=4096,
        bos_ids=(1,),
        eos_ids=(2,),
    ),
    # Checkpoints meta-llama/Llama-3.2-1B, Llama-3.2-3B and Llama-3.1-8B.
    "llama-3.2-1b": _model(
        "llama", 2048, 8192, 16, 32, 8, 64, tied=True, rope_scaling=_stretched(32.0), **_LLAMA3
    ),
    "llama-3.2-3b": _model(
        "llama", 3072, 8192, 28, 24, 8, 128, tied=True, rope_scaling=_stretched(32.0), **_LLAMA3
    ),
    "llama-3.1-8b": _model(
        "llama", 4096, 14336, 32, 32, 8, 128, tied=False, rope_scaling=_stretched(8.0), **_LLAMA3
    ),
    # Checkpoint mistralai/Mistral-7B-v0.3: the first Mistral 7B without a sliding window was v0.2.
    "mistral-7b-v0.3": _model(
        "mistral",
        4096,
        14336,
        32,
        32,
        8,
        128,
        V=32768,
        tied=False,
        norm_eps=1e-5,
        rope_theta=1e6,
        max_position=32768,
        bos_ids=(1,),
        eos_ids=(2,),
    ),
    # Checkpoints HuggingFaceTB/SmolLM2-<size> (base). 135M: standard deviation 1 / sqrt(576).
    "smollm2-135m": _model(
        "llama", 576, 1536, 30, 9, 3, 64, rope_theta=1e5, init_std=1 / 24, **_SMOLLM2
    ),
    "smollm2-360m": _model("llama", 960, 2560, 32, 15, 5, 64, rope_theta=1e5, **_SMOLLM2),
    "smollm2-1.7b": _model("llama", 2048, 8192, 24, 32, 32, 64, rope_theta=1.3e5, **_SMOLLM2),
}


def preset(name: str) -> ModelConfig:
    """The preset of that name (case does not matter). UserError with the nearest name if none."""
    key = name.lower()
    if key in PRESETS:
        return PRESETS[key]
    near = difflib.get_close_matches(key, PRESETS, n=1, cutoff=0.4)
    mend = f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(PRESETS)}"
    raise UserError(f"unknown model preset '{name}'", mend=mend)
