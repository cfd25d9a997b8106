"""The documents of a unit, one after the other, whatever kind of data it is."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angpt_jax.data.columns import arrow_rows, parquet_rows
from angpt_jax.data.sources import COMPRESSED, Source
from angpt_jax.data.streams import decoded, line_number, lines
from angpt_jax.data.tfds_sets import tfds_builder
from angpt_jax.data.tokenizer import parts
from angpt_jax.data.units import Span, Unit

_ROWS = 256  # of a TFDS data set, at once


@dataclass(frozen=True)
class Piece:
    """Text of a document, or, where a document is long, of a part of it.

    Args:
        name: of the document: its file, and its place there
        text: never empty but for an empty document
        begins: whether the document begins here
    """

    name: str
    text: str
    begins: bool = True


@dataclass(frozen=True)
class Bad:
    """A line or row that is no document; `problem` names it and says why."""

    problem: str


def read(unit: Unit) -> Iterator[Piece | Bad]:
    """What the unit holds, in its order."""
    of_kind = {"text": _text, "jsonl": _jsonl, "parquet": _parquet, "arrow": _arrow, "tfds": _tfds}[unit.source.kind]
    for span in unit.spans:
        yield from of_kind(unit.source, span)


def _text(source: Source, span: Span) -> Iterator[Piece]:
    begins = True
    for part in parts(decoded(source, span.file, span.start, span.stop)):
        yield Piece(span.file, part, begins)
        begins = False


def _jsonl(source: Source, span: Span) -> Iterator[Piece | Bad]:
    stop = -1 if span.file.endswith(COMPRESSED) else span.stop
    first: int | None = None
    for number, (place, line) in enumerate(lines(source, span.file, span.start, stop)):
        if place == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.isspace():
            continue
        text = _text_of(line, source.field)
        if isinstance(text, str):
            yield Piece(f"{span.file}:{place}", text)
        else:
            if first is None:  # the number of the span's first line is counted only where it is needed
                first = line_number(source, span.file, place) - number
            yield _bad(source, f"{source.path(span.file)} line {first + number}", text)


def _text_of(line: bytes, field: str) -> str | Bad:
    """The text of one line of JSON, or what is wrong with it."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Bad(f"not UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Bad(f"broken JSON ({error})")
    if not isinstance(value, dict):
        return Bad(f"not a JSON object but {_type(value)}")
    if field not in value:
        return Bad(f"no field {field} (there are {', '.join(value) or 'none'})")
    return _unicode(value[field], field)


def _type(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", list: "a list", dict: "an object", str: "a text"}
    return names.get(type(value), "a number")


def _unicode(text: Any, field: str) -> str | Bad:
    if not isinstance(text, str):
        return Bad(f"field {field} is {_type(text)}, not a text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Bad(f"field {field} is no Unicode text (half a surrogate pair at character {error.start})")
    return text


def _parquet(source: Source, span: Span) -> Iterator[Piece | Bad]:
    return _of_rows(source, span.file, parquet_rows(source, span.file, span.start, span.stop))


def _arrow(source: Source, span: Span) -> Iterator[Piece | Bad]:
    return _of_rows(source, span.file, arrow_rows(source, span.file))


def _tfds(source: Source, span: Span) -> Iterator[Piece | Bad]:
    data: Any = tfds_builder(Path(source.root), source.key, source.name).as_data_source(split=source.split)

    def rows() -> Iterator[tuple[int, Any]]:
        for start in range(span.start, span.stop, _ROWS):
            numbers = range(start, min(start + _ROWS, span.stop))
            yield from zip(numbers, (row[source.field] for row in data.__getitems__(list(numbers))), strict=True)

    return _of_rows(source, span.file, rows())


def _of_rows(source: Source, file: str, rows: Iterable[tuple[int, Any]]) -> Iterator[Piece | Bad]:
    """Documents of (row, bytes of text)."""
    for row, value in rows:
        text = value
        if isinstance(value, bytes):
            try:
                text = value.decode("utf-8")
            except UnicodeDecodeError as error:
                text = Bad(f"field {source.field} is not UTF-8 at byte {error.start}")
        text = text if isinstance(text, Bad) else _unicode(text, source.field)
        yield (
            Piece(f"{file}:{row}", text)
            if isinstance(text, str)
            else _bad(source, f"{source.path(file)} row {row}", text)
        )


def _bad(source: Source, place: str, what: Bad) -> Bad:
    return Bad(f"{source.key}: {what.problem}, got {place}; mend it, or pass over it with --skip_bad_lines")
