"""Model folders made without our code: the safetensors library writes the weights, and the tensor
names and shapes are stated here as transformers has them."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from llmq_nb.model.config import ModelConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPE_NAMES = {BF16: "bfloat16", np.dtype(np.float32): "float32", np.dtype(np.float16): "float16"}
# H * D = 64 is not C; 37 is no multiple of 16, so the table has padded rows.
SIZES = {"C": 32, "F": 48, "L": 2, "H": 4, "G": 2, "D": 16, "V": 37}
FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
Tensors = dict[str, np.ndarray[Any, Any]]


def hf_shapes(family: str, tied: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of `SIZES` in transformers' state dict."""
    C, F, q, k = 32, 48, 64, 32
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (37, C)}
    for i in range(2):
        layer = {
            "input_layernorm.weight": (C,),
            "self_attn.q_proj.weight": (q, C),
            "self_attn.k_proj.weight": (k, C),
            "self_attn.v_proj.weight": (k, C),
            "self_attn.o_proj.weight": (C, q),
            "post_attention_layernorm.weight": (C,),
            "mlp.gate_proj.weight": (F, C),
            "mlp.up_proj.weight": (F, C),
            "mlp.down_proj.weight": (C, F),
        }
        if family == "qwen2":
            layer |= {f"self_attn.{n}_proj.bias": (r,) for n, r in (("q", q), ("k", k), ("v", k))}
        if family == "qwen3":
            layer |= {"self_attn.q_norm.weight": (16,), "self_attn.k_norm.weight": (16,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (C,)
    if not tied:
        shapes["lm_head.weight"] = (37, C)
    return shapes


def random_tensors(family: str, tied: bool, dtype: Any, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    shapes = hf_shapes(family, tied).items()
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes}


def library_save(path: Path, tensors: Tensors) -> None:
    """The safetensors library as the writer."""
    spec = getattr(safetensors, "TensorSpec", None)  # since 0.8
    entries: dict[str, Any] = {}
    for name, t in tensors.items():
        entry: dict[str, Any] = {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape)}
        if spec is None:
            entries[name] = {**entry, "data": t.tobytes()}
        else:
            entries[name] = spec(**entry, data_ptr=t.ctypes.data, data_len=t.nbytes)
    path.write_bytes(safetensors.serialize(entries, {"format": "pt"}))


def library_load(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The safetensors library as the reader: name -> (dtype, shape, bytes) over all files."""
    return {
        name: (entry["dtype"], list(entry["shape"]), bytes(entry["data"]))
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in safetensors.deserialize(path.read_bytes())
    }


def make_config(family: str, tied: bool = False, **changes: Any) -> ModelConfig:
    flags = {"qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    return ModelConfig(family=family, tied=tied, **{**SIZES, **flags, **changes})  # type: ignore


def save_folder(folder: Path, tensors: Tensors, shards: int = 1) -> Path:
    """A folder with the tensors dealt to so many shards."""
    folder.mkdir()
    if shards == 1:
        library_save(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        library_save(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def leftovers(folder: Path) -> list[str]:
    """Names that a finished or failed write must not leave."""
    names = [path.name for path in folder.rglob("*")]
    return [n for n in names if n.endswith((".tmp", ".llmq_nb_staging", ".llmq_nb_old"))]
