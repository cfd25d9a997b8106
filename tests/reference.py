"""NumPy float64 reference of the forward passes of anGPT, GPT+ and nGPT, written from their equations alone.

Nothing here comes from `angpt_jax`, so that the JAX models can be checked against it. W has shape (out, in), and
every learnable scale is given in its effective value. D is the model width, H the number of heads, K the head width,
F the feed-forward width, V the vocabulary. Parameters are a plain dict: `embedding` and `head` (V, D), and `layers`,
a list of dicts with `query`, `key`, `value` (H*K, D), `attention_out` (D, H*K), `up`, `gate` (F, D), `down` (D, F);
the scales of each architecture:

* anGPT: per layer `alpha_attention`, `alpha_mlp` (D,); top level `logit_scale` (V,).
* GPT+: per layer `attention_norm`, `mlp_norm` (D,), with QK-norm also `query_norm`, `key_norm` (K,); top level
  `final_norm` (D,).
* nGPT: per layer `alpha_attention`, `alpha_mlp` (D,), `query_key_scale` (H, K), `up_scale`, `gate_scale` (F,); top
  level `logit_scale` (V,).
"""

from typing import Any

import numpy as np
from numpy.random import Generator

Array = np.ndarray
Params = dict[str, Any]


def as_float64(tree: Any) -> Any:
    """The same tree of dicts and lists with every leaf a float64 array."""
    if isinstance(tree, dict):
        return {name: as_float64(value) for name, value in tree.items()}
    return [as_float64(value) for value in tree] if isinstance(tree, list) else np.asarray(tree, dtype=np.float64)


def silu(x: Array) -> Array:
    """x · sigmoid(x) = x · (1 + tanh(x/2)) / 2, which cannot overflow."""
    return x * 0.5 * (1 + np.tanh(x / 2))


def rms_norm(x: Array, gain: Array, eps: float = 1e-6) -> Array:
    """gain · x / √(mean(x²) + eps) over the last axis."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * gain


def unit(x: Array, eps: float = 1e-12) -> Array:
    """x / √(Σ x² + eps) over the last axis."""
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + eps)


def split_heads(x: Array, heads: int) -> Array:
    """(T, H*K) → (H, T, K): entries h*K … (h+1)*K are head h."""
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


def rope(x: Array, theta: float) -> Array:
    """Rotate each pair (x[i], x[i + K/2]) of position p by the angle p · theta^(-2i/K); x is (H, T, K)."""
    _, length, width = x.shape
    half = width // 2
    angle = np.arange(length)[:, None] * theta ** (-2 * np.arange(half) / width)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(q: Array, k: Array, v: Array, scale: float, segments: Array | None) -> Array:
    """softmax(scale · q kᵀ + mask) v for (H, T, K), heads put side by side: (T, H*K)."""
    allowed = np.tri(q.shape[1], dtype=bool)
    if segments is not None:
        segments = np.asarray(segments)
        allowed &= segments[:, None] == segments[None, :]
    scores = np.where(allowed, scale * q @ k.transpose(0, 2, 1), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


def nu_angpt(width: int, head_width: int, feed_forward: int) -> dict[str, float]:
    """The constants ν of anGPT; ν_acf = 1/√E[SiLU(s·g)²], g ~ N(0,1), s = √(d/f), by the trapezoid rule."""
    g = np.linspace(-12.0, 12.0, 200_001)
    density = np.exp(-(g**2) / 2) / np.sqrt(2 * np.pi)
    second_moment = np.trapezoid(silu(np.sqrt(width / feed_forward) * g) ** 2 * density, g)
    return {
        "nu_qkv": float(np.sqrt(width / head_width)),
        "nu_p": float(np.sqrt(head_width / width)),
        "nu_uz": float(np.sqrt(width / feed_forward)),
        "nu_d": float(np.sqrt(feed_forward / width)),
        "nu_acf": float(1 / np.sqrt(second_moment)),
    }


def lerp(h: Array, x: Array, alpha: Array) -> Array:
    """ν(α) ⊙ (h + α ⊙ (x − h)) with ν(α) = 1/√(α² + (1−α)²) and α = |alpha|."""
    alpha = np.abs(alpha)
    return (h + alpha * (x - h)) / np.sqrt(alpha**2 + (1 - alpha) ** 2)


def forward_angpt(params: Params, tokens: Array, heads: int, theta: float, segments: Array | None) -> Array:
    """anGPT: no norm anywhere; h ← ν(α) ⊙ (h + α ⊙ (x − h)); logits = s_Z ⊙ W_head h."""
    h = params["embedding"][tokens]
    width = h.shape[-1]
    for layer in params["layers"]:
        head_width = len(layer["query"]) // heads
        nu = nu_angpt(width, head_width, len(layer["up"]))

        q, k, v = (nu["nu_qkv"] * split_heads(h @ layer[name].T, heads) for name in ("query", "key", "value"))
        y = attention(rope(q, theta), rope(k, theta), v, np.sqrt(head_width), segments)
        h = lerp(h, nu["nu_p"] * y @ layer["attention_out"].T, layer["alpha_attention"])

        u, z = (nu["nu_uz"] * h @ layer[name].T for name in ("up", "gate"))
        a = nu["nu_acf"] * u * silu(np.sqrt(width) * z)
        h = lerp(h, nu["nu_d"] * a @ layer["down"].T, layer["alpha_mlp"])
    return params["logit_scale"] * (h @ params["head"].T)


def forward_gpt_plus(
    params: Params, tokens: Array, heads: int, theta: float, segments: Array | None, qk_norm: bool
) -> Array:
    """GPT+: h ← h + f(RMSNorm(h)) for attention and SwiGLU; logits = W_head RMSNorm(h)."""
    h = params["embedding"][tokens]
    for layer in params["layers"]:
        x = rms_norm(h, layer["attention_norm"])
        q, k, v = (split_heads(x @ layer[name].T, heads) for name in ("query", "key", "value"))
        if qk_norm:
            q, k = rms_norm(q, layer["query_norm"]), rms_norm(k, layer["key_norm"])
        y = attention(rope(q, theta), rope(k, theta), v, 1 / np.sqrt(q.shape[-1]), segments)
        h = h + y @ layer["attention_out"].T

        x = rms_norm(h, layer["mlp_norm"])
        h = h + (x @ layer["up"].T * silu(x @ layer["gate"].T)) @ layer["down"].T
    return rms_norm(h, params["final_norm"]) @ params["head"].T


def forward_ngpt(params: Params, tokens: Array, heads: int, theta: float, segments: Array | None) -> Array:
    """nGPT: h ← Norm(h + α ⊙ (Norm(x) − h)), q and k ← s_qk ⊙ Norm(RoPE(·)); logits = s_Z ⊙ W_head h."""
    h = params["embedding"][tokens]
    width = h.shape[-1]
    for layer in params["layers"]:
        q, k, v = (split_heads(h @ layer[name].T, heads) for name in ("query", "key", "value"))
        s_qk = layer["query_key_scale"][:, None, :]
        q, k = s_qk * unit(rope(q, theta)), s_qk * unit(rope(k, theta))
        y = attention(q, k, v, np.sqrt(q.shape[-1]), segments)
        h = unit(h + np.abs(layer["alpha_attention"]) * (unit(y @ layer["attention_out"].T) - h))

        u = layer["up_scale"] * (h @ layer["up"].T)
        z = np.sqrt(width) * layer["gate_scale"] * (h @ layer["gate"].T)
        h = unit(h + np.abs(layer["alpha_mlp"]) * (unit(u * silu(z) @ layer["down"].T) - h))
    return params["logit_scale"] * (h @ params["head"].T)


def forward(
    arch: str,
    params: Params,
    tokens: Array,
    heads: int,
    rope_theta: float = 10000.0,
    segments: Array | None = None,
    qk_norm: bool = True,
) -> Array:
    """Logits (T, V) of one sequence (T,); `segments` parts it into documents; `qk_norm` is read by GPT+ only."""
    params, tokens = as_float64(params), np.asarray(tokens)
    if arch == "angpt":
        return forward_angpt(params, tokens, heads, rope_theta, segments)
    if arch == "gpt_plus":
        return forward_gpt_plus(params, tokens, heads, rope_theta, segments, qk_norm)
    if arch == "ngpt":
        return forward_ngpt(params, tokens, heads, rope_theta, segments)
    raise ValueError(f"unknown architecture {arch!r}: angpt, gpt_plus or ngpt")


def loss(logits: Array, targets: Array) -> float:
    """Mean over positions of log Σ exp(logits) − logits[target], in nats."""
    logits = np.asarray(logits, dtype=np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_z = np.log(np.exp(shifted).sum(axis=-1))
    return float(np.mean(log_z - shifted[np.arange(len(targets)), targets]))


def random_params(
    arch: str, rng: Generator, vocab: int, width: int, heads: int, feed_forward: int, layers: int, qk_norm: bool = True
) -> Params:
    """Random weights with unit rows, and scales away from their initial values, so that a missing one shows."""

    def around_one(spread: float, *shape: int) -> Array:
        return rng.uniform(1 - spread, 1 + spread, shape)

    shapes = {name: (width, width) for name in ("query", "key", "value", "attention_out")}
    shapes |= {"up": (feed_forward, width), "gate": (feed_forward, width), "down": (width, feed_forward)}
    params: Params = {name: unit(rng.standard_normal((vocab, width))) for name in ("embedding", "head")}
    params["layers"] = [{name: unit(rng.standard_normal(s)) for name, s in shapes.items()} for _ in range(layers)]
    params |= {"final_norm": around_one(0.2, width)} if arch == "gpt_plus" else {"logit_scale": around_one(0.3, vocab)}
    for layer in params["layers"]:
        if arch == "gpt_plus":
            layer |= {name: around_one(0.2, width) for name in ("attention_norm", "mlp_norm")}
            if qk_norm:
                layer |= {name: around_one(0.2, width // heads) for name in ("query_norm", "key_norm")}
        else:
            for name in ("alpha_attention", "alpha_mlp"):
                layer[name] = rng.uniform(0.05, 0.4, width) * rng.choice([-1.0, 1.0], width)
        if arch == "ngpt":
            layer["query_key_scale"] = around_one(0.3, heads, width // heads)
            layer |= {name: around_one(0.3, feed_forward) for name in ("up_scale", "gate_scale")}
    return params
