"""Checkpoints: train state, data iterator and step, saved together by Orbax, in the background."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from angpt_jax.errors import DivergedError


class Checkpoints:
    """The checkpoints of one run directory; use it as a context manager, so that the last save is committed."""

    def __init__(self, directory: Path, keep_latest: int, keep_every_steps: int | None = None):
        policies: list[ocp.checkpoint_managers.PreservationPolicy] = [ocp.checkpoint_managers.LatestN(keep_latest)]
        if keep_every_steps:
            policies.append(ocp.checkpoint_managers.EveryNSteps(keep_every_steps))
        self._manager = ocp.CheckpointManager(
            directory.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: Any) -> None:
        """Waits until the last save is committed, in all processes; not after an error that only this one may have met
        (all of them see that a run diverged): the others would not come."""
        if kind is None or kind is DivergedError or jax.process_count() == 1:
            self._manager.close()

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data: dict[str, Any]) -> None:
        """Starts to save `state` and the data iterator's state as `step`, unless that step is there already."""
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data))
        self._manager.save(step, args=items)

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """The state in the shapes, dtypes and shardings of `abstract`, and the data iterator's state."""
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return restored["state"], restored["data"]
