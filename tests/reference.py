"""NumPy float64 reference of anGPT, GPT+ and nGPT, written from their equations alone; the rest: `reference_designs`.

Nothing here comes from `angpt_jax`, so that the JAX models can be checked against it. D is the model width, H and G the
numbers of heads of queries and of keys and values, K the head width, F the feed-forward width, V the vocabulary.

Parameters are plain dicts. Matrices are (out, in): `embedding` and `head` (V, D), and in each dict of the list `layers`
`query` (H*K, D), `key`, `value` (G*K, D), `attention_out` (D, H*K), `up`, `gate` (F, D), `down` (D, F). Scales, gains
and biases, in their effective value, stand in one dict for each norm, join or head: `layer["mlp_norm"]["gain"]`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Params = dict[str, Any]
QUERY_KEY_VALUE = ("query", "key", "value")


class Sequence(NamedTuple):
    """One sequence of T tokens and how it is attended to; `segments` parts it into documents."""

    tokens: Array
    heads: int
    theta: float = 10_000.0
    segments: Array | None = None


def silu(x: Array) -> Array:
    """x · sigmoid(x) = x · (1 + tanh(x/2)) / 2, which cannot overflow."""
    return x * 0.5 * (1 + np.tanh(x / 2))


def rms_norm(x: Array, gain: Array, eps: float = 1e-6) -> Array:
    """gain · x / √(mean(x²) + eps) over the last axis."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * gain


def unit(x: Array, eps: float = 1e-12) -> Array:
    """x / √(Σ x² + eps) over the last axis."""
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + eps)


def split_heads(x: Array, width: int) -> Array:
    """(T, H*K) → (H, T, K): entries h*K … (h+1)*K are head h."""
    return x.reshape(len(x), -1, width).transpose(1, 0, 2)


def heads_of(layer: Params, name: str, x: Array, s: Sequence) -> Array:
    """W x, split in heads of the width that the queries have."""
    return split_heads(x @ layer[name].T, len(layer["query"]) // s.heads)


def rope(x: Array, theta: float) -> Array:
    """Rotate each pair (x[i], x[i + K/2]) of position p by the angle p · theta^(-2i/K); x is (H, T, K)."""
    _, length, width = x.shape
    half = width // 2
    angle = np.arange(length)[:, None] * theta ** (-2 * np.arange(half) / width)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(q: Array, k: Array, v: Array, scale: float, segments: Array | None) -> Array:
    """softmax(scale · q kᵀ + mask) v for q (H, T, K), heads put side by side: (T, H*K); query h sees head h·G/H."""
    allowed = np.tri(q.shape[1], dtype=bool)
    if segments is not None:
        segments = np.asarray(segments)
        allowed &= segments[:, None] == segments[None, :]
    k, v = (np.repeat(x, len(q) // len(x), axis=0) for x in (k, v))
    scores = np.where(allowed, scale * q @ k.transpose(0, 2, 1), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


@cache
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
    """h + α ⊙ (x − h)."""
    return h + alpha * (x - h)


def approximate_lerp(h: Array, x: Array, alpha: Array) -> Array:
    """ν(α) ⊙ (h + α ⊙ (x − h)) with ν(α) = 1/√(α² + (1−α)²)."""
    return lerp(h, x, alpha) / np.sqrt(alpha**2 + (1 - alpha) ** 2)


def exact_lerp(h: Array, x: Array, alpha: Array) -> Array:
    """Norm(h + α ⊙ (x − h))."""
    return unit(lerp(h, x, alpha))


def angpt(
    params: Params,
    s: Sequence,
    join: Callable[[Array, Array, Array], Array] = approximate_lerp,
    sign: Callable[[Array], Array] = np.abs,
    scale_per: str = "vocab",
) -> Array:
    """anGPT: no norm anywhere; h ← ν(α) ⊙ (h + α ⊙ (x − h)), α = |s|; logits = s_Z ⊙ W_head h, or W_head (s_Z ⊙ h)."""
    h = params["embedding"][s.tokens]
    width = h.shape[-1]
    for layer in params["layers"]:
        head_width = len(layer["query"]) // s.heads
        nu = nu_angpt(width, head_width, len(layer["up"]))

        q, k, v = (nu["nu_qkv"] * heads_of(layer, name, h, s) for name in QUERY_KEY_VALUE)
        y = attention(rope(q, s.theta), rope(k, s.theta), v, np.sqrt(head_width), s.segments)
        h = join(h, nu["nu_p"] * y @ layer["attention_out"].T, sign(layer["attention_residual"]["alpha"]))

        u, z = (nu["nu_uz"] * h @ layer[name].T for name in ("up", "gate"))
        a = nu["nu_acf"] * u * silu(np.sqrt(width) * z)
        h = join(h, nu["nu_d"] * a @ layer["down"].T, sign(layer["mlp_residual"]["alpha"]))
    scale = params["logits"]["logit_scale"]
    return scale * (h @ params["head"].T) if scale_per == "vocab" else (scale * h) @ params["head"].T


def ngpt(params: Params, s: Sequence) -> Array:
    """nGPT: h ← Norm(h + α ⊙ (Norm(x) − h)), q and k ← s_qk ⊙ Norm(RoPE(·)); logits = s_Z ⊙ W_head h.

    With grouped queries, a head of keys has the s_qk of the first head of queries that it serves.
    """
    h = params["embedding"][s.tokens]
    width = h.shape[-1]
    for layer in params["layers"]:
        q, k, v = (heads_of(layer, name, h, s) for name in QUERY_KEY_VALUE)
        s_q = layer["qk"]["query_key_scale"]
        s_k = np.array([s_q[g * len(q) // len(k)] for g in range(len(k))])
        q, k = s_q[:, None, :] * unit(rope(q, s.theta)), s_k[:, None, :] * unit(rope(k, s.theta))
        y = attention(q, k, v, np.sqrt(q.shape[-1]), s.segments)
        h = exact_lerp(h, unit(y @ layer["attention_out"].T), np.abs(layer["attention_residual"]["alpha"]))

        u = layer["gating"]["up_scale"] * (h @ layer["up"].T)
        z = np.sqrt(width) * layer["gating"]["gate_scale"] * (h @ layer["gate"].T)
        h = exact_lerp(h, unit(u * silu(z) @ layer["down"].T), np.abs(layer["mlp_residual"]["alpha"]))
    return params["logits"]["logit_scale"] * (h @ params["head"].T)


def gpt_heads(
    layer: Params, x: Array, s: Sequence, qk_norm: bool = True, value: Callable[[Array], Array] | None = None
) -> Array:
    """softmax(q kᵀ/√K) v, heads side by side, q and k rotated, with QK-norm before that."""
    q, k, v = (heads_of(layer, name, x, s) for name in QUERY_KEY_VALUE)
    if qk_norm:
        q, k = rms_norm(q, layer["qk"]["query_gain"]), rms_norm(k, layer["qk"]["key_gain"])
    v = value(v) if value else v
    return attention(rope(q, s.theta), rope(k, s.theta), v, 1 / np.sqrt(q.shape[-1]), s.segments)


def qk_norm_attention(layer: Params, x: Array, s: Sequence) -> Array:
    """Attention of GPT+."""
    return gpt_heads(layer, x, s) @ layer["attention_out"].T


def plain_attention(layer: Params, x: Array, s: Sequence) -> Array:
    """Attention without QK-norm."""
    return gpt_heads(layer, x, s, qk_norm=False) @ layer["attention_out"].T


def swiglu(layer: Params, x: Array) -> Array:
    """W_down (W_up x ⊙ SiLU(W_gate x))."""
    return (x @ layer["up"].T * silu(x @ layer["gate"].T)) @ layer["down"].T


def pre_norm(
    params: Params,
    s: Sequence,
    norm: Callable[..., Array] = rms_norm,
    attend: Callable[[Params, Array, Sequence], Array] = qk_norm_attention,
    mlp: Callable[[Params, Array], Array] = swiglu,
    embedding_gain: float | Array = 1.0,
) -> Array:
    """h ← h + f(norm(h)) for attention and MLP; logits = W_head norm(h). GPT+ with RMSNorm, QK-norm and SwiGLU."""
    h = embedding_gain * params["embedding"][s.tokens]
    for layer in params["layers"]:
        h = h + attend(layer, norm(h, **layer["attention_norm"]), s)
        h = h + mlp(layer, norm(h, **layer["mlp_norm"]))
    return norm(h, **params["final_norm"]) @ params["head"].T


def loss(logits: Array, targets: Array) -> float:
    """Mean over positions of log Σ exp(logits) − logits[target], in nats."""
    logits = np.asarray(logits, dtype=np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_z = np.log(np.exp(shifted).sum(axis=-1))
    return float(np.mean(log_z - shifted[np.arange(len(targets)), targets]))
