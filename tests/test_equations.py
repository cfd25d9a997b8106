"""angpt_jax/README.md: the code and tests that it names exist, and its tables say what the code does."""

import ast
import math
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from conftest import SIZES

import angpt_jax
from angpt_jax import cli, experiment
from angpt_jax.arch import Arch, Constraint, Recommended
from angpt_jax.archs import RECIPES
from angpt_jax.archs.angpt import angpt
from angpt_jax.axes import Axes
from angpt_jax.config import Config
from angpt_jax.errors import UserError
from angpt_jax.nu import Nu
from angpt_jax.part import Part, setting_types
from angpt_jax.parts import PARTS
from angpt_jax.places import NUMBERS, OVERRIDABLE, hidden_nu, override

PACKAGE = Path(angpt_jax.__file__).parent
TESTS = Path(__file__).parent
README = (PACKAGE / "README.md").read_text("utf-8")
CODE, TEST = re.compile(r"`([\w/]+\.py): (\w+)`"), re.compile(r"`tests/(\w+\.py)::(\w+)`")
Row = dict[str, str]


def tables() -> list[list[Row]]:
    """Every table as rows of heading → cell."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", README, re.MULTILINE):
        heading, _, *rows = (
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()
        )
        found.append([dict(zip(heading, row, strict=True)) for row in rows])
    return found


def rows(*headings: str) -> list[Row]:
    """The rows of all tables that have these columns."""
    return [row for table in tables() for row in table if set(headings) <= set(row)]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@cache
def defined(path: Path) -> set[str]:
    """What a file defines at its top level; it is not imported."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("file, name", sorted(set(CODE.findall(README))))
def test_code_that_it_names_exists(file: str, name: str) -> None:
    assert name in defined(PACKAGE / file)


@pytest.mark.parametrize("file, name", sorted(set(TEST.findall(README))))
def test_tests_that_it_names_exist(file: str, name: str) -> None:
    assert name.startswith("test_") and name in defined(TESTS / file)


def test_each_equation_has_code_and_a_test_and_nothing_else_is_in_their_columns() -> None:
    equations = rows("equation", "code", "test")
    assert len(equations) > 40
    for row in equations:
        for column, pattern in (("code", CODE), ("test", TEST)):
            assert re.fullmatch(f"{pattern.pattern}(, {pattern.pattern})*", row[column]), row


def test_papers_are_those_that_the_code_names() -> None:
    code = "".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    assert set(re.findall(r"\d{4}\.\d{5}", README)) <= set(re.findall(r"\d{4}\.\d{5}", code))
    designs = "".join(
        path.read_text("utf-8")
        for folder in ("archs", "parts")
        for path in (PACKAGE / folder).iterdir()
        if path.suffix == ".py"
    )
    assert set(re.findall(r"\d{4}\.\d{5}", designs)) <= set(re.findall(r"\d{4}\.\d{5}", README))


def test_every_recipe_has_its_row_in_both_tables_of_recipes() -> None:
    assert [quoted(row["recipe"])[0] for row in rows("recipe", "`gate`")] == list(RECIPES)
    others = {quoted(row["recipe"])[0] for row in rows("recipe", "source", "equation")}
    assert others == RECIPES.keys() - {"angpt", "gpt_plus", "ngpt"}
    for row in rows("recipe", "source", "equation"):
        assert quoted(row["recipe"])[0] in [name for _, name in CODE.findall(row["code"])]


def test_every_part_is_named() -> None:
    assert {name for parts in PARTS.values() for name in parts} - set(quoted(README)) == set()


@pytest.mark.parametrize("row", rows("recipe", "`gate`"), ids=lambda row: quoted(row["recipe"])[0])
def test_the_table_of_places_is_that_of_the_recipes(row: Row) -> None:
    arch = RECIPES[quoted(row["recipe"])[0]](SIZES)
    assert {f"`{place}`" for place in OVERRIDABLE} | {"recipe", "optimizer"} == row.keys()
    for place in PARTS:
        assert row[f"`{place}`"].count("–") + len(quoted(row[f"`{place}`"])) >= 1
        assert filled(arch, place) == written(row[f"`{place}`"], place), place
    assert (arch.nu == Nu()) == (row["`nu`"] == "1")
    assert [arch.constraint.norm, arch.constraint.along] == (
        quoted(row["`constraint`"]) or ["none", Constraint().along]
    )
    assert (arch.optimizer == Recommended()) == (row["optimizer"] == "Adam")
    assert ("√D" in row["`gate`"]) == (arch.gate["gate_scale"] > 1)
    assert ("1/√K" in row["`qk`"]) == (arch.qk["softmax_scale"] < 1)
    assert arch.gate["activation"] == ("gelu" if "gelu" in row["`gate`"] else "silu")


def filled(arch: Arch, place: str) -> list[str]:
    """Names of the parts there: one, or attention's and the MLP's."""
    part = getattr(arch, place)
    kinds = [part.kind] if isinstance(part, Part) else [part.attention.kind, part.mlp.kind]
    return [name for kind in kinds for name, known in PARTS[place].items() if known is kind]


def written(cell: str, place: str) -> list[str]:
    return [
        name for text in cell.replace("–", "`identity`").split(" / ") for name in quoted(text) if name in PARTS[place]
    ]


SWITCHES = [
    (quoted(row["recipe"])[0], key, row["default"], value)
    for row in rows("point", "key")
    for key, value in product(quoted(row["key"]), quoted(row["other values"]))
]
TINY = {"width": 24, "layers": 2, "heads": 3, "vocab": 31, "context": 8}


@cache
def resolved(recipe: str, *flags: str) -> Any:
    required = [f"--model.{name}={size}" for name, size in TINY.items()]
    required += [f"--model.arch={recipe}", "--optim.peak_lr=1e-3", "--data.batch_size=1", "--run.steps=10"]
    return experiment.resolved(cli.parse(Config, [*required, *flags], command="train"))


def settled(recipe: str, *flags: str) -> Any:
    """Architecture with every setting of its parts written out, optimizer, and what else decides a model."""
    config, arch, sizes = resolved(recipe, *flags)
    places = [written_out(getattr(arch, place).at(name)) for place in PARTS for name in ("attention", "mlp")]
    return places, arch.nu, arch.constraint, sizes, config.optim, config.model.tied_embeddings


def written_out(part: Part) -> dict[str, Any]:
    return {"kind": part.kind} | {name: part[name] for name in setting_types(part.kind)}


@pytest.mark.parametrize("recipe, key, default, value", SWITCHES)
def test_a_switch_has_the_default_that_is_written_and_takes_the_other_values(
    recipe: str, key: str, default: str, value: str
) -> None:
    assert settled(recipe, f"--{key}={value}") != settled(recipe)
    for written_default in quoted(default):
        assert settled(recipe, f"--{key}={written_default}") == settled(recipe)


def test_every_setting_of_the_parts_of_angpt_is_a_switch() -> None:
    keys = {key.removeprefix("model.places.") for recipe, key, *_ in SWITCHES if recipe == "angpt"}
    missing = []
    for place in PARTS:
        settings = setting_types(getattr(angpt(SIZES), place).at("mlp").kind)
        missing += [f"{place}.{name}" for name in ("part", *settings) if f"{place}.{name}" not in keys]
    assert missing == ["init.part"]  # other distributions need a setting of their own
    assert {f"nu.{name}" for name in Nu.__dataclass_fields__} <= keys


@pytest.mark.parametrize("text", [text for text in quoted(README.replace("\n", " ")) if text.startswith("{")])
def test_places_that_it_shows_are_accepted(text: str) -> None:
    places = yaml.safe_load(text)
    same = places == {"head": {"scale_init": None}}  # null leaves it to the recipe
    assert (override(angpt(SIZES), places, SIZES) == angpt(SIZES)) == same


def test_words_for_numbers_are_all_there() -> None:
    paragraph = README.partition("**Numbers.**")[2].partition("\n\n")[0]
    assert quoted(paragraph) == list(NUMBERS)


def test_nu_without_effect_are_those_that_are_refused() -> None:
    hidden = {
        recipe: quoted(row["ν without effect"])
        for row in rows("recipe", "ν without effect")
        for recipe in quoted(row["recipe"])
    }
    for recipe in RECIPES:
        arch = RECIPES[recipe](SIZES)
        assert sorted(hidden.get(recipe, [])) == sorted(hidden_nu(arch)), recipe
        for name in hidden.get(recipe, []):
            with pytest.raises(UserError, match=rf"model\.places\.nu\.{name}: has no effect"):
                override(arch, {"nu": {name: 0.5}}, SIZES)


@pytest.mark.parametrize("layers", [2, 18])
def test_gpt_plus_is_drawn_normal_and_what_writes_to_the_stream_by_depth(layers: int) -> None:
    init = RECIPES["gpt_plus"](replace(SIZES, layers=layers)).init.make()
    for role in ("embedding", "query", "key", "value", "up", "gate", "head", "attention_out", "down"):
        drawn = np.asarray(init(jax.random.key(0), (200, 300), Axes(role, ("a", "b"), inputs=("a",))))
        depth = math.sqrt(2 * layers) if role in ("attention_out", "down") else 1.0
        assert drawn.std() == pytest.approx(0.02 / depth, rel=0.02), role
        assert abs(drawn.mean()) < 1e-3 and (np.abs(drawn) > 4 * drawn.std()).any()  # not cut off
