"""What `train --dry_run true` prints: all that can be known of a run before its first step."""

from dataclasses import fields

import numpy as np

from angpt_jax import flops, footprint, placement
from angpt_jax.arch import Arch, Sizes
from angpt_jax.config import Config
from angpt_jax.experiment import Experiment, compiled_step


def describe(config: Config, arch: Arch, sizes: Sizes, built: Experiment) -> str:
    """Places, sizes, ν table, schedule table, mesh, FLOPs and the memory of the compiled step, as text."""
    tokens_per_step = config.data.batch_size * config.model.context
    rows = config.data.batch_size // built.layout.parts("batch")
    lines = [
        str(arch),
        "",
        f"{flops.parameter_count(built.abstract.params):,} parameters",
        f"{tokens_per_step:,} tokens a step, {config.run.steps:,} steps, {tokens_per_step * config.run.steps:,} tokens",
        f"{built.flops_per_token(config.model.context):,} FLOPs per token, forward and backward",
        f"mesh {built.layout.shape}, {rows} sequences per device, attention: {built.model.how.attention}",
        "",
        *placement.table(built),
        "",
        "nu",
        *(f"  {f.name:<13}  {getattr(arch.nu, f.name):.4f}" for f in fields(arch.nu)),
        "learning rate",
        *_schedule_points(config, built),
        *_memory(config, built),
    ]
    return "\n".join(lines)


def _schedule_points(config: Config, built: Experiment) -> list[str]:
    steps = config.run.steps
    points = sorted({0, *(round(steps * tenth / 10) for tenth in range(1, 10)), steps - 1})
    return [f"  step {point + 1:<8,}  {np.asarray(built.schedule(point)):.2e}" for point in points]


def _memory(config: Config, built: Experiment) -> list[str]:
    (device, *_) = built.abstract.step.sharding.device_set
    found = footprint.footprint(compiled_step(built, config), built.abstract)
    return footprint.lines(found, footprint.memory_of(device))
