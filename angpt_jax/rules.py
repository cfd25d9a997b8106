"""What a training config must satisfy beyond its types; every rule that needs no JAX, one line for each problem.

raise_problems(check(config))                    # before JAX is imported
raise_problems(check(config, devices=8))         # once the devices are known: also mesh and divisibility
"""

import math
import os
from collections.abc import Iterator

from angpt_jax import mesh_rules, meshes, path_rules
from angpt_jax.config import SAVEABLE, Config, DistributedConfig, ModelConfig, phase_steps
from angpt_jax.form import flatten
from angpt_jax.mesh_rules import near_multiples
from angpt_jax.processes import membership
from angpt_jax.schema import show

LONGEST_NAME = 200  # bytes of one part of run.dir; file systems take 255, checkpoints append to it


def check(config: Config, devices: int | None = None, slices: int = 1) -> list[str]:
    """All problems of `config` (on `devices` devices in `slices` slices, if given), as lines for a UserError; empty if
    it is fine."""
    numbers = [*_counts(config), *mesh_rules.of_the_mesh(config.mesh)]
    others = [*_floats(config), *_seeds(config), *_paths(config)]
    others += [*_heads(config.model), *_remat(config.model), *_schedule(config), *_distributed(config.distributed)]
    fit = [] if numbers else [*_stop(config), *_fit(config, devices, slices)]  # they divide by those numbers
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
        ("model.loss_vocab_chunk", model.loss_vocab_chunk, 1),
        ("optim.micro_batches", config.optim.micro_batches, 1),
        ("optim.max_bad_steps", config.optim.max_bad_steps, 1),
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
    for role, factor in optim.lr_factors.items():
        if not 0 <= factor < most:
            yield f"optim.lr_factors.{role}: must be a finite number >= 0, got {factor}"
    for path, value in flatten(config.model.places, ("model", "places")):
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{'.'.join(path)}: must be a finite number, got {value}"


def _seeds(config: Config) -> Iterator[str]:
    for key, value in (("run.seed", config.run.seed), ("data.shuffle_seed", config.data.shuffle_seed)):
        if not 0 <= value < 2**32:
            yield f"{key}: must be >= 0 and < 2**32, got {value}"


def _paths(config: Config) -> Iterator[str]:
    data, directory = config.data, config.run.dir
    for key, path, *longest in (
        ("data.source", data.source),
        *((f"data.mixture.{source}", source) for source in data.mixture),
        *((f"data.validation_sets.{name}", source) for name, source in data.validation_sets.items()),
        ("data.tokenizer", data.tokenizer),
        ("data.cache_dir", data.cache_dir),
        ("run.dir", directory, LONGEST_NAME),
        ("run.init_from", config.run.init_from),
    ):
        yield from path_rules.of_path(key, path, *longest)
    if directory is not None and ".." in directory.split("/"):
        yield f"run.dir: must not contain '..', got {show(directory)}; give the folder itself"


def _heads(model: ModelConfig) -> Iterator[str]:
    """Rotary angles turn pairs, so the width of a head is even."""
    width, heads = model.width, model.heads
    if width >= 1 and heads >= 1 and width % (2 * heads):
        near = near_multiples(width, 2 * heads)
        yield f"model.width: must be an even multiple of model.heads, got {width} with {heads} heads; {near}"
    if heads >= 1 and model.key_value_heads >= 1 and heads % model.key_value_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield f"model.kv_heads: must divide model.heads, got {model.kv_heads} with {heads} heads; one of {divisors}"


def _remat(model: ModelConfig) -> Iterator[str]:
    for name in model.remat if isinstance(model.remat, list) else []:
        if name not in SAVEABLE:
            yield f"model.remat: no array of a layer, got {show(name)}; none, full or a list of {', '.join(SAVEABLE)}"


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


def _distributed(distributed: DistributedConfig) -> Iterator[str]:
    for key, seconds in (
        ("connect_timeout_seconds", distributed.connect_timeout_seconds),
        ("barrier_timeout_seconds", distributed.barrier_timeout_seconds),
        ("heartbeat_timeout_seconds", distributed.heartbeat_timeout_seconds),
    ):
        if seconds < 1:
            yield f"distributed.{key}: must be >= 1, got {seconds}"
    yield from membership.problems(distributed, os.environ)


def _fit(config: Config, devices: int | None, slices: int) -> Iterator[str]:
    """Problems of sizes that must divide one another, and of memory."""
    model, micro = config.model, config.optim.micro_batches
    if config.data.batch_size % micro:
        near = near_multiples(config.data.batch_size, micro)
        rule = f"must be a multiple of optim.micro_batches, got {config.data.batch_size} with {micro}"
        yield f"data.batch_size: {rule}; {near}"
    else:
        yield from mesh_rules.fit(config, devices, slices)
    if not config.dry_run:
        sizes = meshes.shape(config.mesh, devices)
        rules = meshes.rules(config.mesh)
        axes = {axis for name in ("embed", "feed_forward") for axis in rules.get(name, ())}
        parts = [sizes[axis] for axis in axes]
        if None not in parts:
            yield from _memory(model, math.prod(part or 1 for part in parts))


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
