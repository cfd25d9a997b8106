"""Every bad input of the table is answered by its lines, with exit code 2, at once, and nothing is touched."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bad_inputs import ROWS, Row, prepared, workspace, wrote, yaml
from commands import Outcome, one_device, run_here

from angpt_jax import cli
from angpt_jax.config import Config
from angpt_jax.prepare import PrepareConfig, prepare
from angpt_jax.train import train

SECONDS = 5.0
COMMANDS = {"train": (train, Config), "prepare": (prepare, PrepareConfig)}
START = "angpt_jax: error: "


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workspace(tmp_path_factory.mktemp("template") / "w")


@pytest.fixture
def folder(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace of its own, deep in a folder of its own."""
    copied = tmp_path / "a" / "b" / "w"
    shutil.copytree(template, copied)
    config = copied / "runs/there/config.yaml"
    config.write_text(config.read_text().replace(str(template), str(copied)))
    monkeypatch.chdir(copied)
    return copied


def snapshot(folder: Path) -> dict[str, object]:
    """Everything below `folder`: kind and mode; of files, size, time and content (the beginning of a large one)."""

    def content(path: Path) -> object:
        if path.is_symlink():
            return os.readlink(path)
        if not path.is_file():
            return path.is_dir()
        with path.open("rb") as file:
            return file.read(10**6)

    return {
        str(path): (status.st_mode, content(path), None if path.is_dir() else (status.st_size, status.st_mtime_ns))
        for path in sorted(folder.rglob("*"))
        for status in [path.lstat()]
    }


def flags_of(row: Row) -> list[str]:
    config = ["--config", row.config] if row.config and row.command == "train" else []
    return [*config, *shlex.split(row.flags)]


def memory() -> str:
    return f"{0.8 * os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.1f}"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_bad_input_is_named_and_nothing_is_touched(
    row: Row, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row.make(folder)
    before = snapshot(tmp_path)
    run, schema = COMMANDS[row.command]
    began = time.perf_counter()
    done = run_here(run, schema, row.command, *flags_of(row), monkeypatch=monkeypatch, capsys=capsys)
    seconds = time.perf_counter() - began
    lines = done.err.removesuffix("\n").split("\n")
    expected = [line.replace("{w}", str(folder)).replace("{memory}", memory()) for line in row.lines]
    assert lines == [START + line for line in expected]
    assert (done.code, done.out) == (2, "")
    assert all(line.isprintable() for line in lines)
    assert snapshot(tmp_path) == before
    assert seconds < SECONDS


WITHOUT_JAX = """
import contextlib, io, json, sys
from angpt_jax import cli, train
from angpt_jax.config import Config
answers = []
for argv in json.load(sys.stdin):
    sys.argv, err, code = ["train", *argv], io.StringIO(), None
    with contextlib.redirect_stderr(err):
        try:
            cli.main(train.train, Config, "train", None)
        except SystemExit as ended:
            code = ended.code
    loaded = sorted({"jax", "jaxlib", "flax", "orbax"} & set(sys.modules))
    answers.append([code, loaded, err.getvalue().splitlines()])
print(json.dumps(answers))
"""


def test_what_is_wrong_with_a_config_is_found_before_jax_is_imported(folder: Path) -> None:
    rows = [row for row in ROWS if row.early]
    assert len({row.case for row in rows}) > 20
    for number, row in enumerate(rows):  # their files have names in common
        (folder / str(number)).mkdir()
        shutil.copy("tiny.yaml", folder / str(number))
        row.make(folder / str(number))
        if row.flags.endswith("./text"):
            (folder / str(number) / "text").mkdir()
    script = WITHOUT_JAX.replace("sys.argv, err", 'os.chdir(f"{home}/{len(answers)}")\n    sys.argv, err')
    script = f"import os\nhome = {str(folder)!r}\n{script}"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps([flags_of(row) for row in rows]),
        env=one_device(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[2, [], [START + line for line in row.lines]] for row in rows]
    assert time.perf_counter() - began < SECONDS + 0.1 * len(rows)


def test_what_is_written_in_another_way_is_taken(folder: Path) -> None:
    wrote("x.yaml", "optim: {peak_lr: 3e-4}\nmodel: {tied_embeddings: true}\n")(folder)
    config = cli.parse(Config, ["--config", "tiny.yaml", "--config", "x.yaml", "--run.steps=1_000"], command="train")
    assert (config.optim.peak_lr, config.model.tied_embeddings, config.run.steps) == (0.0003, True, 1000)


RED = "\x1b[31m\x07\u202e"
SHOWN = "\\x1b[31m\\x07\\u202e"


def hostile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, list[str]]]:
    """Where text from outside gets into an error: what is run, and its flags."""
    tiny = ["--config", "tiny.yaml"]
    wrote(f"red/{RED}.txt", b"\xff")(folder)
    wrote("x.jsonl", json.dumps({RED: "a"}))(folder)
    wrote("t.json", json.dumps({"version": RED}))(folder)
    yaml(json.dumps({"run": {RED: 1, "dir": RED}, "data": {"mixture": {"x\x1b": -1}}}))(folder)
    facts = prepared(folder)
    (folder / "made/manifest.json").write_text(json.dumps(facts | {"version": RED, "format": RED}))
    monkeypatch.setenv("JAX_NUM_PROCESSES", RED)
    return {
        "a flag": ("train", [*tiny, f"--run.{RED}", "1"]),
        "a value": ("train", [*tiny, "--run.steps", RED]),
        "a path": ("train", [*tiny, "--data.source", RED, "--run.dir", RED]),
        "a word": ("train", [*tiny, RED]),
        "a config": ("train", ["--config", RED]),
        "a config file": ("train", ["--config", f"{RED}.yaml"]),
        "a file": ("train", [*tiny, "--config", "x.yaml"]),
        "a variable": ("train", tiny),
        "a name in a folder": ("train", [*tiny, "--data.source", "red", "--distributed.processes", "1"]),
        "a manifest": ("train", [*tiny, "--data.source", "made", "--distributed.processes", "1"]),
        "a tokenizer": ("train", [*tiny, "--data.tokenizer", "t.json", "--distributed.processes", "1"]),
        "a field": ("prepare", ["--source", "x.jsonl", "--out", "o", "--workers", "1"]),
    }


def test_no_error_holds_what_a_terminal_obeys(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Outcome] = {}
    for name, (command, flags) in hostile(folder, monkeypatch).items():
        run, schema = COMMANDS[command]
        seen[name] = run_here(run, schema, command, *flags, monkeypatch=monkeypatch, capsys=capsys)
        monkeypatch.setattr(sys, "argv", ["x"])
    assert {name: done.code for name, done in seen.items()} == dict.fromkeys(seen, 2)
    shown = {name: [line for line in done.err.splitlines() if SHOWN[:8] in line] for name, done in seen.items()}
    assert [name for name, lines in shown.items() if not lines] == []
    assert all(line.isprintable() for done in seen.values() for line in done.err.removesuffix("\n").split("\n"))
