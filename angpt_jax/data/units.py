"""The units of a source: what is read, tokenized and written at once. They follow from the input and the unit size
alone, never from the number of workers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from angpt_jax.data.columns import row_groups
from angpt_jax.data.corpus import name_hash
from angpt_jax.data.sources import ALLOWED, COMPRESSED, File, Source
from angpt_jax.data.streams import decoded
from angpt_jax.data.tfds_sets import tfds_builder

Side = Literal["train", "validation"]


@dataclass(frozen=True)
class Span:
    """A part of one file: bytes start … stop of text or JSONL, row groups of Parquet, rows of TFDS; the rest whole.

    Args:
        file: of the source
        start: where it begins
        stop: where it ends
        size: bytes that it counts for
    """

    file: str
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Unit:
    """Spans that are read one after the other.

    Args:
        source: that they belong to
        spans: in their order
        side: of all their documents; None where the name of each decides
    """

    source: Source
    spans: tuple[Span, ...]
    side: Side | None

    @property
    def size(self) -> int:
        return sum(span.size for span in self.spans)


def cut(source: Source, unit_bytes: int, side: Side | None, fraction: float) -> list[Unit]:
    """The units of a source whose documents all go to `side`, or, for None, are split by the fraction."""
    if source.kind == "text":
        sides = _text_sides(source, side, fraction)
        return [unit for of, spans in sides for unit in _grouped(source, spans, of, unit_bytes)]
    spans = {"jsonl": _byte_ranges, "parquet": _row_groups, "arrow": _whole, "tfds": _rows}[source.kind]
    units = _grouped(source, spans(source, unit_bytes), side, unit_bytes)
    if not units:
        raise source.wrong("empty", source.name, ALLOWED)
    return units


def _grouped(source: Source, spans: Iterable[Span], side: Side | None, unit_bytes: int) -> list[Unit]:
    """Neighbours together, as long as they fit into a unit."""
    groups: list[list[Span]] = []
    size = math.inf
    for span in spans:
        size += span.size
        if size > unit_bytes:
            groups.append([])
            size = span.size
        groups[-1].append(span)
    return [Unit(source, tuple(group), side) for group in groups]


def _whole(source: Source, unit_bytes: int) -> list[Span]:
    return [Span(file.name, 0, file.size, file.size) for file in source.files if file.size]


def _byte_ranges(source: Source, unit_bytes: int) -> Iterator[Span]:
    """Ranges of a unit's size; compressed files can't be entered in the middle."""
    for file in source.files:
        step = file.size if file.name.endswith(COMPRESSED) else unit_bytes
        for start in range(0, file.size, max(step, 1)):
            stop = min(start + step, file.size)
            yield Span(file.name, start, stop, stop - start)


def _row_groups(source: Source, unit_bytes: int) -> Iterator[Span]:
    for file in source.files:
        for number, size in enumerate(row_groups(source, file.name)):
            yield Span(file.name, number, number + 1, size)


def _rows(source: Source, unit_bytes: int) -> Iterator[Span]:
    info = tfds_builder(Path(source.root), source.key, source.name).info.splits[source.split]
    step = max(1, info.num_examples * unit_bytes // max(1, info.num_bytes))
    for start in range(0, info.num_examples, step):
        stop = min(start + step, info.num_examples)
        yield Span(source.split, start, stop, (stop - start) * info.num_bytes // info.num_examples)


def _text_sides(source: Source, side: Side | None, fraction: float) -> list[tuple[Side, list[Span]]]:
    """As `corpus.split_documents` splits and orders them: by the hash of the name, neither side empty."""
    files = sorted((file for file in source.files if file.size), key=lambda file: name_hash(file.name))
    if not files:
        raise source.wrong("empty", source.name, "text files with text in them")
    spans = [Span(file.name, 0, file.size, file.size) for file in files]
    if side is not None:
        return [(side, spans)]
    if len(files) == 1:
        place = _place_of_cut(source, files[0], fraction)
        name, size = files[0].name, files[0].size
        return [("train", [Span(name, 0, place, place)]), ("validation", [Span(name, place, size, size - place)])]
    held_out = min(max(sum(name_hash(file.name) < fraction for file in files), 1), len(files) - 1)
    return [("train", spans[held_out:]), ("validation", spans[:held_out])]


def _place_of_cut(source: Source, file: File, fraction: float) -> int:
    """The byte where `corpus.split_documents` cuts a single document, found without holding it in memory."""
    length = sum(len(text) for text in decoded(source, file.name, 0, file.size))
    if length < 2:
        raise source.wrong("one character can't be split", source.name, "more text, or a --validation_source")
    cut_at = min(max(round(length * (1 - fraction)), 1), length - 1)
    places = _line_ends_around(decoded(source, file.name, 0, file.size), cut_at)
    fitting = [end for end in places[1:] if 2 * end[0] >= cut_at and 2 * (length - end[0]) >= length - cut_at]
    return min(fitting, key=lambda end: abs(end[0] - cut_at), default=places[0])[1]


def _line_ends_around(texts: Iterable[str], cut_at: int) -> Sequence[tuple[int, int]]:
    """(character, byte) of the cut, and of the ends of the lines before and behind it, as far as there are any."""
    characters = size = 0
    cut: tuple[int, int] | None = None
    before: list[tuple[int, int]] = []
    for text in texts:
        near = cut_at - characters
        if cut is None and near <= len(text):
            cut = (cut_at, size + len(text[:near].encode()))
        if (end := text.rfind("\n", 0, max(near, 0)) + 1) > 0:
            before = [(characters + end, size + len(text[:end].encode()))]
        if cut is not None and (end := text.find("\n", max(near, 0)) + 1) > 0:
            return [cut, *before, (characters + end, size + len(text[:end].encode()))]
        characters, size = characters + len(text), size + len(text.encode())
    assert cut is not None
    return [cut, *before]
