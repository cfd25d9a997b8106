"""Rows of tables: how they are read, what they are called, which config they are."""

from pathlib import Path
from typing import Any

import pytest
from commands import TINY

from angpt_jax import rows
from angpt_jax.errors import UserError
from angpt_jax.rows import Row, name_of, short_keys


def test_an_entry_changes_what_all_rows_share():
    entries = [
        {"name": "a"},
        {"name": "b", "config": ["x", "y"], "model": {"places": {"qk.part": "unit_qk"}}, "run.steps": 5},
    ]
    found, problems = rows.read(entries, ["default"], {"run": {"steps": 3}, "run.seed": 1})
    assert problems == []
    assert found == [
        Row("a", ("default",), {"run.steps": 3, "run.seed": 1}),
        Row("b", ("x", "y"), {"run.steps": 5, "run.seed": 1, "model.places.qk.part": "unit_qk"}),
    ]


def test_all_that_is_wrong_with_entries_is_listed():
    names = [None, "", "a/b", "..", "é", "x" * 101, 3, "-a"]
    entries: list[Any] = [{"name": name} for name in names[1:]]
    entries += ["a", {}, {"name": "a"}, {"name": "a", "run.dir": "x"}, {"name": "b", "config": "x"}]
    entries += [{"name": "c", "config": [""]}, {"name": "d", "run": {"resume": "must"}}]
    rule = "must be letters, digits, dots, + = _ or -, at most 100, and begin with a letter or digit"
    shown = [repr(name) if len(str(name)) < 100 else f"'{'x' * 76}..." for name in names[1:]]
    assert rows.read(entries, [], {"dry_run": True})[1] == [
        "values.dry_run: is not for a row to say, got true; the command that runs it decides",
        *(f"list[{place}].name: {rule}, got {name}" for place, name in enumerate(shown, 1)),
        "list[8]: must be a mapping with a name, got 'a'",
        "list[9]: has no name; give it one",
        "list[11]: has the name of another row, got 'a'; names differ",
        "list[11].run.dir: is not for a row to say, got 'x'; the command that runs it decides",
        "list[12].config: must be a list of config names or files, got 'x'",
        "list[13].config: must be a list of config names or files, got ['']",
        "list[14].run.resume: is not for a row to say, got 'must'; the command that runs it decides",
    ]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "base"),
        ({"optim.peak_lr": 4e-3, "optim.beta2": 0.99}, "peak_lr=0.004+beta2=0.99"),
        ({"optim.epsilon": 1e-8, "model.tied_embeddings": True}, "epsilon=1e-08+tied_embeddings=true"),
        ({"run.stop_at_step": None, "model.remat": ["attention", "up"]}, "stop_at_step=null+remat=attention_up"),
        ({"model.places.residual": {"part": "lerp", "alpha_init": 1}}, "residual=part_lerp_alpha_init_1"),
        ({"data.source": "../my data/é.txt"}, "source=.._my_data_.txt"),
        ({"places.residual.alpha_init": 1, "places.mlp.alpha_init": 2}, "residual.alpha_init=1+mlp.alpha_init=2"),
    ],
)
def test_a_name_says_what_changes(values: dict[str, Any], name: str):
    assert name_of(values) == name
    assert rows.problems_of_name(name, "x") == []


def test_keys_are_as_long_as_they_must_be():
    keys = ["a.b.c", "x.b.c", "b.c", "d.e", "f"]
    short = {"a.b.c": "a.b.c", "x.b.c": "x.b.c", "b.c": "b.c", "d.e": "e", "f": "f"}
    assert short_keys(keys) == short_keys(reversed(keys)) == short
    assert list(short_keys(["b", "a"])) == ["b", "a"]


def test_the_words_of_a_row_give_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    values = {"optim.clip_norm": None, "data.source": "x y", "optim.peak_lr": 1e-5, "model.tied_embeddings": True}
    row = Row("a", ("tiny.yaml",), {**values, "model.places.qk": {"part": "unit_qk"}, "run.stop_at_step": 3})
    config = row.but("b", {"optim.clip_norm": "none", "run.stop_at_step": None}).config()
    assert (config.optim.clip_norm, config.data.source, config.optim.peak_lr) == ("none", "x y", 1e-5)
    assert (config.model.tied_embeddings, config.run.stop_at_step, config.run.seed) == (True, None, 0)
    assert config.model.places == {"head": {"scale_init": 5.6}, "qk": {"part": "unit_qk"}}
    with pytest.raises(UserError) as caught:
        row.but("b", {"run.stepz": 3, "run.seed": "x"}).config()
    assert caught.value.problems == (
        "b: run.stepz: unknown key; did you mean run.steps?",
        "b: run.seed: expected int, got 'x'",
    )
    with pytest.raises(UserError, match="^b: run.seed: must be >= 0 and < 2\\*\\*32, got -1$"):
        row.but("b", {"run.seed": -1}).config()
