"""Which values of a small grid serve a contender best, by training loss alone, and how far from them is still good."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from angpt_jax.form import flatten
from angpt_jax.metrics import Record
from angpt_jax.plots.history import number

SEED = 2**31 - 1  # of tuning runs; of no reported one, however many there will be, so that more need no new tuning
WITHIN = 0.02  # of the best score: what tolerance means
LAST = 0.1  # share of the steps whose losses are averaged
Values = dict[str, Any]


@dataclass(frozen=True)
class Tolerance:
    """The range of one setting around the best value in which the score is within WITHIN of the best.

    Args:
        low: lower end
        high: upper end
        ends: whether it ends inside the grid, below and above; else it may be wider
    """

    low: float
    high: float
    ends: tuple[bool, bool]

    @property
    def octaves(self) -> float:
        return math.log2(self.high / self.low)


@dataclass(frozen=True)
class Tuning:
    """The scores of a contender.

    Args:
        grid: values that were tried
        scores: of each; infinite where training diverged or failed
        chosen: the values of the smallest score; null where none is finite
        at_edge: keys whose chosen number is the smallest or the largest of its list
        key: the setting that `tolerance` is about; null without one that has several numbers
        tolerance: of that setting
    """

    grid: list[Values]
    scores: list[float]
    chosen: Values | None
    at_edge: list[str]
    key: str | None
    tolerance: Tolerance | None

    def profile(self) -> tuple[np.ndarray, np.ndarray]:
        """The values of `key`, ascending, and the best score with each."""
        best: dict[float, float] = {}
        for values, score in zip(self.grid, self.scores, strict=True) if self.key else ():
            place = values[self.key or ""]
            best[place] = min(score, best.get(place, math.inf))
        places = sorted(best)
        return np.array(places, float), np.array([best[place] for place in places], float)


def lists(over: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key, however the mapping was nested."""
    return {".".join(path): values for path, values in flatten(dict(over)) if path}


def grid(over: Mapping[str, Sequence[Any]]) -> list[Values]:
    """Every combination of the lists."""
    return [dict(zip(over, values, strict=True)) for values in product(*over.values())]


def score(records: Sequence[Record], steps: int) -> float:
    """Mean training loss of the last tenth of the steps; infinite if one of them is not finite.

    Before an epoch is over those batches had not been seen when their loss was taken; the held-out text is not used.
    """
    losses = [number(record["loss"]) for record in records if "loss" in record and record["step"] > (1 - LAST) * steps]
    mean = float(np.mean(losses)) if losses else math.inf
    return mean if math.isfinite(mean) else math.inf


def choose(over: Mapping[str, Sequence[Any]], scores: Sequence[float]) -> Tuning:
    """What follows from the scores of `grid(over)`."""
    tried, scores = grid(over), list(scores)
    numbers = {key: values for key, values in over.items() if len(values) > 1 and all(map(_is_positive, values))}
    key = next(iter(numbers), None)
    if not any(map(math.isfinite, scores)):
        return Tuning(tried, scores, None, [], key, None)
    chosen = tried[int(np.argmin(scores))]
    edges = [name for name, values in numbers.items() if chosen[name] in (min(values), max(values))]
    found = Tuning(tried, scores, chosen, edges, key, None)
    return Tuning(tried, scores, chosen, edges, key, tolerance(*found.profile()) if key else None)


def _is_positive(value: Any) -> bool:
    return number(value) > 0


def tolerance(places: np.ndarray, scores: np.ndarray) -> Tolerance:
    """Around the best of `places`, ascending; the score is linear in log place between them, and nothing is taken for
    good on the way to an infinite one."""
    best, logs = int(np.argmin(scores)), np.log(places)
    limit = scores[best] * (1 + WITHIN)

    def end(outwards: int) -> tuple[float, bool]:
        inside = best
        while 0 <= (outside := inside + outwards) < len(places):
            if scores[outside] > limit:
                share = (limit - scores[inside]) / (scores[outside] - scores[inside])  # 0 beside an infinite one
                return float(np.exp(logs[inside] + share * (logs[outside] - logs[inside]))), True
            inside = outside
        return float(places[inside]), False

    (low, ends_below), (high, ends_above) = end(-1), end(1)
    return Tolerance(low, high, (ends_below, ends_above))
