"""How sure a fit is: intervals from resampled runs, and what it says of runs that it has not seen."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from angpt_jax.errors import UserError
from angpt_jax.laws.optima import Curve

T = TypeVar("T")
Interval = tuple[float, float]
DRAWS = 10  # for one resample that can be fitted, before the rest is given up


def intervals(
    items: Sequence[T],
    draw: Callable[[np.random.Generator, Sequence[T]], Sequence[T]],
    estimate: Callable[[Sequence[T]], dict[str, float]],
    resamples: int,
    confidence: float,
    seed: int,
) -> tuple[dict[str, Interval], int]:
    """Percentile intervals of all that `estimate` gives, and of how many resamples; none if half of them failed.

    A draw that can't be fitted (`estimate` raises a UserError) is drawn again.
    """
    random, found = np.random.default_rng(seed), []
    for _ in range(DRAWS * resamples):
        if len(found) == resamples:
            break
        try:
            found.append(estimate(draw(random, items)))
        except UserError:
            continue
    if 2 * len(found) < resamples:
        return {}, len(found)
    tail = (1 - confidence) / 2
    return {name: _percentiles([one[name] for one in found], tail) for name in found[0]}, len(found)


def _percentiles(values: list[float], tail: float) -> Interval:
    low, high = np.quantile(values, [tail, 1 - tail]).tolist()
    return low, high


def runs(random: np.random.Generator, items: Sequence[T]) -> list[T]:
    """As many of them, with replacement."""
    return [items[place] for place in random.integers(len(items), size=len(items))]


def curves_and_runs(random: np.random.Generator, items: Sequence[Curve]) -> list[Curve]:
    """As many curves with replacement, and in each as many of its runs."""
    drawn = []
    for curve in runs(random, items):
        places = random.integers(len(curve.x), size=len(curve.x))
        drawn.append(Curve(curve.at, curve.x[places], curve.loss[places], curve.name))
    return drawn


def largest(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Which are held out: those of the largest sizes, that share of all different ones and at least one."""
    different = np.unique(sizes)
    return sizes >= different[-max(1, round(fraction * len(different)))]
