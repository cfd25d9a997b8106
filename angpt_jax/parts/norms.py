"""Parts that bring a vector to a norm. They fill every place of that kind: after the look-up, before a sublayer, on
the values, on the hidden units of the MLP, on a branch, before the head.

`axis` is the logical name of the last axis, which the skeleton gives; `layer` counts from 1.
"""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops
from angpt_jax.axes import learnable
from angpt_jax.part import Factor


class Norm(nn.Module):
    """What all of them share: the name of the axis that the norm runs over."""

    factor: ClassVar[Factor] = "removed"
    axis: str = "embed"

    def vector(self, role: str, x: Array, start: float) -> Array:
        """A learnable vector as long as the last axis of x."""
        return learnable(self, role, (self.axis,), x.shape[-1:], start)

    def affine(self, x: Array) -> Array:
        """γ ⊙ x + β, γ starting at 1 and β at 0."""
        return x * self.vector("gain", x, 1.0) + self.vector("bias", x, 0.0)


class Identity(Norm):
    """x: no norm at all."""

    factor: ClassVar[Factor] = "kept"

    @nn.compact
    def __call__(self, x: Array, layer: Array | None = None) -> Array:
        return x


class RMSNorm(Norm):
    """γ ⊙ x / √(mean x² + ε), γ starting at 1 (arXiv 1910.07467)."""

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Array, layer: Array | None = None) -> Array:
        return ops.rms_norm(x, self.epsilon) * self.vector("gain", x, 1.0)


class DepthScaledRMSNorm(Norm):
    """RMSNorm(x) / √l in layer l = 1 … N (LayerNorm scaling, arXiv 2502.05795, with RMSNorm for LayerNorm)."""

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Array, layer: Array) -> Array:
        return ops.rms_norm(x, self.epsilon) * self.vector("gain", x, 1.0) * jax.lax.rsqrt(layer)


class LayerNorm(Norm):
    """γ ⊙ (x − mean x) / √(var x + ε) + β, γ starting at 1 and β at 0 (arXiv 1607.06450)."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, layer: Array | None = None) -> Array:
        return self.affine(ops.layer_norm(x, self.epsilon))


class UnitNorm(Norm):
    """radius · x / ‖x‖, without a parameter (nGPT, arXiv 2410.01131)."""

    radius: float = 1.0
    epsilon: float = 1e-12

    @nn.compact
    def __call__(self, x: Array, layer: Array | None = None) -> Array:
        return self.radius * ops.unit_norm(x, self.epsilon)


class ScaleNorm(Norm):
    """g · x / ‖x‖ with one learnable g that starts at √D (arXiv 1910.05895, section 3.2)."""

    epsilon: float = 1e-12

    @nn.compact
    def __call__(self, x: Array, layer: Array | None = None) -> Array:
        return learnable(self, "gain", (), (), x.shape[-1] ** 0.5) * ops.unit_norm(x, self.epsilon)


class SeeDNorm(Norm):
    """(tanh(x · β) α + γ) ⊙ x / RMS(x), vectors α and γ starting at 1, β at 0 (arXiv 2510.22777, eq. 3).

    Its gain sees ‖x‖; at β = 0 it is RMSNorm.
    """

    factor: ClassVar[Factor] = "seen"
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Array, layer: Array | None = None) -> Array:
        x = x.astype(jnp.float32)
        alpha, beta, gamma = self.vector("alpha", x, 1.0), self.vector("beta", x, 0.0), self.vector("gain", x, 1.0)
        seen = jnp.tanh(jnp.sum(x * beta, axis=-1, keepdims=True))
        return (seen * alpha + gamma) * ops.rms_norm(x, self.epsilon)
