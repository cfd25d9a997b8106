"""GPT+ with another norm: everything that is not named here is GPT+'s, its QK-norm too."""

import math
from dataclasses import replace

from angpt_jax.arch import NOTHING, Arch, Sizes
from angpt_jax.archs.gpt_plus import gpt_plus
from angpt_jax.part import Part, Split, part
from angpt_jax.parts import norms, pointwise, residual


def ln_scaling(sizes: Sizes) -> Arch:
    """The norm before both sublayers of layer l times 1/√l (LayerNorm scaling, arXiv 2502.05795), with RMSNorm.

    The final norm is not scaled.
    """
    return replace(gpt_plus(sizes), name="ln_scaling", input_norm=part(norms.DepthScaledRMSNorm))


def dyt(sizes: Sizes) -> Arch:
    """γ ⊙ tanh(a x) + β for each RMSNorm on the stream, a from 0.5, and √D · E[token] (arXiv 2503.10622).

    The factor behind the embedding is learnable and is the paper's for language models. Taken here: one start of a for
    every place, where the paper tunes it by width; QK-norm stays RMSNorm.
    """
    return _pointwise("dyt", part(pointwise.DyT), sizes)


def derf(sizes: Sizes) -> Arch:
    """γ ⊙ erf(a x + s) + β for each RMSNorm on the stream, a from 0.5, s from 0 (arXiv 2512.10938), √D · E[token].

    Taken here: DyT's learnable factor behind the embedding; QK-norm stays RMSNorm.
    """
    return _pointwise("derf", part(pointwise.Derf), sizes)


def _pointwise(name: str, function: Part, sizes: Sizes) -> Arch:
    return replace(
        gpt_plus(sizes),
        name=name,
        embedding_norm=part(pointwise.LearnableScale, scale_init=math.sqrt(sizes.width)),
        input_norm=function,
        final_norm=function,
    )


def hybrid_norm(sizes: Sizes) -> Arch:
    """y = h + Attention(h) with RMSNorm on q, k and v; h ← Norm(y) + MLP(Norm(y)) (HybridNorm, arXiv 2503.04598).

    The norm before the MLP is also what the MLP's branch is added to, so that it stands in attention's join. Taken
    here: q, k and v are normalized in each head, before the rotation; a final RMSNorm as in GPT+.
    """
    return replace(
        gpt_plus(sizes),
        name="hybrid_norm",
        input_norm=NOTHING,
        value=part(norms.RMSNorm),
        residual=Split(attention=part(residual.NormedAdd, norm="rms_norm"), mlp=part(residual.Add)),
    )


def scale_norm(sizes: Sizes) -> Arch:
    """g · h/‖h‖ with one g a norm, from √D, for each RMSNorm on the stream (arXiv 1910.05895).

    Without the paper's FixNorm of the embeddings.
    """
    return replace(
        gpt_plus(sizes), name="scale_norm", input_norm=part(norms.ScaleNorm), final_norm=part(norms.ScaleNorm)
    )


def see_dnorm(sizes: Sizes) -> Arch:
    """RMSNorm with a gain that sees its input, for each RMSNorm on the stream (SeeDNorm, arXiv 2510.22777)."""
    return replace(gpt_plus(sizes), name="see_dnorm", input_norm=part(norms.SeeDNorm), final_norm=part(norms.SeeDNorm))


def geo_norm(sizes: Sizes) -> Arch:
    """A stream of norm √D that branches turn along great circles, less in deeper layers (GeoNorm, arXiv 2601.22095).

    Taken here: the embedded token is brought to norm √D, sublayers read the stream as it is, the step of layer l is
    1/√l, no final norm.
    """
    return replace(
        gpt_plus(sizes),
        name="geo_norm",
        embedding_norm=part(norms.UnitNorm, radius=math.sqrt(sizes.width)),
        input_norm=NOTHING,
        residual=part(residual.Geodesic),
        final_norm=NOTHING,
    )
