"""Laws are found again in runs that follow them, with noise; what is not enough for a fit is refused by name."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from scaling_runs import BEST_BATCH, BEST_LR, LAW, penalty

from angpt_jax.errors import UserError
from angpt_jax.laws import bootstrap, fits, loss, optima
from angpt_jax.laws.fits import Settings
from angpt_jax.laws.optima import Curve, NoMinimum, Optima
from angpt_jax.laws.points import Point, labels, tuned

SETTINGS = Settings(resamples=30, confidence=0.95, seed=0, held_out_fraction=0.2)
SIZES = np.geomspace(3e5, 1e9, 7)
A_OPT = LAW.beta / (LAW.alpha + LAW.beta)


def point(
    n: float, d: float, value: float | None = None, batch: float = 1e5, lr: float = 1e-3, others: str = ""
) -> Point:
    return Point("run", n, d, 6 * n * d, float(LAW(n, d)) if value is None else value, batch, lr, others)


def grid(noise: float = 0.0, seed: int = 0, sizes: Sequence[float] = tuple(SIZES), law: Callable = LAW) -> list[Point]:
    """Three lengths of each size."""
    random = np.random.default_rng(seed)
    pairs = [(n, ratio * n) for n in sizes for ratio in (5, 20, 80)]
    return [point(n, d, float(law(n, d) * np.exp(noise * random.standard_normal()))) for n, d in pairs]


def refused(make: Callable[..., Any], *arguments: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        make(*arguments)
    return list(caught.value.problems)


def test_a_law_without_noise_is_found_exactly():
    fitted = fits.of_loss(grid(), Settings(2, 0.9, 0, 0.2))
    for name, value in fitted.estimates.items():
        assert value == pytest.approx(A_OPT if name == "a" else getattr(LAW, name), rel=1e-3), name
    assert fitted.held_out is not None and fitted.held_out.error < 1e-5 and fitted.notes == []


@pytest.mark.parametrize("noise, near", [(0.002, 0.02), (0.01, 0.08)])
def test_exponents_are_near_and_within_their_intervals(noise, near):
    fitted = fits.of_loss(grid(noise, seed=1), SETTINGS)
    assert fitted.resamples == SETTINGS.resamples
    for name, true in ("alpha", LAW.alpha), ("beta", LAW.beta), ("a", A_OPT):
        low, high = fitted.intervals[name]
        assert low < true < high and high - low > noise, name
        assert fitted.estimates[name] == pytest.approx(true, abs=near)
    assert fitted.held_out is not None and fitted.held_out.error < 2 * noise + 0.003


def test_intervals_of_one_seed_are_the_same_and_wider_with_more_confidence():
    def of_mean(confidence: float, seed: int) -> tuple[float, float]:
        def estimate(sample: Sequence[float]) -> dict[str, float]:
            return {"mean": float(np.mean(sample))}

        return bootstrap.intervals(np.arange(20.0).tolist(), bootstrap.runs, estimate, 50, confidence, seed)[0]["mean"]

    assert of_mean(0.8, 0) == of_mean(0.8, 0) != of_mean(0.8, 1)
    assert of_mean(0.95, 0)[0] < of_mean(0.8, 0)[0] < of_mean(0.8, 0)[1] < of_mean(0.95, 0)[1]


def test_one_run_that_went_wrong_hardly_moves_the_law():
    """Huber: a squared error would follow it."""
    runs = grid()
    runs[10] = point(runs[10].parameters, runs[10].tokens, 1.2 * runs[10].loss)
    fitted = fits.of_loss(runs, Settings(2, 0.9, 0, 0.2))
    assert fitted.estimates["alpha"] == pytest.approx(LAW.alpha, abs=2e-3)


def test_the_error_on_unseen_runs_tells_a_law_that_breaks():
    def broken(n: float, d: float) -> float:
        return float(LAW(n, d)) * (1.1 if 6 * n * d > 2e20 else 1.0)

    fitted = fits.of_loss(grid(law=broken), Settings(2, 0.9, 0, 0.05))
    assert fitted.held_out is not None and len(fitted.held_out.at) == 1
    assert fitted.held_out.error > 0.08
    sound = fits.of_loss(grid(), Settings(2, 0.9, 0, 0.05)).held_out
    assert sound is not None and sound.error < 1e-5


def test_of_each_size_and_length_the_best_setting_counts_with_all_its_seeds():
    best = [point(1e6, 1e8, value, lr=2e-3) for value in (3.0, 3.2)]
    others = [point(1e6, 1.02e8, 2.9, lr=1e-3), point(1e6, 1e8, 3.9, lr=1e-3), point(1e6, 1e8, 3.15, others="x")]
    far = point(1e6, 2e8, 9.0)
    assert tuned([*others, *best, far]) == [*best, far]


def test_values_within_five_percent_count_as_one():
    assert labels([1.0, 100.0, 104.9, 1.04, 106.0]).tolist() == [0, 1, 1, 0, 2]


def arrays(*pairs: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    n, d = np.array(pairs, float).T
    return n, d


LACKS = [
    (
        [(1e6, d) for d in (1e7, 2e7, 4e7, 8e7, 16e7, 32e7, 64e7)],
        ["law: needs runs of at least 3 parameter counts, got 1 (1,000,000)"],
    ),
    (
        [(n, d) for n in (1e6, 2e6) for d in (1e7, 2e7)],
        [
            "law: needs runs of at least 3 parameter counts, got 2 (1,000,000 and 2,000,000)",
            "law: needs runs of at least 3 token counts, got 2 (10,000,000 and 20,000,000)",
            "law: needs at least 7 pairs (parameters, tokens) for its 5 unknowns, got 4",
        ],
    ),
    (
        [(n, 20 * n) for n in SIZES],
        [
            "law: needs tokens that are not tied to parameters (correlation of their logs at most 0.99), got 1.000; "
            "add runs of the same sizes that are shorter or longer"
        ],
    ),
]


@pytest.mark.parametrize("pairs, lines", LACKS, ids=["one size", "few", "tied"])
def test_too_few_runs_are_refused_and_what_is_missing_is_said(pairs, lines):
    n, d = arrays(*pairs)
    assert refused(loss.fit, n, d, np.ones_like(n)) == lines


def test_an_exponent_that_the_runs_leave_open_is_said():
    fitted = fits.of_loss(grid(law=lambda n, d: 2 + 400 / n**0.34), Settings(2, 0.9, 0, 0.2))
    law = fitted.fit
    assert isinstance(law, loss.LossLaw)
    assert law.alpha == pytest.approx(0.34, abs=0.02)
    edge = loss.LossLaw(1, 1, 1, 0.3, 3.0)
    assert edge.on_the_edge == ["beta"] and law(1e6, 1e6) == pytest.approx(2 + 400 / 1e6**0.34, rel=1e-3)


def budget(flops: float, noise: float, random: np.random.Generator) -> list[Point]:
    """Seven sizes around the best one."""
    best = (LAW.alpha * LAW.A / (LAW.beta * LAW.B) * (flops / 6) ** LAW.beta) ** (1 / (LAW.alpha + LAW.beta))
    sizes = best * np.geomspace(1 / 3, 3, 7)
    values = [float(LAW(n, flops / 6 / n) * np.exp(noise * random.standard_normal())) for n in sizes]
    return [point(n, flops / 6 / n, value) for n, value in zip(sizes, values, strict=True)]


def test_minima_at_equal_flops_grow_as_the_law_says():
    random = np.random.default_rng(0)
    points = [run for flops in (1e17, 1e18, 1e19, 1e20, 1e21) for run in budget(flops, 0.0005, random)]
    fitted = fits.of_isoflop(points, SETTINGS)
    assert isinstance(fitted.fit, Optima) and len(fitted.fit.optima) == 5
    assert fitted.estimates["exponent"] == pytest.approx(A_OPT, abs=0.02)
    low, high = fitted.intervals["exponent"]
    assert low < A_OPT < high and fitted.held_out is not None and fitted.held_out.error < 0.15


def sweep(x: str, sizes: Iterable[float], noise: float = 0.0005) -> list[Point]:
    """Batch sizes, or learning rates, at their true optimum of the other."""
    random, found = np.random.default_rng(0), []
    for n in sizes:
        batch, lr = 8192 * (n / 1e6) ** BEST_BATCH, 1e-3 * (n / 1e6) ** BEST_LR
        for factor in 2.0 ** np.array([-3.3, -2.2, -0.8, 0.2, 1.3, 2.6]):
            b, rate = (batch * factor, lr) if x == "batch" else (batch, lr * factor)
            value = float(LAW(n, 20 * n)) + penalty(n, b, rate) + noise * random.standard_normal()
            found.append(point(n, 20 * n, value, b, rate))
    return found


@pytest.mark.parametrize("x, fit, true", [("batch", fits.of_batch, BEST_BATCH), ("lr", fits.of_lr, BEST_LR)])
def test_the_best_batch_size_and_learning_rate_grow_as_they_should(x, fit, true):
    fitted = fit(sweep(x, SIZES), SETTINGS)
    assert fitted.estimates["exponent"] == pytest.approx(true, abs=0.02)
    low, high = fitted.intervals["exponent"]
    assert low < true < high
    assert fitted.fit.law(1e6) == pytest.approx(8192 if x == "batch" else 1e-3, rel=0.05)
    assert fitted.held_out is not None and fitted.held_out.error < 0.1


def test_only_runs_that_agree_in_all_else_are_compared():
    """A cross: learning rates at one batch size, batch sizes at one learning rate; and runs with another decay."""
    n, d = 1e6, 2e7
    rates = [point(n, d, 3 + abs(k) / 10, 8192, 1e-3 * 2.0**k) for k in (-2, -1, 0, 1, 2)]
    batches = [point(n, d, 2.9 + abs(k) / 10, 8192 * 2.0**k, 2e-3) for k in (-1, 1)]
    other = [point(n, d, 2.0, 8192, 1e-3 * 2.0**k, others="decay") for k in (0, 1)]
    (curve,) = fits.slices([*rates, *batches, *other], "peak_lr", "batch_tokens")
    assert sorted(curve.x) == [run.peak_lr for run in rates]
    (curve,) = fits.slices([*rates, *batches], "batch_tokens", "peak_lr")
    assert sorted(curve.x) == [4096, 8192, 16384]


def curve(*loss_values: float) -> Curve:
    return Curve(1e6, 2.0 ** np.arange(len(loss_values)), np.array(loss_values), "1,000,000 parameters")


@pytest.mark.parametrize(
    "losses, local, reason",
    [
        ((3, 2), True, "2 of the 3 values that a parabola needs"),
        ((3, 2, 1), True, "the lowest loss is at the edge of its values, at 4"),
        ((1, 2, 3), True, "the lowest loss is at the edge of its values, at 1"),
        ((1, 2, 1), False, "its parabola opens downward"),
        ((9, 4, 1.1), False, "its parabola is lowest outside of its values, 1 to 4"),
    ],
)
def test_a_curve_without_a_minimum_is_not_used(losses, local, reason):
    with pytest.raises(NoMinimum) as caught:
        optima.minimum(curve(*losses), local)
    assert str(caught.value) == reason


def test_seeds_are_averaged_and_the_parabola_is_that_of_the_means():
    both = Curve(1, np.array([1.0, 1, 2, 4]), np.array([2.0, 4, 1, 3]), "")
    assert [list(part) for part in both.means()] == [[1, 2, 4], [3, 1, 3], [2, 1, 1]]
    found = optima.minimum(both, local=True)
    assert (found.x, found.loss) == (pytest.approx(2), pytest.approx(1))
    assert found(np.array([1.0, 4.0])) == pytest.approx([3, 3])


def test_a_power_law_with_too_few_minima_says_which_curves_were_not_used():
    assert refused(fits.of_lr, grid(), SETTINGS) == [
        "lr: needs minima over peak learning rates, all else equal, at 3 parameter counts at least, got 0, as no runs "
        "differ in that alone"
    ]
    runs = [*sweep("batch", [1e6, 2e6]), *(point(4e6, 8e7, 3 - b / 1e6, b) for b in (1e5, 2e5, 4e5))]
    assert refused(fits.of_batch, runs, SETTINGS) == [
        "batch: needs minima over batch sizes, all else equal, at 3 parameter counts at least, got 2; not used: "
        "4,000,000 parameters, 80,000,000 tokens: the lowest loss is at the edge of its values, at 4e+05"
    ]
    assert refused(fits.of_isoflop, budget(1e18, 0, np.random.default_rng(0)), SETTINGS) == [
        "isoflop: needs minima over parameter counts of equal FLOPs at 3 budgets at least, got 1"
    ]


def test_the_power_law_of_three_minima_is_not_checked_on_unseen_ones():
    fitted = fits.of_lr(sweep("lr", [1e6, 4e6, 16e6]), SETTINGS)
    assert fitted.held_out is None
    assert fitted.notes == ["not checked on unseen optima: needs 4 of them at least, got 3"]


def test_intervals_are_not_given_where_most_resamples_fail():
    def never(sample: Sequence[int]) -> dict[str, float]:
        raise UserError("law: needs more")

    assert bootstrap.intervals([1, 2], bootstrap.runs, never, 10, 0.9, 0) == ({}, 0)


def test_the_largest_are_held_out_at_least_one():
    assert bootstrap.largest(np.array([3, 1, 2, 3]), 0.2).tolist() == [True, False, False, True]
    assert bootstrap.largest(np.arange(10), 0.2).tolist() == [False] * 8 + [True] * 2
