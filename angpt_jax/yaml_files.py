"""YAML without surprises, in both directions: what a config file may hold, and how a config is written down.

Reading refuses anchors, aliases, tags (so nothing can be constructed or blown up), keys that stand twice, deep
nesting and large files. Numbers are JSON-like: `3e-4` is a number; `010`, `0x10`, `1:30`, `no` and dates are text.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.reader import ReaderError

from angpt_jax.errors import UserError

LARGEST = 100_000  # bytes; PyYAML needs about a quarter of a second for that many
DEEPEST = 20  # mappings and lists inside one another

_FLOAT = r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)? | [-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    | [-+]?\.?(?:inf|Inf|INF) | \.?(?:nan|NaN|NAN)"""
_PLAIN = {  # what text without quotes means, apart from text: tag, pattern, first characters
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(?:0|[1-9][0-9_]{0,63})", list("-+0123456789")),
    "float": (_FLOAT, list("-+.0123456789iInN")),
}


class _Loader(yaml.SafeLoader):
    """Refuses what is not plain, and has no resolvers but those added below."""

    yaml_implicit_resolvers = {}
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        problem = None
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            problem = "anchors and aliases are not allowed"
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            problem = "tags are not allowed"
        elif self.depth == DEEPEST:
            problem = f"nested more than {DEEPEST} deep"
        if problem:
            raise ComposerError(None, None, problem, event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    """Has resolvers of its own, added below."""


for _name, (_pattern, _first) in _PLAIN.items():
    for _class in (_Loader, _Dumper):  # the dumper quotes what either this loader or YAML 1.1 would not read as text
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"(?:{_pattern})$", re.X), _first)


def dump(values: dict[str, Any]) -> str:
    """`values` (no list or dict stands in it twice) as YAML in the order of its keys; `load` gives the same again."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def load(text: str, key: str, source: str, prefix: str = "") -> Any:
    """The value that the YAML `text` holds.

    A UserError names `key` and `source` if `text` is not YAML of the kind above, or each key that stands twice (its
    dotted name begins with `prefix`) with both line numbers.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
    except ReaderError as error:
        where = f"line {text.count(chr(10), 0, error.position) + 1}"
        raise UserError(f"{key}: is not YAML (character {chr(error.character)!a}, {where}), got {source}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{key}: is not YAML ({error.problem}{where}), got {source}") from None
    problems = list(_twice(node, prefix, source))
    if problems:
        raise UserError(*problems)
    return value


def _twice(node: yaml.Node | None, path: str, source: str) -> Iterator[str]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _twice(item, path, source)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = f"{path}.{key.value}".removeprefix("."), key.start_mark.line + 1
            if name in lines:
                yield f"{name}: stands twice, on lines {lines[name]} and {line} of {source}; keep one"
            lines[name] = line
            yield from _twice(value, name, source)


def read_mapping(path: Path) -> dict[str, Any]:
    """What the YAML file `path` holds; a UserError under the key `config` says why it can't be used."""
    source = repr(str(path))
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"config: is {'a directory' if path.is_dir() else 'not a regular file'}, got {source}")
        with open(path, "rb") as file:
            raw = file.read(LARGEST + 1)
        text = raw.decode("utf-8")
    except OSError as error:
        raise UserError(f"config: can't be read ({error.strerror}), got {source}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"config: is not UTF-8 text (byte {error.start}), got {source}") from None
    if len(raw) > LARGEST:
        raise UserError(f"config: is too large, got {source}; at most {LARGEST // 1000} kB")
    value = load(text, "config", source)
    if not isinstance(value, dict):
        found = {list: "a list", type(None): "nothing"}.get(type(value), "one value")
        raise UserError(f"config: must be a mapping of sections, got {found} in {source}")
    return value
