"""Checkpoints: train state, manifest and the state of the data, saved together by Orbax, in the background.

    with Checkpoints(folder, keep_latest=2) as checkpoints:      # leaving it commits the last save
        checkpoints.save(step, state, data)                      # raises what went wrong with the save before
        checkpoints.check()                                      # each step: raises it as soon as it is known

Reading them back is `angpt_jax.restore`.
"""

import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from angpt_jax import integrity
from angpt_jax.errors import DivergedError, StorageError, UserError, warn
from angpt_jax.processes.group import ALONE, Group
from angpt_jax.restore import MANIFEST, STATE, reason_of, steps_in

UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a save that was not committed
DELETED = ".deleted"  # ends the name of a checkpoint that is about to go
LEFT_SECONDS, QUIET_SECONDS = 5.0, 0.5  # how long the rest of a failed save may come again, and must not to be gone
LEAVING_SECONDS = 20  # how long a save is waited for after an error that the other processes may not share


class Checkpoints:
    """Writes the checkpoints of one run directory and deletes those that are not to be kept.

    Orbax's own CheckpointManager hides in a thread what went wrong until all processes have come, and some can't;
    its AsyncCheckpointer tells.
    """

    def __init__(
        self, directory: Path, keep_latest: int, keep_every_steps: int | None = None, group: Group = ALONE
    ) -> None:
        self._folder, self._group = directory.absolute(), group
        self._keep_latest, self._keep_every_steps = keep_latest, keep_every_steps
        self._saving: int | None = None
        self._failed = False
        with self._storing():
            if group.is_first:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._remove_rest(say=True)
            self._steps = set(json.loads(group.everyone("steps", json.dumps(steps_in(self._folder)))[0]))
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(),
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),  # their error is lost
        )

    def __enter__(self) -> "Checkpoints":
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Waits until the last save is committed; after an error that the other processes may not share, not for long.
        What goes wrong with it does not hide the error that ends the run."""
        fine = kind is None or (isinstance(error, SystemExit) and not error.code)
        together = fine or kind is DivergedError or self._group.is_alone  # all of them see that a run diverged
        try:
            self._leave(None if together else LEAVING_SECONDS)
        except StorageError as failure:
            if fine:
                raise
            warn(*failure.problems)
        finally:
            sys.unraisablehook = self._hook

    def _unraisable(self, what: Any) -> None:
        """When a part of a save fails, TensorStore can't tell Orbax any more how the others went: no news either."""
        if str(what.exc_value) != "Event loop is closed":
            self._hook(what)

    def save(self, step: int, state: Any, data: dict[str, Any]) -> None:
        """Starts to save `state` and `data` as `step`, unless that step is there already; all processes call it."""
        self._finish()
        if step in self._steps:
            return
        self._saving = step
        items = ocp.args.Composite(
            **{
                STATE: ocp.args.StandardSave(state),
                MANIFEST: ocp.args.JsonSave(integrity.manifest(state, data)),
            }
        )
        with self._storing():
            self._checkpointer.save(self._folder / str(step), args=items)

    def check(self) -> None:
        """Raises what went wrong with the save in the background, if that is known by now; costs next to nothing."""
        if self._saving is not None:
            with self._storing():
                self._checkpointer.check_for_errors()

    def _finish(self) -> None:
        """Waits until the last save is committed, then deletes those that need not be kept any more."""
        if self._saving is None:
            return
        with self._storing():
            self._checkpointer.wait_until_finished()
            self._steps.add(self._saving)
            self._saving = None
            newest = sorted(self._steps)[-self._keep_latest :]
            every = self._keep_every_steps
            kept = {step for step in self._steps if step in newest or (every and step % every == 0)}
            for step in self._steps - kept if self._group.is_first else ():
                self._delete(self._folder / str(step))
            self._steps = kept

    def _delete(self, path: Path) -> None:
        """A kill leaves a checkpoint whole, or not under its name."""
        going = path.rename(path.with_name(path.name + DELETED))
        shutil.rmtree(going, ignore_errors=True)

    def _leave(self, seconds: float | None) -> None:
        if seconds is not None:
            waiting = threading.Thread(target=self._finish_quietly, daemon=True)
            waiting.start()
            waiting.join(seconds)
            return
        try:
            if not self._failed:
                self._finish()
        finally:
            self._checkpointer.close()
            if self._failed:
                self._remove_rest_of_failed()

    def _finish_quietly(self) -> None:
        try:
            self._finish()
        except StorageError as failure:
            warn(*failure.problems)

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """What goes wrong with files becomes a StorageError, and what the save left is removed."""
        try:
            yield
        except (UserError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # TensorStore's errors are ValueErrors, those of Orbax of many kinds
            saving, self._saving, self._failed = self._saving, None, True
            self._remove_rest(say=False)
            what = "write checkpoints" if saving is None else f"save step {saving}"
            raise StorageError(
                f"run.dir: can't {what}, got {str(self._folder)!r} ({reason_of(error)}); make room or mend it, then "
                "start again: the checkpoints before are as they were"
            ) from error

    def _remove_rest_of_failed(self) -> None:
        """Other parts of a save that failed may still be written, and make their folders again."""
        deadline, seen = time.monotonic() + LEFT_SECONDS, 0.0
        while time.monotonic() < min(deadline, seen + QUIET_SECONDS) or not seen:
            if any(UNFINISHED in path.name for path in self._folder.glob("*")) or not seen:
                seen = time.monotonic()
                self._remove_rest(say=False)
            time.sleep(0.05)

    def _remove_rest(self, say: bool) -> None:
        """Removes what saves and deletions left that did not come to their end."""
        if not self._group.is_first or not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            if UNFINISHED not in path.name and not path.name.endswith(DELETED):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            if say and UNFINISHED in path.name:
                warn(f"run.dir: removed the rest of a save that did not end, got {str(path)!r}; nothing to do")


def _is_news(record: logging.LogRecord) -> bool:
    """Orbax logs the traceback of what it raises later, which becomes one line here."""
    return not (record.exc_info and "orbax" in record.pathname + record.getMessage())


for _logger in ("absl", "asyncio"):  # asyncio tells of the other parts of a save that failed
    logging.getLogger(_logger).addFilter(_is_news)
