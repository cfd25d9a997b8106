"""The state that a run saved, as arrays and as one number."""

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from conftest import by_path

from angpt_jax import experiment, restore, run_dir


@cache
def abstract(config_yaml: str, folder: Path) -> Any:
    """Shapes and dtypes of a run's state, on one device."""
    config, arch, sizes = experiment.resolved(run_dir.load_config(folder))
    mesh = type(config.mesh)()
    return experiment.build(replace(config, mesh=mesh), arch, sizes, jax.devices()[:1]).abstract


def state_of(run: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """path → array, of the newest checkpoint or that of `step`."""
    folder = run / "checkpoints"
    step = max(restore.steps_in(folder)) if step is None else step
    found = restore.read_step(folder, step, abstract((run / "config.yaml").read_text(), run))
    assert isinstance(found, restore.Restored), found
    return {path: np.asarray(leaf) for path, leaf in by_path(found.state).items()}


def digest(run: Path, step: int | None = None, without: tuple[str, ...] = ()) -> str:
    """Of every bit of it."""
    summed = hashlib.sha256()
    for path, array in sorted(state_of(run, step).items()):
        if path not in without:
            summed.update(f"{path} {array.dtype} {array.shape}".encode() + array.tobytes())
    return summed.hexdigest()
