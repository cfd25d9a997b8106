"""One run at a time in a run directory: `run.lock` there says which process has it.

    with locked(directory, group):       # a UserError if another run has it

The lock of a process of this machine that is gone, as after a kill, is taken over; that of another machine is not, for
nobody here can tell.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from angpt_jax.errors import UserError, warn
from angpt_jax.processes.group import Group

NAME = "run.lock"
WRITTEN_SECONDS = 2.0  # until a lock that was made must say whose it is

Owner = dict[str, Any]


@contextmanager
def locked(directory: Path, group: Group) -> Iterator[None]:
    """Holds the directory until the block ends, in whatever way; process 0 does it for all."""
    path, mine = directory / NAME, _myself()
    group.agreed("run.dir is free", partial(_take, path, mine) if group.is_first else lambda: None)
    try:
        yield
    finally:
        if group.is_first:
            _release(path, mine)


def _myself() -> Owner:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "process_started": _process_started(os.getpid()),
        "token": uuid.uuid4().hex,
    }


def _take(path: Path, mine: Owner) -> None:
    try:
        while not _made(path, mine):
            owner = _owner(path)
            if owner is None:
                continue
            where = f"got {str(path.parent)!r}, where process {owner['pid']} on {owner['host']} runs since "
            if owner["host"] != mine["host"]:
                raise UserError(
                    f"run.dir: is in use, {where}{owner['since']}; wait for it or use another --run.dir; if it is "
                    f"gone, remove {str(path)!r}"
                )
            if _is_alive(owner):
                raise UserError(f"run.dir: is in use, {where}{owner['since']}; wait for it or use another --run.dir")
            _set_aside(path, owner)
            warn(
                f"run.dir: the run before did not end by itself, got a lock of process {owner['pid']} of "
                f"{owner['since']}, which is gone; going on in its place"
            )
    except OSError as error:
        raise UserError(f"run.dir: can't be locked, got {str(path)!r}; {error.strerror}") from error


def _made(path: Path, mine: Owner) -> bool:
    """Makes the lock, unless there is one."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        with os.fdopen(file, "w", encoding="utf-8") as lock:
            lock.write(json.dumps(mine) + "\n")
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _owner(path: Path) -> Owner | None:
    """Whose lock it is; None if it is gone by now."""
    deadline = time.monotonic() + WRITTEN_SECONDS
    while True:
        try:
            owner = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(owner, dict) and {"pid", "host", "since", "token"} <= owner.keys():
                return owner
        except FileNotFoundError:
            return None
        except ValueError:  # made, but not written yet
            pass
        if time.monotonic() > deadline:
            raise UserError(
                f"run.dir: has a lock that says not whose it is, got {str(path)!r}; if no run is at work there, "
                "remove it"
            )
        time.sleep(0.05)


def _is_alive(owner: Owner) -> bool:
    """Whether the process is still there, and not another one with its number."""
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return _process_started(owner["pid"]) == owner.get("process_started")


def _process_started(pid: int) -> str | None:
    """When, in ticks since the machine's start; "gone" if it only waits to be buried; None if nobody tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "gone" if fields[0] in "ZX" else fields[19]


def _set_aside(path: Path, owner: Owner) -> None:
    """Removes a lock, but only that of `owner`: another run may have taken it over meanwhile."""
    aside = path.with_name(f"{NAME}.{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _owner(aside) == owner:
        aside.unlink()
    else:
        aside.rename(path)


def _release(path: Path, mine: Owner) -> None:
    try:
        if json.loads(path.read_text(encoding="utf-8")) == mine:
            path.unlink()
    except (OSError, ValueError):
        pass  # it is not ours any more
