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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from angpt_jax import cli, experiment, run_dir
from angpt_jax.config import Config
from angpt_jax.errors import DivergedError, StorageError, UserError
from angpt_jax.files import write_whole
from angpt_jax.rows import Row
from angpt_jax.stopping import EXIT_STOPPED, StopRequest

State = Literal["finished", "diverged", "failed", "stopped", "begun", "new"]
POLL_SECONDS = 0.1
STOP_SECONDS = 300.0  # that a run which was asked to stop may take to save
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
    trials: list[Trial] = []
    found: dict[str, list[str]] = {}  # problem → the rows that have it
    logs, names = {f"{row.name}.log": row.name for row in rows}, Counter(row.name for row in rows)
    for row in rows:
        try:
            if names[row.name] > 1:
                raise UserError("is the name of several rows; names differ")
            if row.name in logs:
                raise UserError(f"is the name of the log of {logs[row.name]}; give it another")
            config, *_ = experiment.resolved(row.config())
            if config.dry_run:
                raise UserError("dry_run: must be false where runs are trained, got true; leave it out")
            trial = Trial(row, config, (folder / row.name).absolute())
            run_dir.check(trial.directory, config)
            trials.append(trial)
        except UserError as error:
            for problem in error.problems:
                found.setdefault(problem.removeprefix(f"{row.name}: "), []).append(row.name)
    cli.raise_problems(
        f"{name}: {problem}"
        for problem, names in found.items()
        for name in (["every row"] if len(names) == len(rows) > 1 else names)
    )
    return trials


def outcome(trial: Trial) -> Outcome:
    """What the files of its directory say."""
    if run_dir.summarized_step(trial.directory) >= trial.config.run.last_step:
        return Outcome("finished")
    ended = run_dir.read_json(trial.directory / ENDED)
    if ended.get("state") in get_args(State):
        return Outcome(ended["state"], str(ended.get("said", "")))
    return Outcome("begun" if run_dir.holds_run(trial.directory) else "new")


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
    try:
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
    finally:  # none is left alone, also where a log can't be written
        for place in places:
            place.stop()
        for place in places:
            place.wait()
    return {trial.name: ends.get(trial.name) or outcome(trial) for trial in trials}


class _Place:
    """Cores on which one run is at work at a time."""

    def __init__(self, cores: set[int] | None):
        self._cores = cores
        self._told: float | None = None  # when the run was asked to stop
        self.running: tuple[Trial, subprocess.Popen[bytes]] | None = None
        self.seconds = 0.0

    def start(self, trial: Trial) -> None:
        self._began, self._told = time.monotonic(), None
        try:
            trial.directory.parent.mkdir(parents=True, exist_ok=True)
            (trial.directory / ENDED).unlink(missing_ok=True)
            # A session of its own: a Ctrl-C reaches this process alone, which passes it on once.
            with trial.log.open("ab") as log, _on(self._cores):
                process = subprocess.Popen(
                    trial.command(sys.executable),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise StorageError(f"{trial.name}: can't be started, got {str(trial.log)!r} ({error.strerror})") from error
        self.running = (trial, process)

    def stop(self) -> None:
        """Asks the run to stop, once; one that does not is killed, which loses the steps since its last checkpoint."""
        if self.running is None:
            return
        if self._told is None:
            self._told = time.monotonic()
            self.running[1].terminate()
        elif time.monotonic() > self._told + STOP_SECONDS:
            self.running[1].kill()

    def wait(self) -> None:
        """Until the run, which was asked to stop, is gone."""
        while self.running and self.running[1].poll() is None:
            self.stop()
            time.sleep(POLL_SECONDS)

    def ended(self) -> tuple[str, Outcome] | None:
        """Name of the run and how it ended, if it has; the place is free then."""
        if self.running is None or (code := self.running[1].poll()) is None:
            return None
        (trial, _), self.running = self.running, None
        self.seconds = time.monotonic() - self._began
        found = _ended(trial, code, self._told is not None)
        if found.state != "finished" and trial.directory.is_dir():
            try:
                write_whole(trial.directory / ENDED, json.dumps(asdict(found)) + "\n")
            except OSError as error:
                raise StorageError(
                    f"{trial.name}: can't be written, got {str(trial.directory)!r} ({error.strerror})"
                ) from error
        return trial.name, found


def _ended(trial: Trial, code: int, was_told: bool) -> Outcome:
    """How a run ended that exited with `code`."""
    if code == 0 and outcome(trial).state == "finished":
        return Outcome("finished")
    said = f"(exit code {code}) {_last_line(trial.log)}".rstrip()
    if code == 0:
        said = f"(no summary.json of its end; remove {trial.directory} to train it again) {_last_line(trial.log)}"
    if code == EXIT_STOPPED or (was_told and code < 0):  # a signal of ours, before there was something to save
        return Outcome("stopped", said)
    return Outcome("diverged" if code == DivergedError.exit_code else "failed", said)


@contextmanager
def _on(cores: set[int] | None) -> Iterator[None]:
    """What is started meanwhile gets these cores; None is all that this process has."""
    if cores is None:
        yield
        return
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


def _shared_cores(count: int) -> list[set[int] | None]:
    """The cores of this process in `count` parts; None, all of them, where there is one part or no way to tell."""
    if count == 1 or not hasattr(os, "sched_getaffinity"):
        return [None] * count
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[place::count]) or None for place in range(count)]


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
