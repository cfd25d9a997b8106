"""Runs of a table: what is done is not repeated, what fails stops nothing, a signal ends all of it."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import tree
from fake_trials import begun, make, replace_training, tiny

from angpt_jax import cli, experiment, trials
from angpt_jax.errors import StorageError, UserError
from angpt_jax.rows import Row
from angpt_jax.stopping import SIGNALS, StopRequest
from angpt_jax.trials import Outcome, Trial, outcome, run_all

Said = list[str]


@pytest.fixture(autouse=True)
def nothing_trains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handlers of signals are those of before again, whatever came."""
    replace_training(monkeypatch)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(runs: list[Trial], at_a_time: int = 1, also: Callable[[str], None] = lambda line: None) -> tuple[dict, Said]:
    """How the runs stand, and what was said, without seconds; `also` is called with each line."""
    said: Said = []

    def say(line: str) -> None:
        said.append(re.sub(r"after \d+ s", "after 0 s", line))
        also(line)

    with StopRequest() as stop:
        return run_all(runs, stop, say, at_a_time), said


def stopping(trial: Trial) -> Callable[[str], None]:
    """Sends SIGTERM to this process once the run says that it is ready, as soon as a line names it."""

    def stop(line: str) -> None:
        if line.endswith(f"{trial.name} …"):
            while not (trial.directory / "ready").exists():
                time.sleep(0.01)
            signal.raise_signal(signal.SIGTERM)

    return stop


def test_what_ended_is_not_repeated_and_what_failed_stops_nothing(tmp_path: Path):
    runs = make(tmp_path, "fails", "trains", "diverges", "refuses")
    states, said = run(runs)
    assert states == {
        "fails": Outcome("failed", "(exit code 1) out of luck"),
        "trains": Outcome("finished"),
        "diverges": Outcome("diverged", "(exit code 3) loss is nan"),
        "refuses": Outcome("failed", "(exit code 1) run.dir: is in use"),
    }
    assert said == [
        "[1/4] fails …",
        "fails: failed after 0 s (exit code 1) out of luck",
        "[2/4] trains …",
        "trains: finished after 0 s",
        "[3/4] diverges …",
        "diverges: diverged after 0 s (exit code 3) loss is nan",
        "[4/4] refuses …",
        "refuses: failed after 0 s (exit code 1) run.dir: is in use",
    ]
    again, said = run(runs)
    assert again == states and said[:2] == ["2 of 4 runs are done already", "[1/2] fails …"]
    assert [begun(trial) for trial in runs] == [2, 1, 1, 2]
    assert runs[0].log.read_text() == "begins fails\nout of luck\n" * 2


def test_a_signal_stops_the_running_ones_and_starts_no_other(tmp_path: Path):
    runs = make(tmp_path, "trains", "waits", "waits-too")
    states, said = run(runs, also=stopping(runs[1]))
    assert list(states.values()) == [
        Outcome("finished"),
        Outcome("stopped", "(exit code 75) begins waits"),
        Outcome("new"),
    ]
    assert said[2:] == ["[2/3] waits …", "waits: stopped after 0 s (exit code 75) begins waits"]
    assert outcome(runs[1]).state == "stopped" and begun(runs[2]) == 0


@pytest.mark.parametrize(("name", "code"), [("sleeps", -15), ("ignores", -9)])
def test_a_run_that_does_not_save_is_ended_all_the_same(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the signal itself where it was too early for a handler, in the end by one that nobody can ignore."""
    monkeypatch.setattr(trials, "STOP_SECONDS", 0.2)
    runs = make(tmp_path, name)
    states, _ = run(runs, also=stopping(runs[0]))
    assert states == {name: Outcome("stopped", f"(exit code {code}) begins {name}")}


def test_none_is_left_alone_when_another_can_not_be_started(tmp_path: Path):
    runs = make(tmp_path, "waits", "trains")
    runs[1].log.mkdir(parents=True)

    def ready(line: str) -> None:
        while not (runs[0].directory / "ready").exists():
            time.sleep(0.01)

    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        run(runs, at_a_time=2, also=ready)
    assert caught.value.problems == (f"trains: can't be started, got '{runs[1].log}' (Is a directory)",)
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((runs[0].directory / "ready").read_text()), 0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_at_a_time_share_the_cores(tmp_path: Path):
    ours = sorted(os.sched_getaffinity(0))
    runs = make(tmp_path, "trains-1", "trains-2", "trains-3")
    states, said = run(runs, at_a_time=2)
    assert list(states.values()) == [Outcome("finished")] * 3
    assert said[:2] == ["[1/3] trains-1 …", "[2/3] trains-2 …"] and "[3/3] trains-3 …" in said[3:]
    theirs = [json.loads(trial.directory.with_name(f"{trial.name}.cores").read_text()) for trial in runs]
    assert sorted(theirs[0] + theirs[1]) == ours and theirs[2] in theirs[:2]
    assert sorted(os.sched_getaffinity(0)) == ours
    assert trials._shared_cores(len(ours) + 1)[-1] is None


def test_an_end_without_a_summary_is_said(tmp_path: Path):
    (trial,) = runs = make(tmp_path, "mute")
    said = f"(no summary.json of its end; remove {trial.directory} to train it again) begins mute"
    assert run(runs)[0] == {"mute": Outcome("failed", said)}


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "3", '{"state": "gone"}', '{"steps": "14"}', '{"steps": 13}', "\xff"]
)
def test_damaged_records_are_as_if_they_were_not_there(damage: str, tmp_path: Path):
    (trial,) = make(tmp_path, "x")
    assert outcome(trial) == Outcome("new")
    trial.directory.mkdir(parents=True)
    for name in (trials.ENDED, "summary.json"):
        (trial.directory / name).write_bytes(damage.encode("latin-1"))
    assert outcome(trial) == Outcome("new")
    (trial.directory / "config.yaml").touch()
    assert outcome(trial) == Outcome("begun")


def test_what_finished_after_all_is_finished(tmp_path: Path):
    """As a run that outlived a killed sweep, whose next one found the directory in use."""
    (trial,) = make(tmp_path, "x")
    trial.directory.mkdir(parents=True)
    (trial.directory / trials.ENDED).write_text('{"state": "failed", "said": "in use"}')
    assert outcome(trial) == Outcome("failed", "in use")
    (trial.directory / "summary.json").write_text('{"steps": 14}')
    assert outcome(trial) == Outcome("finished")
    longer = replace(trial, config=replace(trial.config, run=replace(trial.config.run, steps=15)))
    earlier = replace(longer, config=replace(longer.config, run=replace(longer.config.run, stop_at_step=14)))
    assert [outcome(longer).state, outcome(earlier).state] == ["failed", "finished"]


def problems(rows: list[Row], folder: Path) -> list[str]:
    before = tree(folder)
    with pytest.raises(UserError) as caught:
        trials.plan(rows, folder / "runs")
    assert tree(folder) == before
    return list(caught.value.problems)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Row:
    """A row in a folder where runs/other holds its run."""
    monkeypatch.chdir(tmp_path)
    config = experiment.resolved(tiny(tmp_path))[0]
    (tmp_path / "runs/other").mkdir(parents=True)
    (tmp_path / "runs/other/config.yaml").write_text(cli.to_yaml(config))
    return Row("other", ("tiny.yaml",))


def test_a_plan_names_what_is_wrong_in_each_row(base: Row, tmp_path: Path):
    rows = [
        base.but("other", {"run.seed": 3}),
        base.but("b", {"run.steps": 0, "optim.beta2": 2}),
        base.but("c", {"data.sorce": "x", "run.steps": "x"}),
        base.but("d", {"model.places.residual.part": "ad"}),
        base.but("b.log", {}),
        base.but("twice", {}),
        base.but("twice", {"run.seed": 1}),
        base.but("dry", {"dry_run": True}),
    ]
    assert problems(rows, tmp_path) == [
        f"other: run.seed: differs from the run in {tmp_path}/runs/other, got 3; it was 0: use that, or another "
        "--run.dir",
        "b: run.steps: must be >= 1, got 0",
        "b: optim.beta2: must be >= 0 and < 1, got 2.0",
        "c: data.sorce: unknown key; did you mean data.source?",
        "c: run.steps: expected int, got 'x'",
        "d: model.places.residual.part: unknown part, got 'ad'; did you mean add?",
        "b.log: is the name of the log of b; give it another",
        "twice: is the name of several rows; names differ",
        "twice: is the name of several rows; names differ",
        "dry: dry_run: must be false where runs are trained, got true; leave it out",
    ]


def test_what_is_wrong_in_every_row_is_said_once(base: Row, tmp_path: Path):
    rows = [Row(name, ("nowhere.yaml",), {"run.seed": seed}) for name, seed in (("a", 1), ("b", -1))]
    said = "config: can't be read (No such file or directory), got 'nowhere.yaml'"
    assert problems(rows, tmp_path) == [f"every row: {said}"]
    assert problems(rows[:1], tmp_path) == [f"a: {said}"]
    (tmp_path / "nowhere.yaml").write_text("run: {steps: 0}")
    assert problems([base.but(row.name, {"run.steps": 0, **row.values}) for row in rows], tmp_path) == [
        "every row: run.steps: must be >= 1, got 0",
        "b: run.seed: must be >= 0 and < 2**32, got -1",
    ]


def test_a_plan_goes_on_with_a_run_of_the_same_config(base: Row, tmp_path: Path):
    free = base.but("other", {"run.log_every_steps": 7})
    (trial,) = trials.plan([free], Path("runs"))
    assert (trial.directory, trial.config.model.feed_forward) == (tmp_path / "runs/other", 128)
    assert outcome(trial) == Outcome("begun")


def test_a_command_can_be_given_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    row = Row("a", ("tiny.yaml", "my own.yaml"), {"model.places": {"qk": {"part": "unit_qk"}}, "data.source": "a b"})
    line = Trial(row, tiny(tmp_path), Path("/x/a")).line()
    assert line == (
        "python -m angpt_jax.train --config tiny.yaml --config 'my own.yaml' --model.places "
        """'{"qk": {"part": "unit_qk"}}' --data.source 'a b' --run.dir /x/a"""
    )
