"""Pure array functions, without parameters. Products in the compute dtype, everything delicate in float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def linear(x: Array, kernel: Array, nu: float, dtype: Any, out_dtype: Any | None = None) -> Array:
    """ν · W x: all axes of x but batch and length meet as many first axes of the kernel, its input side.

    Operands are cast to `dtype`, the product accumulates in float32, and ν (which bfloat16 would round) multiplies
    it there, before the cast to `out_dtype` (default: `dtype`).
    """
    axes_x = tuple(range(2, x.ndim))
    y = jax.lax.dot_general(
        x.astype(dtype),
        kernel.astype(dtype),
        ((axes_x, tuple(range(len(axes_x)))), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return (y * nu).astype(out_dtype or dtype)


def rms_norm(x: Array, epsilon: float) -> Array:
    """x / √(mean x² + ε) over the last axis, in float32 (arXiv 1910.07467)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def layer_norm(x: Array, epsilon: float) -> Array:
    """(x − mean x) / √(var x + ε) over the last axis, in float32 (arXiv 1607.06450)."""
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def unit_norm(x: Array, epsilon: float = 1e-12) -> Array:
    """x / √(Σ x² + ε) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def rotary_angles(length: int, head_width: int, theta: float) -> Array:
    """Angles_LR of position p and pair i, p · θ^(−2i/K), R = K/2, in float32 (RoPE, arXiv 2104.09864)."""
    frequencies = theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies[None, :]


def rotate(x_BLHK: Array, angles_LR: Array) -> Array:
    """Rotates each pair (x_i, x_{i+K/2}) by its angle, in float32: a true rotation, so norms do not change."""
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles_LR)[None, :, None, :], jnp.sin(angles_LR)[None, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention_mask(length: int, segments_BL: Array | None) -> Array:
    """mask_BLL: query l may see key m ≤ l, of the same document if segments are given (else B = 1)."""
    causal_1LL = jnp.tril(jnp.ones((1, length, length), dtype=bool))
    if segments_BL is None:
        return causal_1LL
    return causal_1LL & (segments_BL[:, :, None] == segments_BL[:, None, :])


def attention_weights(q_BLHK: Array, k_BLGK: Array, mask_BLL: Array, scale: float) -> Array:
    """weights_BHLM = softmax(scale · q kᵀ) over the visible keys, in float32; G key heads serve H/G queries each."""
    k_BLHK = repeat_heads(k_BLGK, q_BLHK.shape[2])
    scores = jnp.einsum("blhk,bmhk->bhlm", q_BLHK, k_BLHK, preferred_element_type=jnp.float32) * scale
    return jax.nn.softmax(jnp.where(mask_BLL[:, None], scores, jnp.finfo(jnp.float32).min), axis=-1)


def attention(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, mask_BLL: Array, scale: float) -> Array:
    """softmax(scale · q kᵀ) v over the visible keys; scores and softmax in float32."""
    weights = attention_weights(q_BLHK, k_BLGK, mask_BLL, scale).astype(v_BLGK.dtype)
    v_BLHK = repeat_heads(v_BLGK, q_BLHK.shape[2])
    return jnp.einsum("bhlm,bmhk->blhk", weights, v_BLHK, preferred_element_type=jnp.float32).astype(v_BLGK.dtype)


def repeat_heads(x_BLGK: Array, heads: int) -> Array:
    """x_BLHK: each of the G heads stands H/G times, side by side (grouped queries, arXiv 2305.13245)."""
    batch, length, groups, width = x_BLGK.shape
    repeated = jnp.broadcast_to(x_BLGK[:, :, :, None], (batch, length, groups, heads // groups, width))
    return repeated.reshape(batch, length, heads, width)


def attention_entropy(q_BLHK: Array, k_BLGK: Array, mask_BLL: Array, scale: float) -> Array:
    """entropy_BHL of each query's weights, −Σ p ln p, in nats."""
    weights = attention_weights(q_BLHK, k_BLGK, mask_BLL, scale)
    return -jnp.sum(jax.scipy.special.xlogy(weights, weights), axis=-1)


def cross_entropy(logits_BLV: Array, targets_BL: Array) -> Array:
    """nats_BL of each target, in float32."""
    logits_BLV = logits_BLV.astype(jnp.float32)
    target_logits = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BLV, axis=-1) - target_logits
