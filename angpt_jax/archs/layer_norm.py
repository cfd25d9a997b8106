"""Decoders with LayerNorm and a plain GELU MLP: Pre-LN, Post-LN, DeepNorm, NormFormer.

Taken here for all of them: rotary positions, no biases in the maps, embedding and head not tied, as in the rest of
this package, so that the norms are what differs.
"""

import math
from dataclasses import replace

from angpt_jax.arch import NOTHING, Arch, Sizes
from angpt_jax.archs.gpt_plus import ADAMW, depth_scaled_normal
from angpt_jax.part import Split, part
from angpt_jax.parts import gate, head, init, norms, pointwise, qk, residual


def pre_ln(sizes: Sizes) -> Arch:
    """GPT-2: LayerNorm before each sublayer and at the end, GELU (Radford et al. 2019; arXiv 2002.04745)."""
    return Arch(
        name="pre_ln",
        input_norm=part(norms.LayerNorm),
        qk=part(qk.Rotary, softmax_scale=1 / math.sqrt(sizes.head_width)),
        gate=part(gate.PlainActivation, activation="gelu"),
        residual=part(residual.Add),
        final_norm=part(norms.LayerNorm),
        head=part(head.PlainLogits),
        init=depth_scaled_normal(sizes),
        optimizer=ADAMW,
    )


def post_ln(sizes: Sizes) -> Arch:
    """h ← LayerNorm(h + x), no norm before a sublayer or at the end (arXiv 1706.03762); N(0, 0.02²) throughout."""
    return replace(
        pre_ln(sizes),
        name="post_ln",
        input_norm=NOTHING,
        residual=part(residual.NormedAdd, norm="layer_norm"),
        final_norm=NOTHING,
        init=part(init.ScaledNormal, std=0.02),
    )


def deep_norm(sizes: Sizes) -> Arch:
    """h ← LayerNorm((2N)^¼ h + x), Xavier init with gain (8N)^−¼ (DeepNorm of a decoder, arXiv 2203.00555, figure 2).

    Embedding and head, of which the paper says nothing, are N(0, 1/D).
    """
    return replace(
        post_ln(sizes),
        name="deep_norm",
        residual=part(residual.NormedAdd, norm="layer_norm", stream_scale=(2 * sizes.layers) ** 0.25),
        init=part(init.GainedXavier, gain=(8 * sizes.layers) ** -0.25, vocab_std=1 / math.sqrt(sizes.width)),
    )


def normformer(sizes: Sizes) -> Arch:
    """Pre-LN, a scale per head, LayerNorm behind attention and behind the activation (arXiv 2110.09456).

    Without the paper's scaled residuals, which it keeps for its smallest models.
    """
    layer_norm = part(norms.LayerNorm)
    return replace(
        pre_ln(sizes),
        name="normformer",
        value=part(pointwise.HeadScale),
        hidden_norm=layer_norm,
        branch_norm=Split(attention=layer_norm, mlp=NOTHING),
    )
