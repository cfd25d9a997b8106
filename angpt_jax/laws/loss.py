"""L(N, D) = E + A/N^α + B/D^β, fitted to the losses of runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy.optimize import minimize, nnls

from angpt_jax.errors import UserError
from angpt_jax.laws.points import labels

DELTA = 1e-3  # of the Huber loss, as in the source
VALUES = 3  # parameter counts, and token counts: two would leave α or β free beside E
POINTS = 7  # two more than the law has parameters, so that there is something left to judge it by
TIED = 0.99  # correlation of log N and log D beyond which their two terms can't be told apart
EXPONENTS = (0.05, 0.2, 0.4, 0.7, 1.2)  # starts of α and of β: all pairs of them
DESCENTS = 9  # from the best of those 25 starts
RANGE = (0.01, 3.0)  # of α and β
PRECISION = {"maxiter": 500, "ftol": 1e-9}
FIVE = ("E", "A", "B", "alpha", "beta")


@dataclass(frozen=True)
class LossLaw:
    """L(N, D) = E + A/N^α + B/D^β."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __call__(self, parameters: Any, tokens: Any) -> Any:
        """The loss, nats per token."""
        return self.E + self.A * np.power(parameters, -self.alpha) + self.B * np.power(tokens, -self.beta)

    @property
    def allocation(self) -> float:
        """a of N_opt ∝ C^a where C ∝ N·D: β/(α + β)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def on_the_edge(self) -> list[str]:
        """The exponents that ended at the edge of their range, which the runs don't determine."""
        near = {name: [abs(getattr(self, name) / edge - 1) < 1e-3 for edge in RANGE] for name in ("alpha", "beta")}
        return [name for name, edges in near.items() if any(edges)]


def missing(parameters: np.ndarray, tokens: np.ndarray, points: int = POINTS) -> Iterator[str]:
    """What the fit lacks; `points`: how many different (N, D) it wants."""
    sizes, lengths = labels(parameters), labels(tokens)
    for name, values, found in ("parameter", parameters, sizes), ("token", tokens, lengths):
        if (count := len(set(found))) < VALUES:
            yield f"law: needs runs of at least {VALUES} {name} counts, got {count}{_listed(values, found)}"
    pairs = set(zip(sizes.tolist(), lengths.tolist(), strict=True))
    if len(pairs) < points:
        yield f"law: needs at least {points} pairs (parameters, tokens) for its 5 unknowns, got {len(pairs)}"
    if len(set(sizes)) > 1 and len(set(lengths)) > 1:
        correlation = np.corrcoef(np.log(parameters), np.log(tokens))[0, 1]
        if abs(correlation) > TIED:
            yield (
                f"law: needs tokens that are not tied to parameters (correlation of their logs at most {TIED}), got "
                f"{correlation:.3f}; add runs of the same sizes that are shorter or longer"
            )


def _listed(values: np.ndarray, found: np.ndarray) -> str:
    firsts = [f"{values[found == label].min():,.0f}" for label in sorted(set(found))]
    return f" ({' and '.join(firsts)})" if firsts else ""


def fit(
    parameters: np.ndarray,
    tokens: np.ndarray,
    loss: np.ndarray,
    points: int = POINTS,
    descents: int = DESCENTS,
) -> LossLaw:
    """The law with the least Σ Huber(log L̂ − log L); a UserError says what is missing.

    Approach 3 of Hoffmann et al. 2022 (arXiv 2203.15556): log L̂ is the log-sum-exp of log E, log A − α log N and
    log B − β log D, and a quasi-Newton method descends from many starts. Ours: the starts are pairs of exponents, whose
    E, A and B are those of non-negative least squares, and the best `descents` of them are taken; N and D count in
    units of their geometric means; the Huber losses are summed, since a descent stops early at a mean of such small
    numbers (Besiroglu et al. 2024, arXiv 2404.10102); SLSQP descends, in a twentieth of the time of L-BFGS-B.
    """
    problems = list(missing(parameters, tokens, points))
    if problems:
        raise UserError(*problems)
    middle = np.log(parameters).mean(), np.log(tokens).mean()
    logs = np.log(parameters) - middle[0], np.log(tokens) - middle[1]
    target = np.log(loss)
    lowest, highest = target.min() - 9, target.max() + 1
    bounds = [(lowest, highest)] * 3 + [RANGE] * 2
    starts = [_start(alpha, beta, *logs, loss, lowest) for alpha, beta in product(EXPONENTS, EXPONENTS)]
    starts.sort(key=lambda start: _objective(start, *logs, target)[0])
    ends = [
        minimize(_objective, start, (*logs, target), "SLSQP", jac=True, bounds=bounds, options=PRECISION)
        for start in starts[:descents]
    ]
    e, a, b, alpha, beta = min(ends, key=lambda end: end.fun).x.tolist()
    E, A, B = np.exp([e, a + alpha * middle[0], b + beta * middle[1]]).tolist()
    return LossLaw(E, A, B, alpha, beta)


def _start(alpha: float, beta: float, n: np.ndarray, d: np.ndarray, loss: np.ndarray, lowest: float) -> np.ndarray:
    terms = np.stack([np.ones_like(n), np.exp(-alpha * n), np.exp(-beta * d)], axis=1)
    factors = nnls(terms / loss[:, None], np.ones_like(loss))[0]
    return np.array([*np.log(np.maximum(factors, np.exp(lowest + 1))), alpha, beta])


def _objective(x: np.ndarray, n: np.ndarray, d: np.ndarray, target: np.ndarray) -> tuple[float, np.ndarray]:
    """Σ Huber(residual)/δ and its gradient; n and d are logs."""
    e, a, b, alpha, beta = x
    terms = np.stack([np.full_like(n, e), a - alpha * n, b - beta * d])
    predicted = np.logaddexp.reduce(terms, axis=0)
    residual = predicted - target
    size = np.abs(residual)
    value = np.where(size <= DELTA, residual**2 / (2 * DELTA), size - DELTA / 2).sum()
    slopes = np.clip(residual / DELTA, -1, 1) * np.exp(terms - predicted)
    return float(value), np.array([*slopes.sum(axis=1), -(slopes[1] * n).sum(), -(slopes[2] * d).sum()])
