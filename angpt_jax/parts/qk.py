"""Parts for the place `qk`: what happens to queries and keys around the rotation, and the softmax scale."""

from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
from jax import Array

from angpt_jax import ops
from angpt_jax.axes import learnable, scale
from angpt_jax.part import Factor

Rotation = Callable[[Array], Array]


class Rotary(nn.Module):
    """RoPE(q), RoPE(k), nothing else."""

    factor: ClassVar[Factor] = "seen"
    softmax_scale: float

    @nn.compact
    def __call__(self, q_BLHK: Array, k_BLGK: Array, rotate: Rotation) -> tuple[Array, Array]:
        return rotate(q_BLHK), rotate(k_BLGK)


class QKNorm(nn.Module):
    """RoPE(γ_q ⊙ RMSNorm(q)), the same for k; gains of length K, shared by the heads (arXiv 2010.04245, 2302.05442)."""

    factor: ClassVar[Factor] = "removed"
    softmax_scale: float
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, q_BLHK: Array, k_BLGK: Array, rotate: Rotation) -> tuple[Array, Array]:
        shape = q_BLHK.shape[-1:]
        q = ops.rms_norm(q_BLHK, self.epsilon) * learnable(self, "query_gain", ("head_dim",), shape, 1.0)
        k = ops.rms_norm(k_BLGK, self.epsilon) * learnable(self, "key_gain", ("head_dim",), shape, 1.0)
        return rotate(q), rotate(k)


class UnitQK(nn.Module):
    """Norm(RoPE(q)), Norm(RoPE(k)): unit vectors, no parameter."""

    factor: ClassVar[Factor] = "removed"
    softmax_scale: float

    @nn.compact
    def __call__(self, q_BLHK: Array, k_BLGK: Array, rotate: Rotation) -> tuple[Array, Array]:
        return ops.unit_norm(rotate(q_BLHK)), ops.unit_norm(rotate(k_BLGK))


class ScaledUnitQK(nn.Module):
    """s_qk ⊙ Norm(RoPE(q)), the same s_qk for k (nGPT, arXiv 2410.01131, eq. 15–16).

    With grouped queries, a head of keys has the s_qk of the first query head that it serves.
    """

    factor: ClassVar[Factor] = "removed"
    softmax_scale: float
    scale_init: float
    scale_stored: float

    @nn.compact
    def __call__(self, q_BLHK: Array, k_BLGK: Array, rotate: Rotation) -> tuple[Array, Array]:
        names, shape = ("heads", "head_dim"), q_BLHK.shape[-2:]
        s_HK = scale(self, "query_key_scale", names, shape, init=self.scale_init, stored=self.scale_stored)
        s_GK = s_HK[:: q_BLHK.shape[-2] // k_BLGK.shape[-2]]
        return s_HK * ops.unit_norm(rotate(q_BLHK)), s_GK * ops.unit_norm(rotate(k_BLGK))
