"""The mesh as the config describes it: sizes of its axes, and what is split over which. Without JAX."""

import itertools
import math
from collections.abc import Iterator, Mapping

from angpt_jax.config import MeshConfig

AXES = ("replica", "fsdp", "tensor", "context")
Rules = dict[str, tuple[str, ...]]

_DATA: Rules = {"batch": ("replica", "fsdp")}
_FSDP: Rules = _DATA | {"embed": ("fsdp",)}
_TENSOR: Rules = _FSDP | dict.fromkeys(("vocab", "heads", "kv_heads", "feed_forward"), ("tensor",))
PRESETS: dict[str, Rules] = {
    "data_parallel": _DATA,
    "fsdp": _FSDP,
    "fsdp_tensor": _TENSOR,
    "context": _TENSOR | {"length": ("context",), "embed": ("fsdp", "context")},
}
LOGICAL = ("batch", "length", "embed", "vocab", "heads", "kv_heads", "feed_forward", "head_dim", "layers")
TOGETHER = (  # two axes of one array can't be split over the same mesh axis
    *(("embed", name) for name in ("vocab", "heads", "kv_heads", "feed_forward")),
    ("heads", "head_dim"),
    *(("layers", name) for name in ("embed", "heads", "kv_heads", "feed_forward", "head_dim")),
    ("batch", "length"),
)


def rules(mesh: MeshConfig) -> Rules:
    """logical axis → mesh axes: the preset, with `mesh.rules` replaced."""
    own = {name: _as_tuple(value) for name, value in mesh.rules.items()}
    return {name: axes for name, axes in (PRESETS[mesh.preset] | own).items() if axes}


def used(rules: Rules) -> set[str]:
    """The mesh axes that something is split over."""
    return {axis for axes in rules.values() for axis in axes}


def _as_tuple(value: object) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(map(str, value))
    return () if value is None else (str(value),)


def sizes(mesh: MeshConfig) -> dict[str, int]:
    return {axis: getattr(mesh, axis) for axis in AXES}


def shape(mesh: MeshConfig, devices: int | None) -> dict[str, int | None]:
    """Devices along each axis; -1 becomes what is left of `devices`, None where that is unknown or no whole number."""
    given = sizes(mesh)
    fixed = math.prod(size for size in given.values() if size != -1)
    left = devices // fixed if devices is not None and devices % fixed == 0 else None
    return {axis: left if size == -1 else size for axis, size in given.items()}


def words(sizes: Mapping[str, int]) -> str:
    """`replica 2, fsdp 4, …`."""
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


def fits(mesh: MeshConfig, devices: int) -> bool:
    """Whether the axes multiply to the number of devices."""
    filled = shape(mesh, devices).values()
    return None not in filled and math.prod(size for size in filled if size) == devices


def nearest(mesh: MeshConfig, devices: int, slices: int = 1, count: int = 3) -> list[tuple[int, ...]]:
    """Shapes that fit, those that change the wanted sizes least first."""
    wanted = sizes(mesh).values()

    def distance(candidate: tuple[int, ...]) -> float:
        return sum(abs(math.log(size / want)) for size, want in zip(candidate, wanted, strict=True) if want != -1)

    needed = used(rules(mesh)) | {"fsdp"}
    fitting = (
        candidate
        for candidate in _shapes(devices, len(AXES))
        if candidate[0] % slices == 0
        and all(size == 1 or axis in needed for axis, size in zip(AXES, candidate, strict=True))
    )
    return sorted(fitting, key=distance)[:count]


def _shapes(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `devices` as a product of `axes` numbers."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for front in itertools.product(divisors, repeat=axes - 1):
        if devices % math.prod(front) == 0:
            yield (*front, devices // math.prod(front))
