"""What a mesh must satisfy: its axes, its rules, and the sizes that are split over it; one line for each problem."""

import math
from collections.abc import Iterator

from angpt_jax import meshes
from angpt_jax.config import Config, MeshConfig
from angpt_jax.schema import show


def of_the_mesh(mesh: MeshConfig) -> Iterator[str]:
    """Problems of the values themselves."""
    sizes = {f"mesh.{axis}": size for axis, size in meshes.sizes(mesh).items()}
    for key, size in sizes.items():
        if size < 1 and size != -1:
            yield f"{key}: must be >= 1, or -1 for all devices that are left, got {size}"
    left = [key for key, size in sizes.items() if size == -1]
    if len(left) > 1:
        yield f"{left[0]}: only one mesh axis can be -1, got -1 also for {' and '.join(left[1:])}"
    for name, value in mesh.rules.items():
        yield from _rule(name, value)


def _rule(name: str, value: object) -> Iterator[str]:
    axes = value if isinstance(value, list) else [] if value is None else [value]
    if name not in meshes.LOGICAL:
        yield f"mesh.rules.{name}: no axis of an array, got {show(value)}; one of {', '.join(meshes.LOGICAL)}"
    elif not all(axis in meshes.AXES for axis in axes):
        allowed = f"one of {', '.join(meshes.AXES)}, a list of them, or null"
        yield f"mesh.rules.{name}: must be mesh axes, got {show(value)}; {allowed}"
    elif len(set(axes)) < len(axes):
        yield f"mesh.rules.{name}: must name each mesh axis once, got {show(value)}"


def fit(config: Config, devices: int | None, slices: int) -> Iterator[str]:
    """Problems of the mesh with the devices and of the sizes with the mesh; what is unknown is passed over."""
    mesh = config.mesh
    yield from _use(mesh)
    if devices is not None:
        yield from _product(mesh, devices, slices)
    yield from _sizes(config, meshes.shape(mesh, devices))
    yield from _chunk(config, meshes.shape(mesh, devices))


def _use(mesh: MeshConfig) -> Iterator[str]:
    """Mesh axes over which all devices would compute the same, and arrays that two rules split over one mesh axis."""
    rules = meshes.rules(mesh)
    for axis, size in meshes.sizes(mesh).items():
        if size > 1 and axis not in meshes.used(rules):
            presets = [name for name, preset in meshes.PRESETS.items() if axis in meshes.used(preset)]
            near = f"{' or '.join(presets)} does" if presets else "1 would do"
            yield f"mesh.{axis}: preset {mesh.preset} splits nothing over it, got {size}; {near}"
    for first, second in meshes.TOGETHER:
        if both := set(rules.get(first, ())) & set(rules.get(second, ())):
            axes = " and ".join(sorted(both))
            yield f"mesh.rules.{second}: an array has it together with {first}, got {axes} for both; change one"


def _product(mesh: MeshConfig, devices: int, slices: int) -> Iterator[str]:
    given = meshes.sizes(mesh)
    near = ", ".join(" * ".join(map(str, shape)) for shape in meshes.nearest(mesh, devices, slices))
    if not meshes.fits(mesh, devices):
        fixed = math.prod(size for size in given.values() if size != -1)
        got = " * ".join(map(str, given.values())) + ("" if -1 in given.values() else f" = {fixed}")
        names = " * ".join(meshes.AXES)
        yield f"mesh: {names} must be the {devices} devices there are, got {got}; {near} would do"
    elif (meshes.shape(mesh, devices)["replica"] or 0) % slices:
        got = f"{mesh.replica}; mesh {near} would do"
        yield f"mesh.replica: must be a multiple of the {slices} slices that the devices are in, got {got}"


def _sizes(config: Config, shape: dict[str, int | None]) -> Iterator[str]:
    """An axis that is split must have a multiple of as many entries."""
    model, rules, micro = config.model, meshes.rules(config.mesh), config.optim.micro_batches
    for key, name, value in (
        ("data.batch_size", "batch", config.data.batch_size),
        ("model.context", "length", model.context),
        ("model.width", "embed", model.width),
        ("model.feed_forward", "feed_forward", model.feed_forward_width),
        ("model.vocab", "vocab", model.vocab),
        ("model.heads", "heads", model.heads),
        ("model.kv_heads", "kv_heads", model.key_value_heads),
        ("model.width", "head_dim", model.width // model.heads),
        ("model.layers", "layers", model.layers),
    ):
        axes = rules.get(name, ())
        divisor = math.prod(shape[axis] or 1 for axis in axes) * (micro if name == "batch" else 1)
        if value % divisor == 0 or any(shape[axis] is None for axis in axes):
            continue
        over = " * ".join(
            [*(f"mesh.{axis}" for axis in axes), *["optim.micro_batches"] * (name == "batch" and micro > 1)]
        )
        if "heads" in name:
            near = f"{over} {math.gcd(value, divisor)} would do"
        else:
            near = near_multiples(value, math.lcm(divisor, 2 * model.heads if name == "embed" else 1))
        yield f"{key}: must be a multiple of {over}, got {value} with {divisor}; {near}"
        if name == "heads" and model.kv_heads is None:
            return


def _chunk(config: Config, shape: dict[str, int | None]) -> Iterator[str]:
    chunk, vocab = config.model.loss_vocab_chunk, config.model.vocab
    axes = meshes.rules(config.mesh).get("vocab", ())
    if chunk is None or any(shape[axis] is None for axis in axes):
        return
    parts = math.prod(shape[axis] or 1 for axis in axes)
    if vocab % chunk or chunk % parts:
        fitting = [n for n in range(parts, vocab + 1, parts) if vocab % n == 0]
        near = ", ".join(map(str, sorted(sorted(fitting, key=lambda n: abs(math.log(n / chunk)))[:3])))
        over = " * ".join(f"mesh.{axis}" for axis in axes)
        rule = "must divide model.vocab" + (f" and be a multiple of {over} = {parts}" if parts > 1 else "")
        yield f"model.loss_vocab_chunk: {rule}, got {chunk} with {vocab}; {near} would do"


def near_multiples(value: int, step: int) -> str:
    """The multiples of `step` next to `value`, in words."""
    below = value // step * step
    return " or ".join(str(multiple) for multiple in (below, below + step) if multiple) + " would do"
