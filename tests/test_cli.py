"""Files and flags → a config, its help, its YAML, and the exit code of a command."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_lines import TINY, TOP_KEYS, Draw, Text, bare_train, make_folder, problems, train, write

from angpt_jax import cli, form
from angpt_jax.config import Config
from angpt_jax.errors import StorageError, UserError, print_problems, warn
from angpt_jax.schema import leaves


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def test_a_file_that_is_not_there_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "_PACKAGED", folder / "packaged")
    for name, line in {
        "tinny": "config: no config of that name, got 'tinny'; did you mean tiny?",
        "huge": "config: no config of that name, got 'huge'; there are tiny in configs/",
        "no.yaml": "config: can't be read (No such file or directory), got 'no.yaml'",
        "./configs": "config: is a directory, got 'configs'",
        "/dev/zero": "config: is not a regular file, got '/dev/zero'",
    }.items():
        assert problems(bare_train, f"--config={name}") == [line]


def test_other_errors_are_listed_beside_a_missing_file():
    lines = problems(train, "--config", "no.yaml", "--run.steps", "x")
    assert [line.partition(":")[0] for line in lines] == ["config", "run.steps"]


def test_required_fields_are_all_missed():
    lines = problems(bare_train, "--run.steps", "5", "--model.width")
    assert "optim.peak_lr: is required; expected float (highest learning rate of the schedule)" in lines
    assert [line.partition(":")[0] for line in lines] == [
        *["model.width", "model.arch", "model.layers", "model.heads", "model.vocab", "model.context"],
        *["optim.peak_lr", "data.batch_size"],
    ]


def test_endless_errors_end():
    Path("x.yaml").write_text("run:\n" + "".join(f"  key{i}: 0\n" for i in range(200)))
    lines = problems(train, "--config", "x.yaml")
    assert len(lines) == form.LISTED + 1
    assert lines[-1] == f"and more: only the first {form.LISTED} errors are listed"


def test_later_files_win_over_earlier_ones_and_flags_over_files(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "packaged").mkdir()
    monkeypatch.setattr(cli, "_PACKAGED", folder / "packaged")
    Path("packaged/tiny.yaml").write_text("run: {steps: 7}")  # hidden by ./configs/tiny.yaml
    Path("packaged/base_0.5b.yaml").write_text("run: {seed: 1, log_every_steps: 2}\nmodel: {places: {a: {b: 1, c: 1}}}")
    Path("over.yml").write_text("run: {seed: 3, steps: 50}\nmodel: {places: {a: {c: 2}, d: {}}}\ndata:\n")
    argv = [
        "--run.seed",
        "4",
        "--config",
        "base_0.5b",
        "--config=over.yml",
        "--model.places.a.e",
        "x",
        "--model.places.a",
        "{}",
    ]
    config = train(*argv)
    assert (config.run.seed, config.run.steps, config.run.log_every_steps) == (4, 50, 2)
    assert config.model.places == {"a": {"b": 1, "c": 2, "e": "x"}, "d": {}}
    assert cli.config_name(argv, "tiny") == "over"
    assert cli.config_name(argv[:4], "tiny") == "base_0.5b"
    assert cli.config_name([], "tiny") == "tiny"


def test_a_command_finds_what_lies_in_its_folder_first():
    Path("configs/evaluate").mkdir()
    for path, seed in ("configs/other.yaml", 5), ("configs/evaluate/tiny.yaml", 6), ("configs/evaluate/sets.yaml", 7):
        Path(path).write_text(TINY.replace("steps: 100", f"steps: 100, seed: {seed}"))
    found = {name: str(cli.config_path(name, "evaluate")) for name in ("tiny", "other", "sets")}
    assert list(found.values()) == ["configs/evaluate/tiny.yaml", "configs/other.yaml", "configs/evaluate/sets.yaml"]
    assert str(cli.config_path("tiny")) == "configs/tiny.yaml"
    assert cli.config_name(["--config", "sets"], "x", "evaluate") == "sets"
    assert problems(train, "--config", "sets")[0].startswith("config: no config of that name, got 'sets'; ")


def test_a_default_config_is_read_only_without_another():
    Path("configs/other.yaml").write_text(TINY)
    Path("configs/tiny.yaml").write_text(TINY.replace("steps: 100", "steps: 100, seed: 5"))
    for argv, seed in ([], 5), (["--config", "other"], 0):
        assert cli.parse(Config, argv, command="train", default_config="tiny").run.seed == seed


def test_other_schemas_can_be_flat_nested_and_hold_lists():
    text = write(
        "--runs", "[a, b]", "--draw.temperature", "1", "--sizes", "[1, 2]", "--pair", "[3, 4]", "--mode", "two"
    )
    assert text == Text(["a", "b"], "", Draw(3, 1.0), [1, 2], (3.0, 4.0), "two", {})
    assert write("--runs", "[]", "--prompt=--x").prompt == "--x"
    assert write("--runs", "[]", "--prompt", "").prompt == ""
    assert write("--runs", "[]", "--grid", "{a.b: [1]}", "--grid.c", "[2]").grid == {"a.b": [1.0], "c": [2.0]}
    assert problems(write, "--runs", "a", "--sizes", "[x]", "--grid.c", "[y]", "--draw.top_q", "1") == [
        "draw.top_q: unknown key; did you mean draw.top_k?",
        "runs: expected a list of str, got 'a'",
        "sizes: expected a list of int or null, got ['x']",
        "grid.c: expected a list of float, got ['y']",
    ]


NASTY = ["null", "no", "3e-4", "010", "1", "true", "~", ".inf", "nan", "a: b", "#x", "- x", "é\u2028", "a\n\nb"]
NASTY += ["'", '"', "{", "*x", "&x", "!x", " x ", "\0", "\t"]


@pytest.mark.parametrize("text", NASTY)
def test_yaml_gives_the_same_config_again(text: str):
    shared = {"alpha_init": 0.1}
    name = text if text.isprintable() else "name"
    places = {"residual": shared, "qk": shared, name: [text, 1, -2.5e-8, 1e22, None, False, {}], "empty": {}}
    config = train("--optim.clip_norm", "none", "--run.resume", "never")
    model = dataclasses.replace(config.model, places=places)
    run = dataclasses.replace(config.run, dir=text, seed=2**32 - 1)
    config = dataclasses.replace(config, model=model, run=run)
    written = cli.to_yaml(config)
    Path("x.yaml").write_text(written, encoding="utf-8")
    again = bare_train("--config", "x.yaml")
    assert again == config
    assert cli.to_yaml(again) == written


def test_yaml_has_all_sections_in_declared_order():
    sections = re.findall(r"^\w+", cli.to_yaml(train()), re.MULTILINE)
    assert sections == [field.name for field in dataclasses.fields(Config)]


def test_changed_names_what_differs():
    old = train("--model.places.a.b", "1", "--run.seed", "5")
    new = train("--model.places.a.c", "2")
    assert cli.changed(old, new) == [
        ("model.places.a.b", 1, None),
        ("run.seed", 5, 0),
        ("model.places.a.c", None, 2),
    ]
    assert cli.changed(dataclasses.asdict(old), old) == []
    assert cli.changed(train(), train("--model.places.a", "1")) == [("model.places.a", None, 1)]


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (Config, ["--dry_run true or false", "float, none or null", "(default: 1e-08)", "optim: the optimizer"]),
        (Text, ["(default: 3)", "the k likeliest, none of the others", "divides logits by 100 % of it"]),
    ],
)
def test_help_shows_every_field(schema: type, texts: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.parse(schema, ["--run.steps", "x", "--help"], command="train", default_config="tiny")
    assert caught.value.code == 0
    shown = "".join(capsys.readouterr().out.split())  # lines may be broken at any place
    texts += ["python -m angpt_jax.train", "(default: tiny)", "1e3 is refused"]
    for leaf in leaves(schema):
        assert leaf.meaning
        state = "required" if leaf.default is dataclasses.MISSING else "default:"
        texts += [f"--{leaf.key}", f"{leaf.meaning} ({state}"]
    assert [text for text in texts if "".join(text.split()) not in shown] == []


def test_help_shows_words_where_a_field_takes_them(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.parse(Text, ["a", "--help"], command="text", words="runs")
    usage = capsys.readouterr().out.splitlines()[0]
    assert usage == "usage: python -m angpt_jax.text RUN... [--config FILE]... [--KEY VALUE]..."
    with pytest.raises(SystemExit):
        cli.parse(Text, ["--help"], command="text")
    assert capsys.readouterr().out.splitlines()[0] == usage.replace("RUN... ", "")


def test_main_turns_errors_into_lines_and_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seen: list[tuple[int, str]] = []

    def finish(config: Config, name: str) -> int | None:
        seen.append((config.run.steps, name))
        return None if config.run.seed == 0 else 75

    def fail(config: Config, name: str) -> int | None:
        raise StorageError("run.dir: can't be written, got 'x'", "second line")

    def bug(config: Config, name: str) -> int | None:
        raise ValueError("a bug")

    def code(run: Any, *argv: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["train", *argv])
        with pytest.raises(SystemExit) as exit:
            cli.main(run, Config, "train", "tiny")
        return exit.value.code

    assert code(finish) == 0
    assert code(finish, "--config", "configs/tiny.yaml", "--run.seed", "1") == 75
    assert seen == [(100, "tiny")] * 2
    assert capsys.readouterr() == ("", "")
    assert code(finish, "--run.steps", "x", "--foo", "1") == 2
    assert capsys.readouterr() == (
        "",
        f"angpt_jax: error: foo: unknown key; the keys are {TOP_KEYS}\n"
        "angpt_jax: error: run.steps: expected int, got 'x'\n",
    )
    assert code(fail) == 4
    assert capsys.readouterr().err == (
        "angpt_jax: error: run.dir: can't be written, got 'x'\nangpt_jax: error: second line\n"
    )
    with pytest.raises(ValueError, match="a bug"):
        cli.main(bug, Config, "train", "tiny")


def test_raise_problems_raises_only_problems():
    cli.raise_problems([])
    with pytest.raises(UserError) as caught:
        cli.raise_problems(iter(["a", "b"]))
    assert caught.value.problems == ("a", "b")


def test_a_bad_value_is_refused_before_jax_is_loaded():
    code = "\n".join(
        [
            "import runpy, sys",
            "sys.argv = ['train', '--config', 'tiny', '--run.steps', '0']",
            "try: runpy.run_module('angpt_jax.train', run_name='__main__')",
            "except SystemExit as ended: print(ended.code, 'jax' in sys.modules)",
        ]
    )
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2 False\n", "angpt_jax: error: run.steps: must be >= 1, got 0\n")


def test_nothing_here_imports_jax():
    heavy = "{'jax', 'flax', 'numpy'} & sys.modules.keys()"
    code = f"import sys, angpt_jax.cli, angpt_jax.rules; print({heavy})"
    root = Path(cli.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


PRINTS = """
from dataclasses import dataclass
from angpt_jax import cli

@dataclass(frozen=True)
class Nothing:
    'A command.'

cli.main(lambda config, name: print("a line"), Nothing, command="prints", default_config=None)
"""


def test_a_reader_that_has_enough_ends_the_command_without_a_traceback():
    root, piped = Path(cli.__file__).parents[1], subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PRINTS], cwd=root, stdout=piped, stderr=piped) as started:
        assert started.stdout and started.stderr
        started.stdout.close()
        assert (started.stderr.read(), started.wait(60)) == (b"", 128 + signal.SIGPIPE)


def test_a_warning_holds_no_more_than_an_error_does(capsys):
    """Nothing that a terminal obeys, and no password of an address."""
    text = "run.dir: removed, got 'a\x1b[2J' of https://user:secret@host/x; nothing to do"
    warn(text)
    print_problems(text)
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == r"angpt_jax: warning: run.dir: removed, got 'a\x1b[2J' of https://***@host/x; nothing to do"
    assert error == warning.replace("warning", "error")
