"""From the tree of parameters to the tensors of a file, and back: names, one tensor a layer, (out, in).

`layers/attention/query` of shape (N, in, out) is `layers.0.attention.query.weight` … of shape (out, in) each. Which
axis is which, the annotation of the weight says (`angpt_jax.axes`); nothing is computed, so that both ways are exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from angpt_jax.axes import LAYERS, Axes
from angpt_jax.exports.exported import annotated, is_box
from angpt_jax.model import Decoder


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Args:
        name: in the file
        shape: in the file
        path: of its leaf in the tree
        layer: index of its layer, None outside of the layers
        order: of the leaf's axes (without that of the layers) in the file
        is_matrix: whether it is a matrix, or else a scale, gain or bias
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    layer: int | None
    order: tuple[int, ...]
    is_matrix: bool


def entries(decoder: Decoder) -> list[Entry]:
    """The tensors of a decoder, in the order of its tree."""
    leaves = jax.tree_util.tree_leaves_with_path(annotated(decoder), is_leaf=is_box)
    return [
        entry for path, box in leaves for entry in _of_leaf(tuple(key.key for key in path), box.value.shape, box.axes)
    ]


def _of_leaf(path: tuple[str, ...], shape: tuple[int, ...], axes: Axes) -> Iterator[Entry]:
    layers, names = (range(shape[0]), axes.names[1:]) if axes.names[:1] == (LAYERS,) else ((None,), axes.names)
    shape = shape[len(axes.names) - len(names) :]
    order = tuple(sorted(range(len(names)), key=lambda axis: names[axis] in axes.inputs))  # outputs first
    first, *below = path
    suffix = ("weight",) if axes.is_matrix else ()
    for layer in layers:
        number = () if layer is None else (str(layer),)
        name = ".".join((first, *number, *below, *suffix))
        yield Entry(name, tuple(shape[axis] for axis in order), path, layer, order, axes.is_matrix)


def tensor(entry: Entry, params: Any) -> np.ndarray:
    """The array of one entry, as it lies in a file."""
    leaf = _leaf(params, entry.path)
    array = leaf if entry.layer is None else leaf[entry.layer]
    return np.asarray(array.transpose(entry.order), order="C")


def tree(found: list[tuple[Entry, np.ndarray]]) -> dict[str, Any]:
    """The parameters, float32, of all entries and their arrays; the inverse of `tensor`."""
    stacks: dict[tuple[str, ...], list[np.ndarray]] = {}
    alone: dict[tuple[str, ...], np.ndarray] = {}
    for entry, array in found:
        ours = array.astype(np.float32, copy=False).transpose(np.argsort(entry.order))
        if entry.layer is None:
            alone[entry.path] = np.asarray(ours, order="C")
        else:
            stacks.setdefault(entry.path, []).append(ours)
    params: dict[str, Any] = {}
    for path, leaf in [*alone.items(), *((path, np.stack(layers)) for path, layers in stacks.items())]:
        *above, last = path
        node = params
        for name in above:
            node = node.setdefault(name, {})
        node[last] = leaf
    return params


def _leaf(params: Any, path: tuple[str, ...]) -> np.ndarray:
    for name in path:
        params = params[name]
    return params
