"""Loss curves of 200 steps beside PyTorch's on the same GPU, weights and tokens.

    python -m bench.compare_curves           (needs torch and transformers; neither is a dependency)

PyTorch in FP32, in BF16 autocast, with weights and activations stored in BF16 and FP32 master
weights, which is what we store, and the same with the blocks' products of e4m3-rounded operands;
ours in BF16, FP8 by the card's units, and FP8 by emulation. Each
kind runs from the same weights and from two perturbed ones (relative 2^-9 of normal noise: BF16's
own rounding). The band of BF16 noise at a step is what lies between the lowest and the highest of
PyTorch's BF16 runs of that start, relative to its FP32 run. One JSON line a figure.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch  # pyright: ignore

from bench.compare_torch import (
    CURVE,
    RATE,
    STEPS,
    WARM_UP,
    B,
    T,
    batch_of,
    hf_model,
    ours,
    text,
    torch_loss,
)
from llmq_nb.train.initial import set_weights

STARTS = 3
Weights = dict[str, Any]


def windows() -> np.ndarray:
    """(STEPS, B, T + 1) bytes of text."""
    stream, rng = text(), np.random.default_rng(1)
    starts = rng.integers(0, stream.size - T - 1, (STEPS, B))
    return stream[starts[..., None] + np.arange(T + 1)]


def start_of(index: int) -> Weights:
    """The weights of a start: the model's own, or perturbed."""
    weights = {k: v.clone() for k, v in hf_model(CURVE).state_dict().items()}
    if index:
        torch.manual_seed(1000 + index)
        for value in weights.values():
            value *= 1 + 2.0**-9 * torch.randn_like(value)
    return weights


def rate_of(step: int) -> float:
    return RATE * min(1.0, (step + 1) / WARM_UP)


def rounded(x: Any) -> Any:
    """The values that x has as e4m3 codes under its own absmax, float32."""
    scale = x.float().abs().max().clamp(min=1e-30) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


class Fp8Linear(torch.autograd.Function):
    """A product of e4m3-rounded operands, forward and backward; the bias gradient is exact."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        a, w = rounded(x), rounded(weight)
        ctx.save_for_backward(a, w)
        ctx.bias = bias is not None
        y = a @ w.T
        return (y + bias.float() if ctx.bias else y).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,), (a, w) = grads, ctx.saved_tensors
        d = rounded(dy)
        dw = d.flatten(0, -2).T @ a.flatten(0, -2)
        db = dy.float().flatten(0, -2).sum(0).to(dy.dtype) if ctx.bias else None
        return (d @ w).to(dy.dtype), dw.to(dy.dtype), db


def torch_curve(
    weights: Weights, batches: np.ndarray, kind: Literal["fp32", "autocast", "stored", "e4m3"]
) -> list[float]:
    """PyTorch's losses. stored, e4m3: a BF16 model that FP32 master weights are rounded into."""
    run = hf_model(CURVE)
    run.load_state_dict(weights)
    masters = list(run.parameters())
    stored = kind in ("stored", "e4m3")
    if stored:
        masters = [p.detach().clone() for p in masters]
        run.bfloat16()
    if kind == "e4m3":
        for layer in run.model.layers:
            for m in layer.modules():
                if isinstance(m, torch.nn.Linear):
                    m.forward = lambda x, m=m: Fp8Linear.apply(x, m.weight, m.bias)
    groups = [
        {"params": [p for p in masters if p.ndim == 2]},
        {"params": [p for p in masters if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step, w in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        run.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
            loss = torch_loss(run, w[:, :-1], w[:, 1:])
        loss.backward()
        if stored:
            for master, p in zip(masters, run.parameters(), strict=True):
                master.grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        if stored:
            with torch.no_grad():
                for master, p in zip(masters, run.parameters(), strict=True):
                    p.copy_(master)
        losses.append(loss.item())
    return losses


def our_curve(weights: Weights, batches: np.ndarray, **precision: Any) -> list[float]:
    """Our losses; precision: keys of `[precision]`."""
    run = hf_model(CURVE)
    run.load_state_dict(weights)
    change = lambda c: dataclasses.replace(  # noqa: E731
        c, precision=dataclasses.replace(c.precision, **precision)
    )
    engine = ours(run, CURVE, B, T, "bf16", change)
    losses = [
        engine.train_step(
            batch_of(w[:, :-1], w[:, 1:]), step=i, updates=i, learning_rate=rate_of(i)
        ).loss
        for i, w in enumerate(batches)
    ]
    engine.close()
    return losses


def gradient_errors(weights: Weights, batches: np.ndarray) -> dict[str, float]:
    """Relative L2 distance of FP8's gradients from BF16's after 200 steps, by kind of parameter.

    The median over layers. The same weights and batch; in FP8 by the card's units, e4m3.
    """
    run = hf_model(CURVE)
    run.load_state_dict(weights)
    trained = ours(run, CURVE, B, T, "bf16")
    for i, w in enumerate(batches):
        batch = batch_of(w[:, :-1], w[:, 1:])
        trained.train_step(batch, step=i, updates=i, learning_rate=rate_of(i))
    arrays = [(s.parameter, trained.read(s.master)) for s in trained.states]
    trained.close()
    found = []
    for matmul in ("bf16", "e4m3"):
        change = lambda c, m=matmul: dataclasses.replace(  # noqa: E731
            c, precision=dataclasses.replace(c.precision, matmul=m)
        )
        engine = ours(run, CURVE, B, T, "bf16", change)
        set_weights(engine, iter(arrays))
        w = batches[0]
        engine.train_step(batch_of(w[:, :-1], w[:, 1:]), step=0, updates=0, learning_rate=0.0)
        found.append([engine.read(s.gradient).astype(np.float64) for s in engine.states])
        engine.close()
    errors: dict[str, list[float]] = {}
    for (p, _), exact, rounded_ in zip(arrays, *found, strict=True):
        error = float(np.linalg.norm(rounded_ - exact) / np.linalg.norm(exact))
        errors.setdefault(p.field, []).append(error)
    return {field: round(float(np.median(e)), 4) for field, e in errors.items()}


KINDS: dict[str, Callable[[Weights, np.ndarray], list[float]]] = {
    "torch fp32": lambda w, b: torch_curve(w, b, "fp32"),
    "torch bf16 autocast": lambda w, b: torch_curve(w, b, "autocast"),
    "torch bf16 stored": lambda w, b: torch_curve(w, b, "stored"),
    "torch e4m3": lambda w, b: torch_curve(w, b, "e4m3"),
    "ours bf16": our_curve,
    "ours e4m3": lambda w, b: our_curve(w, b, matmul="e4m3"),
    "ours e4m3, emulated": lambda w, b: our_curve(w, b, matmul="e4m3", fp8_units="emulate"),
    "ours e4m3, e5m2 gradients": lambda w, b: our_curve(w, b, matmul="e4m3", gradient="e5m2"),
}
NOISE = ("torch bf16 autocast", "torch bf16 stored")


def main(only: tuple[str, ...] = ()) -> None:
    """only: kinds to run, the FP32 and BF16 of PyTorch among them."""
    batches = windows()
    starts = [start_of(i) for i in range(STARTS)]
    losses: dict[str, np.ndarray] = {}
    for name, run in KINDS.items():
        if only and name not in only:
            continue
        begin = time.perf_counter()
        losses[name] = np.array([run(start, batches) for start in starts])
        print(json.dumps({"curve": name, "seconds": time.perf_counter() - begin}), flush=True)
    print(
        json.dumps({"e4m3 gradients from bf16's": gradient_errors(starts[0], batches)}), flush=True
    )
    gaps = {name: values - losses["torch fp32"] for name, values in losses.items()}
    noise = np.concatenate([gaps[name] for name in NOISE])
    low, high = noise.min(axis=0), noise.max(axis=0)
    for name, gap in gaps.items():
        outside = np.maximum(np.maximum(gap - high, low - gap), 0.0)
        last = losses[name][:, -20:].mean(axis=1)
        line = {
            "curve": name,
            "last_20": np.round(last, 4).tolist(),
            "mean_gap": round(float(np.abs(gap).mean()), 4),
            "largest_gap": round(float(np.abs(gap).max()), 4),
            "steps_inside_band": round(float((outside == 0).mean()), 3),
            "farthest_outside": round(float(outside.max()), 4),
        }
        print(json.dumps(line), flush=True)
    print(json.dumps({"losses": {k: np.round(v, 4).tolist() for k, v in losses.items()}}))


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    main(tuple(sys.argv[1:]))
