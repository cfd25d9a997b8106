"""One annotation per weight: logical names of its axes, and which of them face the input.

Everything that must know a weight's meaning asks this annotation: sharding, the axis of the norm, fan-in at init,
weight decay. Axes are found by name, so the `layers` axis that a scan puts in front shifts nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

LAYERS = "layers"
Side = Literal["inputs", "embed"]
Along = Literal["inputs", "embed", "matrix"]


@dataclass(frozen=True)
class Axes:
    """What a weight's axes mean.

    Args:
        role: which weight it is ("query", "down", "alpha", …)
        names: logical name of each axis
        inputs: names of the axes that face the input: a "row of W" runs along them; empty for a learnable scale
    """

    role: str
    names: tuple[str, ...]
    inputs: tuple[str, ...] = ()

    @property
    def is_matrix(self) -> bool:
        return bool(self.inputs)

    def along(self, along: Along) -> tuple[int, ...]:
        """Positions of the axes that a norm runs over: the input side (rows of W), the embedding dimension, or all
        of one layer's matrix."""
        whole = tuple(name for name in self.names if name != LAYERS)
        wanted = {"inputs": self.inputs, "embed": ("embed",), "matrix": whole}[along]
        return tuple(i for i, name in enumerate(self.names) if name in wanted)


@flax.struct.dataclass
class Annotated(nn.meta.AxisMetadata[Any]):
    """A parameter in its box: the value and its axes, as `model.init` returns it."""

    value: Any
    axes: Axes = flax.struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Annotated":
        return Annotated(val, self.axes)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Annotated":
        names = self.axes.names
        names = (*names[:index], params[nn.PARTITION_NAME], *names[index:])
        return Annotated(self.value, replace(self.axes, names=names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Annotated":
        names = self.axes.names
        return Annotated(self.value, replace(self.axes, names=names[:index] + names[index + 1 :]))


def weight(module: nn.Module, axes: Axes, shape: tuple[int, ...], init: Callable[..., Array]) -> Array:
    """Makes the float32 parameter `axes.role` of `module`; `init(key, shape, axes)` draws it."""
    return cast(Array, module.param(axes.role, lambda key: Annotated(init(key, shape, axes), axes)))  # unboxed


def learnable(module: nn.Module, role: str, names: tuple[str, ...], shape: tuple[int, ...], start: float) -> Array:
    """A float32 scale, gain or bias whose entries all start at `start`."""
    return weight(module, Axes(role, names), shape, lambda key, shape, axes: jnp.full(shape, start, jnp.float32))


def scale(
    module: nn.Module, role: str, names: tuple[str, ...], shape: tuple[int, ...], *, init: float, stored: float
) -> Array:
    """A learnable scale s that starts at `init` and is stored as ŝ = s · stored/init (nGPT, arXiv 2410.01131, 2.5).

    Under Adam the effective rate of s is lr · init/stored.
    """
    return learnable(module, role, names, shape, stored) * (init / stored)


def axes_of(boxed: Any) -> Any:
    """The tree of `Axes` of a tree of annotated parameters."""
    return jax.tree.map(lambda box: box.axes, boxed, is_leaf=lambda x: isinstance(x, Annotated))
