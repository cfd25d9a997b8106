"""What a training config must satisfy beyond its types; every rule that needs no JAX, one line for each problem.

raise_problems(check(config))                    # before JAX is imported
raise_problems(check(config, devices=8))         # once the devices are known: also mesh and divisibility
"""

import math
import os
from collections.abc import Iterator

from angpt_jax.config import Config, MeshConfig, ModelConfig, phase_steps
from angpt_jax.form import flatten
from angpt_jax.schema import show

LONGEST_NAME = 200  # bytes of one part of a path; file systems take 255, checkpoints append to it


def check(config: Config, devices: int | None = None) -> list[str]:
    """All problems of `config` (on `devices` devices, if given), as lines for a UserError; empty if it is fine."""
    numbers = [*_counts(config), *_mesh_axes(config.mesh)]
    others = [*_floats(config), *_seeds(config), *_paths(config), *_heads(config.model), *_schedule(config)]
    fit = [] if numbers else [*_stop(config), *_fit(config, devices)]  # they compare and divide by those numbers
    return [*numbers, *others, *fit]


def _counts(config: Config) -> Iterator[str]:
    model, data, run = config.model, config.data, config.run
    for key, value, least in (
        ("model.width", model.width, 1),
        ("model.layers", model.layers, 1),
        ("model.heads", model.heads, 1),
        ("model.vocab", model.vocab, 1),
        ("model.context", model.context, 2),
        ("model.feed_forward", model.feed_forward, 1),
        ("model.kv_heads", model.kv_heads, 1),
        ("optim.warmup_steps", config.optim.warmup_steps, 0),
        ("optim.decay_steps", config.optim.decay_steps, 1),
        ("data.batch_size", data.batch_size, 1),
        ("data.validation_tokens", data.validation_tokens, 1),
        ("data.workers", data.workers, 0),
        ("run.steps", run.steps, 1),
        ("run.log_every_steps", run.log_every_steps, 1),
        ("run.instrument_every_steps", run.instrument_every_steps, 1),
        ("run.eval_every_steps", run.eval_every_steps, 1),
        ("run.checkpoint_every_steps", run.checkpoint_every_steps, 1),
        ("run.keep_latest", run.keep_latest, 2),
        ("run.keep_every_steps", run.keep_every_steps, 1),
    ):
        if value is not None and value < least:
            yield f"{key}: must be >= {least}, got {value}"


def _floats(config: Config) -> Iterator[str]:
    """Ranges; each comparison is false for nan, and infinity is in none of them."""
    optim, most = config.optim, math.inf
    clip_norm = 1.0 if optim.clip_norm == "none" else optim.clip_norm
    for key, value, fits, rule in (
        ("model.rope_theta", config.model.rope_theta, lambda x: 0 < x < most, "a finite number > 0"),
        ("optim.peak_lr", optim.peak_lr, lambda x: 0 < x < most, "a finite number > 0"),
        ("optim.warmup_fraction", optim.warmup_fraction, lambda x: 0 <= x <= 1, "between 0 and 1"),
        ("optim.decay_fraction", optim.decay_fraction, lambda x: 0 < x <= 1, "> 0 and <= 1"),
        ("optim.end_lr_fraction", optim.end_lr_fraction, lambda x: 0 <= x <= 1, "between 0 and 1"),
        ("optim.weight_decay", optim.weight_decay, lambda x: 0 <= x < most, "a finite number >= 0"),
        ("optim.clip_norm", clip_norm, lambda x: 0 < x < most, "a finite number > 0, or none"),
        ("optim.beta1", optim.beta1, lambda x: 0 <= x < 1, ">= 0 and < 1"),
        ("optim.beta2", optim.beta2, lambda x: 0 <= x < 1, ">= 0 and < 1"),
        ("optim.epsilon", optim.epsilon, lambda x: 0 < x < most, "a finite number > 0"),
        ("data.validation_fraction", config.data.validation_fraction, lambda x: 0 < x < 1, "> 0 and < 1"),
    ):
        if value is not None and not fits(value):
            yield f"{key}: must be {rule}, got {value}"
    for source, weight in config.data.mixture.items():
        if not 0 < weight < most:
            yield f"data.mixture.{source}: must be a finite number > 0, got {weight}"
    for path, value in flatten(config.model.places, ("model", "places")):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{'.'.join(path)}: must be a finite number, got {value}"


def _seeds(config: Config) -> Iterator[str]:
    for key, value in (("run.seed", config.run.seed), ("data.shuffle_seed", config.data.shuffle_seed)):
        if not 0 <= value < 2**32:
            yield f"{key}: must be >= 0 and < 2**32, got {value}"


def _paths(config: Config) -> Iterator[str]:
    data, directory = config.data, config.run.dir
    for key, path in (
        ("data.source", data.source),
        *((f"data.mixture.{source}", source) for source in data.mixture),
        *((f"data.validation_sets.{name}", source) for name, source in data.validation_sets.items()),
        ("data.tokenizer", data.tokenizer),
        ("data.cache_dir", data.cache_dir),
        ("run.dir", directory),
    ):
        if path is not None and not path.isprintable():
            yield f"{key}: must be printable text (no newline or NUL), got {show(path)}"
    parts = directory.split("/") if directory is not None else []
    if ".." in parts:
        yield f"run.dir: must not contain '..', got {show(directory)}; give the folder itself"
    if any(len(part.encode(errors="surrogatepass")) > LONGEST_NAME for part in parts):
        yield f"run.dir: must have no part longer than {LONGEST_NAME} bytes, got {show(directory)}"


def _heads(model: ModelConfig) -> Iterator[str]:
    """Rotary angles turn pairs, so the width of a head is even."""
    width, heads = model.width, model.heads
    if width >= 1 and heads >= 1 and width % (2 * heads):
        near = _near(width, 2 * heads)
        yield f"model.width: must be an even multiple of model.heads, got {width} with {heads} heads; {near}"
    if heads >= 1 and model.key_value_heads >= 1 and heads % model.key_value_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield f"model.kv_heads: must divide model.heads, got {model.kv_heads} with {heads} heads; one of {divisors}"


def _near(value: int, step: int) -> str:
    """The multiples of `step` next to `value`, in words."""
    below = value // step * step
    return " or ".join(str(multiple) for multiple in (below, below + step) if multiple) + " would do"


def _schedule(config: Config) -> Iterator[str]:
    optim, steps = config.optim, config.run.steps
    if optim.warmup_steps is not None and optim.warmup_fraction is not None:
        yield (
            f"optim.warmup_steps: can't be given together with optim.warmup_fraction, "
            f"got {optim.warmup_steps} and {optim.warmup_fraction}; set one of them to null"
        )
    warmup_key, warmup = _phase("warmup", optim.warmup_steps, optim.warmup_fraction, steps)
    decay_key, decay = _phase("decay", optim.decay_steps, optim.decay_fraction, steps)
    if warmup >= steps >= 1:
        yield (
            f"{warmup_key}: the warm-up must be shorter than run.steps, "
            f"got {warmup} steps with run.steps {steps}; at most {steps - 1} steps"
        )
    elif optim.schedule == "wsd" and warmup + decay > steps >= 1:
        yield (
            f"{decay_key}: warm-up and decay must fit into run.steps, got {decay} steps after a warm-up of {warmup} "
            f"({warmup_key}) with run.steps {steps}; at most {steps - warmup} steps"
        )


def _phase(name: str, count: int | None, fraction: float | None, steps: int) -> tuple[str, int]:
    """The key that decides how long a phase of the schedule is, and its steps (0 for an impossible fraction)."""
    if count is not None:
        return f"optim.{name}_steps", count
    possible = fraction is not None and 0 <= fraction <= 1
    return f"optim.{name}_fraction", phase_steps(None, fraction if possible else None, steps)


def _stop(config: Config) -> Iterator[str]:
    stop, steps = config.run.stop_at_step, config.run.steps
    if stop is not None and not 1 <= stop <= steps:
        yield f"run.stop_at_step: must be between 1 and run.steps, got {stop} with run.steps {steps}"


def _mesh_axes(mesh: MeshConfig) -> Iterator[str]:
    sizes = {"mesh.replica": mesh.replica, "mesh.fsdp": mesh.fsdp, "mesh.tensor": mesh.tensor}
    for key, size in sizes.items():
        if size < 1 and size != -1:
            yield f"{key}: must be >= 1, or -1 for all devices that are left, got {size}"
    left = [key for key, size in sizes.items() if size == -1]
    if len(left) > 1:
        yield f"{left[0]}: only one mesh axis can be -1, got -1 also for {' and '.join(left[1:])}"


def _fit(config: Config, devices: int | None) -> Iterator[str]:
    """Problems of sizes that are split over the mesh; an axis of unknown size (None) is passed over."""
    model, mesh = config.model, config.mesh
    if devices is not None:
        yield from _product(mesh, devices)
    replica, fsdp, tensor = _mesh_shape(mesh, devices)
    batch_parts = replica * fsdp if replica and fsdp else None
    for key, value, divisor, parts, step in (
        ("data.batch_size", config.data.batch_size, "mesh.replica * mesh.fsdp", batch_parts, 1),
        ("model.width", model.width, "mesh.fsdp", fsdp, 2 * model.heads),
        ("model.feed_forward", model.feed_forward_width, "mesh.tensor", tensor, 1),
        ("model.vocab", model.vocab, "mesh.tensor", tensor, 1),
    ):
        if parts and value % parts:
            near = _near(value, math.lcm(parts, step))
            yield f"{key}: must be a multiple of {divisor}, got {value} with {parts}; {near}"
    for key, heads in (("model.heads", model.heads), ("model.kv_heads", model.key_value_heads)):
        if tensor and heads % tensor:
            near = f"mesh.tensor {math.gcd(heads, tensor)} would do"
            yield f"{key}: must be a multiple of mesh.tensor, got {heads} with {tensor}; {near}"
            break
    if fsdp and tensor and not config.dry_run:
        yield from _memory(model, fsdp * tensor)


def _product(mesh: MeshConfig, devices: int) -> Iterator[str]:
    sizes = (mesh.replica, mesh.fsdp, mesh.tensor)
    fixed = math.prod(size for size in sizes if size != -1)
    if fixed == devices or (-1 in sizes and devices % fixed == 0):
        return

    def distance(shape: tuple[int, ...]) -> float:
        return sum(abs(math.log(size / want)) for size, want in zip(shape, sizes, strict=True) if want != -1)

    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    shapes = [(r, f, devices // r // f) for r in divisors for f in divisors if devices // r % f == 0]
    near = ", ".join(" * ".join(map(str, shape)) for shape in sorted(shapes, key=distance)[:3])
    got = " * ".join(map(str, sizes)) + ("" if -1 in sizes else f" = {fixed}")
    yield f"mesh: replica * fsdp * tensor must be the {devices} devices there are, got {got}; {near} would do"


def _mesh_shape(mesh: MeshConfig, devices: int | None) -> tuple[int | None, ...]:
    """Sizes of the axes; -1 becomes what is left of `devices`, or None where that is unknown or not a whole number."""
    sizes = (mesh.replica, mesh.fsdp, mesh.tensor)
    fixed = math.prod(size for size in sizes if size != -1)
    left = devices // fixed if devices is not None and devices % fixed == 0 else None
    return tuple(left if size == -1 else size for size in sizes)


def _memory(model: ModelConfig, parts: int) -> Iterator[str]:
    """A model is refused if the float32 parameters alone, split into `parts`, exceed 80 % of this machine's memory."""
    shared = model.key_value_heads / model.heads  # of the maps of keys and values
    layer = (2 + 2 * shared) * model.width**2 + 3 * model.width * model.feed_forward_width
    needed = 4 * (2 * model.vocab * model.width + model.layers * layer) / parts
    there = 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        yield (
            f"model: its parameters need {needed / 1e9:.1f} GB on each device, got vocab {model.vocab}, width "
            f"{model.width}, layers {model.layers}; at most {there / 1e9:.1f} GB (80 % of this machine's memory)"
        )
