"""Storage that fails, as a user meets it: damaged checkpoints, full disks, errors in the middle, two runs at once."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Outcome, make_workspace, one_device, run_here, run_process, tmpfs, tree

from angpt_jax import cli, metrics, pretrain, rules, run_dir, sample
from angpt_jax import train as command
from angpt_jax.config import Config
from angpt_jax.evaluation import Evaluator
from angpt_jax.loop import StepReporter
from angpt_jax.stopping import StopRequest

# TensorStore drops what it still waits for when another part of a save or a read fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Command = Callable[..., Outcome]
SAVING = ("--run.checkpoint_every_steps", "5")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("storage"))


@pytest.fixture(scope="module")
def base(workspace: Path) -> tuple[Path, Outcome]:
    """Ten steps of fourteen on one device, with checkpoints of 5 and 10."""
    flags = ("--config", "tiny.yaml", "--run.dir", "runs/base", "--run.stop_at_step", "10", *SAVING)
    return workspace / "runs/base", run_process(workspace, "train", *flags)


@pytest.fixture
def train(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`train(NAME, *flags)` with the run directory runs/NAME, in this process: on eight devices."""
    monkeypatch.chdir(workspace)

    def run(name: str, *flags: str) -> Outcome:
        given = ("--config", "tiny.yaml", "--run.dir", f"runs/{name}", *SAVING, *flags)
        return run_here(command.train, Config, "train", *given, monkeypatch=monkeypatch, capsys=capsys)

    return run


@pytest.fixture
def write_samples(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.chdir(workspace)

    def run(name: str) -> Outcome:
        given = ("--run.dir", f"runs/{name}", "--samples", "1", "--tokens", "2")
        return run_here(sample.sample, sample.SampleConfig, "sample", *given, monkeypatch=monkeypatch, capsys=capsys)

    return run


@pytest.fixture
def copy(base: tuple[Path, Outcome], request: pytest.FixtureRequest) -> Path:
    """The base run under the name of the test."""
    folder = base[0].with_name(request.node.name.replace("[", "-").replace("]", ""))
    shutil.copytree(base[0], folder)
    return folder


def saved(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def lose_arrays(checkpoint: Path) -> None:
    """Parameters and moments, which lie side by side, so that whoever reads some of them sees it."""
    shutil.rmtree(checkpoint / "state/ocdbt.process_0")


def damage(checkpoint: Path) -> None:
    """Flips a bit in the largest file."""
    path = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def the_error(outcome: Outcome, code: int) -> str:
    """The one line on stderr."""
    assert outcome.code == code, outcome
    lines = [line for line in outcome.err.splitlines() if not line.startswith(("angpt_jax: warning: ", "tokenizing "))]
    assert len(lines) == 1, outcome.err
    (line,) = lines
    return line.removeprefix("angpt_jax: error: ")


def test_the_last_checkpoint_is_there_when_the_process_ends(base: tuple[Path, Outcome]) -> None:
    run, done = base
    assert (done.code, "Traceback" in done.err) == (0, False)
    assert saved(run) == {"5", "10"}
    assert "run.lock" not in {path.name for path in run.iterdir()}


def test_a_damaged_newest_checkpoint_is_passed_over(train: Command, copy: Path) -> None:
    """And so the run goes on, on other devices than before, with the same losses: also those of steps 6 to 10."""
    before = {r["step"]: r["loss"] for r in metrics.read(copy / "metrics.jsonl") if "loss" in r}
    damage(copy / "checkpoints/10")
    done = train(copy.name)
    assert done.code == 0 and f"resumed at step 5 from {copy}" in done.out
    (line,) = done.err.splitlines()
    assert line.startswith("angpt_jax: warning: run.dir: the checkpoint of step 10 is damaged (")
    assert line.endswith(f"), got '{copy}/checkpoints/10'; renamed to 10.damaged, going on with step 5")
    assert saved(copy) == {"10.damaged", "10", "14"}
    after = {r["step"]: r["loss"] for r in metrics.read(copy / "metrics.jsonl") if "loss" in r}
    assert sorted(after) == list(range(1, 15))
    assert {step: after[step] for step in before} == pytest.approx(before, rel=1e-5)
    assert "nothing to train" in train(copy.name).out
    assert saved(copy) == {"10.damaged", "10", "14"}


def test_without_a_whole_checkpoint_nothing_starts_anew(train: Command, write_samples: Command, copy: Path) -> None:
    lose_arrays(copy / "checkpoints/10")
    shutil.rmtree(copy / "checkpoints/5/state")
    before = tree(copy)
    for outcome in (train(copy.name), write_samples(copy.name)):
        start = f"run.dir: none of its checkpoints is whole, got '{copy}/checkpoints' (step 10: "
        assert the_error(outcome, 2).startswith(start)
    assert tree(copy) == before


def test_samples_come_from_the_newest_whole_checkpoint_and_change_nothing(write_samples: Command, copy: Path) -> None:
    lose_arrays(copy / "checkpoints/10")
    (copy / "checkpoints/12.orbax-checkpoint-tmp").mkdir()  # of a run at work
    before, names = tree(copy), saved(copy)
    done = write_samples(copy.name)
    assert done.code == 0 and "--- sample 1 of step 5 ---" in done.out
    assert "the checkpoint of step 10 is damaged" in done.err and "renamed" not in done.err
    assert (tree(copy), saved(copy)) == (before, names)


def test_samples_of_no_run_or_of_no_checkpoint_are_refused(write_samples: Command, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    assert the_error(write_samples(copy.name), 2).startswith("run.dir: holds no checkpoint, got ")
    (copy / "config.yaml").unlink()
    assert the_error(write_samples(copy.name), 2).startswith("run.dir: holds no run (no config.yaml), got ")


def test_a_checkpoint_of_another_model_is_refused(train: Command, copy: Path) -> None:
    """Though somebody made the config agree."""
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("feed_forward: 128", "feed_forward: 64"))
    before = tree(copy)
    line = the_error(train(copy.name, "--model.feed_forward", "64"), 2)
    assert line.startswith("run.dir: the checkpoint of step 10 does not fit the config, got ")
    assert "(saved: float32[2, 32, 128], wanted: float32[2, 32, 64]); " in line
    assert tree(copy) == before


def test_a_second_run_is_told_who_is_there(train: Command, copy: Path) -> None:
    """In a directory that a process of this machine, or of another one, has."""
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": "today", "token": "its"}
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    for host in (owner["host"], "elsewhere"):
        (copy / "run.lock").write_text(json.dumps(owner | {"host": host, "process_started": started}))
        before = tree(copy)
        line = the_error(train(copy.name), 2)
        assert line.startswith(f"run.dir: is in use, got '{copy}', where process {os.getpid()} on {host} runs since ")
        assert tree(copy) == before


@pytest.mark.parametrize("name", ["../x", "a/../../x", "x" * 300, "a\nb", "a\0b"])
def test_a_hostile_name_of_a_run_is_refused(workspace: Path, name: str) -> None:
    before = tree(workspace)
    config = cli.parse(Config, ["--config", str(workspace / "tiny.yaml"), "--run.dir", f"runs/{name}"], command="train")
    assert [problem.partition(":")[0] for problem in rules.check(config)] == ["run.dir"]
    assert tree(workspace) == before


def config_of(run: Path, *flags: str) -> Config:
    return cli.parse(Config, ["--config", "tiny.yaml", "--run.dir", str(run), *flags], command="train")


def raises(error: BaseException) -> Callable[..., None]:
    def method(*given: object, **more: object) -> None:
        raise error

    return method


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (Evaluator, "evaluate", RuntimeError("in an evaluation")),
        (StepReporter, "_speed", RuntimeError("in the logging")),
        (StepReporter, "_speed", SystemExit(0)),
        (StepReporter, "waited_for_data", RuntimeError("in a step")),
    ],
)
def test_an_error_in_the_middle_loses_no_checkpoint_that_was_due(
    workspace: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: BaseException
) -> None:
    """It comes after the save of step 11 has begun."""
    monkeypatch.chdir(workspace)
    saves = []
    save = pretrain.Checkpoints.save

    def save_then_break(*given, **more) -> None:
        save(*given, **more)
        saves.append(given[1])
        monkeypatch.setattr(owner, method, raises(error))

    monkeypatch.setattr(pretrain.Checkpoints, "save", save_then_break)
    flags = ("--run.checkpoint_every_steps", "1", "--run.eval_every_steps", "12")
    with pytest.raises(type(error)), StopRequest() as request:
        pretrain.pretrain(config_of(copy, *flags), "tiny", request)
    assert saves == [11]
    assert "11" in saved(copy)
    assert not (copy / "run.lock").exists()


@pytest.fixture
def small_disk(workspace: Path) -> Iterator[Path]:
    """A run directory on a file system that has room for two checkpoints and a little more, not for three."""
    with tmpfs(workspace / "runs/small_disk", "size=1600k") as folder:
        yield folder


def test_a_full_disk_ends_the_run_with_4_and_leaves_what_was_saved(workspace: Path, small_disk: Path) -> None:
    began = time.monotonic()
    flags = ("--config", "tiny.yaml", "--run.dir", "runs/small_disk", "--run.steps", "4000", *SAVING)
    done = run_process(workspace, "train", *flags, "--run.eval_every_steps", "4000")
    lines = ("run.dir: can't save step 15, got ", "run.dir: can't be written any more, got ")
    assert the_error(done, 4).startswith(lines)
    # The metrics may meet the full disk before the checkpoint is waited for, which is then said as a warning.
    assert f"run.dir: can't save step 15, got '{small_disk}/checkpoints' (No space left on device); " in done.err
    last = max(record["step"] for record in metrics.read(small_disk / "metrics.jsonl"))
    assert last <= 20 and time.monotonic() - began < 60
    assert saved(small_disk) == {"5", "10"}
    assert not (small_disk / "run.lock").exists()
    assert write_samples_from(workspace).endswith("of step 10 ---")


def write_samples_from(workspace: Path) -> str:
    done = run_process(workspace, "sample", "--run.dir", "runs/small_disk", "--samples", "1", "--tokens", "2")
    return done.out.splitlines()[0]


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
TRAIN = "import runpy; runpy.run_module('angpt_jax.train', run_name='__main__')"


def test_a_limit_of_file_sizes_ends_the_run_with_4(workspace: Path, copy: Path) -> None:
    """The failure of a disk that needs no rights to be made."""
    flags = ["--config", "tiny.yaml", "--run.dir", f"runs/{copy.name}", *SAVING]
    command = [sys.executable, "-c", f"{LIMIT}\n{TRAIN}", *flags]
    done = subprocess.run(command, cwd=workspace, env=one_device(), capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stderr.splitlines() if line.startswith("angpt_jax: error: ")]
    assert (done.returncode, len(errors)) == (4, 1), done.stderr
    assert "run.dir: can't save step 14, got " in errors[0] and "(File too large)" in errors[0]
    assert "Traceback" not in done.stderr
    assert saved(copy) == {"5", "10"}
    assert run_dir.holds_run(copy)
