"""Parts for the places `input_norm` (before a sublayer) and `final_norm` (before the head)."""

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops
from angpt_jax.axes import Axes, weight


class Identity(nn.Module):
    """x: no norm at all."""

    @nn.compact
    def __call__(self, x_BLD: Array) -> Array:
        return x_BLD


class RMSNorm(nn.Module):
    """γ ⊙ x / √(mean x² + ε), γ of length D starting at 1 (arXiv 1910.07467)."""

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x_BLD: Array) -> Array:
        return ops.rms_norm(x_BLD, self.epsilon) * gain(self, "gain", ("embed",), x_BLD.shape[-1:])


def gain(module: nn.Module, role: str, names: tuple[str, ...], shape: tuple[int, ...]) -> Array:
    """A learnable gain that starts at 1."""
    return weight(module, Axes(role, names), shape, lambda key, shape, axes: jnp.ones(shape, jnp.float32))
