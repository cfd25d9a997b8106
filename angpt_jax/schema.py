"""What a config dataclass allows: its leaves by dotted key, a value checked against a type, the finished object."""

import argparse
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from typing import Any, Literal, TypeVar, Union

from jsonargparse import ArgumentParser

T = TypeVar("T")


@dataclass(frozen=True)
class Leaf:
    """One field that is not a section.

    Args:
        key: dotted name
        hint: its type
        default: its default, or dataclasses.MISSING if it is required
        meaning: its line in the docstring
    """

    key: str
    hint: Any
    default: Any
    meaning: str


def meanings(schema: type) -> dict[str, str]:
    """Field name → meaning, from the Args section of the docstring and of those of its base classes."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        args = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")[2]
        found |= dict(re.findall(r"^ {4}(\w+): (.+)$", re.sub(r"\n {6,}", " ", args), re.MULTILINE))
    return found


def leaves(schema: type, prefix: str = "", instance: Any = MISSING) -> Iterator[Leaf]:
    """The leaves of `schema` in declared order; their defaults come from `instance` where there is one."""
    hints, meaning = typing.get_type_hints(schema), meanings(schema)
    for field in dataclasses.fields(schema):
        key, hint = prefix + field.name, hints[field.name]
        if instance is not MISSING:
            default = getattr(instance, field.name)
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
        if dataclasses.is_dataclass(hint):
            yield from leaves(typing.cast(type, hint), f"{key}.", default)
        else:
            yield Leaf(key, hint, default, meaning[field.name])


def sections(schema: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and meaning of every section of `schema`."""
    hints, meaning = typing.get_type_hints(schema), meanings(schema)
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            yield prefix + name, meaning[name]
            yield from sections(typing.cast(type, hint), f"{prefix}{name}.")


def build(schema: type[T], values: dict[str, Any], prefix: str = "") -> T:
    """The dataclass whose leaves are `values`, by dotted key."""
    hints = typing.get_type_hints(schema)
    arguments = {}
    for field in dataclasses.fields(typing.cast(Any, schema)):
        key, hint = prefix + field.name, hints[field.name]
        is_section = dataclasses.is_dataclass(hint)
        arguments[field.name] = build(typing.cast(type, hint), values, f"{key}.") if is_section else values[key]
    return schema(**arguments)


def options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; (hint,) for any other type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_mapping(hint: Any) -> bool:
    """Whether the type takes a mapping, so that its key can be followed by further names."""
    return any(option is dict or typing.get_origin(option) is dict for option in options(hint))


def of_mapping(hint: Any) -> Any:
    """The type of a mapping's values; Any where they may be mappings themselves, or where it says nothing."""
    args = next((typing.get_args(option) for option in options(hint) if typing.get_origin(option) is dict), ())
    return args[1] if args and not is_mapping(args[1]) else Any


def _names(hint: Any) -> Iterator[str]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for option in args:
            yield from _names(option)
    elif origin is Literal:
        yield from map(str, args)
    elif hint is bool:
        yield from ("true", "false")
    elif origin in (list, tuple):
        yield f"a list of {allowed(args[0])}"
    elif is_mapping(hint):
        yield "a mapping"
    else:
        yield {types.NoneType: "null", Any: "anything"}.get(hint) or hint.__name__


def allowed(hint: Any) -> str:
    """The type in the words of YAML: `int`, `true or false`, `float, none or null`, `a list of str`."""
    *first, last = _names(hint)
    return f"{', '.join(first)} or {last}" if first else last


@functools.cache
def _parser(hint: Any) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser


def checked(hint: Any, value: Any) -> Any:
    """`value` as the type wants it (an int where a float is due becomes one); a ValueError if it is not of the type.

    jsonargparse decides, without its conversions from text: `"12"` is no int and `"yes"` no bool.
    """
    if value is None or (isinstance(value, str) and str in options(hint)):
        if type(value) not in options(hint):
            raise ValueError
        return value
    try:
        result = _parser(hint).parse_object({"value": value}, defaults=False).value
    except argparse.ArgumentError:
        raise ValueError from None
    if isinstance(value, str) and result != value:
        raise ValueError
    return result


def show(value: Any) -> str:
    """`value` on one line of a message: null, true and false as in YAML, text in quotes, shortened."""
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
