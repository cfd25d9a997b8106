"""All fits for the runs of one architecture, with their intervals and their errors on runs that were held out."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from angpt_jax.errors import UserError
from angpt_jax.laws import bootstrap, loss, optima
from angpt_jax.laws.bootstrap import Interval
from angpt_jax.laws.loss import FIVE, LossLaw
from angpt_jax.laws.optima import LEAST, Curve, Kind, Optima
from angpt_jax.laws.points import Point, column, labels, of_size_and_length, tuned

ISOFLOP = Kind("isoflop", "parameter counts of equal FLOPs", "budgets", local=False)
BATCH = Kind("batch", "batch sizes, all else equal,", "parameter counts", local=True)
LR = Kind("lr", "peak learning rates, all else equal,", "parameter counts", local=True)
RESAMPLED_LAW, RESAMPLED_OPTIMA = 5, 2  # what a resample needs at least: as many points as the law has unknowns


@dataclass(frozen=True)
class Settings:
    """How the bootstrap and the check on unseen runs are made."""

    resamples: int
    confidence: float
    seed: int
    held_out_fraction: float


@dataclass(frozen=True)
class HeldOut:
    """What a fit to the smaller runs says of the largest.

    Args:
        at: compute of the runs, or what the optima belong to
        predicted: loss of the runs, or optima
        measured: the same, seen
    """

    at: np.ndarray
    predicted: np.ndarray
    measured: np.ndarray

    @property
    def error(self) -> float:
        """Mean of |predicted/measured − 1|."""
        return float(np.mean(np.abs(self.predicted / self.measured - 1)))


@dataclass(frozen=True)
class Fitted:
    """A fit.

    Args:
        name: law, isoflop, batch or lr
        fit: what was fitted
        runs: that it was fitted to
        estimates: its numbers by name
        intervals: of those numbers; empty where too few resamples could be fitted
        resamples: that could be fitted
        held_out: None where a fit without the largest runs lacks something
        notes: what a reader must know
    """

    name: str
    fit: LossLaw | Optima
    runs: list[Point]
    estimates: dict[str, float]
    intervals: dict[str, Interval]
    resamples: int
    held_out: HeldOut | None
    notes: list[str] = field(default_factory=list)


def of_loss(points: Sequence[Point], settings: Settings) -> Fitted:
    """L(N, D) of the best setting at each (N, D), with all its seeds."""
    runs = tuned(points)
    fit, notes = _loss_law(runs), []
    notes += [f"{name} ended at the edge of what is searched: the runs do not determine it" for name in fit.on_the_edge]

    def estimate(sample: Sequence[Point]) -> dict[str, float]:
        return _of_law(_loss_law(sample, points=RESAMPLED_LAW, descents=2))

    intervals, resamples = bootstrap.intervals(
        runs, bootstrap.runs, estimate, settings.resamples, settings.confidence, settings.seed
    )
    left_out = bootstrap.largest(labels(column(runs, "flops")), settings.held_out_fraction)
    seen, unseen = ([run for run, out in zip(runs, left_out, strict=True) if out == which] for which in (False, True))
    try:
        predict = _loss_law(seen, points=RESAMPLED_LAW + 1)
    except UserError as error:
        held_out = None
        notes.append(f"not checked on unseen runs: {'; '.join(error.problems)}")
    else:
        predicted = predict(column(unseen, "parameters"), column(unseen, "tokens"))
        held_out = HeldOut(column(unseen, "flops"), predicted, column(unseen, "loss"))
    return Fitted("law", fit, runs, _of_law(fit), intervals, resamples, held_out, notes)


def _loss_law(runs: Sequence[Point], **options: int) -> LossLaw:
    return loss.fit(column(runs, "parameters"), column(runs, "tokens"), column(runs, "loss"), **options)


def _of_law(law: LossLaw) -> dict[str, float]:
    return {name: getattr(law, name) for name in FIVE} | {"a": law.allocation}


def of_isoflop(points: Sequence[Point], settings: Settings) -> Fitted:
    """N_opt ∝ C^a: approach 2 of Hoffmann et al. 2022 (arXiv 2203.15556)."""
    return _of_curves(ISOFLOP, list(budgets(points)), tuned(points), settings)


def of_batch(points: Sequence[Point], settings: Settings) -> Fitted:
    """B_opt ∝ N^b."""
    return _of_curves(BATCH, list(slices(points, "batch_tokens", "peak_lr")), points, settings)


def of_lr(points: Sequence[Point], settings: Settings) -> Fitted:
    """lr_opt ∝ N^c."""
    return _of_curves(LR, list(slices(points, "peak_lr", "batch_tokens")), points, settings)


FITS: dict[str, Callable[[Sequence[Point], Settings], Fitted]] = {
    "law": of_loss,
    "isoflop": of_isoflop,
    "batch": of_batch,
    "lr": of_lr,
}


def budgets(points: Sequence[Point]) -> Iterator[Curve]:
    """Losses against parameters at each compute budget that has several sizes, of the best setting at each size."""
    runs = tuned(points)
    sizes, found = labels(column(runs, "parameters")), labels(column(runs, "flops"))
    for budget in sorted(set(found.tolist())):
        inside = np.flatnonzero(found == budget)
        if len(set(sizes[inside])) < 2:
            continue
        chosen = [runs[place] for place in inside]
        flops = float(np.exp(np.log(column(chosen, "flops")).mean()))
        yield Curve(flops, column(chosen, "parameters"), column(chosen, "loss"), f"{flops:.3g} FLOPs")


def slices(points: Sequence[Point], x: str, equal: str) -> Iterator[Curve]:
    """Losses against `x` of the runs of each (N, D) that agree in all other settings of the optimizer.

    Of several such sets that are enough for a parabola it is the one with the lowest loss; else the largest.
    """
    for group in of_size_and_length(points):
        sets: defaultdict[tuple, list[Point]] = defaultdict(list)
        for point in group:
            sets[getattr(point, equal), point.others].append(point)
        chosen = max(sets.values(), key=lambda runs: _worth(runs, x))
        if len(set(column(chosen, x))) > 1:
            parameters, tokens = column(chosen, "parameters").min(), column(chosen, "tokens").min()
            name = f"{parameters:,.0f} parameters, {tokens:,.0f} tokens"
            yield Curve(float(parameters), column(chosen, x), column(chosen, "loss"), name)


def _worth(runs: Sequence[Point], x: str) -> tuple[int, float]:
    values = column(runs, x)
    means = Curve(0, values, column(runs, "loss"), "").means()[1]
    return min(len(set(values)), LEAST), -float(means.min())


def _of_curves(kind: Kind, curves: Sequence[Curve], points: Sequence[Point], settings: Settings) -> Fitted:
    fit = optima.fit(kind, curves)

    def estimate(sample: Sequence[Curve]) -> dict[str, float]:
        return _of_optima(optima.fit(kind, sample, RESAMPLED_OPTIMA))

    intervals, resamples = bootstrap.intervals(
        curves, bootstrap.curves_and_runs, estimate, settings.resamples, settings.confidence, settings.seed
    )
    at, x = (np.array([getattr(optimum, name) for optimum in fit.optima]) for name in ("at", "x"))
    unseen = bootstrap.largest(at, settings.held_out_fraction)
    held_out, notes = None, [f"not used: {reason}" for reason in fit.left_out]
    if len(set(at[~unseen])) >= LEAST:
        held_out = HeldOut(at[unseen], optima.power_law(at[~unseen], x[~unseen])(at[unseen]), x[unseen])
    else:
        notes.append(f"not checked on unseen optima: needs {LEAST + 1} of them at least, got {len(set(at))}")
    return Fitted(kind.name, fit, list(points), _of_optima(fit), intervals, resamples, held_out, notes)


def _of_optima(fit: Optima) -> dict[str, float]:
    return {"factor": fit.law.factor, "exponent": fit.law.exponent}
