"""Parts for the place `gate`: the activation of the MLP, in float32. `inputs` names the maps that feed it,
`factor` is about u."""

from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops
from angpt_jax.axes import scale
from angpt_jax.nu import ACTIVATIONS
from angpt_jax.part import Factor

GATED = ("up", "gate")


class GatedActivation(nn.Module):
    """u ⊙ f(c · z); c = √D keeps the argument's std at √(D/F) for unit z (arXiv 2505.22014; SwiGLU: 2002.05202)."""

    inputs: ClassVar[tuple[str, ...]] = GATED
    factor: ClassVar[Factor] = "kept"
    activation: str = "silu"
    gate_scale: float = 1.0

    @nn.compact
    def __call__(self, u_BLF: Array, z_BLF: Array) -> Array:
        gate = ACTIVATIONS[self.activation].traced(self.gate_scale * z_BLF.astype(jnp.float32))
        return u_BLF.astype(jnp.float32) * gate


class UnitGatedActivation(nn.Module):
    """Norm(u) ⊙ f(c · Norm(z)): an exact norm in the place of ν_uz."""

    inputs: ClassVar[tuple[str, ...]] = GATED
    factor: ClassVar[Factor] = "removed"
    activation: str = "silu"
    gate_scale: float = 1.0

    @nn.compact
    def __call__(self, u_BLF: Array, z_BLF: Array) -> Array:
        gate = ACTIVATIONS[self.activation].traced(self.gate_scale * ops.unit_norm(z_BLF))
        return ops.unit_norm(u_BLF) * gate


class ScaledGatedActivation(nn.Module):
    """(s_u ⊙ u) ⊙ f(c · s_v ⊙ z) (nGPT, arXiv 2410.01131, eq. 20–21)."""

    inputs: ClassVar[tuple[str, ...]] = GATED
    factor: ClassVar[Factor] = "kept"
    gate_scale: float
    activation: str = "silu"
    scale_init: float = 1.0
    scale_stored: float = 1.0

    @nn.compact
    def __call__(self, u_BLF: Array, z_BLF: Array) -> Array:
        names, shape = ("feed_forward",), u_BLF.shape[-1:]
        s_u = scale(self, "up_scale", names, shape, init=self.scale_init, stored=self.scale_stored)
        s_v = scale(self, "gate_scale", names, shape, init=self.scale_init, stored=self.scale_stored)
        gate = ACTIVATIONS[self.activation].traced(self.gate_scale * s_v * z_BLF.astype(jnp.float32))
        return s_u * u_BLF.astype(jnp.float32) * gate


class PlainActivation(nn.Module):
    """f(c · u): an MLP of two matrices, without a gate (arXiv 1706.03762)."""

    inputs: ClassVar[tuple[str, ...]] = ("up",)
    factor: ClassVar[Factor] = "seen"
    activation: str = "gelu"
    gate_scale: float = 1.0

    @nn.compact
    def __call__(self, u_BLF: Array) -> Array:
        return ACTIVATIONS[self.activation].traced(self.gate_scale * u_BLF.astype(jnp.float32))
