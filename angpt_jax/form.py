"""The form that a schema is: files and flags fill it in, and every error is noted before anything is built."""

import types
from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from difflib import get_close_matches
from typing import Any

from angpt_jax.errors import UserError
from angpt_jax.schema import Leaf, allowed, checked, is_mapping, leaves, of_mapping, options, show
from angpt_jax.yaml_files import load

LISTED = 50  # errors that are shown; a file of another kind has thousands

KeyPath = tuple[str, ...]  # a dotted key, taken apart
Given = tuple[KeyPath, Any]  # one value that somebody wrote


def flatten(value: Any, path: KeyPath = ()) -> Iterator[Given]:
    """The values inside nested mappings with their paths; an empty mapping is a value."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from flatten(part, (*path, str(name)))
    else:
        yield path, value


def dotted(path: KeyPath) -> str:
    """The key as it stands in an error: dotted, on one line, not endless."""
    key = ".".join(path)
    return key if key.isprintable() and len(key) <= 80 else show(key)


class Form:
    """Values by leaf of `schema`; each `add_…` overrides what stands there, mappings are merged."""

    def __init__(self, schema: type):
        self._leaves = {leaf.key: leaf for leaf in leaves(schema)}
        self._values: dict[str, Any] = {}
        self._named: set[str] = set()  # leaves that somebody tried to give
        self._problems: list[str] = []

    def note(self, *problems: str) -> None:
        """Adds lines to the error that `finish` raises."""
        self._problems += problems
        if len(self._problems) > LISTED:
            raise UserError(*self._problems[:LISTED], f"and more: only the first {LISTED} errors are listed")

    def add_flags(self, flags: Iterable[tuple[str, str | None]]) -> None:
        """Fills in flags: dotted key, and text or None where no value followed."""
        given: list[Given] = []
        for key, text in flags:
            path = tuple(key.split("."))
            try:
                given += flatten(self._flag_value(path, text), path)
            except UserError as error:
                self.note(*error.problems)
        self.add(given)

    def _flag_value(self, path: KeyPath, text: str | None) -> Any:
        leaf, rest = self._owner(path)
        if text is None and leaf.hint is bool:
            return True
        if text is None:
            raise UserError(f"{dotted(path)}: needs a value" + ("" if rest else f"; expected {allowed(leaf.hint)}"))
        if text == "" or (not rest and str in options(leaf.hint)):
            return None if text == "null" and types.NoneType in options(leaf.hint) else text
        return load(text, dotted(path), show(text), dotted(path))

    def add(self, given: Iterable[Given], origin: str = "") -> None:
        """Fills in the values of one source; `origin` (" in FILE") stands behind a wrong value."""
        given = [(path, value) for path, value in given if value not in (None, {}) or not self._names_below(path)]
        self.note(*_conflicts(given, origin))
        for path, value in given:
            try:
                self._set(path, value, origin)
            except UserError as error:
                self.note(*error.problems)

    def _set(self, path: KeyPath, value: Any, origin: str) -> None:
        leaf, rest = self._owner(path, origin)
        if value == "" and leaf.default != "":
            raise UserError(f"{dotted(path)}: needs a value, got ''{origin}; expected {allowed(leaf.hint)}")
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise UserError(f"{dotted(path)}: is not UTF-8 text, got {show(value)}{origin}")
        key, hint = leaf.key, leaf.hint
        if rest and of_mapping(hint) is not Any:  # nothing nests there: the names are one, which has dots
            rest = (".".join(rest),)
            key, hint = dotted(path), of_mapping(hint)
        else:
            for name in reversed(rest):
                value = {name: value}
            rest = ()
        try:
            result = checked(hint, value)
        except ValueError:
            inexact = isinstance(value, float) and int in options(hint)
            advice = "; write whole numbers as 1000 or 1_000" if inexact else ""
            raise UserError(f"{key}: expected {allowed(hint)}, got {show(value)}{origin}{advice}") from None
        for tail, part in flatten(result):
            _put(self._values, (leaf.key, *rest, *tail), part)

    def _owner(self, path: KeyPath, origin: str = "") -> tuple[Leaf, KeyPath]:
        """The leaf that `path` names, and the names below it when the leaf is a mapping."""
        for end in range(len(path), 0, -1):
            leaf, rest = self._leaves.get(".".join(path[:end])), path[end:]
            if leaf and (not rest or (is_mapping(leaf.hint) and all(name and name.isprintable() for name in rest))):
                self._named.add(leaf.key)
                return leaf, rest
        names = self._names_below(path)
        if names:
            raise UserError(f"{dotted(path)}: is a section, not a value{origin}; its keys are {', '.join(names)}")
        raise UserError(f"{dotted(path)}: unknown key{origin}; {self._suggestion(path)}")

    def _names_below(self, path: KeyPath) -> list[str]:
        prefix = "".join(f"{name}." for name in path)
        below = (key.removeprefix(prefix).partition(".")[0] for key in self._leaves if key.startswith(prefix))
        return list(dict.fromkeys(below))

    def _suggestion(self, path: KeyPath) -> str:
        *section, name = path
        for end in range(1, len(path)):
            if leaf := self._leaves.get(".".join(path[:end])):
                return "names are printable text" if is_mapping(leaf.hint) else f"{leaf.key} has no keys of its own"
        siblings = self._names_below(tuple(section))
        near = get_close_matches(name, siblings, 1)
        if near:
            return f"did you mean {'.'.join((*section, near[0]))}?"
        by_name = {key.rpartition(".")[2]: key for key in self._leaves}
        near = get_close_matches(name, by_name, 1, cutoff=0.8)
        if near:
            return f"did you mean {by_name[near[0]]}?"
        if section and siblings:
            return f"the keys of {dotted(tuple(section))} are {', '.join(siblings)}"
        return f"the keys are {', '.join(self._names_below(()))}"

    def finish(self, *, all_read: bool) -> dict[str, Any]:
        """Values of all leaves by key, or a UserError with all problems; required ones are missed if `all_read`."""
        for leaf in self._leaves.values():
            if leaf.default is not MISSING:
                self._values.setdefault(leaf.key, leaf.default)
            elif all_read and leaf.key not in self._named:
                self.note(f"{leaf.key}: is required; expected {allowed(leaf.hint)} ({leaf.meaning})")
        if self._problems:
            raise UserError(*self._problems)
        return self._values


def _conflicts(given: list[Given], origin: str) -> Iterator[str]:
    """Problems of one source that gives a key two values, or a value and a mapping."""
    seen: dict[KeyPath, Any] = {}
    for path, value in given:
        path = tuple(".".join(path).split("."))  # a file may write a key with dots
        first = seen.setdefault(path, value)
        if repr(first) != repr(value):  # nan is not equal to itself
            yield f"{dotted(path)}: given twice, got {show(first)} and {show(value)}{origin}; keep one"
    for path in seen:
        for head in (path[:end] for end in range(1, len(path))):
            if seen.get(head, {}) != {}:
                both = f"{show(seen[head])} and {dotted(path)}"
                yield f"{dotted(head)}: given as a value and as a mapping, got {both}{origin}; keep one"


def _put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Sets the value at `path`, making mappings on the way; an empty mapping empties nothing."""
    *section, name = path
    for part in section:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    if value != {} or not isinstance(values.get(name), dict):
        values[name] = value
