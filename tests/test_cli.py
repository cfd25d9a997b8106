"""Files and flags → a config, or exact error lines."""

import dataclasses
import math
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from angpt_jax import cli, form, yaml_files
from angpt_jax.config import Config
from angpt_jax.errors import StorageError, UserError
from angpt_jax.schema import leaves

TINY = """\
model: {arch: angpt, width: 64, layers: 2, heads: 4, vocab: 257, context: 32}
optim: {peak_lr: 3e-4}
data:
  batch_size: 8
mesh:
run: {steps: 100}
"""
RUN_KEYS = (
    "steps, dir, stop_at_step, log_every_steps, eval_every_steps, checkpoint_every_steps, keep_latest, "
    "keep_every_steps, seed, resume"
)
TOP_KEYS = "model, optim, data, run, mesh, dry_run"
MODEL_KEYS = "arch, width, layers, heads, vocab, context, feed_forward, rope_theta, compute_dtype, scan_layers, places"


@dataclass(frozen=True)
class Draw:
    """How to draw.

    Args:
        top_k: the k likeliest,
            none of the others
        temperature: divides logits by 100 % of it
    """

    top_k: int | None = 40
    temperature: float = 0.8


@dataclass(frozen=True)
class Text:
    """What to write.

    Args:
        runs: folders
        prompt: begin with this
        draw: how to draw
        sizes: sizes to try
        pair: two of them
        mode: a number or a word
        grid: values by key
    """

    runs: list[str]
    prompt: str = ""
    draw: Draw = field(default_factory=lambda: Draw(top_k=3))
    sizes: list[int] | None = None
    pair: tuple[float, ...] = (1.0, 2.0)
    mode: Literal[1, "two"] = 1
    grid: dict[str, list[float]] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory that holds configs/tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/tiny.yaml").write_text(TINY)
    return tmp_path


def train(*argv: str) -> Config:
    return cli.parse(Config, ["--config", "tiny", *argv], command="train")


def bare_train(*argv: str) -> Config:
    return cli.parse(Config, list(argv), command="train")


def write(*argv: str) -> Text:
    return cli.parse(Text, list(argv), command="text")


def problems(call: Any, *argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        call(*argv)
    assert all(line.isprintable() for line in caught.value.problems)
    return list(caught.value.problems)


FLAGS: list[tuple[list[str], Any, Any]] = [  # flags, what is read, its value
    (["--optim.peak_lr", "2e-3"], lambda c: c.optim.peak_lr, 0.002),
    (["--optim.peak_lr=2e-3"], lambda c: c.optim.peak_lr, 0.002),
    (["--optim.peak_lr", "1"], lambda c: c.optim.peak_lr, 1.0),
    (["--run.steps", "1_000"], lambda c: c.run.steps, 1000),
    (["--mesh.fsdp", "-1", "--run.seed", "+7"], lambda c: (c.mesh.fsdp, c.run.seed), (-1, 7)),
    (["--dry_run", "true"], lambda c: c.dry_run, True),
    (["--model.scan_layers=false"], lambda c: c.model.scan_layers, False),
    (["--optim.clip_norm", "none"], lambda c: c.optim.clip_norm, "none"),
    (["--optim.clip_norm", "1"], lambda c: c.optim.clip_norm, 1.0),
    (["--optim.clip_norm", "null"], lambda c: c.optim.clip_norm, None),
    (["--run.dir", "null"], lambda c: c.run.dir, None),
    (["--run.dir", "12"], lambda c: c.run.dir, "12"),
    (["--run.dir", "a: [b"], lambda c: c.run.dir, "a: [b"),
    (["--data.source", "null"], lambda c: c.data.source, "null"),
    (["--run.seed", "5", "--run.seed", "5"], lambda c: c.run.seed, 5),
    (["--optim.beta1", "nan", "--optim.beta1", "nan"], lambda c: str(c.optim.beta1), "nan"),
    (
        ["--optim.beta1", "-inf", "--optim.beta2", ".inf"],
        lambda c: (c.optim.beta1, c.optim.beta2),
        (-math.inf, math.inf),
    ),
    (["--model.places.residual.alpha_init", "0.1"], lambda c: c.model.places, {"residual": {"alpha_init": 0.1}}),
    (["--model.places", "{a: {b: [1, x]}}", "--model.places.a.c", "no"], lambda c: c.model.places["a"]["c"], "no"),
    (["--model.places", "{}"], lambda c: c.model.places, {}),
]


@pytest.mark.parametrize(("argv", "read", "value"), FLAGS, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_a_flag_sets_its_field(argv: list[str], read: Any, value: Any):
    found = read(train(*argv))
    assert found == value
    assert type(found) is type(value)


BAD_FLAGS: list[tuple[list[str], list[str]]] = [
    (["--model.d_modle", "64"], [f"model.d_modle: unknown key; the keys of model are {MODEL_KEYS}"]),
    (["--model.widht=64"], ["model.widht: unknown key; did you mean model.width?"]),
    (["--steps", "3"], ["steps: unknown key; did you mean run.steps?"]),
    (["--modle.width", "3"], ["modle.width: unknown key; did you mean model.width?"]),
    (["--foo", "[x"], [f"foo: unknown key; the keys are {TOP_KEYS}"]),
    (["--run.dir.x", "3"], ["run.dir.x: unknown key; run.dir has no keys of its own"]),
    (["--model.places..x", "3"], ["model.places..x: unknown key; names are printable text"]),
    (["--model.places.a\nb", "3"], [r"'model.places.a\nb': unknown key; names are printable text"]),
    (["--mesh", "{fsdp: 2}"], ["mesh: is a section, not a value; its keys are replica, fsdp, tensor"]),
    (["--run.steps", "abc"], ["run.steps: expected int, got 'abc'"]),
    (["--run.steps", "1e3"], ["run.steps: expected int, got 1000.0; write whole numbers as 1000 or 1_000"]),
    (["--run.steps=1.5"], ["run.steps: expected int, got 1.5; write whole numbers as 1000 or 1_000"]),
    (["--run.steps", "010"], ["run.steps: expected int, got '010'"]),
    (["--run.steps", "9" * 5000], [f"run.steps: expected int, got '{'9' * 76}..."]),
    (["--run.steps", "null"], ["run.steps: expected int, got null"]),
    (["--run.steps", "true"], ["run.steps: expected int, got true"]),
    (["--run.stop_at_step", "x"], ["run.stop_at_step: expected int or null, got 'x'"]),
    (["--optim.peak_lr", "high"], ["optim.peak_lr: expected float, got 'high'"]),
    (["--optim.clip_norm", "off"], ["optim.clip_norm: expected float, none or null, got 'off'"]),
    (["--model.compute_dtype", "bf16"], ["model.compute_dtype: expected float32 or bfloat16, got 'bf16'"]),
    (["--run.resume", "yes"], ["run.resume: expected auto, never or must, got 'yes'"]),
    (["--dry_run", "no"], ["dry_run: expected true or false, got 'no'"]),
    (["--dry_run", "0"], ["dry_run: expected true or false, got 0"]),
    (["--model.places", "x"], ["model.places: expected a mapping, got 'x'"]),
    (["--optim.peak_lr="], ["optim.peak_lr: needs a value, got ''; expected float"]),
    (["--run.dir", ""], ["run.dir: needs a value, got ''; expected str or null"]),
    (["--dry_run"], ["dry_run: needs a value; expected true or false"]),
    (["--run.steps", "--run.seed", "3"], ["run.steps: needs a value; expected int"]),
    (["--model.places.a"], ["model.places.a: needs a value"]),
    (["--config"], ["config: needs a value; expected a YAML file or a name in configs/"]),
    (["--run.seed", "1", "--run.seed=2"], ["run.seed: given twice, got 1 and 2; keep one"]),
    (
        ["--model.places.a", "x", "--model.places.a.b", "1"],
        ["model.places.a: given as a value and as a mapping, got 'x' and model.places.a.b; keep one"],
    ),
    (["x", "--"], [f"{word}: is not a flag; write --KEY VALUE, --help lists the keys" for word in ("'x'", "'--'")]),
    (
        ["-x", "--=3"],
        [f"{word}: is not a flag; write --KEY VALUE, --help lists the keys" for word in ("'-x'", "'--=3'")],
    ),
    (
        ["--model.places", "{a: 1, a: 2}"],
        ["model.places.a: stands twice, on lines 1 and 1 of '{a: 1, a: 2}'; keep one"],
    ),
    (
        ["--model.places.a", "[1"],
        ["model.places.a: is not YAML (expected ',' or ']', but got '<stream end>', line 1, column 3), got '[1'"],
    ),
    (["--run.dir", "\udcff"], [r"run.dir: is not UTF-8 text, got '\udcff'"]),
    (
        ["--run.steps", "x", "--model.widht", "3", "--optim.beta1", "y"],
        [
            "model.widht: unknown key; did you mean model.width?",
            "run.steps: expected int, got 'x'",
            "optim.beta1: expected float, got 'y'",
        ],
    ),
]


@pytest.mark.parametrize(
    ("argv", "lines"), BAD_FLAGS, ids=lambda x: " ".join(x)[:40].encode("ascii", "replace").decode()
)
def test_a_bad_flag_is_named(argv: list[str], lines: list[str]):
    assert problems(train, *argv) == lines


IN_X = " in 'x.yaml'"
BAD_FILES: list[tuple[str | bytes, list[str]]] = [
    (
        "run: {steps: [}",
        ["config: is not YAML (expected the node content, but found '}', line 1, column 15), got 'x.yaml'"],
    ),
    (
        "run:\n\tsteps: 1",
        [r"config: is not YAML (found character '\t' that cannot start any token, line 2, column 1), got 'x.yaml'"],
    ),
    ("run: 1\nx: \0", [r"config: is not YAML (character '\x00', line 2), got 'x.yaml'"]),
    ("a: 1\n---\nb: 1", ["config: is not YAML (but found another document, line 2, column 1), got 'x.yaml'"]),
    ("run: &a {}\n", ["config: is not YAML (anchors and aliases are not allowed, line 1, column 6), got 'x.yaml'"]),
    ("run: *a\n", ["config: is not YAML (anchors and aliases are not allowed, line 1, column 6), got 'x.yaml'"]),
    (
        "run: !!python/object/apply:os.system [touch canary]\n",
        ["config: is not YAML (tags are not allowed, line 1, column 6), got 'x.yaml'"],
    ),
    ("run: " + "[" * 5000, ["config: is not YAML (nested more than 20 deep, line 1, column 25), got 'x.yaml'"]),
    ("? [a]\n: 1\n", ["config: is not YAML (found unhashable key, line 1, column 3), got 'x.yaml'"]),
    (b"run: \xe9\n", ["config: is not UTF-8 text (byte 5), got 'x.yaml'"]),
    ("- 1\n", ["config: must be a mapping of sections, got a list in 'x.yaml'"]),
    ("", ["config: must be a mapping of sections, got nothing in 'x.yaml'"]),
    ("tiny", ["config: must be a mapping of sections, got one value in 'x.yaml'"]),
    ("#" * (yaml_files.LARGEST + 1), ["config: is too large, got 'x.yaml'; at most 100 kB"]),
    (
        "run:\n  steps: 1\n  seed: 1\n  steps: 1\nrun: {}\n",
        [
            "run.steps: stands twice, on lines 2 and 4 of 'x.yaml'; keep one",
            "run: stands twice, on lines 1 and 5 of 'x.yaml'; keep one",
        ],
    ),
    (
        "model: {places: {a: [{b: 1, b: 1}]}}",
        ["model.places.a.b: stands twice, on lines 1 and 1 of 'x.yaml'; keep one"],
    ),
    ("run: {seed: 1}\nrun.seed: 2", [f"run.seed: given twice, got 1 and 2{IN_X}; keep one"]),
    ("run: 5", [f"run: is a section, not a value{IN_X}; its keys are {RUN_KEYS}"]),
    (
        "run: {stepz: 5}\n1: 2",
        [f"run.stepz: unknown key{IN_X}; did you mean run.steps?", f"1: unknown key{IN_X}; the keys are {TOP_KEYS}"],
    ),
    ("optim: {peak_lr: '3e-4'}", [f"optim.peak_lr: expected float, got '3e-4'{IN_X}"]),
    ("model: {scan_layers: no}", [f"model.scan_layers: expected true or false, got 'no'{IN_X}"]),
    ("run: {dir: 5}", [f"run.dir: expected str or null, got 5{IN_X}"]),
    ("run: {dir: ''}", [f"run.dir: needs a value, got ''{IN_X}; expected str or null"]),
    (
        "model: {width: 010, heads: 0x10}",
        [f"model.{key}{IN_X}" for key in ("width: expected int, got '010'", "heads: expected int, got '0x10'")],
    ),
    (
        "model: {heads: '4', vocab: 1:30}",
        [f"model.{key}{IN_X}" for key in ("heads: expected int, got '4'", "vocab: expected int, got '1:30'")],
    ),
    ("model: {context: 2024-01-01}", [f"model.context: expected int, got '2024-01-01'{IN_X}"]),
]


@pytest.mark.parametrize(("text", "lines"), BAD_FILES, ids=lambda x: str(x)[:40].encode("ascii", "replace").decode())
def test_a_bad_file_is_named(text: str | bytes, lines: list[str]):
    Path("x.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    assert problems(train, "--config", "x.yaml") == lines
    assert not Path("canary").exists()


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
        "grid: expected a mapping, got {'c': ['y']}",
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


def test_nothing_here_imports_jax():
    heavy = "{'jax', 'flax', 'numpy'} & sys.modules.keys()"
    code = f"import sys, angpt_jax.cli, angpt_jax.rules; print({heavy})"
    root = Path(cli.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
