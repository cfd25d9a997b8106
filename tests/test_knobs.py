"""A field of the config that nobody reads is a lie: each must be used by name somewhere outside config and rules."""

import ast
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from angpt_jax.config import Config
from angpt_jax.meshes import AXES

PACKAGE = Path(__file__).parent.parent / "angpt_jax"


def knobs(schema: type) -> list[str]:
    """Names of the leaf fields of a config dataclass."""
    return [
        name
        for f in fields(schema)
        for name in (knobs(f.type) if isinstance(f.type, type) and is_dataclass(f.type) else [f.name])
    ]


def attributes_read() -> set[str]:
    """Every attribute name that is read in the package, but where configs are defined and checked."""
    sources = [path for path in PACKAGE.rglob("*.py") if path.name not in ("config.py", "rules.py")]
    nodes = (node for path in sources for node in ast.walk(ast.parse(path.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("knob", [name for name in knobs(Config) if name not in AXES])
def test_each_knob_is_read(knob: str) -> None:
    assert knob in attributes_read()


def test_mesh_axes_are_read_by_name() -> None:
    assert AXES == ("replica", "fsdp", "tensor", "context")
