"""The constants ν that stand where norm layers were: Python floats, known when the model is built.

A row of W (a vector that meets the input) has norm at most 1, so E‖Wx‖² = out/in for a unit x, and
ν = √(in/out) brings a linear map back to norm 1. Source: anGPT (arXiv 2505.22014), section 3.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Nu:
    """One factor per linear map and one for the activation. 1.0 is "no factor": XLA drops the multiplication."""

    query: float = 1.0
    key: float = 1.0
    value: float = 1.0
    attention_out: float = 1.0
    up: float = 1.0
    gate: float = 1.0
    down: float = 1.0
    activation: float = 1.0


@dataclass(frozen=True)
class Activation:
    """One non-linearity twice: for traced arrays, and for the float64 quadrature of its ν; `homogeneous`: a factor
    c > 0 in front of it comes out as a power of c."""

    traced: Callable[[Array], Array]
    exact: Callable[[np.ndarray], np.ndarray]
    homogeneous: bool = False


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(jax.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "gelu": Activation(jax.nn.gelu, lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    "relu": Activation(jax.nn.relu, lambda x: np.maximum(x, 0), homogeneous=True),
    "relu_squared": Activation(lambda x: jax.nn.relu(x) ** 2, lambda x: np.maximum(x, 0) ** 2, homogeneous=True),
}


def activation_nu(activation: str, input_std: float) -> float:
    """1/√E[f(s·g)²] for g ~ N(0, 1) and s = input_std, by Gauss–Hermite quadrature (exact to about 1e-4 at a kink).

    With a gate input of std s = √(D/F), u ⊙ f(√D·z) has norm 1 after this factor (arXiv 2505.22014, appendix A).
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(160)
    mean_square = (weights * ACTIVATIONS[activation].exact(input_std * nodes) ** 2).sum() / weights.sum()
    return 1.0 / math.sqrt(float(mean_square))


def linear_nu(inputs: int, outputs: int) -> float:
    """√(in/out): the factor of a linear map with unit rows."""
    return math.sqrt(inputs / outputs)


def lerp_nu(alpha: float) -> float:
    """ν(α) = 1/√(α² + (1−α)²): the factor of h + α(x − h) with independent unit h and x (eq. 8)."""
    return 1.0 / math.sqrt(alpha**2 + (1 - alpha) ** 2)


def approximate_nu(
    width: int, heads: int, feed_forward: int, activation: str = "silu", inputs: tuple[str, ...] = ("up", "gate")
) -> Nu:
    """The ν of anGPT: every linear map and the activation keep unit vectors at norm 1 in the mean.

    A head maps D → K; the output projection sees H unit heads side by side (norm √H) and maps D → D. `inputs` are the
    maps that feed the activation: without a gate, ‖f(√D·u)‖² is F times the mean square that the gated u ⊙ f(√D·z) has.
    """
    head_width = width // heads
    to_head = linear_nu(width, head_width)
    to_feed_forward = linear_nu(width, feed_forward)
    gated = activation_nu(activation, input_std=math.sqrt(width / feed_forward))
    return Nu(
        query=to_head,
        key=to_head,
        value=to_head,
        attention_out=math.sqrt(head_width / width),
        up=to_feed_forward,
        gate=to_feed_forward,
        down=linear_nu(feed_forward, width),
        activation=gated if "gate" in inputs else gated / math.sqrt(feed_forward),
    )
