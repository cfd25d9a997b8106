"""The skeleton: one decoder for every architecture. It never asks which one it runs; the places do the rest."""

from operator import itemgetter
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from angpt_jax import ops
from angpt_jax.arch import Arch, Sizes
from angpt_jax.axes import LAYERS, Axes, weight
from angpt_jax.how import How
from angpt_jax.measure import COLLECTION, measure, norms, spread
from angpt_jax.part import Sublayer
from angpt_jax.seen import Cached, Seen, Window

EMBEDDING = Axes("embedding", ("vocab", "embed"), inputs=("embed",))
HEAD = Axes("head", ("embed", "vocab"), inputs=("embed",))


def linear(module: "Attention | MLP", x: Array, axes: Axes, width: int, nu: float, out_dtype: Any) -> Array:
    """ν · W x with the weight `axes.role` of `module`, `width` numbers a token. A list in `remat` calls it that."""
    w = weight(module, axes, (x.shape[-1], width), module.arch.init.make())
    y = ops.linear(x, w, nu, module.how.dtype, out_dtype, module.how.layout.of(axes))
    return checkpoint_name(y, axes.role)


class Attention(nn.Module):
    """ν_p W_p concat(softmax(scale · q kᵀ + mask) v), q, k, v = ν W h; returns float32."""

    arch: Arch
    sizes: Sizes
    how: How

    @nn.compact
    def __call__(self, x_BLD: Array, seen: Seen) -> tuple[Array, Seen | None]:
        arch, nu, sizes, dtype = self.arch, self.arch.nu, self.sizes, self.how.dtype

        def project(role: str, heads: str, count: int, factor: float) -> Array:
            axes = Axes(role, ("embed", heads), inputs=("embed",))  # the heads side by side
            y = linear(self, x_BLD, axes, count * sizes.head_width, factor, dtype)
            return y.reshape(*y.shape[:2], count, sizes.head_width)

        q_BLHK = project("query", "heads", sizes.heads, nu.query)
        k_BLGK = project("key", "kv_heads", sizes.key_value_heads, nu.key)
        v_BLGK = project("value", "kv_heads", sizes.key_value_heads, nu.value)
        qk = arch.qk.make(name="qk")
        q_BLHK, k_BLGK = qk(q_BLHK, k_BLGK, lambda x_BLHK: ops.rotate(x_BLHK, seen.turns))
        v_BLGK = arch.value.make(name="value_norm", axis="head_dim")(v_BLGK)
        measure(self, "q", lambda: norms(q_BLHK))
        measure(self, "k", lambda: norms(k_BLGK))
        q_BLHK, k_BLGK, v_BLGK = (x.astype(dtype) for x in (q_BLHK, k_BLGK, v_BLGK))
        scale = qk.softmax_scale
        measure(self, "entropy", lambda: spread(ops.attention_entropy(q_BLHK, k_BLGK, seen.segments_BL, scale)))
        y_BLHK, seen_next = seen.attend(self.how, q_BLHK, k_BLGK, v_BLGK, scale)
        y_BLE = y_BLHK.reshape(*y_BLHK.shape[:2], -1)
        axes = Axes("attention_out", ("heads", "embed"), inputs=("heads",))
        return linear(self, y_BLE, axes, sizes.width, nu.attention_out, jnp.float32), seen_next


class MLP(nn.Module):
    """ν_d W_d (ν_acf · gate(u, z)), u, z = ν W h; returns float32. The gate says which maps feed it."""

    arch: Arch
    sizes: Sizes
    how: How

    @nn.compact
    def __call__(self, x_BLD: Array) -> Array:
        arch, nu, sizes, dtype = self.arch, self.arch.nu, self.sizes, self.how.dtype

        def project(role: str) -> Array:
            axes = Axes(role, ("embed", "feed_forward"), inputs=("embed",))
            return linear(self, x_BLD, axes, sizes.feed_forward, getattr(nu, role), dtype)

        gate = arch.gate.make(name="gating")
        u_BLF, *z_BLF = (project(role) for role in gate.inputs)
        a_BLF = nu.activation * gate(u_BLF, *z_BLF)
        a_BLF = arch.hidden_norm.make(name="hidden_norm", axis="feed_forward")(a_BLF)
        measure(self, "u", lambda: norms(u_BLF))
        measure(self, "a", lambda: norms(a_BLF))
        axes = Axes("down", ("feed_forward", "embed"), inputs=("feed_forward",))
        return linear(self, checkpoint_name(a_BLF.astype(dtype), "hidden"), axes, sizes.width, nu.down, jnp.float32)


class Block(nn.Module):
    """Two sublayers, each: stream → input_norm → sublayer → branch_norm → residual join. The stream is float32."""

    arch: Arch
    sizes: Sizes
    how: How

    @nn.compact
    def __call__(self, h_BLD: Array, layer: Array, seen: Seen) -> tuple[Array, Seen | None]:
        attention = Attention(self.arch, self.sizes, self.how, name="attention")
        mlp = MLP(self.arch, self.sizes, self.how, name="mlp")
        x_BLD, seen_next = attention(self.enter("attention", h_BLD, layer), seen)
        h_BLD = self.join("attention", x_BLD, h_BLD, layer)
        x_BLD = mlp(self.enter("mlp", h_BLD, layer))
        return self.join("mlp", x_BLD, h_BLD, layer), seen_next

    def enter(self, name: Sublayer, h_BLD: Array, layer: Array) -> Array:
        measure(self, f"{name}_stream", lambda: norms(h_BLD))
        return self.arch.input_norm.at(name).make(name=f"{name}_norm")(h_BLD, layer)

    def join(self, name: Sublayer, x_BLD: Array, h_BLD: Array, layer: Array) -> Array:
        arch = self.arch
        x_BLD = arch.branch_norm.at(name).make(name=f"{name}_branch_norm")(x_BLD, layer)
        measure(self, f"{name}_branch", lambda: norms(x_BLD))
        h_BLD = arch.residual.at(name).make(name=f"{name}_residual")(h_BLD, x_BLD, layer)
        return self.how.layout.constrain(h_BLD, "batch", "length", None)


class Decoder(nn.Module):
    """tokens_BL, segments_BL → logits_BLV (float32). `segments` number the documents of a window.

    Layers are scanned over a leading `layers` axis of their parameters; `scan_layers=False` unrolls the same scan,
    so both have the same parameters and the same checkpoints. `remat="full"` keeps only the stream between layers
    and computes each layer again in the backward pass; a tuple of names keeps these arrays of each layer as well.
    `layers_apart` gives each layer parameters of its own, `layer_1` and so on (`apart` makes them).
    """

    arch: Arch
    sizes: Sizes
    how: How = How()
    scan_layers: bool = True
    remat: Literal["none", "full"] | tuple[str, ...] = "none"
    tied_embeddings: bool = False
    attend_across_documents: bool = False
    loss_vocab_chunk: int | None = None
    layers_apart: bool = False

    def __call__(self, tokens_BL: Array, segments_BL: Array) -> Array:
        h_BLD, w_DV, _ = self.features(tokens_BL, self.window(segments_BL))
        return self.logits(h_BLD, w_DV)

    def nats(self, tokens_BL: Array, segments_BL: Array, targets_BL: Array) -> Array:
        """nats_BL: cross-entropy of each target, `loss_vocab_chunk` entries of the vocabulary at a time."""
        if self.loss_vocab_chunk is None:
            return ops.cross_entropy(self(tokens_BL, segments_BL), targets_BL)
        h_BLD, w_DV, _ = self.features(tokens_BL, self.window(segments_BL))
        place = self.how.layout.of(HEAD)
        return ops.chunked_cross_entropy(h_BLD, w_DV, targets_BL, self.loss_vocab_chunk, self.how.dtype, place)

    def extend(self, tokens_BL: Array, seen: list[Cached]) -> tuple[Array, list[Cached]]:
        """logits_BV behind the last of the new tokens, and the caches of the layers with all of them.

        Only with `layers_apart`.
        """
        h_BLD, w_DV, seen = self.features(tokens_BL, seen)
        return self.logits(h_BLD[:, -1:], w_DV)[:, 0], seen

    def window(self, segments_BL: Array) -> Window:
        """What the tokens of a whole window see."""
        angles = ops.rotary_angles(jnp.arange(segments_BL.shape[1]), self.sizes.head_width, self.sizes.rope_theta)
        return Window(None if self.attend_across_documents else segments_BL, angles)

    def logits(self, h_BLD: Array, w_DV: Array) -> Array:
        return ops.linear(h_BLD, w_DV, 1.0, self.how.dtype, jnp.float32, self.how.layout.of(HEAD))

    @nn.compact
    def features(self, tokens_BL: Array, seen: Any) -> tuple[Array, Array, Any]:
        """What the logits are the product of: the last hidden states h_BLD, and the head as it meets them, w_DV; and
        what a next call sees. `seen` is a Window for all layers, or a list with a cache for each."""
        arch, sizes, layout = self.arch, self.sizes, self.how.layout
        init = arch.init.make()
        w_VD = weight(self, EMBEDDING, (sizes.vocab, sizes.width), init)
        h_BLD = ops.lookup(w_VD, tokens_BL, layout)
        h_BLD = arch.embedding_norm.make(name="embedding_norm")(h_BLD)
        h_BLD, seen = self.each_layer(h_BLD, seen) if self.layers_apart else self.layers()(h_BLD, self.numbers(), seen)
        measure(self, "final_stream", lambda: norms(h_BLD))
        h_BLD = arch.final_norm.make(name="final_norm")(h_BLD)
        w_DV = w_VD.T if self.tied_embeddings else weight(self, HEAD, w_VD.T.shape, init)
        return h_BLD, arch.head.make(name="logits")(w_DV), seen

    def numbers(self) -> Array:
        """Of the layers, from 1."""
        return jnp.arange(1.0, self.sizes.layers + 1)

    def layers(self) -> nn.Module:
        """The block, scanned over the number of its layer."""
        scanned = nn.scan(
            self.block(),
            variable_axes={"params": 0, COLLECTION: 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]  flax types it as int
            length=self.sizes.layers,
            unroll=1 if self.scan_layers else self.sizes.layers,
            metadata_params={nn.PARTITION_NAME: LAYERS},
        )
        return scanned(self.arch, self.sizes, self.how, name="layers")

    def each_layer(self, h_BLD: Array, seen: list[Cached]) -> tuple[Array, list[Any]]:
        """The layers one after the other, each with its own parameters and what it sees."""
        seen_next = []
        for number, (layer, of_layer) in enumerate(zip(self.numbers(), seen, strict=True), 1):
            block = Block(self.arch, self.sizes, self.how, name=f"layer_{number}")
            h_BLD, of_next = block(h_BLD, layer, of_layer)
            seen_next.append(of_next)
        return h_BLD, seen_next

    def block(self) -> type[nn.Module]:
        if self.remat == "none":
            return Block
        names = () if self.remat == "full" else self.remat
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return nn.remat(Block, prevent_cse=False, policy=policy)


def apart(params: Any, layers: int) -> dict[str, Any]:
    """The parameters of a decoder with `layers_apart`, from those with a `layers` axis in front."""
    stacked = params["layers"]
    each = {f"layer_{number + 1}": jax.tree.map(itemgetter(number), stacked) for number in range(layers)}
    return {name: leaf for name, leaf in params.items() if name != "layers"} | each
