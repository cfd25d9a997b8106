"""Which tokens a batch holds, what its fingerprint says of them, and that an evaluation counts every target once."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any, get_args

import numpy as np
import pytest
from token_streams import END, FIRST, numbered, stack, write_stream

from angpt_jax.data.pipeline import (
    Batch,
    Order,
    Packing,
    check_length,
    pipeline_fingerprint,
    train_batches,
    validation_windows,
)
from angpt_jax.data.shards import TokenStream
from angpt_jax.data.tokenizer import ByteTokenizer
from angpt_jax.data.tokens import TokenData, Weighted
from angpt_jax.errors import UserError

ORDER = Order(context=4, batch_size=3, seed=0)
every_packing = pytest.mark.parametrize("packing", get_args(Packing))


def order(**changes: Any) -> Order:
    return dataclasses.replace(ORDER, **changes)


def first_batches(train: TokenStream | Sequence[Weighted], count: int, order: Order = ORDER, **options) -> list[Batch]:
    train = [Weighted("text", train)] if isinstance(train, TokenStream) else train
    with closing(train_batches(train, order, **options)) as batches:
        return [next(batches) for _ in range(count)]


def rows(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [tuple(row) for row in stack(batches)["tokens"].tolist()]


def one_document(tmp_path, ids: int, name: str = "train") -> TokenStream:
    """A stream of so many ids in which every one says where it stands."""
    return write_stream(tmp_path, numbered([ids - 2]), name=name)


def random_documents(seed: int, count: int = 12) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length) for length in rng.integers(0, 30, count)]


@every_packing
def test_batches_are_rows_of_context_plus_one_with_the_weight_of_every_target(tmp_path, packing):
    (batch,) = first_batches(one_document(tmp_path, 50), 1, order(packing=packing))
    shapes = {name: (array.shape, array.dtype) for name, array in batch.items()}
    assert shapes == {"tokens": ((3, 5), np.int32), "segments": ((3, 5), np.int32), "weights": ((3, 4), np.float32)}


@pytest.mark.parametrize(("ids", "padding"), [(41, 0), (38, 3), (40, 1)])
def test_every_target_comes_once_per_epoch_and_the_next_epoch_has_another_order(tmp_path, ids, padding):
    """Windows overlap by the one token that is a target in the first and only an input in the second."""
    stream = one_document(tmp_path, ids)
    expected = stream.open().read(0, ids).tolist()
    batches = first_batches(stream, 20, order(batch_size=5))
    epochs = [batches[start : start + 2] for start in range(0, 20, 2)]
    for epoch in epochs:
        whole = stack(epoch)
        assert sorted(whole["tokens"][:, 1:][whole["weights"] == 1].tolist()) == sorted(expected[1:])
        assert np.sum(whole["weights"] == 0) == padding
    assert len({tuple(rows(epoch)) for epoch in epochs}) == 10


@every_packing
def test_order_depends_on_the_seed_and_no_epoch_of_one_seed_is_an_epoch_of_the_next(tmp_path, packing):
    stream = write_stream(tmp_path, numbered([3] * 9))
    orders = {seed: rows(first_batches(stream, 12, order(seed=seed, packing=packing))) for seed in range(4)}
    assert orders[0] == rows(first_batches(stream, 12, order(packing=packing)))
    epochs = [tuple(seen[start : start + 9]) for seen in orders.values() for start in range(0, 36, 9)]
    assert len(set(epochs)) == len(epochs) and len({frozenset(epoch) for epoch in epochs}) == 1


@pytest.mark.parametrize("seed", range(5))
def test_segments_count_the_documents_of_the_window(tmp_path, seed):
    """From 1 on, and the padding behind the end of the stream is 0."""
    for batch in first_batches(write_stream(tmp_path, random_documents(seed)), 10, order(context=16)):
        for tokens, segments in zip(batch["tokens"].tolist(), batch["segments"].tolist(), strict=True):
            numbers = [tokens[: i + 1].count(END) + (tokens[0] != END) for i in range(len(tokens))]
            assert segments == [number if segment else 0 for number, segment in zip(numbers, segments, strict=True)]


def test_batch_that_processes_cannot_share_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match=r"^data\.batch_size: .*got 3; a multiple of 2"):
        first_batches(one_document(tmp_path, 50), 1, process_count=2)


def mixture(tmp_path, weights: Sequence[float], rows: int = 10) -> list[Weighted]:
    """Sources of as many windows of 4 targets each; the ids of source k are those above 10,000 k."""
    documents = [np.arange(10_000 * number, 10_000 * number + 4 * rows - 1) for number in range(1, len(weights) + 1)]
    streams = [write_stream(tmp_path, [ids], name=f"source{k}") for k, ids in enumerate(documents)]
    return [Weighted(f"source{k}", stream, weights[k]) for k, stream in enumerate(streams)]


@every_packing
@pytest.mark.parametrize("weights", [(0.7, 0.3), (3, 1, 1), (1, 0.05)])
def test_rows_of_a_mixture_are_shared_by_its_weights(tmp_path, packing, weights):
    train = mixture(tmp_path, weights, rows=1000)  # grain is slow to shuffle a few
    sources = [max(row) // 10_000 - 1 for row in rows(first_batches(train, 60, order(batch_size=10, packing=packing)))]
    for count in (100, 600):
        shares = [sources[:count].count(k) / count for k in range(len(weights))]
        np.testing.assert_allclose(shares, np.array(weights) / sum(weights), atol=2 / count + 0.005)


def test_every_source_of_a_mixture_keeps_its_epochs(tmp_path):
    train = mixture(tmp_path, (0.6, 0.4), rows=40)
    seen = rows(first_batches(train, 100))
    for number, part in enumerate(train, 1):
        mine = [row for row in seen if max(row) // 10_000 == number]
        epochs = [mine[start : start + 40] for start in range(0, len(mine) - 39, 40)]
        assert len(epochs) > 2 and all(len(set(epoch)) == 40 for epoch in epochs)
        assert mine[:40] == rows(first_batches(part.stream, 14))[:40]
    assert seen == rows(first_batches(train, 100))


def token_data(stream: TokenStream, validation: TokenStream | None = None) -> TokenData:
    train = (Weighted("book.txt", stream),)
    return TokenData(ByteTokenizer(), train, {"validation": validation or stream}, {"tokens": "a hash", "weight": 1.0})


def test_fingerprint_names_what_gives_other_batches(tmp_path):
    tokens = token_data(one_document(tmp_path, 100))
    first = pipeline_fingerprint(tokens, ORDER)
    assert first == json.loads(json.dumps(pipeline_fingerprint(tokens, order())))
    other_data = dataclasses.replace(tokens, fingerprint={"tokens": "another hash", "weight": 1.0})
    others = {
        "tokens": pipeline_fingerprint(other_data, ORDER),
        "context": pipeline_fingerprint(tokens, order(context=5)),
        "batch_size": pipeline_fingerprint(tokens, order(batch_size=5)),
        "shuffle_seed": pipeline_fingerprint(tokens, order(seed=5)),
        "packing": pipeline_fingerprint(tokens, order(packing="best_fit")),
    }
    for name, other in others.items():
        changed = {key for key in first | other if first.get(key) != other.get(key)}
        assert changed - {"shuffle"} == {name}


def test_fingerprint_holds_the_order_that_training_has(tmp_path):
    """Of as many rows as it samples."""
    stream = one_document(tmp_path, 4 * 1009 + 1)
    first = [row[1] for row in rows(first_batches(stream, 3, order(seed=9)))][:8]
    fingerprint = pipeline_fingerprint(token_data(stream), order(seed=9))
    assert fingerprint["shuffle"] == " ".join(str((token - FIRST) // 4) for token in first)


def test_context_must_fit_into_all_data(tmp_path):
    shorter, longer = one_document(tmp_path, 8), one_document(tmp_path, 9, "longer")
    check_length(token_data(longer), 8)
    with pytest.raises(UserError) as caught:
        check_length(token_data(longer, shorter), 8)
    (problem,) = caught.value.problems
    assert problem.startswith("model.context: sequence longer than the data")
    assert all(words in problem for words in ["9 tokens needed", "8 found", "validation", "got 8; at most 7"])
    with pytest.raises(UserError) as caught:
        check_length(token_data(shorter), 8)
    assert ["book.txt" in problem for problem in caught.value.problems] == [True, False]


@pytest.mark.parametrize("context", [1, 4, 7])
@pytest.mark.parametrize("max_tokens", [1, 8, 27, 28, 29, 10_000])
def test_evaluation_has_every_target_once_in_order(tmp_path, context, max_tokens):
    stream = write_stream(tmp_path, [np.arange(20), np.arange(0), np.arange(5)], shards=2)
    assert stream.count == 29
    ids = stream.open().read(0, min(max_tokens, 28) + 1)
    windows = validation_windows(stream, ByteTokenizer(), context, max_tokens)
    inputs, targets = windows.tokens[:, :-1], windows.tokens[:, 1:]
    counts = windows.weights == 1
    np.testing.assert_array_equal(targets[counts], ids[1:])
    np.testing.assert_array_equal(inputs[counts], ids[:-1])
    assert np.all(windows.weights[~counts] == 0) and np.all(targets[~counts] == END)
    assert counts.any(axis=1).all()
    np.testing.assert_array_equal(windows.segments[:, 1:][~counts], 0)
    begun = (windows.tokens[:, :1] != END) + np.cumsum(windows.tokens == END, axis=1)
    np.testing.assert_array_equal(windows.segments[:, 1:][counts], begun[:, 1:][counts])
    assert (windows.tokens.dtype, windows.segments.dtype, windows.weights.dtype) == (np.int32, np.int32, np.float32)


def test_evaluation_counts_the_bytes_of_its_targets(tmp_path):
    """An end of a document is a target without bytes."""
    text = "héllo\n".encode()
    stream = write_stream(tmp_path, [np.array(list(text)), np.array(list(b"wor"))])
    whole = validation_windows(stream, ByteTokenizer(), 4, 100)
    assert (whole.bytes, whole.weights.sum()) == (stream.text_bytes, stream.count - 1) == (len(text) + 3, 12)
    assert validation_windows(stream, ByteTokenizer(), 4, 3).bytes == 3
    assert validation_windows(stream, ByteTokenizer(), 4, len(text) + 1).bytes == len(text)


def test_mixture_of_equal_weights_uses_each_source_alike(tmp_path):
    counts = Counter(max(row) // 10_000 for row in rows(first_batches(mixture(tmp_path, (1, 1, 1)), 30)))
    assert counts == {1: 30, 2: 30, 3: 30}


def test_a_validation_set_of_empty_documents_is_refused(tmp_path):
    """Bits per byte would be a division by zero."""
    full, empty = write_stream(tmp_path, numbered([30])), write_stream(tmp_path, numbered([0] * 30), name="empty")
    with pytest.raises(UserError, match=r"^validation set validation: holds no text in its first 30 tokens, got "):
        check_length(token_data(full, empty), 8)
