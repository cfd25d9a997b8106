"""The parts that can fill a place, by the names that YAML and flags use."""

from angpt_jax.parts import gate, head, init, norms, qk, residual

NORMS = {"identity": norms.Identity, "rms_norm": norms.RMSNorm}

PARTS: dict[str, dict[str, type]] = {
    "input_norm": NORMS,
    "final_norm": NORMS,
    "qk": {"rotary": qk.Rotary, "qk_norm": qk.QKNorm, "unit_qk": qk.UnitQK},
    "gate": {"gated": gate.GatedActivation, "scaled_gated": gate.ScaledGatedActivation},
    "residual": {
        "add": residual.Add,
        "approximate_lerp": residual.ApproximateLerp,
        "exact_lerp": residual.ExactLerp,
    },
    "head": {"plain": head.PlainLogits, "scaled": head.ScaledLogits},
    "init": {"unit": init.UnitVectors, "normal": init.ScaledNormal},
}
