"""Speed-up at equal loss, and intervals over seeds: pure functions of arrays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import stdtrit  # Student's quantile; scipy.stats takes a second to load


@dataclass(frozen=True)
class Estimate:
    """A number with its spread over seeds.

    Args:
        mean: null without any seed
        low: lower end of the interval; null with fewer than two seeds
        high: upper end of it
        seeds: the number of each seed
    """

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: dict[int, float] = field(default_factory=dict)


def arithmetic(seeds: Mapping[int, float], confidence: float) -> Estimate:
    """Mean x̄ ± t · s/√n, where t is Student's quantile for n − 1 degrees of freedom."""
    values, count = np.array(list(seeds.values()), float), len(seeds)
    if not count:
        return Estimate()
    mean = float(values.mean())
    if count == 1:
        return Estimate(mean, seeds=dict(seeds))
    half = float(stdtrit(count - 1, (1 + confidence) / 2) * values.std(ddof=1) / math.sqrt(count))
    return Estimate(mean, mean - half, mean + half, dict(seeds))


def geometric(seeds: Mapping[int, float], confidence: float) -> Estimate:
    """The same of the logarithms: for ratios, so that twice as fast and half as fast are equally far from 1."""
    logs = arithmetic({seed: math.log(value) for seed, value in seeds.items()}, confidence)
    mean, low, high = (None if log is None else math.exp(log) for log in (logs.mean, logs.low, logs.high))
    return Estimate(mean, low, high, dict(seeds))


def tokens_to(loss: np.ndarray, tokens: np.ndarray, target: float) -> float | None:
    """Tokens until the lowest loss so far is at most `target`; linear between evaluations, the first one's where that
    reaches it already, null where none does."""
    lowest = np.minimum.accumulate(loss)
    reached = np.flatnonzero(lowest <= target)
    if not len(reached):
        return None
    at = int(reached[0])
    if at == 0:
        return float(tokens[0])
    share = (lowest[at - 1] - target) / (lowest[at - 1] - lowest[at])
    return float(tokens[at - 1] + share * (tokens[at] - tokens[at - 1]))


@dataclass(frozen=True)
class Speedup:
    """How much faster a run was than the baseline.

    Args:
        value: a ratio of tokens, > 1 is faster
        reached: whether the run reached the baseline's last loss
    """

    value: float
    reached: bool


def at_equal_loss(
    baseline_loss: np.ndarray, baseline_tokens: np.ndarray, loss: np.ndarray, tokens: np.ndarray
) -> Speedup:
    """The baseline's tokens over those that the other needed for the baseline's last loss.

    Where it never got there, the other way round: tokens that the baseline needed for the other's last loss over all
    tokens of the other. So there is a number for every seed, and a slow run counts with how slow it was.
    """
    needed = tokens_to(loss, tokens, float(baseline_loss[-1]))
    if needed is not None:
        return Speedup(float(baseline_tokens[-1]) / needed, True)
    needed = tokens_to(baseline_loss, baseline_tokens, float(loss[-1]))
    assert needed is not None  # the baseline's last loss is below all of the other's
    return Speedup(needed / float(tokens[-1]), False)


def of_ended_schedules(
    baseline_loss: float, baseline_steps: int, losses: Sequence[float], steps: Sequence[int]
) -> float | None:
    """The baseline's steps over those of a schedule at whose end the other has the baseline's last loss.

    `losses` are the last ones of runs of so many `steps`, ascending; between them the loss is linear in log steps. Null
    where they don't enclose the baseline's.
    """
    if losses[0] < baseline_loss:
        return None
    log_steps = tokens_to(np.array(losses), np.log(steps), baseline_loss)
    return None if log_steps is None else baseline_steps / math.exp(log_steps)
