"""The skeleton: one decoder for every architecture. It never asks which one it runs; the places do the rest."""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops
from angpt_jax.arch import Arch, Sizes
from angpt_jax.axes import LAYERS, Axes, weight
from angpt_jax.measure import COLLECTION, measure, norms, spread
from angpt_jax.part import Sublayer


class Attention(nn.Module):
    """ν_p W_p concat(softmax(scale · q kᵀ + mask) v), q, k, v = ν W h; returns float32."""

    arch: Arch
    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, x_BLD: Array, mask_BLL: Array, angles_LR: Array) -> Array:
        arch, nu, sizes, init = self.arch, self.arch.nu, self.sizes, self.arch.init.make()

        def project(role: str, heads: str, count: int, factor: float) -> Array:
            axes = Axes(role, ("embed", heads, "head_dim"), inputs=("embed",))
            w_DHK = weight(self, axes, (sizes.width, count, sizes.head_width), init)
            return ops.linear(x_BLD, w_DHK, factor, self.dtype)

        q_BLHK = project("query", "heads", sizes.heads, nu.query)
        k_BLGK = project("key", "kv_heads", sizes.key_value_heads, nu.key)
        v_BLGK = project("value", "kv_heads", sizes.key_value_heads, nu.value)
        qk = arch.qk.make(name="qk")
        q_BLHK, k_BLGK = qk(q_BLHK, k_BLGK, lambda x_BLHK: ops.rotate(x_BLHK, angles_LR))
        v_BLGK = arch.value.make(name="value_norm", axis="head_dim")(v_BLGK)
        measure(self, "q", lambda: norms(q_BLHK))
        measure(self, "k", lambda: norms(k_BLGK))
        q_BLHK, k_BLGK, v_BLGK = (x.astype(self.dtype) for x in (q_BLHK, k_BLGK, v_BLGK))
        measure(self, "entropy", lambda: spread(ops.attention_entropy(q_BLHK, k_BLGK, mask_BLL, qk.softmax_scale)))
        y_BLHK = ops.attention(q_BLHK, k_BLGK, v_BLGK, mask_BLL, qk.softmax_scale)
        out_axes = Axes("attention_out", ("heads", "head_dim", "embed"), inputs=("heads", "head_dim"))
        w_HKD = weight(self, out_axes, (sizes.heads, sizes.head_width, sizes.width), init)
        return ops.linear(y_BLHK, w_HKD, nu.attention_out, self.dtype, jnp.float32)


class MLP(nn.Module):
    """ν_d W_d (ν_acf · gate(u, z)), u, z = ν W h; returns float32. The gate says which maps feed it."""

    arch: Arch
    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, x_BLD: Array) -> Array:
        arch, nu, sizes, init = self.arch, self.arch.nu, self.sizes, self.arch.init.make()

        def project(role: str) -> Array:
            axes = Axes(role, ("embed", "feed_forward"), inputs=("embed",))
            w_DF = weight(self, axes, (sizes.width, sizes.feed_forward), init)
            return ops.linear(x_BLD, w_DF, getattr(nu, role), self.dtype)

        gate = arch.gate.make(name="gating")
        u_BLF, *z_BLF = (project(role) for role in gate.inputs)
        a_BLF = nu.activation * gate(u_BLF, *z_BLF)
        a_BLF = arch.hidden_norm.make(name="hidden_norm", axis="feed_forward")(a_BLF)
        measure(self, "u", lambda: norms(u_BLF))
        measure(self, "a", lambda: norms(a_BLF))
        down_axes = Axes("down", ("feed_forward", "embed"), inputs=("feed_forward",))
        w_FD = weight(self, down_axes, (sizes.feed_forward, sizes.width), init)
        return ops.linear(a_BLF.astype(self.dtype), w_FD, nu.down, self.dtype, jnp.float32)


class Block(nn.Module):
    """Two sublayers, each: stream → input_norm → sublayer → branch_norm → residual join. The stream is float32."""

    arch: Arch
    sizes: Sizes
    dtype: Any

    @nn.compact
    def __call__(self, h_BLD: Array, layer: Array, mask_BLL: Array, angles_LR: Array) -> tuple[Array, None]:
        attention = Attention(self.arch, self.sizes, self.dtype, name="attention")
        mlp = MLP(self.arch, self.sizes, self.dtype, name="mlp")
        h_BLD = self.join("attention", lambda x_BLD: attention(x_BLD, mask_BLL, angles_LR), h_BLD, layer)
        return self.join("mlp", mlp, h_BLD, layer), None

    def join(self, name: Sublayer, sublayer: Callable[[Array], Array], h_BLD: Array, layer: Array) -> Array:
        arch = self.arch
        measure(self, f"{name}_stream", lambda: norms(h_BLD))
        x_BLD = sublayer(arch.input_norm.at(name).make(name=f"{name}_norm")(h_BLD, layer))
        x_BLD = arch.branch_norm.at(name).make(name=f"{name}_branch_norm")(x_BLD, layer)
        measure(self, f"{name}_branch", lambda: norms(x_BLD))
        return arch.residual.at(name).make(name=f"{name}_residual")(h_BLD, x_BLD, layer)


class Decoder(nn.Module):
    """tokens_BL, segments_BL → logits_BLV (float32). `segments` number the documents of a window.

    Layers are scanned over a leading `layers` axis of their parameters; `scan_layers=False` unrolls the same scan,
    so both have the same parameters and the same checkpoints. `remat="full"` keeps only the stream between layers
    and computes each layer again in the backward pass.
    """

    arch: Arch
    sizes: Sizes
    dtype: Any = jnp.float32
    scan_layers: bool = True
    remat: Literal["none", "full"] = "none"
    tied_embeddings: bool = False
    attend_across_documents: bool = False

    @nn.compact
    def __call__(self, tokens_BL: Array, segments_BL: Array) -> Array:
        arch, sizes = self.arch, self.sizes
        init = arch.init.make()
        embedding_axes = Axes("embedding", ("vocab", "embed"), inputs=("embed",))
        w_VD = weight(self, embedding_axes, (sizes.vocab, sizes.width), init)
        h_BLD = arch.embedding_norm.make(name="embedding_norm")(w_VD[tokens_BL])
        mask_BLL = ops.attention_mask(tokens_BL.shape[1], None if self.attend_across_documents else segments_BL)
        angles_LR = ops.rotary_angles(tokens_BL.shape[1], sizes.head_width, sizes.rope_theta)
        h_BLD, _ = self.layers()(h_BLD, jnp.arange(1.0, sizes.layers + 1), mask_BLL, angles_LR)
        measure(self, "final_stream", lambda: norms(h_BLD))
        h_BLD = arch.final_norm.make(name="final_norm")(h_BLD)
        if self.tied_embeddings:
            w_DV = w_VD.T
        else:
            w_DV = weight(self, Axes("head", ("embed", "vocab"), inputs=("embed",)), w_VD.T.shape, init)
        w_DV = arch.head.make(name="logits")(w_DV)
        return ops.linear(h_BLD, w_DV, 1.0, self.dtype, jnp.float32)

    def layers(self) -> nn.Module:
        """The block, scanned over the number of its layer."""
        block = nn.remat(Block, prevent_cse=False) if self.remat == "full" else Block
        scanned = nn.scan(
            block,
            variable_axes={"params": 0, COLLECTION: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]  flax types it as int
            length=self.sizes.layers,
            unroll=1 if self.scan_layers else self.sizes.layers,
            metadata_params={nn.PARTITION_NAME: LAYERS},
        )
        return scanned(self.arch, self.sizes, self.dtype, name="layers")
