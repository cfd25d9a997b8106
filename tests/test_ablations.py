"""The tables of configs/ablations: every row is a config that builds, and another one than its neighbours."""

import re
from itertools import combinations
from pathlib import Path

import pytest

from angpt_jax import cli, experiment, sweep
from angpt_jax.archs import RECIPES
from angpt_jax.config import Config
from angpt_jax.nu import Nu
from angpt_jax.sweep import SweepConfig

FOLDER = Path(__file__).parent.parent / "configs" / "ablations"
TABLES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def rows(table: str) -> dict[str, Config]:
    """The config of each row by its name."""
    config = cli.parse(SweepConfig, ["--config", str(FOLDER / f"{table}.yaml")], command="sweep")
    found, problems = sweep.expand(config)
    assert problems == []
    return {row.name: row.config() for row in found}


@pytest.mark.parametrize("table", TABLES)
def test_every_row_keeps_the_rules_and_differs_from_the_others(table):
    built = {}
    for name, config in rows(table).items():
        resolved, arch, sizes = experiment.resolved(config)
        built[name] = (arch, sizes, resolved.model.tied_embeddings)
    for one, other in combinations(built, 2):
        assert built[one] != built[other], (one, other)


def test_the_table_of_nu_has_each_constant_removed_and_wrong_by_2_5_and_10_percent():
    changed = {name: experiment.architecture(config.model)[0].nu for name, config in rows("nu").items()}
    exact = changed["angpt"]
    for field in Nu.__dataclass_fields__:
        assert getattr(changed[f"{field}_off"], field) == 1.0 != getattr(exact, field)
        for factor in (1.02, 1.05, 1.10):
            wrong = getattr(changed[f"{field}_x{factor:.2f}"], field)
            assert wrong == pytest.approx(factor * getattr(exact, field), rel=1e-9)
    assert len(changed) == 1 + 2 + 8 * 4


def test_the_table_of_designs_has_every_recipe_under_its_name():
    assert {name: config.model.arch for name, config in rows("designs").items()} == {name: name for name in RECIPES}


def test_rows_of_the_papers_table_train_on_the_same_tokens():
    configs = rows("openwebtext")
    expected = configs["gpt_plus"]
    assert expected.data.source == "data/openwebtext"
    for config in configs.values():
        assert (config.data, config.run) == (expected.data, expected.run)
        assert config.model.context == expected.model.context


def test_the_readme_counts_the_rows():
    text = (FOLDER / "README.md").read_text()
    counts = dict(re.findall(r"\| \[(\w+)\.yaml\]\(\w+\.yaml\) \| (\d+) \|", text))
    assert {table: int(count) for table, count in counts.items()} == {table: len(rows(table)) for table in TABLES}
