"""A file that can't be used as a config is named, with the line."""

from pathlib import Path

import pytest
from command_lines import RUN_KEYS, TOP_KEYS, make_folder, problems, train

from angpt_jax import yaml_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


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
