"""Which ids stand in which row: a stream cut into windows, or documents packed into rows. Random access, no state.

A row has context + 1 ids, of which the first `context` are inputs and the last `context` targets. Either way each id of
the stream but the very first is a target exactly once in all rows.
"""

from dataclasses import dataclass

import numpy as np

from angpt_jax.data.shards import StreamReader, TokenStream

PADDING = 0  # segment of what fills a row up; documents have 1, 2, …
Row = dict[str, np.ndarray]
_SCANNED = 1 << 24  # ids that are searched for the ends of documents at once


class Windows:
    """Concatenate and split: row k is ids[kL : kL + L + 1] of the stream; the last one is filled up with padding."""

    def __init__(self, stream: TokenStream, context: int):
        self._reader, self._context = stream.open(), context

    def __len__(self) -> int:
        return -(-(self._reader.stream.count - 1) // self._context)

    def __getitem__(self, index: int) -> Row:
        start = index * self._context
        ids = self._reader.read(start, min(start + self._context + 1, self._reader.stream.count))
        return filled([ids], self._context, self._reader.stream.end_of_document)


class PackedRows:
    """Best fit: whole documents side by side in rows that they fill as well as they can.

    A document with more than L targets is cut: its first pieces fill rows of their own, the rest is packed.
    """

    def __init__(self, stream: TokenStream, context: int):
        self._reader, self._context = stream.open(), context
        self._pieces = cut(document_starts(self._reader), context)
        self._rows = best_fit(self._pieces.cost, context)

    def __len__(self) -> int:
        return len(self._rows.ends)

    def __getitem__(self, index: int) -> Row:
        first = self._rows.ends[index - 1] if index else 0
        mine = self._rows.order[first : self._rows.ends[index]]
        starts, targets = self._pieces.start[mine], self._pieces.targets[mine]
        ids = [self._reader.read(start, start + n + 1) for start, n in zip(starts, targets, strict=True)]
        return filled(ids, self._context, self._reader.stream.end_of_document)


def filled(pieces: list[np.ndarray], context: int, end_of_document: int) -> Row:
    """A row of these ids and padding: `tokens`, `segments` (int32, L+1) and `weights` (float32, L), 1 for each target
    that counts.

    An end-of-document id closes one document and opens the next, so that a piece that begins with one shares it with
    the piece before. A piece that begins inside of a document opens a segment with an id that is no target.
    """
    tokens = np.full(context + 1, end_of_document, np.int32)
    segments = np.full(context + 1, PADDING, np.int32)
    counts = np.zeros(context + 1, np.float32)
    at, segment = 0, 0
    for ids in pieces:
        shared = int(at > 0 and ids[0] == end_of_document)
        begin, stop = at - shared, at - shared + len(ids)
        opened = segment - shared + (ids[0] != end_of_document) + np.cumsum(ids == end_of_document)
        tokens[begin:stop], segments[begin:stop], counts[begin + 1 : stop] = ids, opened, 1
        at, segment = stop, int(opened[-1])
    return {"tokens": tokens, "segments": segments, "weights": counts[1:]}


def document_starts(reader: StreamReader) -> np.ndarray:
    """Positions of the end-of-document ids of the stream: of each document's first id, and of the last id of all."""
    stream = reader.stream
    blocks = range(0, stream.count, _SCANNED)
    found = [
        start + np.flatnonzero(reader.read(start, min(start + _SCANNED, stream.count)) == stream.end_of_document)
        for start in blocks
    ]
    return np.concatenate(found)


@dataclass(frozen=True)
class Pieces:
    """Documents, or parts of long ones: position of the first id, number of targets, and what each takes of a row."""

    start: np.ndarray
    targets: np.ndarray
    cost: np.ndarray


def cut(starts: np.ndarray, context: int) -> Pieces:
    """Pieces of at most `context` targets: the ids of a document behind its first, and the one that closes it."""
    lengths = np.diff(starts)
    parts = -(-lengths // context)
    document = np.repeat(np.arange(len(lengths)), parts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    targets = np.minimum(lengths[document] - number * context, context)
    inside = (number > 0) & (targets < context)  # its first id is no target: it needs a place of its own
    return Pieces(starts[document] + number * context, targets, targets + inside)


@dataclass(frozen=True)
class Rows:
    """Pieces in the order of their rows, and where each row ends in that order."""

    order: np.ndarray
    ends: np.ndarray


def best_fit(cost: np.ndarray, capacity: int) -> Rows:
    """Best fit decreasing, for many pieces of few different costs (histogram packing, arXiv 2107.02027, section 3):
    all pieces of one cost are placed at once, into the rows with the least room that is enough."""
    by_cost = np.argsort(-cost, kind="stable")
    row_of = np.empty(len(cost), np.int64)
    room: dict[int, np.ndarray] = {}  # room → rows that have it left
    rows = 0
    sizes, firsts = np.unique(-cost[by_cost], return_index=True)
    for size, mine in zip(-sizes, np.split(by_cost, firsts[1:]), strict=True):
        while len(mine):
            fitting = min((space for space in room if space >= size), default=None)
            if fitting is None:
                fresh = -(-len(mine) // (capacity // size))
                room[capacity], rows = np.arange(rows, rows + fresh), rows + fresh
                continue
            chosen, rest = np.split(room.pop(fitting), [len(mine)])
            if len(rest):
                room[fitting] = rest
            row_of[mine[: len(chosen)]], mine = chosen, mine[len(chosen) :]
            left = int(fitting - size)
            if left:
                room[left] = np.concatenate([room[left], chosen]) if left in room else chosen
    order = np.argsort(row_of, kind="stable")
    return Rows(order, np.cumsum(np.bincount(row_of, minlength=rows)))
