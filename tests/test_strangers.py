"""angpt_jax/RELIABILITY.md: every promise, failure and case stands there once, with tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from bad_inputs import ROWS

import angpt_jax

TESTS = Path(__file__).parent
PAGE = (Path(angpt_jax.__file__).parent / "RELIABILITY.md").read_text("utf-8")
NAMED = re.compile(r"`tests/([\w./]+\.py)::(\w+)`")
WANTED = {
    "promise": [f"R{number}" for number in range(1, 14)] + [f"S{number}" for number in range(1, 6)],
    "failure": [f"D{number}" for number in range(1, 19)],
    "case": [str(number) for number in range(1, 55)],
}


def rows(heading: str) -> dict[str, str]:
    """First word → line, of the table whose first column has that heading."""
    lines = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert all(line.startswith("| ") and line.count(" | ") in (2, 3) for line in lines)
    named = {line.split()[1]: line for line in lines}
    assert len(named) == len(lines)
    return named


@cache
def names_in(file: str) -> set[str]:
    path = TESTS / file
    tree = ast.parse(path.read_text("utf-8")) if path.exists() else ast.parse("")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("heading", WANTED)
def test_each_stands_there_once_in_order(heading: str) -> None:
    assert list(rows(heading)) == WANTED[heading]


@pytest.mark.parametrize("file, name", sorted(set(NAMED.findall(PAGE))))
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    assert name in names_in(file)


def test_nothing_is_without_a_test() -> None:
    lines = {name: line for heading in WANTED for name, line in rows(heading).items()}
    assert [name for name, line in lines.items() if not NAMED.search(line) and "| table |" not in line] == []


def test_the_page_says_table_where_there_are_rows() -> None:
    said = {int(case) for case, line in rows("case").items() if re.search(r"\| table[ ,|]", line)}
    assert said == {row.case for row in ROWS}
    assert len(ROWS) > 90 and len(said) > 40


def test_a_feature_that_is_not_there_is_an_unknown_key_or_said_to_be_missing() -> None:
    unknown = {row.case for row in ROWS if any("unknown key" in line for line in row.lines)}
    said = {int(case) for case, line in rows("case").items() if "o such feature" in line}
    assert unknown - {1} <= said
    assert said - unknown == {20, 24}  # flags that allow what is refused: nothing has their name


def test_every_file_that_is_named_exists() -> None:
    assert all((TESTS.parent / file).exists() for file in re.findall(r"`(tests/\w+\.py)`", PAGE))
