"""What lies where: a table of the parameters over the mesh, and the bytes of each device, as text."""

import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from angpt_jax.axes import Axes
from angpt_jax.experiment import Experiment


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
        rows.append((name, shape, split or "nothing", f"{bytes_on_a_device(w):,}", norm))

    jax.tree_util.tree_map_with_path(note, built.axes, built.abstract.params)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *(_total(name, tree) for name, tree in _parts(built).items())]


def _split(axis: Axes, positions: Iterable[int], sharding: NamedSharding) -> str:
    """`embed: fsdp`, of those of its axes that are split."""
    over = {i: sharding.spec[i] for i in positions}
    meshes = {i: (names,) if isinstance(names, str) else names or () for i, names in over.items()}
    split = {i: [name for name in names if sharding.mesh.shape[name] > 1] for i, names in meshes.items()}
    return ", ".join(f"{axis.names[i]}: {'+'.join(names)}" for i, names in split.items() if names)


def _parts(built: Experiment) -> dict[str, Any]:
    return {"parameters": built.abstract.params, "optimizer state": built.abstract.opt_state}


def _total(name: str, tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    here, whole = sum(map(bytes_on_a_device, leaves)), sum(map(bytes_of, leaves))
    return f"{name}: {whole:,} bytes, {here:,} on each device"


def bytes_of(array: Any) -> int:
    """Of an array, or of what stands for one."""
    return math.prod(array.shape) * array.dtype.itemsize


def bytes_on_a_device(array: Any) -> int:
    """Of the part of it that one device holds."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
