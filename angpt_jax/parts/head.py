"""Parts for the place `head`: what happens to W_head on its way to the logits, in float32."""

from typing import Literal

import flax.linen as nn
from jax import Array

from angpt_jax.axes import scale
from angpt_jax.measure import measure, spread


class PlainLogits(nn.Module):
    """The logits are W_head h."""

    @nn.compact
    def __call__(self, w_DV: Array) -> Array:
        return w_DV


class ScaledLogits(nn.Module):
    """The logits are s_Z ⊙ (W_head h), one scale per vocabulary entry (arXiv 2410.01131, eq. 3; 2505.22014), or
    W_head (s_Z ⊙ h), one per channel.

    The scale multiplies the D × V weights, which are fewer than the logits of a batch; the logits are the same.
    """

    scale_init: float
    scale_stored: float
    scale_per: Literal["vocab", "channel"] = "vocab"

    @nn.compact
    def __call__(self, w_DV: Array) -> Array:
        width, vocab = w_DV.shape
        names, shape = (("vocab",), (1, vocab)) if self.scale_per == "vocab" else (("embed",), (width, 1))
        length = (max(shape),)
        s_Z = scale(self, "logit_scale", names, length, init=self.scale_init, stored=self.scale_stored)
        measure(self, "logit_scale", lambda: spread(s_Z))
        return w_DV * s_Z.reshape(shape)
