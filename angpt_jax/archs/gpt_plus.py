"""GPT+: the paper's baseline, a pre-norm decoder with RMSNorm, RoPE, SwiGLU and QK-norm (arXiv 2505.22014)."""

import math
from dataclasses import replace

from angpt_jax.arch import Arch, Constraint, Recommended, Sizes
from angpt_jax.part import Part, part
from angpt_jax.parts import gate, head, init, norms, qk, residual

ADAMW = Recommended(warmup_fraction=0.1, weight_decay=0.1, clip_norm=1.0)


def depth_scaled_normal(sizes: Sizes) -> Part:
    """N(0, 0.02²), maps that write to the stream divided by √(2N)."""
    return part(init.ScaledNormal, std=0.02, residual_divisor=math.sqrt(2 * sizes.layers))


def gpt_plus(sizes: Sizes) -> Arch:
    """RMSNorm before each sublayer and at the end, QK-norm; AdamW with decay 0.1, 10 % warm-up, clip 1."""
    return Arch(
        name="gpt_plus",
        input_norm=part(norms.RMSNorm),
        qk=part(qk.QKNorm, softmax_scale=1 / math.sqrt(sizes.head_width)),
        gate=part(gate.GatedActivation, activation="silu", gate_scale=1.0),
        residual=part(residual.Add),
        final_norm=part(norms.RMSNorm),
        head=part(head.PlainLogits),
        init=depth_scaled_normal(sizes),
        optimizer=ADAMW,
    )


def gpt_plus_no_qk_norm(sizes: Sizes) -> Arch:
    """GPT+ without QK-norm: the other baseline row of the paper's tables."""
    arch = gpt_plus(sizes)
    return replace(arch, name="gpt_plus_no_qk_norm", qk=part(qk.Rotary, softmax_scale=1 / math.sqrt(sizes.head_width)))


def gpt_plus_bound(sizes: Sizes) -> Arch:
    """GPT+ whose rows of W stay inside anGPT's unit ball: the control that tells the bound from the rest.

    Only the step differs from GPT+: same forward pass, same init (rows of norm 0.02·√in), weight decay still on.
    """
    constraint = Constraint(norm="at_most_one", along="inputs")
    return replace(gpt_plus(sizes), name="gpt_plus_bound", constraint=constraint)
