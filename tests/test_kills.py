"""A run that is killed at random moments ends, to the last bit, where an uninterrupted one does, and loses little."""

from pathlib import Path

import pytest
from commands import make_workspace
from kills import SAVE_EVERY, killed, numbers
from processes import run_all
from states import digest

LAYOUTS = {  # processes, devices of each
    "one device": (1, 1),
    "eight devices": (1, 8),
    "two processes of four": pytest.param((2, 4), marks=pytest.mark.long),
}
FLAGS = ("--optim.warmup_steps", "20", "--run.eval_every_steps", "8")
HEARTBEAT = ("--distributed.heartbeat_timeout_seconds", "4")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("kills"))


def ends_as_if_nothing_had_happened(workspace: Path, layout: tuple[int, int], kills: int, steps: int) -> None:
    """State and all that was logged: losses, gradient norms, learning rates, evaluations."""
    processes, devices = layout
    name, flags = f"{processes}x{devices}-{kills}", ("--run.steps", str(steps), *FLAGS, *HEARTBEAT * (processes > 1))
    whole = workspace / "runs" / f"{name}-whole"
    done = run_all(workspace, processes, devices, *flags, "--run.dir", str(whole))
    assert [outcome.code for outcome in done] == [0] * processes, done
    found = killed(workspace, name, kills, layout, flags, seed=kills)
    print(f"lost steps {found.lost}, exit codes of the others {found.codes}")
    assert len(found.lost) == kills and max(found.lost) <= SAVE_EVERY + 1
    assert 0 not in found.codes
    run = workspace / "runs" / name
    assert numbers(run) == numbers(whole)
    assert digest(run) == digest(whole)
    assert not list((run / "checkpoints").glob("*tmp*"))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_five_kills_change_no_bit(workspace: Path, layout: tuple[int, int]) -> None:
    ends_as_if_nothing_had_happened(workspace, layout, kills=5, steps=40)


@pytest.mark.long
@pytest.mark.parametrize("layout, kills", [((1, 1), 20), ((2, 1), 10)])
def test_thirty_kills_change_no_bit(workspace: Path, layout: tuple[int, int], kills: int) -> None:
    ends_as_if_nothing_had_happened(workspace, layout, kills, steps=8 * kills)
