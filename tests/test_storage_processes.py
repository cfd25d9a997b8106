"""Storage of several processes: they agree on the checkpoint, and the trouble of one ends all."""

import shutil
import time
from pathlib import Path

import pytest
from commands import Outcome, make_workspace
from processes import Processes, errors, free_port, run_all

FLAGS = ("--run.eval_every_steps", "1000", "--run.checkpoint_every_steps", "3", "--run.steps", "1000")

SEES_DAMAGE = """
from angpt_jax import restore

load = restore._load
restore._load = lambda path, *given: "a disk that forgot" if path.name == "6" else load(path, *given)
"""
SMALL_FILES = "\nimport resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("storage"))


@pytest.fixture(scope="module")
def base(workspace: Path) -> Path:
    """Six steps of two processes, with checkpoints of 3 and 6."""
    outcomes = run_all(workspace, 2, 1, *FLAGS, "--run.stop_at_step", "6", "--run.dir", "runs/base")
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    return workspace / "runs/base"


def saved(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def two(workspace: Path, base: Path, name: str, before: str, *flags: str) -> tuple[Path, list[Outcome]]:
    """The base run goes on under another name; process 1 runs `before` first."""
    run = base.with_name(name)
    shutil.copytree(base, run)
    started = Processes(free_port())
    try:
        for process in (0, 1):
            given = (*FLAGS, "--run.dir", f"runs/{name}", "--distributed.heartbeat_timeout_seconds", "4", *flags)
            started.start(workspace, process, 2, 1, *given, before=before if process else None)
        return run, started.outcomes(90)
    finally:
        started.kill()


def test_what_one_process_finds_damaged_none_uses(workspace: Path, base: Path) -> None:
    run, outcomes = two(workspace, base, "agreed", SEES_DAMAGE, "--run.stop_at_step", "8")
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert f"resumed at step 3 from {run}" in outcomes[0].out
    warnings = [line for line in outcomes[0].err.splitlines() if "angpt_jax: warning" in line]
    assert len(warnings) == 1 and "the checkpoint of step 6 is damaged (a disk that forgot (in process 1" in warnings[0]
    assert saved(run) == {"6.damaged", "6", "8"}


def test_a_process_that_cannot_save_ends_all_and_the_checkpoints_before_stay(workspace: Path, base: Path) -> None:
    began = time.monotonic()
    run, outcomes = two(workspace, base, "failing", SMALL_FILES)
    assert outcomes[1].code == 4, outcomes
    assert errors(outcomes[1])[0].startswith(f"run.dir: can't save step 9, got '{run}/checkpoints' (File too large)")
    assert outcomes[0].code not in (0, 2, 3, 75, -1000)
    assert time.monotonic() - began < 60
    assert {"3", "6"} <= saved(run) and "9" not in saved(run)
