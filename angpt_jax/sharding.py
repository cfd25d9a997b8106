"""The mesh of devices, and where each parameter and each batch lies on it: a table from logical axes to mesh axes."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from angpt_jax.axes import Axes
from angpt_jax.config import MeshConfig

MESH_AXES = ("replica", "fsdp", "tensor")
BATCH_AXES = ("replica", "fsdp")
RULES: dict[str, str | None] = {
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "feed_forward": "tensor",
    "head_dim": None,
    "layers": None,
}


def mesh_shape(config: MeshConfig, devices: int) -> tuple[int, ...]:
    """Devices along each mesh axis, with -1 filled in; the rules have checked that they fit."""
    sizes = [getattr(config, axis) for axis in MESH_AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    return tuple(size if size != -1 else devices // fixed for size in sizes)


def make_mesh(config: MeshConfig) -> Mesh:
    """All devices, as `config` arranges them. One device is a mesh of one."""
    shape = mesh_shape(config, jax.device_count())
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def parameter_shardings(axes: Any, mesh: Mesh) -> Any:
    """A tree like the parameters: the sharding of each, from the names of its axes."""

    def sharding(axis: Axes) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(RULES[name] for name in axis.names)))

    return jax.tree.map(sharding, axes)


def optimizer_shardings(tx: optax.GradientTransformation, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """A tree like `tx.init(params)`: moments lie where their parameter lies, counters everywhere."""
    replicated = NamedSharding(mesh, PartitionSpec())
    return optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, params),
        shardings,
        transform_non_params=lambda _: replicated,
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first axis (sequences) split over replicas and fsdp."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def ahead(batches: Iterator[Any], put: Callable[[Any], Any], count: int = 2) -> Iterator[Any]:
    """The batches on their devices, `count` of them under way before they are asked for."""
    waiting = deque(put(batch) for batch in itertools.islice(batches, count))
    while waiting:
        yield waiting.popleft()
        waiting.extend(put(batch) for batch in itertools.islice(batches, 1))


def batch_putter(mesh: Mesh) -> Callable[[Any], Any]:
    """Brings a tree of this process's rows, as NumPy arrays, to the devices as one global batch."""
    sharding = batch_sharding(mesh)
    return lambda rows: jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, array), rows)
