"""Rows of all combinations: what a list, a zip and a grid say, multiplied out. No JAX.

rows, problems = expand([Row("angpt")], zipped={}, grid={"optim.peak_lr": [2e-3, 4e-3]})
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from angpt_jax import rows
from angpt_jax.rows import Row
from angpt_jax.schema import show

MOST = 1000  # rows; also what a SLURM array takes where nobody changed its limit

Lists = Mapping[str, Sequence[Any]]
Axis = list[dict[str, Any]]  # what is chosen from, one entry at a time


def expand(bases: Sequence[Row], zipped: Lists, grid: Lists) -> tuple[list[Row], list[str]]:
    """Each of `bases` with each entry of `zipped` (its lists are read side by side) and each combination of `grid`, and
    what is wrong with them. The order is that of the loops `bases`, `zipped`, keys of `grid`, the last one innermost;
    a name says the base, if that has one, and the values."""
    problems = list(_problems(bases, zipped, grid))
    if problems:
        return [], problems
    found = []
    for base in bases:
        for chosen in product(*_axes(zipped, grid)):
            values = {key: value for choice in chosen for key, value in choice.items()}
            name = "+".join(filter(None, [base.name, rows.name_of(values) if values else ""]))
            problems += rows.problems_of_name(name, "run")
            found.append(base.but(name, values))
    return found, problems


def _axes(zipped: Lists, grid: Lists) -> list[Axis]:
    side_by_side = [dict(zip(zipped, values, strict=True)) for values in zip(*zipped.values(), strict=True)]
    return [*([side_by_side] if zipped else []), *([{key: value} for value in values] for key, values in grid.items())]


def _problems(bases: Sequence[Row], zipped: Lists, grid: Lists) -> Iterator[str]:
    for where, lists in ("zip", zipped), ("grid", grid):
        yield from rows.dotted(lists, where)[1]
        for key, values in lists.items():
            if not values:
                yield f"{where}.{key}: must have values, got []"
            if twice := [base.name for base in bases if key in base.values]:
                row = f" (row {twice[0]})" if twice[0] else ""
                yield f"{where}.{key}: stands in values or list too{row}, got {show(values)}; keep one"
    for key in zipped.keys() & grid.keys():
        yield f"zip.{key}: stands in grid too, got {show(zipped[key])}; keep one"
    if len({len(values) for values in zipped.values()}) > 1:
        counts = ", ".join(f"{len(values)} of {key}" for key, values in zipped.items())
        yield f"zip: must have lists of the same length, got {counts}"
        return
    count = math.prod([len(bases), *map(len, _axes(zipped, grid))])
    if count > MOST:
        yield f"grid: must not be more than {MOST} runs, got {count:,}; sweep fewer values at a time"
    for axis in _axes(zipped, grid):
        yield from _alike(axis, "zip" if axis and len(axis[0].keys() & zipped.keys()) else "grid")


def _alike(axis: Axis, where: str) -> Iterator[str]:
    """Choices that would have one name."""
    seen: dict[str, dict[str, Any]] = {}
    for choice in axis:
        name = rows.name_of(choice)
        first = seen.setdefault(name, choice)
        if first is not choice:
            both = " and ".join(show(one if len(one) > 1 else next(iter(one.values()))) for one in (first, choice))
            yield f"{where}.{', '.join(choice)}: two runs would have the name {name}, got {both}; keep one"
