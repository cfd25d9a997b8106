"""Parts for the place `head`: what happens to the logits W_head h, in float32."""

import flax.linen as nn
from jax import Array

from angpt_jax.axes import scale


class PlainLogits(nn.Module):
    """The logits as they are."""

    @nn.compact
    def __call__(self, logits_BLV: Array) -> Array:
        return logits_BLV


class ScaledLogits(nn.Module):
    """s_Z ⊙ logits, one scale per vocabulary entry (arXiv 2410.01131, eq. 3; 2505.22014)."""

    scale_init: float
    scale_stored: float

    @nn.compact
    def __call__(self, logits_BLV: Array) -> Array:
        shape = logits_BLV.shape[-1:]
        s_V = scale(self, "logit_scale", ("vocab",), shape, init=self.scale_init, stored=self.scale_stored)
        return s_V * logits_BLV
