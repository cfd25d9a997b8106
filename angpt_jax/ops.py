"""Pure array functions, without parameters. Products in the compute dtype, everything delicate in float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from angpt_jax.layout import HERE, Layout, Place
from angpt_jax.product import product

Turns = tuple[Array, Array]  # cosines and sines of rotary angles


def linear(x: Array, kernel: Array, nu: float, dtype: Any, out_dtype: Any | None = None, place: Place = HERE) -> Array:
    """ν · W x over the last axis of x and the first of the kernel, its input side.

    Operands are cast to `dtype`, the product accumulates in float32, and ν (which bfloat16 would round) multiplies
    it there, before the cast to `out_dtype` (default: `dtype`).
    """
    y: Any = product(x.astype(dtype), kernel, place)
    return (y * nu).astype(out_dtype or dtype)


def lookup(table_VD: Array, tokens_BL: Array, layout: Layout) -> Array:
    """h_BLD: the row of each token. Where rows are split, each device looks up its part of every row of its group, then
    they exchange parts for whole rows: that moves hidden states, not the table."""
    in_parts = layout.spec("batch", "length", "embed")
    tokens_BL = layout.lay(tokens_BL, PartitionSpec(*in_parts[:2]))
    parts_BLD = layout.lay(table_VD[tokens_BL], in_parts)
    return layout.constrain(parts_BLD, "batch", "length", None)


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


def rotary_angles(positions_L: Array, head_width: int, theta: float) -> Array:
    """Angles_LR of position p and pair i, p · θ^(−2i/K), R = K/2, in float32 (RoPE, arXiv 2104.09864)."""
    frequencies = theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
    return positions_L.astype(jnp.float32)[..., None] * frequencies


def turns(angles_LR: Array) -> Turns:
    """What a rotation by these angles multiplies with."""
    return jnp.cos(angles_LR), jnp.sin(angles_LR)


def rotate(x_BLHK: Array, turns_LR: Turns) -> Array:
    """Rotates each pair (x_i, x_{i+K/2}) by its angle, in float32: a true rotation, so norms do not change.

    The turns are those of all rows, or of each (B, L, R).
    """
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    cos, sin = (turn[..., None, :] for turn in turns_LR)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention_mask(length: int, segments_BM: Array | None, queries_L: Array | None = None) -> Array:
    """mask_BLM: the query at l may see key m ≤ l, of the same document if segments are given (else B = 1).

    The queries are those at `queries_L`, or at all positions of the window.
    """
    at_L = jnp.arange(length) if queries_L is None else queries_L
    causal_1LM = at_L[None, :, None] >= jnp.arange(length)[None, None, :]
    if segments_BM is None:
        return causal_1LM
    segments_BL = segments_BM if queries_L is None else segments_BM[:, queries_L]
    return causal_1LM & (segments_BL[:, :, None] == segments_BM[:, None, :])


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


def cached_attention(q_BLHK: Array, k_BGMK: Array, v_BGMK: Array, mask_BLM: Array, scale: float) -> Array:
    """The same with the heads of a cache in front of its slots, whose keys are not repeated: the H/G queries of a head
    of keys stand side by side."""
    batch, length, heads, width = q_BLHK.shape
    groups = k_BGMK.shape[1]
    q_BGQK = q_BLHK.reshape(batch, length, groups, -1, width).transpose(0, 2, 3, 1, 4).reshape(batch, groups, -1, width)
    scores = jnp.einsum("bgqk,bgmk->bgqm", q_BGQK, k_BGMK, preferred_element_type=jnp.float32) * scale
    mask_B1QM = jnp.tile(mask_BLM, (1, heads // groups, 1))[:, None]
    weights = jax.nn.softmax(jnp.where(mask_B1QM, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(v_BGMK.dtype)
    y_BGQK = jnp.einsum("bgqm,bgmk->bgqk", weights, v_BGMK, preferred_element_type=jnp.float32).astype(v_BGMK.dtype)
    return y_BGQK.reshape(batch, heads, length, width).transpose(0, 2, 1, 3)


def repeat_heads(x_BLGK: Array, heads: int) -> Array:
    """x_BLHK: each of the G heads stands H/G times, side by side (grouped queries, arXiv 2305.13245)."""
    batch, length, groups, width = x_BLGK.shape
    repeated = jnp.broadcast_to(x_BLGK[:, :, :, None], (batch, length, groups, heads // groups, width))
    return repeated.reshape(batch, length, heads, width)


def attention_entropy(q_BLHK: Array, k_BLGK: Array, segments_BL: Array | None, scale: float) -> Array:
    """entropy_BHL of each query's weights, −Σ p ln p, in nats."""
    weights = attention_weights(q_BLHK, k_BLGK, attention_mask(q_BLHK.shape[1], segments_BL), scale)
    return -jnp.sum(jax.scipy.special.xlogy(weights, weights), axis=-1)


def cross_entropy(logits_BLV: Array, targets_BL: Array) -> Array:
    """nats_BL of each target, in float32."""
    logits_BLV = logits_BLV.astype(jnp.float32)
    target_logits = jnp.take_along_axis(logits_BLV, targets_BL[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BLV, axis=-1) - target_logits


def chunked_cross_entropy(
    h_BLD: Array, w_DV: Array, targets_BL: Array, chunk: int, dtype: Any, place: Place = HERE
) -> Array:
    """nats_BL of the targets under the logits W h, of which only `chunk` vocabulary entries exist at once.

    The chunks are taken one after the other, log Σ exp being added up; the backward pass computes their logits again.
    Where the vocabulary is split over devices, each chunk has as many entries on each of them.
    """
    vocab, parts = w_DV.shape[1], place.layout.parts("vocab")

    def chunks(x: Array) -> Array:
        """(…, V) → (chunks, …, chunk)."""
        split = x.reshape(*x.shape[:-1], parts, vocab // chunk, chunk // parts)
        return jnp.moveaxis(split, -2, 0).reshape(vocab // chunk, *x.shape[:-1], chunk)

    def add(carry: tuple[Array, Array], part: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        (sum_BL, target_BL), (w_DC, ids_C) = carry, part
        logits_BLC = linear(h_BLD, w_DC, 1.0, dtype, jnp.float32, place)
        is_target_BLC = ids_C == targets_BL[..., None]
        target_BL += jnp.sum(jnp.where(is_target_BLC, logits_BLC, 0.0), axis=-1)
        return (jnp.logaddexp(sum_BL, jax.nn.logsumexp(logits_BLC, axis=-1)), target_BL), None

    nothing = jnp.full(targets_BL.shape, -jnp.inf), jnp.zeros(targets_BL.shape)
    parts_of_head = chunks(w_DV), chunks(jnp.arange(vocab))
    (sum_BL, target_BL), _ = jax.lax.scan(jax.checkpoint(add, prevent_cse=False), nothing, parts_of_head)
    return sum_BL - target_BL
