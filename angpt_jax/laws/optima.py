"""Where a loss is lowest, and how that grows: y_opt = k · x^c."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from angpt_jax.errors import UserError

LEAST = 3  # runs of a parabola, which has three coefficients; optima of a power law, one more than it has unknowns


class NoMinimum(Exception):
    """Says why a curve has none that can be used."""


@dataclass(frozen=True)
class Kind:
    """What is fitted.

    Args:
        name: of the fit
        over: what the runs of a curve differ in
        at: what they share, and the optimum depends on
        local: the parabola goes through the lowest point and its two neighbours, not through all points
    """

    name: str
    over: str
    at: str
    local: bool


@dataclass(frozen=True)
class Curve:
    """Losses of runs that differ in `x`, a value for each run, and in seeds; `at`: what they share."""

    at: float
    x: np.ndarray
    loss: np.ndarray
    name: str

    def means(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each x once, the mean loss there, and of how many runs."""
        x, places, counts = np.unique(self.x, return_inverse=True, return_counts=True)
        return x, np.bincount(places, self.loss) / counts, counts


@dataclass(frozen=True)
class Optimum:
    """The minimum of a parabola c₂ t² + c₁ t + c₀ in t = log x − middle.

    Args:
        at: what it belongs to
        x: where it is
        loss: how low
        parabola: c₂, c₁, c₀
        middle: of log x
        ends: the least and the largest x that the parabola goes through
    """

    at: float
    x: float
    loss: float
    parabola: tuple[float, float, float]
    middle: float
    ends: tuple[float, float]

    def __call__(self, x: Any) -> Any:
        """The parabola."""
        return np.polyval(self.parabola, np.log(x) - self.middle)


@dataclass(frozen=True)
class PowerLaw:
    """y = factor · x^exponent."""

    factor: float
    exponent: float

    def __call__(self, x: Any) -> Any:
        return self.factor * np.power(x, self.exponent)


@dataclass(frozen=True)
class Optima:
    """A power law through the optima of curves, and why other curves have none."""

    kind: Kind
    law: PowerLaw
    curves: tuple[Curve, ...]
    optima: tuple[Optimum, ...]
    left_out: tuple[str, ...]


def minimum(curve: Curve, local: bool) -> Optimum:
    """The minimum of the parabola in log x, by least squares over the runs."""
    x, loss, counts = curve.means()
    if len(x) < LEAST:
        raise NoMinimum(f"{len(x)} of the {LEAST} values that a parabola needs")
    if local:
        lowest = int(np.argmin(loss))
        if lowest in (0, len(x) - 1):
            raise NoMinimum(f"the lowest loss is at the edge of its values, at {x[lowest]:.4g}")
        x, loss, counts = (values[lowest - 1 : lowest + 2] for values in (x, loss, counts))
    middle = float(np.log(x).mean())
    second, first, zeroth = np.polyfit(np.log(x) - middle, loss, 2, w=np.sqrt(counts)).tolist()
    if second <= 0:
        raise NoMinimum("its parabola opens downward")
    place = float(np.exp(middle - first / (2 * second)))
    if not x[0] <= place <= x[-1]:
        raise NoMinimum(f"its parabola is lowest outside of its values, {x[0]:.4g} to {x[-1]:.4g}")
    parabola, ends = (second, first, zeroth), (float(x[0]), float(x[-1]))
    return Optimum(curve.at, place, zeroth - first**2 / (4 * second), parabola, middle, ends)


def power_law(x: Any, y: Any) -> PowerLaw:
    """Least squares in logs."""
    logs, middle = np.log(x), np.log(x).mean()
    exponent, height = np.polyfit(logs - middle, np.log(y), 1).tolist()
    return PowerLaw(float(np.exp(height - exponent * middle)), exponent)


def fit(kind: Kind, curves: Sequence[Curve], least: int = LEAST) -> Optima:
    """The power law through the minima of `curves`; a UserError says what is missing."""
    used: list[Curve] = []
    optima: list[Optimum] = []
    left_out: list[str] = []
    for curve in curves:
        try:
            optima.append(minimum(curve, kind.local))
            used.append(curve)
        except NoMinimum as reason:
            left_out.append(f"{curve.name}: {reason}")
    count = len({optimum.at for optimum in optima})
    if count < least:
        seen = "" if curves else ", as no runs differ in that alone"
        seen += f"; not used: {'; '.join(left_out)}" if left_out else ""
        raise UserError(f"{kind.name}: needs minima over {kind.over} at {least} {kind.at} at least, got {count}{seen}")
    law = power_law([optimum.at for optimum in optima], [optimum.x for optimum in optima])
    return Optima(kind, law, tuple(used), tuple(optima), tuple(left_out))
