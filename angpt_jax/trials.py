"""Runs of a table, each in a process and a directory of its own: what is done already, what is left, how it ended.

A run is `python -m angpt_jax.train` with flags, so that it can be repeated by hand; its output stands beside its
directory, in DIRECTORY.log. One that fails stops none of the others.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from angpt_jax import experiment, run_dir
from angpt_jax.config import Config
from angpt_jax.errors import StorageError, UserError
from angpt_jax.files import write_whole
from angpt_jax.rows import Row
from angpt_jax.stopping import EXIT_STOPPED, StopRequest

State = Literal["finished", "diverged", "failed", "stopped", "begun", "new"]
EXIT_DIVERGED = 3
POLL_SECONDS = 0.1
ENDED = "ended.json"  # in the directory of a run that did not come to its end: how it ended


@dataclass(frozen=True)
class Trial:
    """One run of a table: the row, its resolved config, and the directory that it gets."""

    row: Row
    config: Config
    directory: Path

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def log(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.log")

    def command(self, python: str = "python") -> list[str]:
        """What trains it, as words of a command line."""
        return [python, "-m", "angpt_jax.train", *self.row.words(), "--run.dir", str(self.directory)]

    def line(self) -> str:
        return shlex.join(self.command())


@dataclass(frozen=True)
class Outcome:
    """How a run stands.

    Args:
        state: finished; diverged; failed (with an error); stopped (by a signal); begun (has files, was cut off); new
        said: its last line, where it did not finish
    """

    state: State
    said: str = ""


def plan(rows: Sequence[Row], folder: Path) -> list[Trial]:
    """A trial for each row, in `folder`/NAME. A UserError lists what is wrong in any of them, also where a directory
    holds another run; nothing is written."""
    trials, problems = [], []
    for row in rows:
        try:
            config, *_ = experiment.resolved(row.config())
            trial = Trial(row, config, (folder / row.name).absolute())
            run_dir.check(trial.directory, config)
            trials.append(trial)
        except UserError as error:
            said = f"{row.name}: "
            problems += [said + problem.removeprefix(said) for problem in error.problems]
    if problems:
        raise UserError(*problems)
    return trials


def outcome(trial: Trial) -> Outcome:
    """What the files of its directory say."""
    ended, summary = _read(trial.directory / ENDED), _read(trial.directory / "summary.json")
    if summary.get("stopped_by") in ("steps", "stop_at_step") and summary.get("steps") == last_step(trial.config):
        return Outcome("finished")
    if ended:
        return Outcome(**ended)
    return Outcome("begun" if run_dir.holds_run(trial.directory) else "new")


def last_step(config: Config) -> int:
    return config.run.stop_at_step or config.run.steps


def run_all(
    trials: Sequence[Trial], stop: StopRequest, say: Callable[[str], None] = print, at_a_time: int = 1
) -> dict[str, Outcome]:
    """Trains what has not finished or diverged, in order, `at_a_time` of them together, which share the cores; how each
    one stands afterwards, by name. A signal stops the running ones, which save, and starts no further one."""
    waiting = [trial for trial in trials if outcome(trial).state not in ("finished", "diverged")]
    if done := len(trials) - len(waiting):
        say(f"{done} of {len(trials)} runs are done already")
    places = [_Place(cores) for cores in _shared_cores(at_a_time)]
    total, ends = len(waiting), {}
    while any(place.running for place in places) or (waiting and not stop.received):
        for place in places:
            if place.running is None and waiting and not stop.received:
                trial = waiting.pop(0)
                place.start(trial)
                say(f"[{total - len(waiting)}/{total}] {trial.name} …")
            if stop.received:
                place.stop()
            if ended := place.ended():
                name, ends[name] = ended
                say(f"{name}: {ends[name].state} after {place.seconds:,.0f} s {ends[name].said}".rstrip())
        time.sleep(POLL_SECONDS)
    return {trial.name: ends.get(trial.name) or outcome(trial) for trial in trials}


class _Place:
    """Cores on which one run is at work at a time."""

    def __init__(self, cores: set[int] | None):
        self._cores, self._told = cores, False
        self.running: tuple[Trial, subprocess.Popen[bytes]] | None = None
        self.seconds = 0.0

    def start(self, trial: Trial) -> None:
        self._began, self._told = time.monotonic(), False
        try:
            trial.directory.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                (trial.directory / ENDED).unlink()
            with trial.log.open("ab") as log:
                # A session of its own: a Ctrl-C reaches this process alone, which passes it on once.
                ours = os.sched_getaffinity(0) if self._cores else set()
                if self._cores:
                    os.sched_setaffinity(0, self._cores)
                try:
                    process = subprocess.Popen(
                        trial.command(sys.executable), stdout=log, stderr=log, start_new_session=True
                    )
                finally:
                    if self._cores:
                        os.sched_setaffinity(0, ours)
        except OSError as error:
            raise StorageError(f"{trial.name}: can't be started, got {str(trial.log)!r} ({error.strerror})") from error
        self.running = (trial, process)

    def stop(self) -> None:
        """Asks the run to stop, once."""
        if self.running and not self._told:
            self._told = True
            self.running[1].terminate()

    def ended(self) -> tuple[str, Outcome] | None:
        """Name of the run and how it ended, if it has; the place is free then."""
        if self.running is None or (code := self.running[1].poll()) is None:
            return None
        (trial, _), self.running = self.running, None
        self.seconds = time.monotonic() - self._began
        if code == 0:
            return trial.name, outcome(trial)
        states: dict[int, State] = {EXIT_DIVERGED: "diverged", EXIT_STOPPED: "stopped"}
        ended = Outcome(states.get(code, "failed"), f"(exit code {code}) {_last_line(trial.log)}")
        if trial.directory.is_dir():
            write_whole(trial.directory / ENDED, json.dumps(asdict(ended)) + "\n")
        return trial.name, ended


def _shared_cores(count: int) -> list[set[int] | None]:
    """The cores of this process in `count` parts; None, all of them, where there is one part or no way to tell."""
    if count == 1 or not hasattr(os, "sched_getaffinity"):
        return [None] * count
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[place::count]) or None for place in range(count)]


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
