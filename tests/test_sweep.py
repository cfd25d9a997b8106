"""`python -m angpt_jax.sweep`: which runs it makes, what it prints, what it refuses."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Outcome, make_workspace, run_here, tree
from fake_trials import replace_training
from processes import environment

from angpt_jax import cli, experiment, sweep
from angpt_jax.stopping import SIGNALS
from angpt_jax.sweep import SweepConfig

Start = Callable[..., Outcome]
PACKAGED = Path(__file__).parent.parent / "configs" / "sweep"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(make_workspace(tmp_path / "w"))
    return tmp_path / "w"


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Iterator[Start]:
    """Runs the command on tables that start from `tiny.yaml`."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    (folder / "t.yaml").write_text("config: [tiny.yaml]\n")
    yield lambda *flags: run_here(
        sweep.sweep, SweepConfig, "sweep", "--config", "t.yaml", *flags, monkeypatch=monkeypatch, capsys=capsys
    )
    for number, handler in before.items():
        signal.signal(number, handler)


def expanded(*flags: str) -> dict[str, Any]:
    """The values of each run by its name."""
    found, problems = sweep.expand(cli.parse(SweepConfig, list(flags), command="sweep"))
    assert problems == []
    return {row.name: dict(row.values) for row in found}


def test_lists_side_by_side_and_all_combinations_are_multiplied():
    flags = ("--values.run.steps", "9", "--zip", "{model.width: [32, 64], model.heads: [2, 4]}")
    flags += ("--grid", "{optim.peak_lr: [1e-3, 2e-3], run.seed: [0, 1]}")
    runs = expanded(*flags, "--list", "[{name: a}, {name: b, model.arch: ngpt}]")
    ends = [f"peak_lr={rate}+seed={seed}" for rate in (0.001, 0.002) for seed in (0, 1)]
    sizes = ["width=32+heads=2", "width=64+heads=4"]
    assert list(runs) == [f"{name}+{size}+{end}" for name in "ab" for size in sizes for end in ends]
    last = {"run.steps": 9, "model.arch": "ngpt", "model.width": 64, "model.heads": 4}
    assert runs["b+width=64+heads=4+peak_lr=0.002+seed=1"] == last | {"optim.peak_lr": 2e-3, "run.seed": 1}
    assert list(expanded(*flags))[:2] == [f"{sizes[0]}+{ends[0]}", f"{sizes[0]}+{ends[1]}"]
    assert list(expanded("--list", "[{name: a}, {name: b}]")) == ["a", "b"]


def test_keys_below_one_another_in_a_file_or_a_flag_are_dotted_keys(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("grid: {optim: {peak_lr: [1e-3, 2e-3]}, run.seed: [0]}")
    (tmp_path / "b.yaml").write_text("grid: {optim.peak_lr: [3e-3]}")
    one, two = ("--config", str(tmp_path / "a.yaml")), ("--config", str(tmp_path / "b.yaml"))
    assert list(expanded(*one)) == ["peak_lr=0.001+seed=0", "peak_lr=0.002+seed=0"]
    assert list(expanded(*one, *two)) == ["peak_lr=0.003+seed=0"]
    assert list(expanded(*two, *one)) == ["peak_lr=0.001+seed=0", "peak_lr=0.002+seed=0"]
    assert list(expanded(*one, *two, "--grid.optim.peak_lr", "[4e-3]")) == ["peak_lr=0.004+seed=0"]
    places = "{model.places.residual.alpha_init: [0.1], model.places.residual.mlp.alpha_init: [1/layers]}"
    assert list(expanded("--grid", places)) == ["residual.alpha_init=0.1+mlp.alpha_init=1_layers"]


BAD = [
    ("", ["list, zip, grid: must have something to run, got none of them"]),
    (
        "--grid.optim.peak_rl [1] --grid.run.seed [0,1]",
        ["every row: optim.peak_rl: unknown key; did you mean optim.peak_lr?"],
    ),
    (
        "--grid.optim.peak_lr [x,1e-3,-1] --values.run.stepz 3",
        [
            "every row: run.stepz: unknown key; did you mean run.steps?",
            "peak_lr=x: optim.peak_lr: expected float, got 'x'",
        ],
    ),
    (
        "--grid.optim.peak_lr [x,1e-3,-1]",
        [
            "peak_lr=x: optim.peak_lr: expected float, got 'x'",
            "peak_lr=-1: optim.peak_lr: must be a finite number > 0, got -1.0",
        ],
    ),
    (
        "--grid.optim.peak_lr 1e-3 --zip.run.seed x --list x",
        [
            "grid.optim.peak_lr: expected a list of anything, got 0.001",
            "zip.run.seed: expected a list of anything, got 'x'",
            "list: expected a list of a mapping, got 'x'",
        ],
    ),
    ("--grid x", ["grid: expected a mapping, got 'x'"]),
    (
        "--grid.run.seed [] --zip.run.steps [] --at_a_time 0",
        [
            "zip.run.steps: must have values, got []",
            "grid.run.seed: must have values, got []",
            "at_a_time: must be at least 1, got 0",
        ],
    ),
    (
        "--zip {run.seed:[0],run.steps:[1,2]}",
        ["zip: must have lists of the same length, got 1 of run.seed, 2 of run.steps"],
    ),
    (
        "--zip.run.seed [0] --grid.run.seed [1] --grid.run.dir [a] --grid.dry_run [true]",
        [
            "grid.run.dir: is not for a row to say, got ['a']; the command that runs it decides",
            "grid.dry_run: is not for a row to say, got [True]; the command that runs it decides",
            "zip.run.seed: stands in grid too, got [0]; keep one",
        ],
    ),
    (
        "--grid.run.seed [1] --list [{name:a,run.seed:2}]",
        ["grid.run.seed: stands in values or list too (row a), got [1]; keep one"],
    ),
    ("--zip.run.seed [1] --values.run.seed 3", ["zip.run.seed: stands in values or list too, got [1]; keep one"]),
    (
        "--grid.data.source ['a/b',c,'a~b'] --zip {run.seed:[0,0.0],run.steps:[1,1]}",
        [
            "zip.run.seed, run.steps: two runs would have the name seed=0+steps=1, got {'run.seed': 0, 'run.steps': 1} "
            "and {'run.seed': 0.0, 'run.steps': 1}; keep one",
            "grid.data.source: two runs would have the name source=a_b, got 'a/b' and 'a~b'; keep one",
        ],
    ),
    (
        "--list [{name:a},{name:a},{nam:b}]",
        [
            "list[2]: has the name of another row, got 'a'; names differ",
            "list[3]: has no name; give it one",
        ],
    ),
    (
        f"--grid.data.source [{'x' * 100}]",
        [
            "run.name: must be letters, digits, dots, + = _ or -, at most 100, and begin with a letter or digit, got "
            f"'source={'x' * 69}..."
        ],
    ),
    (
        f"--grid.run.seed {list(range(40))} --grid.run.steps {list(range(40))}",
        ["grid: must not be more than 1000 runs, got 1,600; sweep fewer values at a time"],
    ),
    ("--grid.run.seed [0] --dir tiny.yaml", ["dir: is a file, got 'tiny.yaml'; name a folder"]),
    ("--grid.run.seed [0] --dir a/../b", ["dir: must not contain '..', got 'a/../b'; give the folder itself"]),
    (
        "--grid.run.seed [0] --dir gs://b/x",
        ["dir: must be a path of a file system, got 'gs://b/x'; mount the bucket, or download, and give its path"],
    ),
    (
        "--grid.run.seed [0] --print all",
        ["print: expected none, commands or slurm, got 'all'"],
    ),
]


@pytest.mark.parametrize(("flags", "lines"), BAD, ids=[flags[:40] for flags, _ in BAD])
def test_a_bad_table_is_named_and_nothing_is_written(flags: str, lines: list[str], start: Start, folder: Path):
    before = tree(folder)
    words = flags.replace(", ", ",").split()
    done = start(*(re.sub(r"(?<=[\w.]):(?=[\w\[])", ": ", word) if "{" in word else word for word in words))
    assert done.err.splitlines() == [f"angpt_jax: error: {line}" for line in lines]
    assert (done.code, done.out, tree(folder)) == (2, "", before)


def test_links_out_of_the_folder_are_refused(start: Start, folder: Path, tmp_path: Path):
    (folder / "x").mkdir()
    (folder / "x/seed=0.log").symlink_to(tmp_path / "mine")
    said = "angpt_jax: error: dir: holds links that lead out of it (seed=0.log), got 'x'\n"
    assert start("--grid.run.seed", "[0]", "--dir", "x") == Outcome(2, "", said)
    assert not (tmp_path / "mine").exists()


def test_a_directory_of_another_config_is_refused_before_anything_starts(start: Start, folder: Path):
    seeds = ("--grid.run.seed", "[0, 1]")
    other = folder / "runs/sweep/t/seed=1"
    other.mkdir(parents=True)
    table = cli.parse(SweepConfig, ["--config", "t.yaml", *seeds], command="sweep")
    config = experiment.resolved(sweep.expand(table)[0][1].config())[0]
    (other / "config.yaml").write_text(cli.to_yaml(config).replace("steps: 14", "steps: 15"))
    before = tree(folder)
    done = start(*seeds)
    assert done == Outcome(
        2,
        "",
        f"angpt_jax: error: seed=1: run.steps: differs from the run in {other}, got 14; it was 15: use that, or "
        "another --run.dir\n",
    )
    assert tree(folder) == before


GRID = ("--grid", "{model.places.qk.part: [unit_qk], optim.peak_lr: [1e-3, 2e-3]}")


def printed(folder: Path) -> list[str]:
    start = "python -m angpt_jax.train --config tiny.yaml --model.places.qk.part unit_qk --optim.peak_lr"
    return [f"{start} {rate} --run.dir {folder}/runs/sweep/t/part=unit_qk+peak_lr={rate}" for rate in (0.001, 0.002)]


def test_commands_are_printed_and_nothing_is_written(start: Start, folder: Path):
    before = tree(folder)
    assert start(*GRID, "--print", "commands") == Outcome(0, "".join(f"{line}\n" for line in printed(folder)), "")
    assert tree(folder) == before


FAKE = '#!/usr/bin/env bash\necho "$(basename "$0") $*"\n[[ $0 != */python ]] || exit ${ANGPT_CODE:-0}\n'


def test_each_task_of_the_array_runs_its_command(start: Start, folder: Path, tmp_path: Path):
    before = tree(folder)
    done = start(*GRID, "--print", "slurm")
    assert (done.code, done.err, tree(folder)) == (0, "", before)
    assert "#SBATCH --array=0-1\n" in done.out
    for name, text in {"srun": '#!/usr/bin/env bash\nexec "${@:3}"\n', "python": FAKE, "scontrol": FAKE}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def task(number: str | None, **variables: str) -> tuple[int, str, str]:
        around = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"} | variables
        given = around | ({"SLURM_ARRAY_TASK_ID": number} if number else {})
        ended = subprocess.run(["bash", "-c", done.out], env=given, capture_output=True, text=True, cwd=tmp_path)
        return ended.returncode, ended.stdout, ended.stderr

    lines = printed(folder)
    assert [task(number) for number in "01"] == [(0, f"{line}\n", "") for line in lines]
    assert task("0", ANGPT_CODE="75") == (75, f"{lines[0]}\nscontrol requeue 77\n", "")
    assert task("0", ANGPT_CODE="75", SLURM_RESTART_COUNT="100") == (75, f"{lines[0]}\n", "")
    assert task("1", ANGPT_CODE="3") == (3, f"{lines[1]}\n", "")
    assert task("2") == (2, "", "SLURM_ARRAY_TASK_ID: must be 0 … 1, got 2\n")
    assert task(None)[0] == 1


LIST = "[{name: trains}, {name: diverges, optim.peak_lr: 1}, {name: fails}]"


def test_a_table_shows_every_run_and_the_best(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch):
    replace_training(monkeypatch)
    done = start("--list", LIST, "--grid.run.seed", "[0]", "--dir", "x")
    assert (done.code, done.err) == (1, "")
    shown = [line.split() for line in done.out.splitlines()]
    assert [line for line in shown if line[:1] == ["name"]] == [
        ["name", "seed", "state", "steps", "val", "loss", "bits/byte", "ms/step"]
    ]
    rows = [line for line in shown if len(line) > 6 and line[0].endswith("seed=0")]
    numbers = ["14", "1.5000", "1.2500", "250.0"]
    assert rows == [
        ["trains+seed=0", "0", "finished,", "best", *numbers],
        ["diverges+seed=0", "0", "diverged", *numbers],
        ["fails+seed=0", "0", "failed", *numbers],
    ]
    runs = folder / "x"
    assert done.out.splitlines()[-3:] == [
        f"diverges+seed=0: diverged (exit code 3) loss is nan; {runs}/diverges+seed=0.log",
        f"fails+seed=0: failed (exit code 1) out of luck; {runs}/fails+seed=0.log",
        "x/results.json",
    ]
    kept = json.loads((runs / "results.json").read_text())
    assert kept["best"] == "trains+seed=0"
    first = kept["runs"][0]
    assert first.pop("command")
    assert first == {
        "name": "trains+seed=0",
        "directory": f"{runs}/trains+seed=0",
        "values": {"run.seed": 0},
        "state": "finished",
        "said": "",
        "steps": 14.0,
        "val_loss": 1.5,
        "val_bits_per_byte": 1.25,
        "median_step_seconds": 0.25,
    }


def test_diverged_is_a_result(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch):
    replace_training(monkeypatch)
    done = start("--list", "[{name: diverges}]")
    assert (done.code, json.loads((folder / "runs/sweep/t/results.json").read_text())["best"]) == (0, None)
    again = start("--list", "[{name: diverges}]")
    assert again.code == 0 and again.out.startswith("1 of 1 runs are done already\n")


def test_a_signal_stops_the_sweep_with_75(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch):
    replace_training(monkeypatch)
    said = print

    def say(*words: Any, **named: Any) -> None:
        said(*words, **named)
        if words and str(words[0]).endswith("waits …"):
            ready = folder / "runs/sweep/t/waits/ready"
            while not ready.exists():
                pass
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sweep, "print", say, raising=False)
    done = start("--list", "[{name: waits}, {name: trains}]")
    assert (done.code, done.err) == (75, "")
    kept = json.loads((folder / "runs/sweep/t/results.json").read_text())["runs"]
    assert [(one["state"], one["steps"]) for one in kept] == [("stopped", None), ("new", None)]


def test_results_that_can_not_be_written_are_said(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch):
    replace_training(monkeypatch)
    (folder / "x/results.json").mkdir(parents=True)
    done = start("--list", "[{name: trains}]", "--dir", "x")
    assert done.code == 4 and "trains" in done.out
    assert done.err == "angpt_jax: error: dir: can't be written, got 'x/results.json' (Is a directory)\n"


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_packaged_sweep_has_runs_that_can_be_read(path: Path):
    config = cli.parse(SweepConfig, ["--config", path.stem], command="sweep")
    found, problems = sweep.expand(config)
    assert problems == [] and len(found) > 1
    assert len({cli.to_yaml(row.config()) for row in found}) == len(found)
    assert f"python -m angpt_jax.sweep --config {path.stem}\n" in path.read_text()


def test_it_trains(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The one real run, in a process on one device."""
    for name, value in environment(1).items():
        monkeypatch.setenv(name, value)
    done = start("--values.run.steps", "2", "--grid.run.seed", "[5]")
    assert (done.code, done.err) == (0, ""), (folder / "runs/sweep/t/seed=5.log").read_text()
    (one,) = json.loads((folder / "runs/sweep/t/results.json").read_text())["runs"]
    assert (one["state"], one["steps"], one["values"]) == ("finished", 2, {"run.seed": 5})
    assert one["val_bits_per_byte"] > 0 and (folder / "runs/sweep/t/seed=5/checkpoints/2").is_dir()
