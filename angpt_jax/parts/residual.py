"""Parts for the place `residual`: how a branch x joins the stream h, in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops
from angpt_jax.axes import scale


class Add(nn.Module):
    """h + x."""

    @nn.compact
    def __call__(self, h_BLD: Array, x_BLD: Array) -> Array:
        return h_BLD + x_BLD


class ApproximateLerp(nn.Module):
    """ν(α) ⊙ (h + α ⊙ (x − h)), ν(α) = 1/√(α² + (1−α)²), α = |s| of length D (arXiv 2505.22014, eq. 8).

    ν(α) keeps the norm of the stream at 1 in the mean when h and x are independent unit vectors.
    """

    alpha_init: float
    alpha_stored: float

    @nn.compact
    def __call__(self, h_BLD: Array, x_BLD: Array) -> Array:
        alpha_D = learnable_alpha(self, h_BLD.shape[-1], self.alpha_init, self.alpha_stored)
        nu_D = jax.lax.rsqrt(jnp.square(alpha_D) + jnp.square(1 - alpha_D))
        return (nu_D * (1 - alpha_D)) * h_BLD + (nu_D * alpha_D) * x_BLD


class ExactLerp(nn.Module):
    """Norm(h + α ⊙ (Norm(x) − h)), α = |s| of length D (nGPT, arXiv 2410.01131, eq. 10–11)."""

    alpha_init: float
    alpha_stored: float
    epsilon: float = 1e-12

    @nn.compact
    def __call__(self, h_BLD: Array, x_BLD: Array) -> Array:
        alpha_D = learnable_alpha(self, h_BLD.shape[-1], self.alpha_init, self.alpha_stored)
        return ops.unit_norm(h_BLD + alpha_D * (ops.unit_norm(x_BLD, self.epsilon) - h_BLD), self.epsilon)


def learnable_alpha(module: nn.Module, width: int, init: float, stored: float) -> Array:
    """|α| of length D."""
    return jnp.abs(scale(module, "alpha", ("embed",), (width,), init=init, stored=stored))
