"""The largest batch that fits, with few measurements: each is a compilation."""

import math
from collections.abc import Callable

MOST_COMPILES = 6
CLOSE = 1.01  # a batch that is larger by no more than this is not worth another one


def search(
    first: tuple[int, int, bool], limit: int, measure: Callable[[int], tuple[int | None, bool]]
) -> tuple[int, int]:
    """The largest number of units that fits (0: not even one), and how many times it was measured.

    Memory is close to linear in the batch: a line through the first two measurements says where the limit is, a third
    checks it. While it is wrong, a line through the two nearest ones is taken, or the middle where that can't be. The
    search ends where no more than CLOSE could be gained, or after MOST_COMPILES.
    """
    known: dict[int, tuple[int, bool]] = {first[0]: first[1:]}
    other = first[0] * 2 if first[2] else max(1, first[0] // 2)
    for _ in range(MOST_COMPILES):
        if other in known:
            break
        peak, fit = measure(other)
        if peak is None:
            break
        known[other] = (peak, fit)
        fitting = max((units for units, (_, fit) in known.items() if fit), default=0)
        too_many = min((units for units, (_, fit) in known.items() if not fit), default=None)
        guess = _crossing(known, limit)
        if too_many is not None and guess >= too_many:
            guess = (fitting + too_many) // 2
        if 0 < fitting <= guess <= fitting * CLOSE:
            break
        other = max(guess, fitting, 1)
    return max((units for units, (_, fit) in known.items() if fit), default=0), len(known) - 1


def _crossing(known: dict[int, tuple[int, bool]], limit: int) -> int:
    """Units at which the line through the two measurements next to the limit crosses it."""
    nearest = sorted(known, key=lambda units: abs(known[units][0] - limit))
    one, two = nearest[:2]
    a, b = known[one][0], known[two][0]
    slope = (b - a) / (two - one)
    return math.floor(one + (limit - a) / slope) if slope > 0 else 2 * max(one, two)
