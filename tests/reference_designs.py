"""NumPy float64 reference of the designs beside anGPT, GPT+ and nGPT, each from the equations of its paper.

All have rotary positions, no biases in the maps, and a head of its own, as in this project.
"""

import math
from collections.abc import Callable

import numpy as np
from reference import (
    QUERY_KEY_VALUE,
    Array,
    Params,
    Sequence,
    angpt,
    approximate_lerp,
    attention,
    gpt_heads,
    heads_of,
    ngpt,
    plain_attention,
    pre_norm,
    qk_norm_attention,
    rms_norm,
    rope,
    silu,
    swiglu,
    unit,
)


def gelu(x: Array) -> Array:
    """The tanh approximation of x · Φ(x) (arXiv 1606.08415)."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_mlp(layer: Params, x: Array) -> Array:
    """W_down GELU(W_up x)."""
    return gelu(x @ layer["up"].T) @ layer["down"].T


def layer_norm(x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
    """gain · (x − mean x) / √(var x + eps) + bias over the last axis (arXiv 1607.06450)."""
    mean, variance = x.mean(axis=-1, keepdims=True), x.var(axis=-1, keepdims=True)
    return gain * (x - mean) / np.sqrt(variance + eps) + bias


def tanh_in_place_of_a_norm(x: Array, slope: Array, gain: Array, bias: Array) -> Array:
    """gain ⊙ tanh(slope · x) + bias (arXiv 2503.10622)."""
    return gain * np.tanh(slope * x) + bias


def erf_in_place_of_a_norm(x: Array, slope: Array, shift: Array, gain: Array, bias: Array) -> Array:
    """gain ⊙ erf(slope · x + shift) + bias (arXiv 2512.10938)."""
    return gain * np.vectorize(math.erf)(slope * x + shift) + bias


def one_gain_norm(x: Array, gain: Array) -> Array:
    """gain · x/‖x‖ with a single gain (arXiv 1910.05895)."""
    return gain * unit(x)


def self_rescaled_norm(x: Array, alpha: Array, beta: Array, gain: Array) -> Array:
    """(tanh(x · β) α + γ) ⊙ x/RMS(x) (arXiv 2510.22777)."""
    return rms_norm(x, np.tanh(x @ beta)[..., None] * alpha + gain)


def gpt_plus(params: Params, s: Sequence) -> Array:
    """GPT+: RMSNorm before each sublayer and at the end, QK-norm, SwiGLU."""
    return pre_norm(params, s)


def gpt_plus_no_qk_norm(params: Params, s: Sequence) -> Array:
    """GPT+ without QK-norm."""
    return pre_norm(params, s, attend=plain_attention)


def pre_ln(params: Params, s: Sequence) -> Array:
    """GPT-2: LayerNorm before each sublayer and at the end, GELU."""
    return pre_norm(params, s, layer_norm, plain_attention, gelu_mlp)


def post_ln(params: Params, s: Sequence, stream_scale: float = 1.0) -> Array:
    """h ← LayerNorm(c · h + f(h)), c = 1; no other norm (arXiv 1706.03762)."""
    h = params["embedding"][s.tokens]
    for layer in params["layers"]:
        h = layer_norm(stream_scale * h + plain_attention(layer, h, s), **layer["attention_residual"])
        h = layer_norm(stream_scale * h + gelu_mlp(layer, h), **layer["mlp_residual"])
    return h @ params["head"].T


def deep_norm(params: Params, s: Sequence) -> Array:
    """Post-LN with c = (2N)^¼ for N layers (arXiv 2203.00555)."""
    return post_ln(params, s, stream_scale=(2 * len(params["layers"])) ** (1 / 4))


def normformer(params: Params, s: Sequence) -> Array:
    """Pre-LN; each head's output times γ_h, LayerNorm behind attention and on the hidden units (arXiv 2110.09456).

    With grouped queries, the heads that share their values share γ_h.
    """

    def attend(layer: Params, x: Array, s: Sequence) -> Array:
        y, gamma = gpt_heads(layer, x, s, qk_norm=False), layer["value_norm"]["gain"]
        y = y * np.repeat(gamma, y.shape[-1] // len(gamma))
        return layer_norm(y @ layer["attention_out"].T, **layer["attention_branch_norm"])

    def mlp(layer: Params, x: Array) -> Array:
        return layer_norm(gelu(x @ layer["up"].T), **layer["hidden_norm"]) @ layer["down"].T

    return pre_norm(params, s, layer_norm, attend, mlp)


def ln_scaling(params: Params, s: Sequence) -> Array:
    """GPT+ with both norms of layer l = 1 … N divided by √l (arXiv 2502.05795)."""
    h = params["embedding"][s.tokens]
    for number, layer in enumerate(params["layers"], start=1):
        h = h + qk_norm_attention(layer, rms_norm(h, **layer["attention_norm"]) / np.sqrt(number), s)
        h = h + swiglu(layer, rms_norm(h, **layer["mlp_norm"]) / np.sqrt(number))
    return rms_norm(h, **params["final_norm"]) @ params["head"].T


def dyt(params: Params, s: Sequence) -> Array:
    """GPT+ with DyT for RMSNorm and a learnable factor on the embedded tokens (arXiv 2503.10622)."""
    return pre_norm(params, s, tanh_in_place_of_a_norm, embedding_gain=params["embedding_norm"]["gain"])


def derf(params: Params, s: Sequence) -> Array:
    """The same with erf (arXiv 2512.10938)."""
    return pre_norm(params, s, erf_in_place_of_a_norm, embedding_gain=params["embedding_norm"]["gain"])


def hybrid_norm(params: Params, s: Sequence) -> Array:
    """y = h + Attention(h), RMSNorm on q, k and v of each head; h ← Norm(y) + SwiGLU(Norm(y)) (arXiv 2503.04598)."""
    h = params["embedding"][s.tokens]
    for layer in params["layers"]:
        y = gpt_heads(layer, h, s, value=lambda v, layer=layer: rms_norm(v, **layer["value_norm"]))
        normed = rms_norm(h + y @ layer["attention_out"].T, **layer["attention_residual"])
        h = normed + swiglu(layer, normed)
    return rms_norm(h, **params["final_norm"]) @ params["head"].T


def scale_norm(params: Params, s: Sequence) -> Array:
    """GPT+ with ScaleNorm for RMSNorm (arXiv 1910.05895)."""
    return pre_norm(params, s, one_gain_norm)


def see_dnorm(params: Params, s: Sequence) -> Array:
    """GPT+ with SeeDNorm for RMSNorm (arXiv 2510.22777)."""
    return pre_norm(params, s, self_rescaled_norm)


def turned(h: Array, x: Array, rate: float) -> Array:
    """h turned towards x on the sphere through h, by the angle rate · ‖x⊥‖/‖h‖; x⊥ is x without its part along h."""
    radius = np.linalg.norm(h, axis=-1, keepdims=True)
    along = h / radius
    across = x - np.sum(x * along, axis=-1, keepdims=True) * along
    length = np.linalg.norm(across, axis=-1, keepdims=True)
    angle = rate * length / radius
    return radius * (np.cos(angle) * along + np.sin(angle) * across / length)


def geo_norm(params: Params, s: Sequence) -> Array:
    """A stream of norm √D, turned by both branches of layer l at the rate 1/√l (arXiv 2601.22095)."""
    h = params["embedding"][s.tokens]
    h = np.sqrt(h.shape[-1]) * unit(h)
    for number, layer in enumerate(params["layers"], start=1):
        h = turned(h, qk_norm_attention(layer, h, s), 1 / np.sqrt(number))
        h = turned(h, swiglu(layer, h), 1 / np.sqrt(number))
    return h @ params["head"].T


def simple_norm(params: Params, s: Sequence) -> Array:
    """anGPT with unit norms for the constants ν: on q, k and v of each head, on u and z, and on both branches."""
    h = params["embedding"][s.tokens]
    width = h.shape[-1]
    for layer in params["layers"]:
        q, k, v = (heads_of(layer, name, h, s) for name in QUERY_KEY_VALUE)
        q, k = unit(rope(q, s.theta)), unit(rope(k, s.theta))
        y = attention(q, k, unit(v), np.sqrt(q.shape[-1]), s.segments)
        alpha = np.abs(layer["attention_residual"]["alpha"])
        h = approximate_lerp(h, unit(y @ layer["attention_out"].T), alpha)

        u, z = (unit(h @ layer[name].T) for name in ("up", "gate"))
        branch = unit(u * silu(np.sqrt(width) * z) @ layer["down"].T)
        h = approximate_lerp(h, branch, np.abs(layer["mlp_residual"]["alpha"]))
    return params["logits"]["logit_scale"] * (h @ params["head"].T)


FORWARD: dict[str, Callable[..., Array]] = {
    "angpt": angpt,
    "gpt_plus": gpt_plus,
    "gpt_plus_no_qk_norm": gpt_plus_no_qk_norm,
    "gpt_plus_bound": gpt_plus,  # only its step differs
    "ngpt": ngpt,
    "ngpt_bound": ngpt,
    "pre_ln": pre_ln,
    "post_ln": post_ln,
    "deep_norm": deep_norm,
    "normformer": normformer,
    "ln_scaling": ln_scaling,
    "dyt": dyt,
    "derf": derf,
    "hybrid_norm": hybrid_norm,
    "scale_norm": scale_norm,
    "see_dnorm": see_dnorm,
    "geo_norm": geo_norm,
    "simple_norm": simple_norm,
}
