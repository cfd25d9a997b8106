"""Parts for the place `residual`: how a branch x joins the stream h, in float32. `layer` counts from 1.

`linear`: the join is keep ⊙ h + take ⊙ x, whatever h and x are.
"""

from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops
from angpt_jax.axes import scale
from angpt_jax.measure import measure, spread
from angpt_jax.parts.norms import LayerNorm, RMSNorm


class Add(nn.Module):
    """h + x."""

    linear: ClassVar[bool] = True

    @nn.compact
    def __call__(self, h_BLD: Array, x_BLD: Array, layer: Array) -> Array:
        return h_BLD + x_BLD


class NormedAdd(nn.Module):
    """Norm(c · h + x): c = 1 is Post-LN (arXiv 1706.03762), c = (2N)^¼ DeepNorm (arXiv 2203.00555)."""

    linear: ClassVar[bool] = False
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    stream_scale: float = 1.0

    @nn.compact
    def __call__(self, h_BLD: Array, x_BLD: Array, layer: Array) -> Array:
        kind = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}[self.norm]
        return kind(name="norm")(self.stream_scale * h_BLD + x_BLD)


class Geodesic(nn.Module):
    """The step from h along the great circle that x points to: its part across h, x⊥, turns h by η‖x⊥‖/‖h‖.

    h ← cos θ · h + sin θ · ‖h‖ · x⊥/‖x⊥‖, so that ‖h‖ stays what it was; η = rate · l^−decay_power in layer l
    (GeoNorm, arXiv 2601.22095).
    """

    linear: ClassVar[bool] = False
    rate: float = 1.0
    decay_power: float = 0.5
    epsilon: float = 1e-12

    @nn.compact
    def __call__(self, h_BLD: Array, x_BLD: Array, layer: Array) -> Array:
        h_square = jnp.sum(jnp.square(h_BLD), axis=-1, keepdims=True) + self.epsilon
        across = x_BLD - jnp.sum(x_BLD * h_BLD, axis=-1, keepdims=True) / h_square * h_BLD
        across_norm = jnp.sqrt(jnp.sum(jnp.square(across), axis=-1, keepdims=True) + self.epsilon)
        h_norm = jnp.sqrt(h_square)
        turn = self.rate * layer**-self.decay_power * across_norm / h_norm
        return jnp.cos(turn) * h_BLD + (jnp.sin(turn) * h_norm / across_norm) * across


class Lerp(nn.Module):
    """h + α ⊙ (x − h): the join that ν(α) repairs. α of length D or one a layer, |s| or s itself."""

    linear: ClassVar[bool] = True
    alpha_init: float
    alpha_stored: float
    alpha_per: Literal["channel", "layer"] = "channel"
    alpha_sign: Literal["absolute", "signed"] = "absolute"

    @nn.compact
    def __call__(self, h_BLD: Array, x_BLD: Array, layer: Array) -> Array:
        alpha_D = self.alpha(h_BLD.shape[-1])
        return h_BLD + alpha_D * (x_BLD - h_BLD)

    def alpha(self, width: int) -> Array:
        """α, of shape (D,) or ()."""
        names, shape = (("embed",), (width,)) if self.alpha_per == "channel" else ((), ())
        s = scale(self, "alpha", names, shape, init=self.alpha_init, stored=self.alpha_stored)
        alpha_D = jnp.abs(s) if self.alpha_sign == "absolute" else s
        measure(self, "alpha", lambda: spread(alpha_D))
        return alpha_D


class ApproximateLerp(Lerp):
    """ν(α) ⊙ (h + α ⊙ (x − h)), ν(α) = 1/√(α² + (1−α)²) (arXiv 2505.22014, eq. 8).

    ν(α) keeps the norm of the stream at 1 in the mean when h and x are independent unit vectors.
    """

    @nn.compact
    def __call__(self, h_BLD: Array, x_BLD: Array, layer: Array) -> Array:
        alpha_D = self.alpha(h_BLD.shape[-1])
        nu_D = jax.lax.rsqrt(jnp.square(alpha_D) + jnp.square(1 - alpha_D))
        measure(self, "nu_alpha", lambda: spread(nu_D))
        return (nu_D * (1 - alpha_D)) * h_BLD + (nu_D * alpha_D) * x_BLD


class ExactLerp(Lerp):
    """Norm(h + α ⊙ (x − h)) (nGPT, arXiv 2410.01131, eq. 10–11, where x is a unit vector: `branch_norm`)."""

    linear: ClassVar[bool] = False
    epsilon: float = 1e-12

    @nn.compact
    def __call__(self, h_BLD: Array, x_BLD: Array, layer: Array) -> Array:
        alpha_D = self.alpha(h_BLD.shape[-1])
        return ops.unit_norm(h_BLD + alpha_D * (x_BLD - h_BLD), self.epsilon)
