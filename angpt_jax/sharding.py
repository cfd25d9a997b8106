"""From the mesh config to devices, and where parameters, optimizer state and batches lie on them."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from angpt_jax import meshes
from angpt_jax.axes import Axes
from angpt_jax.config import MeshConfig
from angpt_jax.errors import UserError
from angpt_jax.layout import Device, Layout

MOST_UNSPLIT = 0.02  # share of the parameters that may lie whole on every device when there is a rule to split them


def make_layout(config: MeshConfig, devices: Sequence[Device] | None = None) -> Layout:
    """The mesh of `devices` (all there are) and the rules; `angpt_jax.rules` has checked that they fit."""
    return Layout(make_mesh(config, devices or jax.devices()), tuple(meshes.rules(config).items()))


def make_mesh(config: MeshConfig, devices: Sequence[Device]) -> Mesh:
    """The devices, as `config` arranges them. Slices of a pod, which a slower network joins, divide the first axis."""
    shape = tuple(size or 0 for size in meshes.shape(config, len(devices)).values())
    types, slices = (AxisType.Auto,) * len(shape), slice_count(devices)
    if slices == 1:
        return jax.make_mesh(shape, meshes.AXES, axis_types=types, devices=devices)
    within, across = (shape[0] // slices, *shape[1:]), (slices, *(1 for _ in shape[1:]))
    hybrid = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    return Mesh(hybrid, meshes.AXES, axis_types=types)


def slice_count(devices: Sequence[Device]) -> int:
    """Slices of a TPU pod, or islands of GPUs, that only a data-centre network joins."""
    return len(set(map(slice_of, devices)))


def slice_of(device: Device) -> int:
    return getattr(device, "slice_index", None) or 0


def parameter_shardings(axes: Any, layout: Layout) -> Any:
    """A tree like the parameters: the sharding of each, from the names of its axes. Scales and gains, which are small,
    lie as products take them, so that no layer gathers them."""
    return jax.tree.map(lambda axis: layout.sharding(*axis.names, gathered=not axis.is_matrix), axes)


def optimizer_shardings(tx: optax.GradientTransformation, params: Any, shardings: Any, layout: Layout) -> Any:
    """A tree like `tx.init(params)`: moments lie where their parameter lies, counters everywhere."""
    return optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, params),
        shardings,
        transform_non_params=lambda _: everywhere(layout),
    )


def everywhere(layout: Layout) -> NamedSharding:
    return layout.sharding()


def batch_sharding(layout: Layout) -> NamedSharding:
    """The first axis (sequences) split as the rule of `batch` says. The step splits windows, where a rule does."""
    return layout.sharding("batch")


def check_split(axes: Any, params: Any, layout: Layout) -> None:
    """Refuses rules that split parameters but leave more than MOST_UNSPLIT of them whole on every device."""
    whole: dict[str, int] = {}

    def note(axis: Axes, w: Any) -> None:
        if axis.is_matrix and all(layout.parts(name) == 1 for name in axis.names):
            whole[axis.role] = whole.get(axis.role, 0) + w.size

    jax.tree.map(note, axes, params)
    total = sum(w.size for w in jax.tree.leaves(params))
    splits = any(layout.parts(name) > 1 for name in ("embed", "vocab", "heads", "kv_heads", "feed_forward"))
    if splits and sum(whole.values()) > MOST_UNSPLIT * total:
        largest = ", ".join(sorted(whole, key=lambda role: -whole[role])[:3])
        got = ", ".join(f"{name}: {'+'.join(axes)}" for name, axes in layout.rules)
        raise UserError(
            f"mesh.rules: leave {sum(whole.values()) / total:.0%} of the parameters whole on every device ({largest}), "
            f"got {got}; at most {MOST_UNSPLIT:.0%}: split another of their axes, or none (data_parallel)"
        )


def rows_of_process(layout: Layout, rows: int) -> tuple[int, int]:
    """Which part of a batch of `rows` this process reads, and how many parts there are.

    Processes whose devices hold the same rows (they share a window, or a layer) read the same part.
    """
    held: dict[int, set[int]] = {}
    for device, (index, *_) in batch_sharding(layout).devices_indices_map((rows,)).items():
        held.setdefault(device.process_index, set()).add(index.start or 0)
    parts = parts_of_batch(held, layout.shape)
    mine = tuple(sorted(held[jax.process_index()]))
    return parts.index(mine), len(parts)


def parts_of_batch(held: dict[int, set[int]], mesh: dict[str, int]) -> list[tuple[int, ...]]:
    """The parts of a batch that are read by themselves, from the first rows of the blocks that each process holds."""
    parts = sorted({tuple(sorted(starts)) for starts in held.values()})
    if sum(map(len, parts)) != len(set(itertools.chain(*parts))):
        raise UserError(
            f"mesh: processes must hold the same rows or different ones, got {meshes.words(mesh)} over {len(held)} "
            "processes; mesh.tensor * mesh.context must divide the devices of a process, or be a multiple of them"
        )
    return parts


def ahead(batches: Iterator[Any], put: Callable[[Any], Any], count: int = 2) -> Iterator[Any]:
    """The batches on their devices, `count` of them under way before they are asked for."""
    waiting = deque(put(batch) for batch in itertools.islice(batches, count))
    while waiting:
        yield waiting.popleft()
        waiting.extend(put(batch) for batch in itertools.islice(batches, 1))


def batch_putter(layout: Layout, rows: int) -> Callable[[Any], Any]:
    """Brings a tree of this process's rows, as NumPy arrays, to the devices as one batch of `rows`."""
    sharding = batch_sharding(layout)

    def put(local: Any) -> Any:
        return jax.tree.map(
            lambda array: jax.make_array_from_process_local_data(sharding, array, (rows, *array.shape[1:])), local
        )

    return put
