"""What a part is, and the parts that stand where norms stand, in float32. Parameters start at 1: a file brings their
values.

Letters in names: B batch, L length, D width, H heads, G heads of keys and values, K head width, V vocabulary.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

EPSILON = {"layer_norm": 1e-5, "rms_norm": 1e-6, "unit_norm": 1e-12}


class At(NamedTuple):
    """Where a part stands: length of the last axis, layer from 1, heads of queries and of keys, vocabulary."""

    size: int
    layer: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0


def rms(x: Tensor, epsilon: float) -> Tensor:
    """x / √(mean x² + ε)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def unit(x: Tensor, epsilon: float = EPSILON["unit_norm"]) -> Tensor:
    """x / √(Σ x² + ε)."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + epsilon)


class Part(nn.Module):
    """What fills a place. Its parameters are named by `shapes`, its settings are attributes of `given`."""

    def __init__(self, settings: dict[str, Any], at: At):
        super().__init__()
        self.given, self.at = SimpleNamespace(**settings), at
        for name, shape in self.shapes().items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def learned(self, name: str) -> Tensor:
        return self.get_parameter(name).float()


class Identity(Part):
    """x."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class RMSNorm(Part):
    """γ ⊙ x / √(mean x² + ε)."""

    def shapes(self):
        return {"gain": (self.at.size,)}

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.given.epsilon) * self.learned("gain")


class DepthScaledRMSNorm(RMSNorm):
    """RMSNorm(x) / √l in layer l."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.at.layer**0.5


class Affine(Part):
    """γ ⊙ f(x) + β."""

    def shapes(self):
        return {"gain": (self.at.size,), "bias": (self.at.size,)}

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float()) * self.learned("gain") + self.learned("bias")

    def inner(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class LayerNorm(Affine):
    """f(x) = (x − mean x) / √(var x + ε)."""

    def inner(self, x: Tensor) -> Tensor:
        return rms(x - x.mean(-1, keepdim=True), self.given.epsilon)


class DyT(Affine):
    """f(x) = tanh(a x)."""

    def shapes(self):
        return {**super().shapes(), "slope": ()}

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.learned("slope") * x)


class Derf(Affine):
    """f(x) = erf(a x + s)."""

    def shapes(self):
        return {**super().shapes(), "slope": (), "shift": ()}

    def inner(self, x: Tensor) -> Tensor:
        return torch.erf(self.learned("slope") * x + self.learned("shift"))


class UnitNorm(Part):
    """radius · x / ‖x‖."""

    def forward(self, x: Tensor) -> Tensor:
        return self.given.radius * unit(x, self.given.epsilon)


class ScaleNorm(Part):
    """g · x / ‖x‖."""

    def shapes(self):
        return {"gain": ()}

    def forward(self, x: Tensor) -> Tensor:
        return self.learned("gain") * unit(x, self.given.epsilon)


class LearnableScale(Part):
    """g · x."""

    def shapes(self):
        return {"gain": ()}

    def forward(self, x: Tensor) -> Tensor:
        return self.learned("gain") * x.float()


class SeeDNorm(Part):
    """(tanh(x · β) α + γ) ⊙ x / RMS(x)."""

    def shapes(self):
        return dict.fromkeys(("alpha", "beta", "gain"), (self.at.size,))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        seen = torch.tanh((x * self.learned("beta")).sum(-1, keepdim=True))
        return (seen * self.learned("alpha") + self.learned("gain")) * rms(x, self.given.epsilon)


class HeadScale(Part):
    """γ_h · v of head h."""

    def shapes(self):
        return {"gain": (self.at.kv_heads,)}

    def forward(self, x: Tensor) -> Tensor:
        return self.learned("gain")[:, None] * x.float()


NORMS: dict[str, type[Part]] = {
    "identity": Identity,
    "rms_norm": RMSNorm,
    "layer_norm": LayerNorm,
    "unit_norm": UnitNorm,
    "scale_norm": ScaleNorm,
    "see_dnorm": SeeDNorm,
    "dyt": DyT,
    "derf": Derf,
    "learnable_scale": LearnableScale,
}
LAYER_NORMS = NORMS | {"depth_scaled_rms_norm": DepthScaledRMSNorm}
