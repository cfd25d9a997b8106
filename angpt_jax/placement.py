"""What lies where: a table of the parameters over the mesh, and the bytes of each device, as text."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from angpt_jax import meshes
from angpt_jax.axes import Axes
from angpt_jax.experiment import Experiment
from angpt_jax.footprint import bytes_of, whole_bytes_of


def at_start(built: Experiment, attention: str) -> list[str]:
    """What a run says of it: the code that computes attention, and, on several devices, mesh and table."""
    mesh = built.layout.mesh
    chosen = built.model.how.attention
    lines = [f"attention: {chosen}" + (f" ({attention})" if attention != chosen else "")]
    if mesh is None or mesh.size == 1:
        return lines
    return [*lines, f"mesh: {meshes.words(mesh.shape)}", *table(built)]


def table(built: Experiment) -> list[str]:
    """Each parameter: shape, which axis is split over which mesh axes, bytes on each device, and the mesh axes over
    which the constraint's norm is added up (one small all-reduce); then parameters and optimizer state as a whole."""
    along, constrained = built.model.arch.constraint.along, built.model.arch.constraint.norm != "none"
    rows = [("parameter", "shape", "split over", "bytes/device", "norm over")]

    def note(path: Any, axis: Axes, w: Any) -> None:
        split = _split(axis, range(len(axis.names)), w.sharding)
        norm = _split(axis, axis.along(along), w.sharding) if axis.is_matrix and constrained else ""
        shape = " × ".join(map(str, w.shape))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rows.append((name, shape, split or "nothing", f"{bytes_of(w):,}", norm))

    jax.tree_util.tree_map_with_path(note, built.axes, built.abstract.params)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    state = built.abstract
    return [*lines, _total("parameters", state.params), _total("optimizer state", state.opt_state)]


def _split(axis: Axes, positions: Iterable[int], sharding: NamedSharding) -> str:
    """`embed: fsdp`, of those of its axes that are split."""
    over = {i: sharding.spec[i] for i in positions}
    each = {i: (names,) if isinstance(names, str) else names or () for i, names in over.items()}
    split = {i: [name for name in names if sharding.mesh.shape[name] > 1] for i, names in each.items()}
    return ", ".join(f"{axis.names[i]}: {'+'.join(names)}" for i, names in split.items() if names)


def _total(name: str, tree: Any) -> str:
    return f"{name}: {whole_bytes_of(tree):,} bytes, {bytes_of(tree):,} on each device"
