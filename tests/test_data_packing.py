"""Rows of ids: every target once an epoch, no document beside another without a new segment, and rows that are full."""

import pickle
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest
from conftest import SIZES, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from token_streams import END, ids_of, numbered, write_stream

from angpt_jax.data import packing
from angpt_jax.data.packing import PADDING, PackedRows, Row, Windows, best_fit, cut, document_starts, filled
from angpt_jax.data.pipeline import Packing
from angpt_jax.data.shards import Format, TokenStream
from angpt_jax.step import nats

KINDS = {"concatenate": Windows, "best_fit": PackedRows}
LENGTHS = st.lists(st.one_of(st.integers(0, 8), st.integers(0, 70)), min_size=1, max_size=14)
SHARDS, CONTEXTS = st.integers(1, 4), st.integers(1, 20)
PACKINGS, FORMATS = st.sampled_from(get_args(Packing)), st.sampled_from(get_args(Format))


def rows_of(stream: TokenStream, context: int, packing: Packing) -> list[Row]:
    """All rows of an epoch."""
    rows = KINDS[packing](stream, context)
    return [rows[index] for index in range(len(rows))]


def rows_from(lengths: Sequence[int], context: int, packing: Packing, shards: int = 1, format: Format = "memmap"):
    """All rows of an epoch over documents of these lengths."""
    with tempfile.TemporaryDirectory() as folder:
        return rows_of(write_stream(folder, numbered(lengths), shards=shards, format=format), context, packing)


def pairs_of(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Input and target, for every target that counts."""
    return [
        (int(row["tokens"][i]), int(row["tokens"][i + 1])) for row in rows for i in np.flatnonzero(row["weights"] == 1)
    ]


@settings(max_examples=120, deadline=None, derandomize=True)
@given(LENGTHS, CONTEXTS, PACKINGS, SHARDS, FORMATS)
def test_every_token_of_every_document_is_a_target_once_an_epoch(lengths, context, packing, shards, format):
    """Behind the token that it follows in its document; the first id of the stream follows none."""
    ids = ids_of(numbered(lengths)).tolist()
    rows = rows_from(lengths, context, packing, shards, format)
    assert Counter(pairs_of(rows)) == Counter(zip(ids, ids[1:], strict=False))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(LENGTHS, CONTEXTS, PACKINGS, SHARDS, FORMATS)
def test_no_row_mixes_documents_without_a_change_of_segment(lengths, context, packing, shards, format):
    for row in rows_from(lengths, context, packing, shards, format):
        tokens, segments, weights = row["tokens"], row["segments"], row["weights"]
        assert (tokens.dtype, segments.dtype, weights.dtype) == (np.int32, np.int32, np.float32)
        assert len(tokens) == len(segments) == len(weights) + 1 == context + 1
        used = int(np.count_nonzero(segments))
        assert segments[0] == 1 and set(np.diff(segments[:used])) <= {0, 1}
        assert np.all(segments[used:] == PADDING) and np.all(tokens[used:] == END)
        assert np.all(weights[used - 1 :] == 0)
        for segment in range(1, segments.max() + 1):
            ids = tokens[segments == segment]
            inside = ids[1:] if ids[0] == END else ids
            assert END not in inside and np.all(np.diff(inside) == 1)
        for i in range(used - 1):
            same = segments[i] == segments[i + 1]
            assert weights[i] == float(same or tokens[i + 1] == END)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LENGTHS, CONTEXTS, SHARDS)
def test_concatenated_rows_are_the_stream(lengths, context, shards):
    """The last one is filled up."""
    ids = ids_of(numbered(lengths))
    rows = rows_from(lengths, context, "concatenate", shards)
    assert len(rows) == -(-(len(ids) - 1) // context)
    for number, row in enumerate(rows):
        expected = ids[number * context : number * context + context + 1]
        np.testing.assert_array_equal(row["tokens"][: len(expected)], expected)
        assert row["weights"].sum() == len(expected) - 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LENGTHS, CONTEXTS, SHARDS)
def test_best_fit_cuts_no_document_that_fits_into_a_row(lengths, context, shards):
    """All of its ids stand side by side, and its closing id is their last target."""
    rows = rows_from(lengths, context, "best_fit", shards)
    for document in numbered(lengths):
        if 0 < len(document) < context:
            (row,) = (row for row in rows if document[0] in row["tokens"])
            (at,) = np.flatnonzero(row["tokens"] == document[0])
            stop = at + len(document)
            assert row["tokens"][at - 1 : stop + 1].tolist() == [END, *document, END]
            assert len(set(row["segments"][at - 1 : stop].tolist())) == 1
            assert np.all(row["weights"][at - 1 : stop] == 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), CONTEXTS)
def test_pieces_of_documents_lie_behind_one_another_and_fit(lengths, context):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    pieces = cut(starts, context)
    ends = pieces.start + pieces.targets
    assert pieces.start[0] == 0 and ends[-1] == starts[-1] and np.all(pieces.start[1:] == ends[:-1])
    assert np.all(pieces.targets > 0) and np.all(pieces.cost <= context) and set(starts[1:]) <= set(ends)
    assert len(pieces.start) == sum(-(-length // context) for length in lengths)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 40).flatmap(lambda size: st.tuples(st.lists(st.integers(1, size), min_size=1), st.just(size))))
def test_best_fit_places_each_piece_once_and_overfills_no_row(case):
    cost, capacity = np.array(case[0]), case[1]
    rows = best_fit(cost, capacity)
    assert sorted(rows.order.tolist()) == list(range(len(cost)))
    filled = [cost[mine].sum() for mine in np.split(rows.order, rows.ends[:-1])]
    assert all(0 < size <= capacity for size in filled) and rows.ends[-1] == len(cost)
    assert sum(2 * size <= capacity for size in filled) <= 1  # two such rows would have been one


def test_a_piece_goes_where_the_least_room_is_left():
    cost = np.array([2, 3, 5, 7])
    rows = best_fit(cost, 10)
    filled = {tuple(cost[mine].tolist()) for mine in np.split(rows.order, rows.ends[:-1])}
    assert filled == {(3, 7), (2, 5)}


@pytest.mark.parametrize("mean", [20, 100, 400])
def test_best_fit_needs_few_rows_more_than_the_least(mean):
    """Documents of random lengths, most of them short."""
    lengths = 1 + np.random.default_rng(0).geometric(1 / mean, 20_000)
    pieces = cut(np.concatenate([[0], np.cumsum(lengths)]), 512)
    least = -(-lengths.sum() // 512)
    assert len(best_fit(pieces.cost, 512).ends) <= 1.02 * least


@pytest.mark.parametrize("scanned", [1, 7, 64])
def test_documents_are_found_block_by_block(tmp_path, monkeypatch, scanned):
    monkeypatch.setattr(packing, "_SCANNED", scanned)
    documents = numbered([3, 0, 0, 12, 1])
    found = document_starts(write_stream(tmp_path, documents, shards=2).open())
    assert found.tolist() == np.flatnonzero(ids_of(documents) == END).tolist()


@pytest.mark.parametrize("kind", KINDS.values())
def test_rows_pickle_without_the_tokens(tmp_path, kind):
    """Grain pickles them where worker processes read."""
    rows = kind(write_stream(tmp_path, numbered([50_000])), 4096)
    expected = rows[3]["tokens"].tolist()
    pickled = pickle.dumps(rows)
    assert len(pickled) < 4000
    assert pickle.loads(pickled)[3]["tokens"].tolist() == expected


def packed_batch(tmp_path: Path) -> dict[str, Any]:
    """One row of three documents and padding, with ids that the tiny model knows."""
    end, rng = 0, np.random.default_rng(0)
    documents = [rng.integers(1, SIZES.vocab, length) for length in (5, 4, 2)]
    (row,) = rows_of(write_stream(tmp_path, documents, end=end), 20, "best_fit")
    assert row["segments"].tolist() == [1] * 6 + [2] * 5 + [3] * 3 + [4] + [PADDING] * 6
    return {name: array[None] for name, array in row.items()}


def test_a_packed_document_changes_no_logits_of_another(tmp_path):
    model, batch = tiny("angpt"), packed_batch(tmp_path)
    tokens, segments = batch["tokens"][:, :-1], batch["segments"][:, :-1]
    before = model.logits(model.random, tokens, segments)
    for document in (1, 2, 3):
        mine = segments == document
        after = model.logits(model.random, np.where(mine, (tokens + 7) % SIZES.vocab, tokens), segments)
        np.testing.assert_array_equal(after[~mine], before[~mine])
        assert (np.abs(after - before)[mine].max(axis=-1) > 1e-4).all()


def test_padding_changes_no_loss(tmp_path):
    model, batch = tiny("angpt"), packed_batch(tmp_path)
    padding = batch["segments"] == PADDING
    weighted = jax.jit(lambda batch: (nats(model.model, model.random, batch) * batch["weights"]).sum())

    def loss(tokens: np.ndarray) -> float:
        return float(weighted(batch | {"tokens": tokens}))

    assert loss(np.where(padding, 11, batch["tokens"])) == loss(batch["tokens"])
    assert loss(np.where(padding, batch["tokens"], 11)) != loss(batch["tokens"])
    assert batch["weights"].sum() == 5 + 4 + 2 + 3


def test_a_piece_of_a_long_document_opens_a_segment_of_its_own():
    """Its first id is what its first target follows, and no target itself."""
    row = filled([np.array([END, 5, 6, END]), np.array([7, 8, END]), np.array([END, END])], 8, END)
    assert row["tokens"].tolist() == [END, 5, 6, END, 7, 8, END, END, END]
    assert row["segments"].tolist() == [1, 1, 1, 2, 3, 3, 4, 5, PADDING]
    assert row["weights"].tolist() == [1, 1, 1, 0, 1, 1, 1, 0]
