"""Parts that stand where norms stand but look at one entry at a time: no sum over the axis."""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax.axes import learnable
from angpt_jax.part import Factor
from angpt_jax.parts.norms import Norm


class DyT(Norm):
    """γ ⊙ tanh(a x) + β, one learnable a, γ starting at 1 and β at 0 (dynamic tanh, arXiv 2503.10622, section 4)."""

    factor: ClassVar[Factor] = "seen"
    slope_init: float = 0.5

    @nn.compact
    def __call__(self, x: Array, layer: Array | None = None) -> Array:
        slope = learnable(self, "slope", (), (), self.slope_init)
        return self.affine(jnp.tanh(slope * x.astype(jnp.float32)))


class Derf(Norm):
    """γ ⊙ erf(a x + s) + β, learnable scalars a and s (from 0), γ from 1 and β from 0 (arXiv 2512.10938, eq. 10)."""

    factor: ClassVar[Factor] = "seen"
    slope_init: float = 0.5

    @nn.compact
    def __call__(self, x: Array, layer: Array | None = None) -> Array:
        slope, shift = learnable(self, "slope", (), (), self.slope_init), learnable(self, "shift", (), (), 0.0)
        return self.affine(jax.lax.erf(slope * x.astype(jnp.float32) + shift))


class LearnableScale(Norm):
    """g · x with one learnable g: what DyT puts behind the embedding of a language model (arXiv 2503.10622, 5)."""

    factor: ClassVar[Factor] = "kept"
    scale_init: float = 1.0

    @nn.compact
    def __call__(self, x: Array, layer: Array | None = None) -> Array:
        return learnable(self, "gain", (), (), self.scale_init) * x


class HeadScale(Norm):
    """γ_h · v of head h, γ starting at 1 (NormFormer, arXiv 2110.09456).

    The paper scales the heads' outputs; a head is linear in its values, so that it is the same to scale these (with
    grouped queries: one γ for each head of values).
    """

    factor: ClassVar[Factor] = "kept"

    @nn.compact
    def __call__(self, v_BLGK: Array, layer: Array | None = None) -> Array:
        return learnable(self, "gain", ("kv_heads",), v_BLGK.shape[-2:-1], 1.0)[:, None] * v_BLGK.astype(jnp.float32)
