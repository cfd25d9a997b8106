"""Where arrays lie: a mesh of devices, and for each logical axis the mesh axes that it is split over.

The model says the logical names of its axes and nothing else. A weight is kept split over all mesh axes of its rule; a
product takes it gathered over those that also split the data, one layer at a time, and hands its gradient back split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from angpt_jax.axes import Axes

DATA = ("batch", "length")
Device = Any  # a jax.Device, whose name type checkers take for a variable


@dataclass(frozen=True)
class Layout:
    """Hashable, so that a module can have it. Without a mesh everything lies on one device.

    Args:
        mesh: the devices
        rules: logical axis and the mesh axes that it is split over; an axis without a rule is whole everywhere
    """

    mesh: Mesh | None = None
    rules: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def over(self, name: str | None) -> tuple[str, ...]:
        """The mesh axes that a logical axis is split over."""
        return dict(self.rules).get(name or "", ())

    def parts(self, name: str) -> int:
        """How many parts a logical axis is split into."""
        parts = 1
        for axis in self.over(name):
            parts *= self.mesh.shape[axis] if self.mesh else 1
        return parts

    def spec(self, *names: str | None, gathered: bool = False) -> PartitionSpec:
        """Of an array with these axes; `gathered`: whole over the mesh axes that split the data.

        A mesh axis that several of them are split over goes to the last.
        """
        taken = {axis for name in DATA for axis in self.over(name)} if gathered else set()
        parts: list[tuple[str, ...] | None] = []
        for name in reversed(names):
            axes = tuple(axis for axis in self.over(name) if axis not in taken)
            taken |= set(axes)
            parts.append(axes or None)
        return PartitionSpec(*reversed(parts))

    def sharding(self, *names: str | None, gathered: bool = False) -> NamedSharding:
        """Of an array that lies on the mesh, which must be there."""
        assert self.mesh is not None
        return NamedSharding(self.mesh, self.spec(*names, gathered=gathered))

    @property
    def shape(self) -> dict[str, int]:
        """Devices along each mesh axis."""
        return dict(self.mesh.shape) if self.mesh else {}

    def constrain(self, x: Array, *names: str | None, gathered: bool = False) -> Array:
        """`x`, lying as `spec` says of these axes."""
        return self.lay(x, self.spec(*names, gathered=gathered))

    def lay(self, x: Array, spec: PartitionSpec) -> Array:
        if self.mesh is None or self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def of(self, axes: Axes) -> "Place":
        return Place(self, axes.names)


@dataclass(frozen=True)
class Place:
    """Where one weight lies."""

    layout: Layout = Layout()
    names: tuple[str, ...] = ()

    def gathered(self, w: Array) -> Array:
        """`w` as a product takes it."""
        return self.layout.constrain(w, *self.names, gathered=True)

    def added_up(self, product: Callable[[Array, Array], Array], x_BLI: Array, y_BLO: Array) -> Array:
        """product(x, y) over all tokens, an array of the weight's shape. Each device takes the product of its own
        tokens and of their sum gets its part: a reduce-scatter, which XLA does not find by itself."""
        layout, mesh = self.layout, self.layout.mesh
        data = [axis for name in DATA for axis in layout.over(name)]
        if mesh is None or all(mesh.shape[axis] == 1 for axis in data):
            return product(x_BLI, y_BLO)
        scattered = [tuple(axis for axis in layout.over(name) if axis in data) for name in self.names]
        whole = tuple(axis for axis in data if not any(axis in axes for axes in scattered))

        def part(x_BLI: Array, y_BLO: Array) -> Array:
            sum_IO = product(x_BLI, y_BLO)
            for position, axes in enumerate(scattered):
                if axes:
                    sum_IO = jax.lax.psum_scatter(sum_IO, axes, scatter_dimension=position, tiled=True)
            return jax.lax.psum(sum_IO, whole)

        tokens, (inner, outer) = layout.spec(*DATA), layout.spec(*self.names, gathered=True)
        specs = PartitionSpec(*tokens, inner), PartitionSpec(*tokens, outer)
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=layout.spec(*self.names))(x_BLI, y_BLO)


HERE = Place()
