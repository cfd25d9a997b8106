"""The parts that can fill a place, by the names that YAML and flags use."""

from angpt_jax.parts import gate, head, init, norms, pointwise, qk, residual

NORMS = {
    "identity": norms.Identity,
    "rms_norm": norms.RMSNorm,
    "layer_norm": norms.LayerNorm,
    "unit_norm": norms.UnitNorm,
    "scale_norm": norms.ScaleNorm,
    "see_dnorm": norms.SeeDNorm,
    "dyt": pointwise.DyT,
    "derf": pointwise.Derf,
    "learnable_scale": pointwise.LearnableScale,
}
LAYER_NORMS = NORMS | {"depth_scaled_rms_norm": norms.DepthScaledRMSNorm}  # they know the number of their layer

PARTS: dict[str, dict[str, type]] = {
    "embedding_norm": NORMS,
    "input_norm": LAYER_NORMS,
    "qk": {
        "rotary": qk.Rotary,
        "qk_norm": qk.QKNorm,
        "unit_qk": qk.UnitQK,
        "scaled_unit_qk": qk.ScaledUnitQK,
    },
    "value": NORMS | {"head_scale": pointwise.HeadScale},
    "gate": {
        "gated": gate.GatedActivation,
        "unit_gated": gate.UnitGatedActivation,
        "scaled_gated": gate.ScaledGatedActivation,
        "plain": gate.PlainActivation,
    },
    "hidden_norm": NORMS,
    "branch_norm": LAYER_NORMS,
    "residual": {
        "add": residual.Add,
        "normed_add": residual.NormedAdd,
        "lerp": residual.Lerp,
        "approximate_lerp": residual.ApproximateLerp,
        "exact_lerp": residual.ExactLerp,
        "geodesic": residual.Geodesic,
    },
    "final_norm": NORMS,
    "head": {"plain": head.PlainLogits, "scaled": head.ScaledLogits},
    "init": {"unit": init.UnitVectors, "normal": init.ScaledNormal, "gained_xavier": init.GainedXavier},
}
