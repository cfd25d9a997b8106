"""anGPT (Franke et al., NeurIPS 2025, arXiv 2505.22014): constants ν in place of every norm layer."""

import math

from angpt_jax.arch import Arch, Constraint, Sizes
from angpt_jax.nu import approximate_nu
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
