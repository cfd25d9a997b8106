"""TPU slices by name, `v5p:8x8x16`: which there are. Without JAX, so that a bad name is answered at once."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec

from angpt_jax.schema import show

MOST_SLICES = 1024


@dataclass(frozen=True)
class Family:
    """One generation.

    Args:
        axes: of the torus that the chips of a slice form
        most: chips of the largest slice
        options: what the TPU compiler must be told of it; the two cores of a v4 chip work as one device
    """

    axes: int
    most: int
    options: dict[str, str] = field(default_factory=dict)


FAMILIES = {
    "v4": Family(3, 4096, {"chip_config_name": "megacore"}),
    "v5e": Family(2, 256),
    "v5p": Family(3, 6144),
    "v6e": Family(2, 256),
}
_SMALL = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # less than a cube of 64 chips
_NAME = re.compile(r"(\w+):(\d{1,3}(?:x\d{1,3})+)")


def shapes(family: Family) -> Iterator[tuple[int, ...]]:
    """Those of the slices that can be had: squares and double squares, or blocks of whole 4 × 4 × 4 cubes."""
    if family.axes == 2:
        sides = [2**n for n in range(5)]
        yield from ((a, b) for a in sides for b in (a, 2 * a) if a * b <= family.most and (a, b) != (1, 2))
        return
    yield from _SMALL
    longest = 4 * family.most // 64  # a line of cubes
    for a in range(4, round(family.most ** (1 / 3)) + 1, 4):
        for b in range(a, math.isqrt(family.most // a) + 1, 4):
            yield from ((a, b, c) for c in range(b, min(longest, family.most // (a * b)) + 1, 4))


def split(topology: str) -> tuple[Family, tuple[int, ...]]:
    """`v5e:4x4` → its family and (4, 4); it must be one that `check` lets pass."""
    name, _, shape = topology.partition(":")
    return FAMILIES[name], tuple(int(side) for side in shape.split("x"))


def check(topology: str | None, slices: int) -> Iterator[str]:
    """What is wrong with the names, one line each."""
    if not 1 <= slices <= MOST_SLICES:
        yield f"slices: must be between 1 and {MOST_SLICES}, got {slices}"
    elif topology is None and slices > 1:
        yield f"slices: only a named topology can have several, got {slices}; add --topology, e.g. v5e:4x4"
    if topology is None:
        return
    named = _NAME.fullmatch(topology)
    if not named or named[1] not in FAMILIES:
        known = ", ".join(FAMILIES)
        yield f"topology: must be {known} and a shape, got {show(topology)}; e.g. v5e:4x4 or v5p:8x8x16"
    elif split(topology)[1] not in set(shapes(FAMILIES[named[1]])):
        near = ", ".join(_near(named[1], math.prod(split(topology)[1])))
        yield f"topology: {named[1]} has no slice of that shape, got {show(topology)}; near are {near}"
    elif find_spec("libtpu") is None:
        yield f"topology: needs the TPU compiler, got {show(topology)}; pip install -e '.[tpu]'"


def _near(name: str, chips: int) -> list[str]:
    def distance(shape: tuple[int, ...]) -> float:
        return abs(math.log(math.prod(shape) / max(chips, 1)))

    near = itertools.islice(sorted(shapes(FAMILIES[name]), key=distance), 3)
    return [f"{name}:{'x'.join(map(str, shape))}" for shape in near]
