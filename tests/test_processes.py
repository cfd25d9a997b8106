"""Several processes of one run on this machine: the numbers of a single one, one checkpoint, one end for all."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from commands import Outcome, make_workspace
from processes import Processes, errors, free_port, run_all, running

from angpt_jax import metrics

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
ENDLESS = ("--run.steps", "100000", "--run.eval_every_steps", "100000", "--run.checkpoint_every_steps", "100000")
SHORT = ("--run.steps", "10")
MESHES = {
    "two": (2, 2, ()),  # parameters and rows over all four devices
    "four": (4, 1, ("--mesh.tensor", "2")),  # processes 0 and 1 hold the same rows, and so do 2 and 3
}


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="session")
def one_device(workspace: Path) -> dict[tuple[int, str], float]:
    """The numbers of ten steps in one process on one device."""
    (done,) = run_all(workspace, 1, 1, *SHORT, "--run.eval_every_steps", "6", "--run.dir", "runs/one")
    assert done.code == 0, done.err
    return numbers(workspace / "runs/one")


def numbers(run: Path) -> dict[tuple[int, str], float]:
    """Loss and validation loss by step; each stands once."""
    records = metrics.read(run / "metrics.jsonl")
    found = [((r["step"], name), r[name]) for r in records for name in ("loss", "val_loss") if name in r]
    assert len(found) == len(dict(found))
    return dict(found)


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def all_end_with(code: int, outcomes: list[Outcome]) -> None:
    assert [outcome.code for outcome in outcomes] == [code] * len(outcomes), outcomes


@pytest.fixture(scope="session", params=MESHES)
def resumed(request: pytest.FixtureRequest, workspace: Path, one_device: dict) -> tuple[Path, list[Outcome]]:
    """Ten steps, the last four in new processes; what those said."""
    processes, devices, mesh = MESHES[request.param]
    run = workspace / "runs" / request.param
    flags = (*SHORT, *mesh, "--run.eval_every_steps", "6", "--run.dir", f"runs/{request.param}")
    all_end_with(0, run_all(workspace, processes, devices, *flags, "--run.stop_at_step", "6"))
    assert saved(run) == ["6"]
    outcomes = run_all(workspace, processes, devices, *flags)
    all_end_with(0, outcomes)
    assert saved(run) == ["10", "6"]
    return run, outcomes


def test_several_processes_have_the_losses_of_one_through_a_resume(resumed, one_device) -> None:
    """On the same schedule; each step stands once in the metrics."""
    run, _ = resumed
    found = numbers(run)
    assert sorted(step for step, name in found if name == "loss") == list(range(1, 11))
    assert found == pytest.approx(one_device, rel=1e-6)


def test_processes_that_hold_the_same_rows_have_the_losses_of_one(workspace: Path, one_device) -> None:
    """Both hold all rows, and half of each matrix."""
    flags = (*SHORT, "--mesh.tensor", "2", "--run.eval_every_steps", "6", "--run.dir", "runs/tensor")
    all_end_with(0, run_all(workspace, 2, 1, *flags))
    assert numbers(workspace / "runs/tensor") == pytest.approx(one_device, rel=1e-6)


def test_only_the_first_process_speaks_and_writes(resumed) -> None:
    run, outcomes = resumed
    spoken = [re.sub(r"(?m)^\[Gloo\].*\n", "", outcome.out) for outcome in outcomes]
    assert all(text == "" for text in spoken[1:])
    each = "2 × cpu each, 4 devices" if len(outcomes) == 2 else "1 × cpu each, 4 devices"
    assert f"training tokens; {len(outcomes)} processes on 1 host, {each}\n" in spoken[0]
    assert "resumed at step 6" in spoken[0]
    assert len(list((run / "tensorboard").iterdir())) == 2
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "tokenizer.json", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints",
        "summary.json",
    }  # fmt: skip


def test_a_signal_to_one_process_stops_all_at_one_step_with_a_checkpoint(workspace: Path) -> None:
    """And nothing is lost: the next start goes on behind it, until Ctrl-C stops it likewise. All listen on the loopback
    address only."""
    run, flags = workspace / "runs/stopped", (*ENDLESS, "--run.dir", "runs/stopped")
    with running(workspace, 2, 1, *flags) as started:
        started.wait_for_step(run, 2)
        addresses = started.listening(0) | started.listening(1)
        began = time.monotonic()
        started.signal(1, signal.SIGTERM)
        all_end_with(75, started.outcomes())
        assert time.monotonic() - began < 15
    assert addresses and addresses <= LOOPBACK
    summary = json.loads((run / "summary.json").read_text())
    step = summary["steps"]
    assert (saved(run), summary["stopped_by"]) == ([str(step)], "SIGTERM")
    with running(workspace, 2, 1, *flags) as started:
        started.wait_for_step(run, step + 1)
        for process in (0, 1):
            started.signal(process, signal.SIGINT)
        outcomes = started.outcomes()
    all_end_with(75, outcomes)
    assert f"resumed at step {step} " in outcomes[0].out
    last = json.loads((run / "summary.json").read_text())["steps"]
    assert [s for s, name in sorted(numbers(run)) if name == "loss"] == list(range(1, last + 1))
    assert saved(run) == sorted([str(step), str(last)])


def test_a_killed_process_ends_the_others(workspace: Path) -> None:
    """Within the heartbeat time-out, or little more; and they say who is gone."""
    flags = (*ENDLESS, "--run.dir", "runs/killed", "--distributed.heartbeat_timeout_seconds", "4")
    with running(workspace, 2, 1, *flags) as started:
        started.wait_for_step(workspace / "runs/killed", 2)
        began = time.monotonic()
        started.signal(1, signal.SIGKILL)
        first, second = started.outcomes()
        assert time.monotonic() - began < 4 + 6
    assert second.code == -signal.SIGKILL
    assert first.code not in (0, 2, 3, 4, 75)
    assert "process 1 on" in errors(first)[-1] or "task:1" in first.err


FULL = """
from angpt_jax.errors import StorageError
from angpt_jax.loop import StepReporter

def full(*given):
    raise StorageError("run.dir: can't be written, the disk is full")

StepReporter.step_done = full
"""


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_that_only_one_process_met_ends_the_others_too(workspace: Path, number: int) -> None:
    """With its own code there, and another one than 0 where it is only felt."""
    started = Processes(free_port())
    flags = (*ENDLESS, "--run.dir", f"runs/full{number}", "--distributed.heartbeat_timeout_seconds", "4")
    try:
        for process in (0, 1):
            started.start(workspace, process, 2, 1, *flags, before=FULL if process == number else None)
        outcomes = started.outcomes(60)
    finally:
        started.kill()
    assert outcomes[number].code == 4
    assert errors(outcomes[number])[0] == "run.dir: can't be written, the disk is full"
    assert outcomes[1 - number].code in (1, -signal.SIGABRT)


def test_a_single_process_opens_no_port(workspace: Path) -> None:
    with running(workspace, 1, 1, *ENDLESS, "--run.dir", "runs/single") as started:
        started.wait_for_step(workspace / "runs/single", 1)
        assert started.listening(0) == set()


def two_that_differ(workspace: Path, flags: list[tuple[str, ...]], folders: list[Path] | None = None) -> list[Outcome]:
    """Two processes with flags, or in folders, of their own."""
    started = Processes(free_port())
    try:
        for process in (0, 1):
            folder = folders[process] if folders else workspace
            started.start(folder, process, 2, 1, *SHORT, *flags[process])
        return started.outcomes()
    finally:
        started.kill()


def test_a_run_directory_that_is_not_shared_is_refused_and_nothing_stays(tmp_path: Path, workspace: Path) -> None:
    folders = [make_workspace(tmp_path / "a"), make_workspace(tmp_path / "b")]
    outcomes = two_that_differ(workspace, [("--run.dir", "runs/x")] * 2, folders)
    all_end_with(2, outcomes)
    for outcome in outcomes:
        (line,) = errors(outcome)
        start = f"run.dir: must be storage that all processes share, got '{tmp_path}/a/runs/x': process 1 on "
        assert line.startswith(start) and f"does not see it in '{tmp_path}/b/runs/x'" in line
    assert not any((folder / name).exists() for folder in folders for name in ("runs", "cache"))


def test_different_configs_are_refused_by_all(workspace: Path) -> None:
    flags = [("--run.dir", "runs/different", "--optim.peak_lr", rate) for rate in ("1e-3", "2e-3")]
    outcomes = two_that_differ(workspace, flags)
    all_end_with(2, outcomes)
    for outcome in outcomes:
        (line,) = errors(outcome)
        start = r"optim\.peak_lr: must be the same in all processes, got 0\.001 in process 0 on \S+ and "
        assert re.match(start + r"0\.002 in process 1 on \S+; start all with the same", line)
    assert not (workspace / "runs/different").exists()


def test_what_one_process_cannot_do_ends_all_with_its_code(workspace: Path) -> None:
    """Here a cache that can't be written."""
    (workspace / "a_file").touch()
    flags = [("--run.dir", "runs/refused"), ("--run.dir", "runs/refused", "--data.cache_dir", "a_file")]
    outcomes = two_that_differ(workspace, flags)
    all_end_with(4, outcomes)
    lines = [errors(outcome)[0] for outcome in outcomes]
    assert all(line.startswith("data.cache_dir: can't be written") for line in lines)
    assert "(in process 1 on " in lines[0] and "(in process" not in lines[1]


def test_processes_that_stay_away_are_named(workspace: Path) -> None:
    """By process 0; the others name the address where they don't find it."""
    started = Processes(free_port())
    waiting = Processes(free_port())
    seconds = ("--distributed.connect_timeout_seconds", "2", "--run.dir", "runs/missing")
    try:
        started.start(workspace, 0, 3, 1, *seconds)
        waiting.start(workspace, 1, 2, 1, *seconds)
        (first,), (second,) = started.outcomes(), waiting.outcomes()
    finally:
        started.kill()
        waiting.kill()
    assert (first.code, second.code) == (2, 2)
    (line,) = errors(first)
    assert line.startswith(
        f"distributed.processes: 3 must come to 127.0.0.1:{started.port} within 2 s, got 1; missing: 1, 2"
    )
    (line,) = errors(second)
    assert f"got no answer from 127.0.0.1:{waiting.port}" in line
    assert not (workspace / "runs/missing").exists()
