"""The folder of a run: `config.yaml`, `tokenizer.json`, `environment.json`, `checkpoints/`; whether a config may
continue it, and whether files can be written there."""

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax

from angpt_jax import cli, links, weights_folder
from angpt_jax.config import Config
from angpt_jax.errors import StorageError, UserError
from angpt_jax.files import write_whole
from angpt_jax.processes.group import Group

# Fields that may change between two starts of one run: they don't touch what is computed.
FREE = {
    "data.cache_dir",
    "data.on_change",
    "data.workers",
    "dry_run",
    "model.attention",
    "model.loss_vocab_chunk",
    "model.remat",
    "optim.max_bad_steps",
    "optim.micro_batches",
    "run.checkpoint_every_steps",
    "run.dir",
    "run.eval_every_steps",
    "run.init_from",  # a run that has a checkpoint does not look there; config.yaml keeps what it was
    "run.instrument_every_steps",
    "run.keep_every_steps",
    "run.keep_latest",
    "run.log_every_steps",
    "run.resume",
    "run.stop_at_step",
}
FREE_SECTIONS = ("mesh.", "distributed.")
TOKENIZER = "tokenizer.json"
# What --data.on_change continue frees besides: the model stays what it is, and so do its steps.
OTHER_DATA = ("data.source", "data.mixture", "data.packing", "data.shuffle_seed", "data.validation_")
PACKAGES = ("angpt-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy")

# What a disk that fails or is full says, whichever file it is about.
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE}
SHARED_SECONDS = 5.0  # until a file of another machine must be seen; a network file system may take a while


def locate(config: Config, name: str) -> Path:
    """`run.dir`, or `runs/` + the name of the config; absolute."""
    return Path(config.run.dir or f"runs/{name}").absolute()


def holds_run(directory: Path) -> bool:
    return os.path.exists(directory / "config.yaml")


def checkpoints_of(directory: Path) -> Path:
    return directory / "checkpoints"


def load_config(directory: Path) -> Config:
    """The config of the run in `directory`, or of the weights."""
    if not holds_run(directory):
        raise UserError(f"run.dir: holds no run (no config.yaml), got {str(directory)!r}; train one first")
    return cli.parse(Config, ["--config", str(directory / "config.yaml")], command="train", default_config=None)


def summarized_step(directory: Path) -> int:
    """The step that summary.json was written at; 0 without one that can be read."""
    step = read_json(directory / "summary.json").get("steps")
    return step if isinstance(step, int) else 0


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check(directory: Path, config: Config) -> None:
    """Raises if `directory` holds a run that `config` would not continue, or must not be continued."""
    if leading_out := links.leading_out(directory):
        raise UserError(
            f"run.dir: holds links that lead out of it ({', '.join(leading_out[:3])}), got {str(directory)!r}; "
            "give a run.dir on the other disk itself, or remove them"
        )
    if not holds_run(directory):
        folder = checkpoints_of(directory)
        if os.path.isdir(folder) and any(folder.iterdir()):
            raise UserError(
                f"run.dir: holds checkpoints but no config.yaml, got {str(directory)!r}; bring it back, or use "
                "another one"
            )
        if config.run.resume == "must":
            raise UserError(f"run.resume: must, but there is no run in {directory}; use auto to start one")
        return
    if weights_folder.is_one(directory):
        raise UserError(
            f"run.dir: holds weights only, which can't be resumed, got {str(directory)!r}; start another --run.dir "
            f"with --run.init_from {directory}"
        )
    if config.run.resume == "never":
        raise UserError(f"run.dir: holds a run already, got {str(directory)!r}; use another one, or --run.resume auto")
    other_data = OTHER_DATA if config.data.on_change == "continue" else ()
    changes = [
        change
        for change in cli.changed(load_config(directory), config)
        if change[0] not in FREE and not change[0].startswith((*FREE_SECTIONS, *other_data))
    ]
    if changes:
        raise UserError(
            *(
                f"{key}: differs from the run in {directory}, got {new!r}; it was {old!r}: use that, "
                "or another --run.dir"
                for key, old, new in changes
            )
        )


def make(directory: Path) -> None:
    """Makes the folder; what it can't is the user's to mend."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from error


def preflight(directory: Path, state_bytes: int) -> None:
    """Raises if the checkpoints of a state can't be written to the run directory, before anything is computed: writes a
    file, syncs and renames it, and asks for the room of two checkpoints (of one if there are some). Leaves nothing
    behind then, else the folder of the checkpoints."""
    folder = checkpoints_of(directory)
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    probe = folder / f".probe-{uuid.uuid4().hex}"
    renamed = probe.with_suffix(".renamed")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        needed = state_bytes * (1 if any(path.name.isdecimal() for path in folder.iterdir()) else 2)
        with probe.open("wb") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        probe.rename(renamed)
        renamed.unlink()
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(
                f"run.dir: must have room for two checkpoints, got {str(directory)!r} with {free / 1e6:.1f} MB free; "
                f"{needed / 1e6:.1f} MB are needed"
            )
    except (OSError, UserError) as error:
        for path in (probe, renamed):
            with suppress(OSError):
                path.unlink()
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise (_unwritable(directory, error) if isinstance(error, OSError) else error) from error


def _unwritable(directory: Path, error: OSError) -> UserError:
    return UserError(
        f"run.dir: can't be written, got {str(directory)!r} ({error.strerror}); a folder of yours on a disk with room"
    )


@contextmanager
def storage(directory: Path) -> Iterator[None]:
    """What a disk says that fails or is full, while a run is at work, becomes a StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        raise StorageError(
            f"run.dir: can't be written any more, got {str(error.filename or directory)!r} ({error.strerror}); make "
            "room or mend it, then start again: it goes on from the last checkpoint"
        ) from error


def check_shared(directory: Path, group: Group) -> None:
    """Raises in all processes if one of them does not see in its run directory what process 0 writes to its own.
    Nothing stays there.

    The others must not have looked there before: a network file system remembers for a while that nothing was there.
    """
    if group.is_alone:
        return
    missing = [path for path in (directory, *directory.parents) if group.is_first and not path.exists()]
    group.agreed("run.dir", partial(make, directory) if group.is_first else lambda: None)
    token = group.everyone("run.dir: token", f".shared-{uuid.uuid4().hex}")[0]
    if group.is_first:
        (directory / token).touch()
    group.barrier("run.dir: token is written")
    seen = json.dumps({"sees": group.is_first or _appears(directory / token), "directory": str(directory)})
    answers = [json.loads(text) for text in group.everyone("run.dir: seen", seen)]
    blind = [number for number, answer in enumerate(answers) if not answer["sees"]]
    if group.is_first:
        (directory / token).unlink()
        for path in missing if blind else ():
            with suppress(OSError):
                path.rmdir()
    if blind:
        theirs = f"{group.name(blind[0])} does not see it in {answers[blind[0]]['directory']!r}"
        others = f", nor do {len(blind) - 1} more" if len(blind) > 1 else ""
        raise UserError(
            f"run.dir: must be storage that all processes share, got {answers[0]['directory']!r}: {theirs}{others}; "
            "a folder on a network file system, the same for all"
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def record(directory: Path, config: Config, tokenizer: str) -> None:
    """Writes what the run is and where it runs; not which process of it this one is. `tokenizer` is its file."""
    anywhere = replace(config.distributed, coordinator=None, processes=None, process=None)
    write_whole(directory / "environment.json", json.dumps(environment(), indent=2) + "\n")
    write_whole(directory / TOKENIZER, tokenizer)
    write_whole(directory / "config.yaml", cli.to_yaml(replace(config, distributed=anywhere)))


def environment() -> dict[str, Any]:
    """Versions, devices, git commit and command line of this process."""
    return {
        "python": platform.python_version(),
        "packages": {d.name: d.version for d in distributions() if d.name in PACKAGES},
        "devices": [str(device) for device in jax.devices()],
        "device_kind": jax.devices()[0].device_kind,
        "processes": jax.process_count(),
        "git_commit": _git_commit(),
        "command": sys.argv,
    }


def _git_commit() -> str | None:
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
