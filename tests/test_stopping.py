"""SIGTERM and SIGINT, whenever they come: exit code 75 soon after, nothing lost, and a second one changes nothing."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Outcome, make_workspace
from processes import TRAIN, Processes, environment, free_port

from angpt_jax import metrics
from angpt_jax.evaluation import Evaluation, Evaluator
from angpt_jax.stopping import SIGNALS, Stopped, StopRequest

SOON = 15  # seconds from the signal to the end
FLAGS = ("--config", "tiny.yaml", "--run.steps", "100000")

# A phase of a run that says that it began, and takes a while. Each is a program that runs before `train`.
SLOW = """
import time
import {module} as module

whole = module.{name}

def slow(*given, **named):
    open("{phase}", "w").close()
    for _ in range({tenths}):
        time.sleep(0.1)
    return whole(*given, **named)

module.{name} = slow
"""
DATA = ("angpt_jax.job", "load_tokens", 600)  # what is made slow, and for how many tenths of a second
COMPILE = ("angpt_jax.experiment", "compiled_step", 20)
SAVE = ("angpt_jax.checkpoint", "Checkpoints.save", 20)
SLOW_EVALUATION = """
import time
import angpt_jax.evaluation as module

whole = module._batches

def slow(validation, batch_size):
    open("evaluation", "w").close()
    for _ in range(600):
        time.sleep(0.1)
        yield from whole(validation, batch_size)

module._batches = slow
"""


@pytest.fixture
def request_() -> Iterator[StopRequest]:
    """Handlers are those of before again, whatever came."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield StopRequest()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("stopping"))


def start(workspace: Path, name: str, before: str, *flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", before + TRAIN, *FLAGS, "--run.dir", f"runs/{name}", *flags],
        cwd=workspace,
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def slow(phase: str, module: str, name: str, tenths: int) -> str:
    return SLOW.format(phase=phase, module=module, name=name, tenths=tenths)


def wait_for(happened, process: subprocess.Popen, seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stopped(process: subprocess.Popen, *numbers: signal.Signals, apart: float = 0.3) -> Outcome:
    """What the process said after these signals, which it must end from soon."""
    try:
        began = time.monotonic()
        for number in numbers:
            process.send_signal(number)
            time.sleep(apart)
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - began < SOON
        return Outcome(process.returncode, out, err)
    finally:
        process.kill()


def saved(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir())


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("number", SIGNALS)
def test_while_data_are_read_there_is_nothing_to_save(workspace: Path, number: signal.Signals) -> None:
    """At once, with one line, before anything is in the run directory."""
    phase = f"data-{number.name}"
    process = start(workspace, phase, slow(phase, *DATA))
    wait_for((workspace / phase).exists, process)
    done = stopped(process, number, number)
    assert (done.code, done.err) == (
        75,
        f"stopped by {number.name} before the first step; run the same command again\n",
    )
    assert not (workspace / "runs" / phase).exists()


def test_while_it_compiles_the_first_state_is_saved(workspace: Path) -> None:
    """And the next start, which must find it, goes on there."""
    process = start(workspace, "compile", slow("compile", *COMPILE))
    wait_for((workspace / "compile").exists, process)
    done = stopped(process, signal.SIGTERM, signal.SIGINT)
    run = workspace / "runs/compile"
    assert (done.code, saved(run), summary(run)["stopped_by"]) == (75, [0], "SIGTERM")
    assert summary(run)["median_step_seconds"] is None
    again = start(workspace, "compile", "", "--run.resume", "must", "--run.stop_at_step", "2")
    out, err = again.communicate(timeout=100)
    assert again.returncode == 0, err
    assert "resumed at step 0" in out and saved(run) == [0, 2]


def test_while_it_saves_and_steps_nothing_is_lost(workspace: Path) -> None:
    """The signal comes in a save, a second one right behind it and a third later: the step of the signal, or the one
    behind it, is there, and the metrics end with it."""
    process = start(workspace, "save", slow("save", *SAVE), "--run.checkpoint_every_steps", "3")
    wait_for((workspace / "save").exists, process)
    done = stopped(process, signal.SIGINT, signal.SIGTERM, signal.SIGINT, apart=1.5)
    run = workspace / "runs/save"
    assert (done.code, summary(run)["stopped_by"]) == (75, "SIGINT"), done.err
    assert saved(run) == [3, 4] and summary(run)["steps"] == 4
    assert [record["step"] for record in metrics.read(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert "Traceback" not in done.err


def test_an_evaluation_is_cut_between_two_batches(workspace: Path) -> None:
    process = start(workspace, "evaluation", SLOW_EVALUATION, "--run.eval_every_steps", "2")
    wait_for((workspace / "evaluation").exists, process)
    done = stopped(process, signal.SIGTERM)
    run = workspace / "runs/evaluation"
    assert (done.code, saved(run)) == (75, [2]), done.err
    assert [record["step"] for record in metrics.read(run / "metrics.jsonl")] == [1, 2]
    assert not any("val_loss" in record for record in metrics.read(run / "metrics.jsonl"))


@pytest.mark.long
def test_an_evaluation_of_two_processes_is_cut_too(workspace: Path) -> None:
    """They agree on a batch, wherever the signal came."""
    started = Processes(free_port())
    flags = ("--run.steps", "100000", "--run.eval_every_steps", "2", "--run.dir", "runs/two")
    try:
        for process in (0, 1):
            started.start(
                workspace, process, 2, 1, *flags, before=SLOW_EVALUATION.replace("evaluation", f"two{process}")
            )
        deadline = time.monotonic() + 100
        while not all((workspace / f"two{process}").exists() for process in (0, 1)) and time.monotonic() < deadline:
            time.sleep(0.1)
        began = time.monotonic()
        started.signal(1, signal.SIGTERM)
        time.sleep(0.5)
        started.signal(0, signal.SIGTERM)
        outcomes = started.outcomes()
        assert time.monotonic() - began < SOON
    finally:
        started.kill()
    assert [outcome.code for outcome in outcomes] == [75, 75], outcomes
    assert saved(workspace / "runs/two") == [2]


def test_only_the_first_signal_counts(request_: StopRequest) -> None:
    with request_:
        assert request_.asked() is None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert request_.asked() == request_.received == "SIGINT"
    signal.raise_signal(signal.SIGTERM)  # also after it was left


def test_before_there_is_something_to_save_a_signal_raises_once(request_: StopRequest) -> None:
    with StopRequest(at_once=True) as early:
        with pytest.raises(Stopped, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert early.received == "SIGTERM"
    signal.raise_signal(signal.SIGTERM)


def test_a_stop_that_got_lost_on_its_way_is_not_forgotten(request_: StopRequest) -> None:
    early = StopRequest(at_once=True)
    with early:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:  # as where C called back
            pass
        with pytest.raises(Stopped):
            early.only_note()


def test_without_a_signal_all_is_as_before(request_: StopRequest) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(at_once=True) as early:
        early.only_note()
        signal.getsignal(signal.SIGTERM)
        assert early.asked() is None
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_cut_evaluation_has_no_result_and_keeps_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier set was done."""
    asked = []

    def evaluate(window_nats, params, windows, batch_size, put) -> Evaluation:
        window_nats(params, {})
        return Evaluation(1.0, 2.0)

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 3

    monkeypatch.setattr("angpt_jax.evaluation.evaluate", evaluate)
    sets: dict = {"validation": None, "code": None}
    evaluator = Evaluator(lambda params, batch: params, sets, 8, lambda batch: batch)
    assert list(evaluator.evaluate(None, stop)) == ["validation", "code"]
    evaluator.last = Evaluation(3.0, 4.0)
    assert evaluator.evaluate(None, stop) == {} and evaluator.last == Evaluation(3.0, 4.0)
