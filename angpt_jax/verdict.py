"""What finished runs say of a contender against the baseline; every number is paired by seed. No JAX."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from angpt_jax.plots.history import History, number
from angpt_jax.speedup import Estimate, Speedup, arithmetic, at_equal_loss, geometric, of_ended_schedules

Runs = Mapping[int, History]  # of one contender and length, by seed


@dataclass(frozen=True)
class Verdict:
    """One contender.

    Args:
        name: of the contender
        place: its number, which decides its colour
        runs: the whole ones that finished, by seed
        loss: last validation loss, nats per token
        bits_per_byte: the same in bits per byte
        step_seconds: median over seeds of the runs' medians
        difference: last loss minus the baseline's
        tokens: speed-up at equal loss in tokens
        time: the same times the baseline's step time over the contender's
        ended: the same in steps where each schedule ends; of the seeds for which the budgets enclose the baseline
        unreached: seeds in which the baseline's last loss was never reached
        not_enclosed: seeds for which the budgets don't enclose it
    """

    name: str
    place: int
    runs: Runs = field(default_factory=dict)
    loss: Estimate = Estimate()
    bits_per_byte: Estimate = Estimate()
    step_seconds: float | None = None
    difference: Estimate = Estimate()
    tokens: Estimate = Estimate()
    time: Estimate = Estimate()
    ended: Estimate = Estimate()
    unreached: tuple[int, ...] = ()
    not_enclosed: tuple[int, ...] = ()


def curve(run: History) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and validation loss of each evaluation."""
    steps, loss = run.curve("val_loss")
    return run.tokens_at(steps), loss


def last_loss(run: History) -> float:
    return float(run.curve("val_loss")[1][-1])


def judged(
    name: str, place: int, runs: Runs, baseline: Runs, budgets: Mapping[int, Runs], steps: int, confidence: float
) -> Verdict:
    """`budgets`: runs of shorter schedules by their steps; `steps`: of the whole ones. Of the baseline itself there
    is nothing to compare: give it no `baseline`."""
    both = [seed for seed in runs if seed in baseline]
    faster = {seed: _speedup(runs[seed], baseline[seed]) for seed in both}
    seconds = {seed: _step_seconds(run) for seed, run in runs.items()}
    ratios = {seed: _step_seconds(baseline[seed]) / seconds[seed] for seed in both}
    ended = _ended(runs, baseline, budgets, steps) if budgets else {}
    known = [value for value in seconds.values() if np.isfinite(value)]
    return Verdict(
        name,
        place,
        runs,
        loss=arithmetic({seed: last_loss(run) for seed, run in runs.items()}, confidence),
        bits_per_byte=arithmetic(_known(runs, lambda run: number(run.facts()["val_bits_per_byte"])), confidence),
        step_seconds=float(np.median(known)) if known else None,
        difference=arithmetic({seed: last_loss(runs[seed]) - last_loss(baseline[seed]) for seed in both}, confidence),
        tokens=geometric({seed: one.value for seed, one in faster.items()}, confidence),
        time=geometric(
            {seed: faster[seed].value * ratio for seed, ratio in ratios.items() if np.isfinite(ratio)}, confidence
        ),
        ended=geometric({seed: value for seed, value in ended.items() if value is not None}, confidence),
        unreached=tuple(seed for seed, one in faster.items() if not one.reached),
        not_enclosed=tuple(seed for seed, value in ended.items() if value is None),
    )


def _known(runs: Runs, of: Callable[[History], float]) -> dict[int, float]:
    values = {seed: of(run) for seed, run in runs.items()}
    return {seed: value for seed, value in values.items() if np.isfinite(value)}


def _step_seconds(run: History) -> float:
    return number(run.facts()["median_step_seconds"])


def _speedup(run: History, baseline: History) -> Speedup:
    (baseline_tokens, baseline_loss), (tokens, loss) = curve(baseline), curve(run)
    return at_equal_loss(baseline_loss, baseline_tokens, loss, tokens)


def _ended(runs: Runs, baseline: Runs, budgets: Mapping[int, Runs], steps: int) -> dict[int, float | None]:
    """Of each seed that has all of its runs."""
    lengths = {**budgets, steps: runs}
    found = {}
    for seed in baseline:
        if all(seed in of_length for of_length in lengths.values()):
            losses = [last_loss(lengths[length][seed]) for length in sorted(lengths)]
            found[seed] = of_ended_schedules(last_loss(baseline[seed]), steps, losses, sorted(lengths))
    return found
