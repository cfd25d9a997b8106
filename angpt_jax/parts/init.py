"""Parts for the place `init`: how a matrix is drawn, float32. They are called with (key, shape, axes)."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax.axes import Axes, Side

RESIDUAL_ROLES = ("attention_out", "down")  # the maps that write to the stream
GAINED_ROLES = ("value", "attention_out", "up", "gate", "down")  # all but the maps whose products are normalized


@dataclass(frozen=True)
class UnitVectors:
    """Gaussian, scaled to norm exactly 1 along the input side (rows of W) or the embedding dimension."""

    along: Side

    def __call__(self, key: Array, shape: tuple[int, ...], axes: Axes) -> Array:
        w = jax.random.normal(key, shape, jnp.float32)
        return w / jnp.linalg.norm(w, axis=axes.along(self.along), keepdims=True)


@dataclass(frozen=True)
class ScaledNormal:
    """N(0, std²); the maps that write to the stream are divided by `residual_divisor` (√(2N) in GPT-2)."""

    std: float
    residual_divisor: float = 1.0

    def __call__(self, key: Array, shape: tuple[int, ...], axes: Axes) -> Array:
        std = self.std / self.residual_divisor if axes.role in RESIDUAL_ROLES else self.std
        return std * jax.random.normal(key, shape, jnp.float32)


@dataclass(frozen=True)
class GainedXavier:
    """N(0, g² · 2/(in + out)) with g = `gain` for the maps of values and of the MLP and for the output of attention,
    1 for queries and keys (arXiv 2203.00555, figure 2); embedding and head are N(0, `vocab_std`²)."""

    gain: float
    vocab_std: float

    def __call__(self, key: Array, shape: tuple[int, ...], axes: Axes) -> Array:
        inputs = math.prod(shape[i] for i in axes.along("inputs"))
        xavier = math.sqrt(2 / (inputs + math.prod(shape) / inputs))
        std = self.vocab_std if "vocab" in axes.names else xavier * (self.gain if axes.role in GAINED_ROLES else 1.0)
        return std * jax.random.normal(key, shape, jnp.float32)
