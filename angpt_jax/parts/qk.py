"""Parts for the place `qk`: what happens to queries and keys around the rotation, and the softmax scale."""

from collections.abc import Callable

import flax.linen as nn
from jax import Array

from angpt_jax import ops
from angpt_jax.axes import scale
from angpt_jax.parts.norms import gain

Rotation = Callable[[Array], Array]


class Rotary(nn.Module):
    """RoPE(q), RoPE(k), nothing else."""

    softmax_scale: float

    @nn.compact
    def __call__(self, q_BLHK: Array, k_BLHK: Array, rotate: Rotation) -> tuple[Array, Array]:
        return rotate(q_BLHK), rotate(k_BLHK)


class QKNorm(nn.Module):
    """RoPE(γ_q ⊙ RMSNorm(q)), the same for k; gains of length K, shared by the heads (arXiv 2010.04245, 2302.05442)."""

    softmax_scale: float
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, q_BLHK: Array, k_BLHK: Array, rotate: Rotation) -> tuple[Array, Array]:
        shape = q_BLHK.shape[-1:]
        q = ops.rms_norm(q_BLHK, self.epsilon) * gain(self, "query_gain", ("head_dim",), shape)
        k = ops.rms_norm(k_BLHK, self.epsilon) * gain(self, "key_gain", ("head_dim",), shape)
        return rotate(q), rotate(k)


class UnitQK(nn.Module):
    """s_qk ⊙ Norm(RoPE(q)), the same s_qk for k (nGPT, arXiv 2410.01131, eq. 15–16)."""

    softmax_scale: float
    scale_init: float
    scale_stored: float

    @nn.compact
    def __call__(self, q_BLHK: Array, k_BLHK: Array, rotate: Rotation) -> tuple[Array, Array]:
        names, shape = ("heads", "head_dim"), q_BLHK.shape[-2:]
        s_HK = scale(self, "query_key_scale", names, shape, init=self.scale_init, stored=self.scale_stored)
        return s_HK * ops.unit_norm(rotate(q_BLHK)), s_HK * ops.unit_norm(rotate(k_BLHK))
