"""anGPT as a plain decoder: ν, α, ν(α) and s_Z multiplied into the matrices, so that no norm and no scale is left.

    Decoder(arch, sizes) of params  =  Decoder(plain(arch), sizes) of folded(arch, sizes, params)

Each ν is a factor of its matrix. A join h ← keep ⊙ h + take ⊙ x is a plain sum of another stream: with h = g ⊙ r and g
the product of all `keep` so far, r ← r + (take/g) ⊙ x. So g goes into the rows of the matrices that read the stream,
take/g into the columns of those that write to it, and s_Z into the head (arXiv 2505.22014, section 3.3, and algebra).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax.arch import NOTHING, Arch, Constraint, Sizes
from angpt_jax.nu import Nu
from angpt_jax.part import Part, part
from angpt_jax.parts.gate import GatedActivation
from angpt_jax.parts.head import PlainLogits
from angpt_jax.parts.qk import Rotary
from angpt_jax.parts.residual import Add
from angpt_jax.places import SUBLAYERS


def obstacles(arch: Arch, tied_embeddings: bool) -> Iterator[str]:
    """Why an architecture can't be folded; nothing if it can."""
    if tied_embeddings:
        yield "model.tied_embeddings: one matrix can't be the embedding and take the factors of the head"
    for place in ("embedding_norm", "input_norm", "branch_norm", "final_norm"):
        for kind in _kinds(getattr(arch, place)):
            if kind.factor != "kept":
                yield f"{place}: {kind.__name__} depends on the vector that it is given"
    for kind in _kinds(arch.residual):
        if not kind.linear:
            yield f"residual: {kind.__name__} depends on the vectors that it joins"


def _kinds(place: Any) -> list[Any]:
    return list(dict.fromkeys(place.at(sublayer).kind for sublayer in SUBLAYERS))


def folded(arch: Arch, sizes: Sizes, params: Any) -> dict[str, Any]:
    """The parameters of the plain decoder, in the dtype of `params`. There must be no `obstacles`.

    What looks at queries, keys, values or hidden units alone stays where it can't be a factor of a matrix: QK-norm, a
    norm of the values. A stream that an α of exactly 1 forgets can't be written as a sum: what comes out is not finite.
    """
    assert not list(obstacles(arch, "head" not in params))
    layers = params["layers"]
    embedding = params["embedding"] * _diagonal(arch.embedding_norm, params.get("embedding_norm"), sizes.width)
    joins = [_join(arch.residual.at(sublayer), layers.get(f"{sublayer}_residual"), sizes) for sublayer in SUBLAYERS]
    kept_ND = jnp.cumprod(joins[0][0] * joins[1][0], axis=0)  # of the stream behind each layer
    g_ND = jnp.concatenate([jnp.ones_like(kept_ND[:1]), kept_ND[:-1]])  # before it
    reads, writes = {}, {}
    for sublayer, (keep_ND, take_ND) in zip(SUBLAYERS, joins, strict=True):
        reads[sublayer] = g_ND * _stacked(arch.input_norm.at(sublayer), layers.get(f"{sublayer}_norm"), sizes)
        g_ND = g_ND * keep_ND
        branch = _stacked(arch.branch_norm.at(sublayer), layers.get(f"{sublayer}_branch_norm"), sizes)
        writes[sublayer] = take_ND * branch / g_ND
    plain_layers = {
        "attention": _attention(arch, sizes, layers["attention"], reads["attention"], writes["attention"]),
        "mlp": _mlp(arch, sizes, layers["mlp"], reads["mlp"], writes["mlp"]),
    }
    final_D = kept_ND[-1] * _diagonal(arch.final_norm, params.get("final_norm"), sizes.width)
    head = arch.head.make().apply({"params": params.get("logits", {})}, params["head"] * final_D[:, None])
    return {"embedding": embedding, "layers": plain_layers, "head": head}


def plain(arch: Arch) -> Arch:
    """The folded decoder: plain sums, no norm of the stream, no factor."""
    return replace(
        arch,
        name=f"{arch.name}_folded",
        embedding_norm=NOTHING,
        input_norm=NOTHING,
        branch_norm=NOTHING,
        residual=part(Add),
        final_norm=NOTHING,
        head=part(PlainLogits),
        qk=arch.qk.replace(softmax_scale=1.0) if arch.qk.kind is Rotary else arch.qk,
        value=NOTHING if _is_factor(arch.value) else arch.value,
        hidden_norm=NOTHING if _is_factor(arch.hidden_norm) else arch.hidden_norm,
        gate=arch.gate.replace(gate_scale=1.0) if arch.gate.kind is GatedActivation else arch.gate,
        nu=Nu() if _is_factor(arch.hidden_norm) else Nu(activation=arch.nu.activation),
        constraint=Constraint(),
    )


def _is_factor(norm: Part) -> bool:
    """Whether what fills the place of a norm multiplies each entry by a constant, and does no more."""
    return norm.kind.factor == "kept"


def _attention(arch: Arch, sizes: Sizes, weights: Any, read_ND: Array, write_ND: Array) -> dict[str, Any]:
    nu, out = arch.nu, dict(weights)
    scale = arch.qk["softmax_scale"] if arch.qk.kind is Rotary else 1.0
    rows_ND1, write_N1D = read_ND[:, :, None], write_ND[:, None, :]
    out["query"] = weights["query"] * rows_ND1 * (nu.query * scale)
    out["key"] = weights["key"] * rows_ND1 * nu.key
    out["value"] = weights["value"] * rows_ND1 * nu.value
    if _is_factor(arch.value):
        heads = sizes.key_value_heads, sizes.head_width
        value_norm = _stacked(arch.value, out.pop("value_norm", None), sizes, heads)
        out["value"] = out["value"] * value_norm.reshape(sizes.layers, 1, -1)
    out["attention_out"] = weights["attention_out"] * write_N1D * nu.attention_out
    return out


def _mlp(arch: Arch, sizes: Sizes, weights: Any, read_ND: Array, write_ND: Array) -> dict[str, Any]:
    nu, out = arch.nu, dict(weights)
    gate_scale = arch.gate["gate_scale"] if arch.gate.kind is GatedActivation else 1.0
    factors = {"up": nu.up, "gate": nu.gate * gate_scale}
    for role in arch.gate.kind.inputs:
        out[role] = weights[role] * read_ND[:, :, None] * factors[role]
    out["down"] = weights["down"] * write_ND[:, None, :] * nu.down
    if _is_factor(arch.hidden_norm):
        hidden_NF = _stacked(arch.hidden_norm, out.pop("hidden_norm", None), sizes, (sizes.feed_forward,))
        out["down"] = out["down"] * hidden_NF[:, :, None] * nu.activation
    return out


def _join(residual: Part, weights: Any, sizes: Sizes) -> tuple[Array, Array]:
    """keep_ND and take_ND of a linear join, which are what it makes of 1 and 0, and of 0 and 1."""
    one_D, zero_D = jnp.ones(sizes.width), jnp.zeros(sizes.width)

    def join(weights: Any, layer: Array) -> tuple[Array, Array]:
        module = residual.make()
        keep_D = module.apply({"params": weights}, one_D, zero_D, layer)
        return keep_D, module.apply({"params": weights}, zero_D, one_D, layer)

    return jax.vmap(join)(weights or {}, jnp.arange(1.0, sizes.layers + 1))


def _diagonal(norm: Part, weights: Any, *shape: int) -> Array:
    """The factors that a part multiplies each entry by: what it makes of 1."""
    return norm.make().apply({"params": weights or {}}, jnp.ones(shape))


def _stacked(norm: Part, weights: Any, sizes: Sizes, shape: tuple[int, ...] | None = None) -> Array:
    """The same in each layer; `shape` of a vector of width D by default."""
    ones = jnp.ones(shape or (sizes.width,))
    apply = jax.vmap(lambda weights, layer: norm.make().apply({"params": weights}, ones, layer))
    return apply(weights or {}, jnp.arange(1.0, sizes.layers + 1))
