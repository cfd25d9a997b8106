"""The skeleton: one decoder for every architecture. It never asks which one it runs; the places do the rest."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops
from angpt_jax.arch import Arch, Sizes
from angpt_jax.axes import LAYERS, Axes, weight


class Attention(nn.Module):
    """ν_p W_p concat(softmax(scale · q kᵀ + mask) v), q, k, v = ν W h; returns float32."""

    arch: Arch
    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, x_BLD: Array, mask_BLL: Array, angles_LR: Array) -> Array:
        nu, sizes, init = self.arch.nu, self.sizes, self.arch.init.make()
        shape = (sizes.width, sizes.heads, sizes.head_width)

        def project(role: str, factor: float) -> Array:
            w_DHK = weight(self, Axes(role, ("embed", "heads", "head_dim"), inputs=("embed",)), shape, init)
            return ops.linear(x_BLD, w_DHK, factor, self.dtype)

        q_BLHK, k_BLHK, v_BLHK = project("query", nu.query), project("key", nu.key), project("value", nu.value)
        qk = self.arch.qk.make(name="qk")
        q_BLHK, k_BLHK = qk(q_BLHK, k_BLHK, lambda x_BLHK: ops.rotate(x_BLHK, angles_LR))
        y_BLHK = ops.attention(q_BLHK.astype(self.dtype), k_BLHK.astype(self.dtype), v_BLHK, mask_BLL, qk.softmax_scale)
        out_axes = Axes("attention_out", ("heads", "head_dim", "embed"), inputs=("heads", "head_dim"))
        w_HKD = weight(self, out_axes, (sizes.heads, sizes.head_width, sizes.width), init)
        return ops.linear(y_BLHK, w_HKD, nu.attention_out, self.dtype, jnp.float32)


class MLP(nn.Module):
    """ν_d W_d (ν_acf · gate(u, z)), u, z = ν W h; returns float32."""

    arch: Arch
    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, x_BLD: Array) -> Array:
        nu, sizes, init = self.arch.nu, self.sizes, self.arch.init.make()
        to_F = ("embed", "feed_forward")
        w_up_DF = weight(self, Axes("up", to_F, inputs=("embed",)), (sizes.width, sizes.feed_forward), init)
        w_gate_DF = weight(self, Axes("gate", to_F, inputs=("embed",)), (sizes.width, sizes.feed_forward), init)
        u_BLF = ops.linear(x_BLD, w_up_DF, nu.up, self.dtype)
        z_BLF = ops.linear(x_BLD, w_gate_DF, nu.gate, self.dtype)
        a_BLF = (nu.activation * self.arch.gate.make(name="gating")(u_BLF, z_BLF)).astype(self.dtype)
        down_axes = Axes("down", ("feed_forward", "embed"), inputs=("feed_forward",))
        w_FD = weight(self, down_axes, (sizes.feed_forward, sizes.width), init)
        return ops.linear(a_BLF, w_FD, nu.down, self.dtype, jnp.float32)


class Block(nn.Module):
    """Two sublayers, each: stream → input_norm → sublayer → residual join. The stream is float32."""

    arch: Arch
    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, h_BLD: Array, mask_BLL: Array, angles_LR: Array) -> tuple[Array, None]:
        arch = self.arch
        x_BLD = arch.input_norm.make(name="attention_norm")(h_BLD)
        x_BLD = Attention(arch, self.sizes, self.dtype, name="attention")(x_BLD, mask_BLL, angles_LR)
        h_BLD = arch.residual.make(name="attention_residual")(h_BLD, x_BLD)
        x_BLD = arch.input_norm.make(name="mlp_norm")(h_BLD)
        x_BLD = MLP(arch, self.sizes, self.dtype, name="mlp")(x_BLD)
        h_BLD = arch.residual.make(name="mlp_residual")(h_BLD, x_BLD)
        return h_BLD, None


class Decoder(nn.Module):
    """tokens_BL, segments_BL → logits_BLV (float32). `segments` number the documents of a window.

    Layers are scanned over a leading `layers` axis of their parameters; `scan_layers=False` unrolls the same scan,
    so both have the same parameters and the same checkpoints.
    """

    arch: Arch
    sizes: Sizes
    dtype: Any = jnp.float32
    scan_layers: bool = True
    attend_across_documents: bool = False

    @nn.compact
    def __call__(self, tokens_BL: Array, segments_BL: Array) -> Array:
        arch, sizes = self.arch, self.sizes
        init = arch.init.make()
        embedding_axes = Axes("embedding", ("vocab", "embed"), inputs=("embed",))
        h_BLD = weight(self, embedding_axes, (sizes.vocab, sizes.width), init)[tokens_BL]
        mask_BLL = ops.attention_mask(tokens_BL.shape[1], None if self.attend_across_documents else segments_BL)
        angles_LR = ops.rotary_angles(tokens_BL.shape[1], sizes.head_width, sizes.rope_theta)
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]  flax types it as int
            length=sizes.layers,
            unroll=1 if self.scan_layers else sizes.layers,
            metadata_params={nn.PARTITION_NAME: LAYERS},
        )
        h_BLD, _ = layers(arch, sizes, self.dtype, name="layers")(h_BLD, mask_BLL, angles_LR)
        h_BLD = arch.final_norm.make(name="final_norm")(h_BLD)
        w_DV = weight(self, Axes("head", ("embed", "vocab"), inputs=("embed",)), (sizes.width, sizes.vocab), init)
        w_DV = arch.head.make(name="logits")(w_DV)
        return ops.linear(h_BLD, w_DV, 1.0, self.dtype, jnp.float32)
