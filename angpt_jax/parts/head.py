"""Parts for the place `head`: what happens to W_head on its way to the logits, in float32."""

import flax.linen as nn
from jax import Array

from angpt_jax.axes import scale


class PlainLogits(nn.Module):
    """The logits are W_head h."""

    @nn.compact
    def __call__(self, w_DV: Array) -> Array:
        return w_DV


class ScaledLogits(nn.Module):
    """The logits are s_Z ⊙ (W_head h), one scale per vocabulary entry (arXiv 2410.01131, eq. 3; 2505.22014).

    The scale multiplies the D × V weights, which are fewer than the logits of a batch; the logits are the same.
    """

    scale_init: float
    scale_stored: float

    @nn.compact
    def __call__(self, w_DV: Array) -> Array:
        shape = w_DV.shape[-1:]
        return w_DV * scale(self, "logit_scale", ("vocab",), shape, init=self.scale_init, stored=self.scale_stored)
