"""nGPT (Loshchilov et al., arXiv 2410.01131): every vector on the unit sphere, exactly."""

import math
from dataclasses import replace

from angpt_jax.arch import Arch, Constraint, Sizes
from angpt_jax.part import part
from angpt_jax.parts import gate, head, init, norms, qk, residual


def ngpt(sizes: Sizes) -> Arch:
    """LERP with an exact norm, unit branches, q and k, matrices of norm 1 along the embedding dimension, at init too.

    RoPE is a true rotation, and √D is on the gate only, as in the paper (the published code differs in both).
    """
    stored = 1 / math.sqrt(sizes.width)
    return Arch(
        name="ngpt",
        input_norm=part(norms.Identity),
        qk=part(qk.ScaledUnitQK, softmax_scale=math.sqrt(sizes.head_width), scale_init=1.0, scale_stored=stored),
        gate=part(gate.ScaledGatedActivation, activation="silu", gate_scale=math.sqrt(sizes.width)),
        branch_norm=part(norms.UnitNorm),
        residual=part(residual.ExactLerp, alpha_init=0.05, alpha_stored=stored),
        final_norm=part(norms.Identity),
        head=part(head.ScaledLogits, scale_init=1.0, scale_stored=stored),
        init=part(init.UnitVectors, along="embed"),
        constraint=Constraint(norm="one", along="embed"),
    )


def ngpt_bound(sizes: Sizes) -> Arch:
    """nGPT whose matrices have norm at most 1 along the embedding dimension (a row of arXiv 2505.22014's table).

    Only the step differs from nGPT: same forward pass, same init.
    """
    return replace(ngpt(sizes), name="ngpt_bound", constraint=Constraint(norm="at_most_one", along="embed"))
