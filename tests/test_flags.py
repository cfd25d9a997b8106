"""A flag sets its field, or one line says what is wrong with it."""

import math
from pathlib import Path
from typing import Any

import pytest
from command_lines import MODEL_KEYS, TOP_KEYS, Text, make_folder, problems, train

from angpt_jax import cli


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


FLAGS: list[tuple[list[str], Any, Any]] = [  # flags, what is read, its value
    (["--optim.peak_lr", "2e-3"], lambda c: c.optim.peak_lr, 0.002),
    (["--optim.peak_lr=2e-3"], lambda c: c.optim.peak_lr, 0.002),
    (["--optim.peak_lr", "1"], lambda c: c.optim.peak_lr, 1.0),
    (["--run.steps", "1_000"], lambda c: c.run.steps, 1000),
    (["--mesh.fsdp", "-1", "--run.seed", "+7"], lambda c: (c.mesh.fsdp, c.run.seed), (-1, 7)),
    (["--dry_run", "true"], lambda c: c.dry_run, True),
    (["--model.scan_layers=false"], lambda c: c.model.scan_layers, False),
    (["--dry_run"], lambda c: c.dry_run, True),
    (["--dry_run", "--run.seed", "3"], lambda c: c.dry_run, True),
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
    (
        ["--mesh", "{fsdp: 2}"],
        ["mesh: is a section, not a value; its keys are replica, fsdp, tensor, context, preset, rules"],
    ),
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


def write_runs(*argv: str) -> Text:
    """A command whose words without a flag fill `runs`."""
    return cli.parse(Text, list(argv), command="text", words="runs")


def test_words_fill_the_field_that_takes_them():
    text = write_runs("a b", "--prompt", "p", "12", "--draw.top_k=5", "null", "[c]")
    assert (text.runs, text.prompt, text.draw.top_k) == (["a b", "12", "null", "[c]"], "p", 5)
    Path("x.yaml").write_text("runs: [old]\nprompt: old\n")
    assert write_runs("--config", "x.yaml").runs == ["old"]
    assert write_runs("new", "--config", "x.yaml").runs == ["new"]
    assert write_runs("--runs", "[a, b]").runs == ["a", "b"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "runs: is required; expected a list of str (folders)"),
        (["a", "--runs", "[b]"], "runs: given twice, as 'a' and as --runs; keep one"),
        (["a", "-x"], "'-x': is not a flag; write --KEY VALUE, --help lists the keys"),
        (["a", "--"], "'--': is not a flag; write --KEY VALUE, --help lists the keys"),
        (["a", ""], "'': is not a flag; write --KEY VALUE, --help lists the keys"),
        (["a", "\udcff"], r"runs: is not UTF-8 text, got '\udcff'"),
        (["a", "--prompt"], "prompt: needs a value; expected str"),
    ],
    ids=range(7),
)
def test_a_word_that_fills_nothing_is_named(argv: list[str], line: str):
    assert problems(write_runs, *argv) == [line]
