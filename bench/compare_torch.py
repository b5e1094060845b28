"""The cuda engine's gradients beside PyTorch's on the same GPU, weights and tokens.

    python -m bench.compare_torch            (needs torch and transformers; neither is a dependency)

Gradients of transformers' own Qwen2 and Qwen3 models: FP32 against FP32; and BF16, ours and
PyTorch's, both against PyTorch's FP32. Loss curves are in compare_curves. One JSON line a figure.
"""

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch  # pyright: ignore
import transformers  # pyright: ignore

from llmq_nb.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelSection,
    OptimizerConfig,
    PrecisionConfig,
)
from llmq_nb.data.loader import Position, StepBatch
from llmq_nb.model.config import ModelConfig
from llmq_nb.train.engine_cuda import CudaEngine
from llmq_nb.train.initial import set_weights
from llmq_nb.train.snapshot import fused

SMALL = {
    "qwen2": ModelConfig(
        family="qwen2", C=256, F=384, L=3, H=4, G=2, D=64, V=1008, tied=False, qkv_bias=True
    ),
    "qwen3": ModelConfig(
        family="qwen3", C=256, F=384, L=3, H=4, G=1, D=128, V=1008, tied=True, qk_norm=True
    ),
}
CURVE = ModelConfig(
    family="qwen2", C=512, F=1408, L=8, H=8, G=2, D=64, V=272, tied=True, qkv_bias=True
)
B, T, STEPS, RATE, WARM_UP = 16, 512, 200, 1e-3, 20


def hf_model(model: ModelConfig, seed: int = 0) -> Any:
    """A random transformers model of the shape, float32 on the GPU."""
    kinds = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    make_config, make_model = kinds[model.family]
    torch.manual_seed(seed)
    config = make_config(
        vocab_size=model.V,
        hidden_size=model.C,
        intermediate_size=model.F,
        num_hidden_layers=model.L,
        num_attention_heads=model.H,
        num_key_value_heads=model.G,
        head_dim=model.D,
        tie_word_embeddings=model.tied,
        rms_norm_eps=model.norm_eps,
        max_position_embeddings=model.max_position,
        attention_dropout=0.0,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": model.rope_theta}
    return make_model(config).cuda().float().train()


def ours(
    hf: Any,
    model: ModelConfig,
    batch: int,
    length: int,
    dtype: Literal["bf16", "fp32"],
    change: Callable[[Config], Config] = lambda config: config,
) -> CudaEngine:
    """Our engine with the model's weights; master weights and states in FP32 unless `change`d."""
    config = Config(
        model=ModelSection(path="comparison"),
        data=DataConfig(train="comparison"),
        batch=BatchConfig(micro_batch=batch, seq_len=length),
        precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerConfig(learning_rate=RATE, weight_decay=0.1),
    )
    engine = CudaEngine(change(config), model)
    weights = {k: v.detach().float().cpu().numpy() for k, v in hf.state_dict().items()}
    states = engine.states
    set_weights(engine, ((s.parameter, fused(s.parameter, weights)) for s in states))
    return engine


def batch_of(tokens: np.ndarray, targets: np.ndarray) -> StepBatch:
    x, y = (a[None, None].astype(np.int32) for a in (tokens, targets))
    return StepBatch(x, y, np.zeros_like(x), int((targets >= 0).sum()), Position())


def torch_loss(hf: Any, tokens: np.ndarray, targets: np.ndarray) -> Any:
    x, y = (torch.from_numpy(a).long().cuda() for a in (tokens, targets))
    logits = hf(input_ids=x, use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def gradients(family: str) -> None:
    model, rng = SMALL[family], np.random.default_rng(0)
    tokens, targets = (rng.integers(0, model.V, (4, 256)) for _ in range(2))
    hf = hf_model(model)
    found: dict[str, tuple[float, dict[str, np.ndarray]]] = {}
    for name, dtype in (("torch fp32", torch.float32), ("torch bf16", torch.bfloat16)):
        hf.zero_grad()
        run = hf_model(model).to(dtype)
        run.load_state_dict(hf.state_dict())
        loss = torch_loss(run, tokens, targets)
        loss.backward()
        named = dict(run.named_parameters())
        grads = {k: p.grad.float().cpu().numpy() for k, p in named.items() if p.grad is not None}
        found[name] = (float(loss), grads)
    kinds: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    for dtype in kinds:
        engine = ours(hf, model, 4, 256, dtype)
        result = engine.train_step(batch_of(tokens, targets), step=0, updates=0, learning_rate=0.0)
        grads = {}
        for s in engine.states:
            array = engine.read(s.gradient).astype(np.float32)
            grads |= {v.hf_name: array[v.start : v.stop] for v in s.parameter.views}
        found[f"ours {dtype}"] = (result.loss, grads)
        engine.close()
    loss, truth = found.pop("torch fp32")
    for name, (other, grads) in found.items():
        errors = {
            k: float(np.linalg.norm(grads[k] - g) / np.linalg.norm(g)) for k, g in truth.items()
        }
        worst = max(errors, key=lambda k: errors[k])
        whole = np.sqrt(
            sum(np.linalg.norm(grads[k] - g) ** 2 for k, g in truth.items())
            / sum(np.linalg.norm(g) ** 2 for g in truth.values())
        )
        line = {"gradients": family, "of": name, "against": "torch fp32"}
        line |= {"loss_relative": abs(other - loss) / loss, "all_l2": float(whole)}
        print(json.dumps(line | {"worst_l2": errors[worst], "worst": worst}), flush=True)


def text() -> np.ndarray:
    """Bytes of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8).astype(np.int64)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    for shape in SMALL:
        gradients(shape)
