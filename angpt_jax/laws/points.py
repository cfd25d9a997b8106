"""Finished runs as points (N, D, C, loss), and which of them belong together."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

SAME = 0.05  # parameter counts, token counts and FLOPs that differ by less count as equal: steps are whole numbers


@dataclass(frozen=True)
class Point:
    """A finished run.

    Args:
        run: its directory
        parameters: N
        tokens: D, all that it was trained on
        flops: C, all of its training
        loss: validation loss at its end, nats per token
        batch_tokens: tokens of an optimizer step
        peak_lr: highest learning rate of its schedule
        others: the other settings of its optimizer, as text that can be compared
    """

    run: str
    parameters: float
    tokens: float
    flops: float
    loss: float
    batch_tokens: float
    peak_lr: float
    others: str = ""


def labels(values: Iterable[float]) -> np.ndarray:
    """A number for each value, in their order of size; values within `SAME` of the least of a group share it."""
    found = np.asarray(list(values), float)
    numbers = np.zeros(len(found), int)
    least, label = -np.inf, -1
    for place in np.argsort(found, kind="stable"):
        if found[place] > least * (1 + SAME) or label < 0:
            least, label = found[place], label + 1
        numbers[place] = label
    return numbers


def of_size_and_length(points: Sequence[Point]) -> list[list[Point]]:
    """The runs of each (N, D), small N first."""
    groups: defaultdict[tuple[int, int], list[Point]] = defaultdict(list)
    sizes, lengths = labels(p.parameters for p in points), labels(p.tokens for p in points)
    for size, length, point in zip(sizes.tolist(), lengths.tolist(), points, strict=True):
        groups[size, length].append(point)
    return [groups[key] for key in sorted(groups)]


def tuned(points: Sequence[Point]) -> list[Point]:
    """Of each (N, D) the runs, all seeds, of the setting (batch size, learning rate, …) with the lowest mean loss."""
    kept: list[Point] = []
    for group in of_size_and_length(points):
        settings: defaultdict[tuple, list[Point]] = defaultdict(list)
        for point in group:
            settings[point.batch_tokens, point.peak_lr, point.others].append(point)
        kept += min(settings.values(), key=lambda runs: float(np.mean([run.loss for run in runs])))
    return kept


def column(points: Iterable[Point], name: str) -> np.ndarray:
    """One field of all points."""
    return np.array([getattr(point, name) for point in points], float)
