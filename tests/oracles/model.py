"""The whole model in float64: loss and gradients under Hugging Face names, from a config.json.

Qwen2, Qwen3, Llama, Mistral without a window: a pre-norm transformer that differs only in which
tensors exist (biases, q_norm and k_norm, lm_head), so the tensors given decide.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tests.oracles import attention_layer as attn
from tests.oracles import layers
from tests.oracles.layers import Array, f64

Weights = Mapping[str, ArrayLike]
Saved = dict[str, Array]


class _Model:
    """A config, float64 weights, and the gradients collected so far."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, segment_start: ArrayLike):
        self.weights = {name: f64(value) for name, value in weights.items()}
        self.gradients: dict[str, Array] = {}
        self.layer_count = config["num_hidden_layers"]
        self.eps = config["rms_norm_eps"]
        self.H = config["num_attention_heads"]
        self.G = config.get("num_key_value_heads") or self.H
        self.D = config.get("head_dim") or config["hidden_size"] // self.H
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        self.frequencies = attn.rope_frequencies(self.D, theta, rope)
        self.tied = config.get("tie_word_embeddings", False)
        self.head = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
        self.segment_start = np.asarray(segment_start)
        self.positions = np.arange(self.segment_start.shape[1]) - self.segment_start

    def add(self, name: str, gradient: Array) -> None:
        self.gradients[name] = self.gradients.get(name, 0.0) + gradient

    def linear(self, name: str, x: Array) -> Array:
        return layers.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def linear_backward(self, name: str, dy: Array, x: Array) -> Array:
        dx, dweight, dbias = layers.linear_backward(dy, x, self.weights[f"{name}.weight"])
        self.add(f"{name}.weight", dweight)
        if f"{name}.bias" in self.weights:
            self.add(f"{name}.bias", dbias)
        return dx

    def norm(self, name: str, x: Array) -> Array:
        return layers.rmsnorm(x, self.weights[f"{name}.weight"], eps=self.eps)[0]

    def norm_backward(self, name: str, dy: Array, x: Array) -> Array:
        dx, dweight = layers.rmsnorm_backward(dy, x, self.weights[f"{name}.weight"], eps=self.eps)
        self.add(f"{name}.weight", dweight)
        return dx

    def heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.D)

    def attention(self, name: str, x: Array) -> tuple[Array, Saved]:
        """Attention sublayer: name is model.layers.<i>.self_attn, x its normalised input."""
        q = self.heads(self.linear(f"{name}.q_proj", x))
        k = self.heads(self.linear(f"{name}.k_proj", x))
        v = self.heads(self.linear(f"{name}.v_proj", x))
        s = {"x": x, "q": q, "k": k, "v": v}
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        s["q_rope"] = attn.rope(q, self.positions, self.frequencies)
        s["k_rope"] = attn.rope(k, self.positions, self.frequencies)
        out, _ = attn.attention(s["q_rope"], s["k_rope"], v, self.segment_start)
        s["out"] = out.reshape(*out.shape[:2], -1)
        return self.linear(f"{name}.o_proj", s["out"]), s

    def attention_backward(self, name: str, dy: Array, s: Saved) -> Array:
        dout = self.heads(self.linear_backward(f"{name}.o_proj", dy, s["out"]))
        dq, dk, dv = attn.attention_backward(
            dout, s["q_rope"], s["k_rope"], s["v"], self.segment_start
        )
        dq = attn.rope_backward(dq, self.positions, self.frequencies)
        dk = attn.rope_backward(dk, self.positions, self.frequencies)
        if f"{name}.q_norm.weight" in self.weights:
            dq = self.norm_backward(f"{name}.q_norm", dq, s["q"])
            dk = self.norm_backward(f"{name}.k_norm", dk, s["k"])
        flat = (*dy.shape[:2], -1)
        return (
            self.linear_backward(f"{name}.q_proj", dq.reshape(flat), s["x"])
            + self.linear_backward(f"{name}.k_proj", dk.reshape(flat), s["x"])
            + self.linear_backward(f"{name}.v_proj", dv.reshape(flat), s["x"])
        )

    def mlp(self, name: str, x: Array) -> tuple[Array, Saved]:
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        act = layers.swiglu(gate, up)
        return self.linear(f"{name}.down_proj", act), {"x": x, "gate": gate, "up": up, "act": act}

    def mlp_backward(self, name: str, dy: Array, s: Saved) -> Array:
        dact = self.linear_backward(f"{name}.down_proj", dy, s["act"])
        dgate, dup = layers.swiglu_backward(dact, s["gate"], s["up"])
        return self.linear_backward(f"{name}.gate_proj", dgate, s["x"]) + self.linear_backward(
            f"{name}.up_proj", dup, s["x"]
        )

    def forward(self, tokens: ArrayLike) -> tuple[Array, list[tuple[Array, Saved, Array, Saved]]]:
        """(last residual [B, T, C], per layer: input, attention's saved, middle, mlp's saved)."""
        x = layers.embedding(tokens, self.weights["model.embed_tokens.weight"])
        saved = []
        for i in range(self.layer_count):
            name = f"model.layers.{i}"
            y, attention_saved = self.attention(
                f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x)
            )
            h = x + y
            y, mlp_saved = self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", h))
            saved.append((x, attention_saved, h, mlp_saved))
            x = h + y
        return x, saved

    def backward(self, dx: Array, saved: list[tuple[Array, Saved, Array, Saved]]) -> Array:
        """Gradient of the embedding's output, from that of the last residual."""
        for i in reversed(range(self.layer_count)):
            name = f"model.layers.{i}"
            x, attention_saved, h, mlp_saved = saved[i]
            dy = self.mlp_backward(f"{name}.mlp", dx, mlp_saved)
            dx = dx + self.norm_backward(f"{name}.post_attention_layernorm", dy, h)
            dy = self.attention_backward(f"{name}.self_attn", dx, attention_saved)
            dx = dx + self.norm_backward(f"{name}.input_layernorm", dy, x)
        return dx


def model_logits(
    config: Mapping[str, Any], weights: Weights, tokens: ArrayLike, segment_start: ArrayLike
) -> Array:
    """Logits [B, T, V]. Arguments as in model_loss_and_gradients."""
    model = _Model(config, weights, segment_start)
    residual, _ = model.forward(tokens)
    return layers.linear(model.norm("model.norm", residual), model.weights[model.head])


def model_loss(
    config: Mapping[str, Any],
    weights: Weights,
    tokens: ArrayLike,
    targets: ArrayLike,
    segment_start: ArrayLike,
    z_loss: float = 0.0,
) -> float:
    """The loss alone. Arguments as in model_loss_and_gradients."""
    logits = model_logits(config, weights, tokens, segment_start)
    return layers.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), np.ravel(targets), z_loss=z_loss
    )


def model_loss_and_gradients(
    config: Mapping[str, Any],
    weights: Weights,
    tokens: ArrayLike,
    targets: ArrayLike,
    segment_start: ArrayLike,
    z_loss: float = 0.0,
) -> tuple[float, dict[str, Array]]:
    """Mean loss over the targets that are not -100, and its gradient for every tensor of weights.

    config: a parsed config.json, either rope spelling. weights: Hugging Face names; a tied model's
    lm_head is not among them. tokens, targets, segment_start: int [B, T]; targets[b, t] is the
    token to predict at t. The loss includes z_loss lse^2.
    """
    model = _Model(config, weights, segment_start)
    residual, saved = model.forward(tokens)
    final = model.norm("model.norm", residual)
    head = model.weights[model.head]
    logits = layers.linear(final, head).reshape(-1, len(head))
    flat_targets = np.ravel(targets)
    loss = layers.cross_entropy(logits, flat_targets, z_loss=z_loss)

    dlogits = layers.cross_entropy_backward(logits, flat_targets, z_loss=z_loss)
    dfinal, dhead, _ = layers.linear_backward(dlogits.reshape(*final.shape[:2], -1), final, head)
    model.add(model.head, dhead)
    dx = model.backward(model.norm_backward("model.norm", dfinal, residual), saved)
    model.add(
        "model.embed_tokens.weight",
        layers.embedding_backward(dx, tokens, len(model.weights["model.embed_tokens.weight"])),
    )
    return loss, model.gradients
