"""The parts that fill the places of a decoder of angpt_jax, by place and name."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .norms_angpt_jax import EPSILON, LAYER_NORMS, NORMS, At, HeadScale, Part, rms, unit

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def product(linear: nn.Linear, x: Tensor, nu: float = 1.0) -> Tensor:
    """ν · W x in float32, the product itself in the dtype of W."""
    return linear(x.to(linear.weight.dtype)).float() * nu


def rotate(x_BLHK: Tensor, angles_BLR: Tensor) -> Tensor:
    """Turns each pair (x_i, x_{i+K/2}) by its angle."""
    first, second = x_BLHK.float().chunk(2, dim=-1)
    cos, sin = angles_BLR.cos()[:, :, None], angles_BLR.sin()[:, :, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Rotary(Part):
    """RoPE(q), RoPE(k)."""

    def forward(self, q_BLHK: Tensor, k_BLGK: Tensor, angles_BLR: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q_BLHK, angles_BLR), rotate(k_BLGK, angles_BLR)


class QKNorm(Part):
    """RoPE(γ_q ⊙ RMSNorm(q)), the same for k."""

    def shapes(self):
        return {"query_gain": (self.at.size,), "key_gain": (self.at.size,)}

    def forward(self, q_BLHK: Tensor, k_BLGK: Tensor, angles_BLR: Tensor) -> tuple[Tensor, Tensor]:
        q = rms(q_BLHK, self.given.epsilon) * self.learned("query_gain")
        k = rms(k_BLGK, self.given.epsilon) * self.learned("key_gain")
        return rotate(q, angles_BLR), rotate(k, angles_BLR)


class UnitQK(Part):
    """Norm(RoPE(q)), Norm(RoPE(k))."""

    def forward(self, q_BLHK: Tensor, k_BLGK: Tensor, angles_BLR: Tensor) -> tuple[Tensor, Tensor]:
        return unit(rotate(q_BLHK, angles_BLR)), unit(rotate(k_BLGK, angles_BLR))


class ScaledUnitQK(UnitQK):
    """s_qk ⊙ Norm(RoPE(q)); a head of keys has the s_qk of the first head of queries that it serves."""

    def shapes(self):
        return {"query_key_scale": (self.at.heads, self.at.size)}

    def forward(self, q_BLHK: Tensor, k_BLGK: Tensor, angles_BLR: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().forward(q_BLHK, k_BLGK, angles_BLR)
        s_HK = self.learned("query_key_scale") * (self.given.scale_init / self.given.scale_stored)
        return s_HK * q, s_HK[:: self.at.heads // self.at.kv_heads] * k


class GatedActivation(Part):
    """u ⊙ f(c · z)."""

    inputs = ("up", "gate")

    def f(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.given.activation](self.given.gate_scale * x.float())

    def forward(self, u: Tensor, z: Tensor) -> Tensor:
        return u.float() * self.f(z)


class UnitGatedActivation(GatedActivation):
    """Norm(u) ⊙ f(c · Norm(z))."""

    def forward(self, u: Tensor, z: Tensor) -> Tensor:
        return unit(u) * self.f(unit(z))


class ScaledGatedActivation(GatedActivation):
    """(s_u ⊙ u) ⊙ f(c · s_v ⊙ z)."""

    def shapes(self):
        return {"up_scale": (self.at.size,), "gate_scale": (self.at.size,)}

    def forward(self, u: Tensor, z: Tensor) -> Tensor:
        factor = self.given.scale_init / self.given.scale_stored
        return self.learned("up_scale") * factor * u.float() * self.f(self.learned("gate_scale") * factor * z.float())


class PlainActivation(GatedActivation):
    """f(c · u)."""

    inputs = ("up",)

    def forward(self, u: Tensor) -> Tensor:
        return self.f(u)


class Add(Part):
    """h + x."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + x


class NormedAdd(Part):
    """Norm(c · h + x)."""

    def __init__(self, settings: dict[str, Any], at: At):
        super().__init__(settings, at)
        self.norm = PARTS["input_norm"][self.given.norm]({"epsilon": EPSILON[self.given.norm]}, at)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.norm(self.given.stream_scale * h + x)


class Geodesic(Part):
    """cos θ · h + sin θ · ‖h‖ · x⊥/‖x⊥‖, θ = rate · l^−decay_power · ‖x⊥‖/‖h‖."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        h_square = h.square().sum(-1, keepdim=True) + self.given.epsilon
        across = x - (x * h).sum(-1, keepdim=True) / h_square * h
        across_norm = (across.square().sum(-1, keepdim=True) + self.given.epsilon).sqrt()
        turn = self.given.rate * self.at.layer**-self.given.decay_power * across_norm / h_square.sqrt()
        return turn.cos() * h + turn.sin() * h_square.sqrt() / across_norm * across


class Lerp(Part):
    """h + α ⊙ (x − h)."""

    def shapes(self):
        return {"alpha": (self.at.size,) if self.given.alpha_per == "channel" else ()}

    def step(self) -> Tensor:
        s = self.learned("alpha") * (self.given.alpha_init / self.given.alpha_stored)
        return s.abs() if self.given.alpha_sign == "absolute" else s

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + self.step() * (x - h)


class ApproximateLerp(Lerp):
    """ν(α) ⊙ (h + α ⊙ (x − h)), ν(α) = 1/√(α² + (1−α)²)."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        alpha = self.step()
        nu = torch.rsqrt(alpha.square() + (1 - alpha).square())
        return nu * (1 - alpha) * h + nu * alpha * x


class ExactLerp(Lerp):
    """Norm(h + α ⊙ (x − h))."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return unit(super().forward(h, x), self.given.epsilon)


class PlainLogits(Part):
    """W_head h."""

    def forward(self, h: Tensor, head: nn.Linear) -> Tensor:
        return product(head, h)


class ScaledLogits(Part):
    """s_Z ⊙ (W_head h), one scale a vocabulary entry, or W_head (s_Z ⊙ h), one a channel."""

    def shapes(self):
        return {"logit_scale": (self.at.vocab if self.given.scale_per == "vocab" else self.at.size,)}

    def forward(self, h: Tensor, head: nn.Linear) -> Tensor:
        s = self.learned("logit_scale") * (self.given.scale_init / self.given.scale_stored)
        return s * product(head, h) if self.given.scale_per == "vocab" else product(head, s * h)


PARTS: dict[str, dict[str, type[Part]]] = {
    "embedding_norm": NORMS,
    "input_norm": LAYER_NORMS,
    "qk": {"rotary": Rotary, "qk_norm": QKNorm, "unit_qk": UnitQK, "scaled_unit_qk": ScaledUnitQK},
    "value": NORMS | {"head_scale": HeadScale},
    "gate": {
        "gated": GatedActivation,
        "unit_gated": UnitGatedActivation,
        "scaled_gated": ScaledGatedActivation,
        "plain": PlainActivation,
    },
    "hidden_norm": NORMS,
    "branch_norm": LAYER_NORMS,
    "residual": {
        "add": Add,
        "normed_add": NormedAdd,
        "lerp": Lerp,
        "approximate_lerp": ApproximateLerp,
        "exact_lerp": ExactLerp,
        "geodesic": Geodesic,
    },
    "final_norm": NORMS,
    "head": {"plain": PlainLogits, "scaled": ScaledLogits},
}
