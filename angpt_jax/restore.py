"""The newest checkpoint that is whole, in the shapes and shardings that the run wants.

    found = newest_valid(folder, built.abstract, group)     # found.step, found.state, found.data; None: there is none
    found = newest_params(folder, built.abstract.params)    # the parameters alone, without a byte of the moments

One that is damaged, incomplete or unreadable is passed over with a warning and, if the run writes there, renamed. All
processes come to the same answer: each tries, then they tell each other, and what one can't read none uses.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from angpt_jax import integrity
from angpt_jax.errors import StorageError, UserError, warn
from angpt_jax.integrity import Manifest
from angpt_jax.processes.group import ALONE, Group

STATE, MANIFEST = "state", "manifest"  # the items of a checkpoint
PARAMS = "params"  # the part of the state that is a model
ORBAX_METADATA = "_CHECKPOINT_METADATA"  # where Orbax lists the items
SHOWN = 5  # differences in a message
LONGEST = 200  # characters of a reason in a message


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was checked; `data` is what was saved with it."""

    step: int
    state: Any
    data: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """What is read of a checkpoint, and which field of a config an error blames.

    Args:
        under: what the paths of the leaves that are read begin with
        field: that names the folder
    """

    under: str = ""
    field: str = "run.dir"


WHOLE = Part()


class Damaged(Exception):
    """A checkpoint that can't be used, and why."""


def steps_in(folder: Path) -> list[int]:
    """Steps by the names of what lies in a folder of checkpoints, newest first; whole or not."""
    if not folder.is_dir():
        return []
    names = (path.name for path in folder.iterdir())
    return sorted((int(name) for name in names if name.isdecimal() and str(int(name)) == name), reverse=True)


def newest_params(folder: Path, abstract: Any, group: Group = ALONE, field: str = WHOLE.field) -> Restored | None:
    """What `newest_valid` finds, of the parameters alone, which `abstract` describes and `state` holds: nothing else is
    read, nothing renamed, and the state that they were saved in may be another one."""
    found = newest_valid(folder, {PARAMS: abstract}, group, rename=False, part=Part(f"{PARAMS}/", field))
    return found and replace(found, state=found.state[PARAMS])


def newest_valid(
    folder: Path, abstract: Any, group: Group = ALONE, rename: bool = True, part: Part = WHOLE
) -> Restored | None:
    """See above; a UserError if there are checkpoints but none that can be used. Nothing is renamed then.

    Args:
        folder: of the checkpoints, one for all processes
        abstract: shapes, dtypes and shardings of the state, or of a part of it
        group: the processes, all of which call this
        rename: gives those that are passed over the name STEP.damaged
        part: which part
    """
    listed = group.agreed(
        f"{part.field}: list of checkpoints",
        partial(_listed, folder, part.field) if group.is_first else lambda: ([], []),
    )
    steps, damaged = json.loads(group.everyone(f"{part.field}: checkpoints", json.dumps(listed))[0])
    reasons: dict[int, str] = {}
    for step in steps:
        found = read_step(folder, step, abstract, group, part)
        if isinstance(found, Restored):
            if group.is_first:
                for passed_over, reason in reasons.items():
                    kept = f"renamed to {_set_aside(folder / str(passed_over))}, " if rename else ""
                    warn(
                        f"{part.field}: the checkpoint of step {passed_over} is damaged ({reason}), got "
                        f"{str(folder / str(passed_over))!r}; {kept}going on with step {step}"
                    )
            return found
        reasons[step] = found
    if reasons or damaged:
        said = "; ".join([f"step {step}: {reason}" for step, reason in reasons.items()] or [", ".join(damaged)])
        raise UserError(
            f"{part.field}: none of its checkpoints is whole, got {str(folder)!r} ({said}); bring one back, or start "
            f"anew with another --{part.field}"
        )
    return None


def _listed(folder: Path, field: str) -> tuple[list[int], list[str]]:
    try:
        return steps_in(folder), [path.name for path in folder.glob("*.damaged*")]
    except OSError as error:
        raise StorageError(f"{field}: can't be read, got {str(folder)!r}; {error.strerror}") from error


def _set_aside(path: Path) -> str:
    """Renames a checkpoint that is damaged; its new name, which no other had."""
    number, target = 1, path.with_name(f"{path.name}.damaged")
    while target.exists():
        number, target = number + 1, path.with_name(f"{path.name}.damaged-{number + 1}")
    try:
        path.rename(target)
    except OSError as error:
        raise StorageError(
            f"run.dir: can't rename a damaged checkpoint, got {str(path)!r}; {error.strerror}"
        ) from error
    return target.name


def read_step(folder: Path, step: int, abstract: Any, group: Group = ALONE, part: Part = WHOLE) -> Restored | str:
    """The checkpoint, or why it can't be used; the same in all processes."""
    name = f"{part.field}: checkpoint {step}"
    loaded = group.agreed(f"{name} is read", partial(_load, folder / str(step), abstract, part))
    unread = loaded if isinstance(loaded, str) else ""
    if reason := _any_reason(group, f"{name} is there", unread):
        return reason
    assert not isinstance(loaded, str)
    state, stored = loaded
    wrong = integrity.wrong_leaves(stored, state)
    changed = f"{wrong[0]}{f' and {len(wrong) - 1} more' if wrong[1:] else ''}: not what was saved" if wrong else ""
    if reason := _any_reason(group, f"{name} is whole", changed):
        return reason
    return Restored(step, state, stored["data"])


def _any_reason(group: Group, name: str, reason: str) -> str:
    """What the first process has to say that says anything."""
    for number, said in enumerate(group.everyone(name, reason)):
        if said:
            return said if group.is_alone else f"{said} (in {group.name(number)})"
    return ""


def _load(path: Path, abstract: Any, part: Part) -> tuple[Any, Manifest] | str:
    """State and manifest, or why there are none; a UserError if the run wants another state than was saved.

    Nothing here waits for another process: what the handlers of Orbax read, each process reads by itself.
    """
    try:
        stored = _manifest(path, part.field)
        if different := integrity.differences(stored, abstract, part.under):
            more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
            raise UserError(
                f"{part.field}: the checkpoint of step {path.name} does not fit the config, got {str(path)!r}, which "
                f"differs in {'; '.join(different[:SHOWN])}{more}; use the config that saved it, or another "
                f"--{part.field}"
            )
        with _orbax_reads():
            return _arrays(epath.Path(path / STATE), abstract, part), stored
    except Damaged as error:
        return str(error)


def _arrays(path: epath.Path, abstract: Any, part: Part) -> Any:
    if not part.under:
        return ocp.StandardCheckpointHandler().restore(path, args=ocp.args.StandardRestore(abstract))
    each = ocp.checkpoint_utils.construct_restore_args(abstract)
    return ocp.PyTreeCheckpointHandler().restore(
        path, args=ocp.args.PyTreeRestore(abstract, restore_args=each, partial_restore=True)
    )


def _manifest(path: Path, field: str) -> Manifest:
    """The manifest of a checkpoint; Damaged if it is not as written, a UserError if we never wrote one here."""
    items = _items(path)
    if items is not None and not {STATE, MANIFEST} <= items:
        raise UserError(
            f"{field}: holds a checkpoint that this version did not write, got {str(path)!r} with the items "
            f"{', '.join(sorted(items)) or 'none'}; expected {STATE} and {MANIFEST}: use another --{field}"
        )
    with _orbax_reads():
        stored = dict(ocp.JsonCheckpointHandler().restore(epath.Path(path / MANIFEST)))
    if not integrity.is_whole(stored):
        raise Damaged("its manifest is not as it was written")
    if stored["format"] != integrity.FORMAT:
        raise UserError(
            f"{field}: holds a checkpoint of another version, got format {stored['format']} in {str(path)!r}; "
            f"expected {integrity.FORMAT}: use another --{field}"
        )
    return stored


def _items(path: Path) -> set[str] | None:
    """The items that a checkpoint was saved with; None if the file that says so is damaged."""
    if not path.is_dir():
        raise Damaged("it is not a folder")
    try:
        names = {child.name for child in path.iterdir()}
    except OSError as error:
        raise Damaged(reason_of(error)) from error
    if not names:
        raise Damaged("it is empty")
    if ORBAX_METADATA not in names:
        return None if names & {STATE, MANIFEST} else names
    try:
        return set(json.loads((path / ORBAX_METADATA).read_text("utf-8"))["item_handlers"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _orbax_reads:
    """Orbax, TensorStore and the codecs raise whatever they stumble over in a damaged file: all of that is Damaged, but
    not what the device or the memory says."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, MemoryError | jax.errors.JaxRuntimeError):
            raise Damaged(reason_of(error)) from error


def reason_of(error: BaseException) -> str:
    """What was first said of trouble with files, without where it was said."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())
    system = re.search(r"([^:]+) \[os_error_code", text)
    return system[1].strip() if system else f"{type(error).__name__}: {text[:LONGEST]}"
