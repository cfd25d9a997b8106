"""anGPT (Franke et al., NeurIPS 2025, arXiv 2505.22014): constants ν for every norm layer; and its exact twin."""

import math
from dataclasses import replace

from angpt_jax.arch import Arch, Constraint, Sizes
from angpt_jax.nu import Nu, approximate_nu
from angpt_jax.part import part
from angpt_jax.parts import gate, head, init, norms, qk, residual


def angpt(sizes: Sizes) -> Arch:
    """LERP with ν(α), rows of W inside the unit ball, no norm layer, no warm-up, no decay.

    Open in the paper, taken here: softmax scale √K, no QK-norm, |α|, scales stored as 1/√D.
    """
    stored = 1 / math.sqrt(sizes.width)
    return Arch(
        name="angpt",
        input_norm=part(norms.Identity),
        qk=part(qk.Rotary, softmax_scale=math.sqrt(sizes.head_width)),
        gate=part(gate.GatedActivation, activation="silu", gate_scale=math.sqrt(sizes.width)),
        residual=part(residual.ApproximateLerp, alpha_init=0.01, alpha_stored=stored),
        final_norm=part(norms.Identity),
        head=part(head.ScaledLogits, scale_init=1.0, scale_stored=stored),
        init=part(init.UnitVectors, along="inputs"),
        nu=approximate_nu(sizes.width, sizes.heads, sizes.feed_forward, activation="silu"),
        constraint=Constraint(norm="at_most_one", along="inputs"),
    )


def simple_norm(sizes: Sizes) -> Arch:
    """anGPT with an exact norm behind each linear map of a layer where anGPT has a constant ν; ν(α) stays.

    The idea of SimpleGPT (arXiv 2602.01212), a norm behind each linear map, in anGPT's frame. Taken here: unit norms
    without SimpleGPT's gains and factor √D, q, k and v normalized in each head, anGPT's joins, bound and head.
    """
    unit = part(norms.UnitNorm)
    return replace(
        angpt(sizes),
        name="simple_norm",
        qk=part(qk.UnitQK, softmax_scale=math.sqrt(sizes.head_width)),
        value=unit,
        gate=part(gate.UnitGatedActivation, activation="silu", gate_scale=math.sqrt(sizes.width)),
        branch_norm=unit,
        nu=Nu(),
    )
