"""Which tokens a batch holds, that its order can be resumed, and that an evaluation counts every target once."""

import dataclasses
import json
import pickle
from contextlib import closing

import numpy as np
import pytest

from angpt_jax.data.pipeline import _Windows, check_length, pipeline_fingerprint, train_batches, validation_windows
from angpt_jax.data.tokenizer import ByteTokenizer
from angpt_jax.data.tokens import TokenData, TokenFile
from angpt_jax.errors import UserError

END = 256


@pytest.fixture
def make_file(tmp_path):
    """Writes a stream of ids to a token file."""

    def make(ids, name: str = "train.bin") -> TokenFile:
        np.asarray(ids, np.uint16).tofile(tmp_path / name)
        return TokenFile(str(tmp_path / name), "uint16", len(ids))

    return make


def numbered(count: int) -> range:
    """A stream in which every id says where it stands, behind all ids that mean something."""
    return range(1000, 1000 + count)


def first_batches(file: TokenFile, count: int, **settings) -> list[dict[str, np.ndarray]]:
    defaults = {"end_of_document": END, "context": 4, "batch_size": 3, "seed": 0}
    with closing(train_batches(file, **(defaults | settings))) as batches:
        return [next(batches) for _ in range(count)]


def rows(batches: list[dict[str, np.ndarray]]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch["tokens"].tolist()]


def random_stream(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.2, END, rng.integers(0, 256, count))


def test_batches_are_int32_of_context_plus_one(make_file):
    (batch,) = first_batches(make_file(numbered(50)), 1)
    assert batch.keys() == {"tokens", "segments"}
    assert all(array.shape == (3, 5) and array.dtype == np.int32 for array in batch.values())


@pytest.mark.parametrize("count", [41, 42, 44])
def test_every_target_comes_once_per_epoch_and_the_next_epoch_has_another_order(make_file, count):
    """Windows overlap by the one token that is a target in the first and only an input in the second."""
    seen = rows(first_batches(make_file(numbered(count)), 20, batch_size=5))
    windows = {tuple(numbered(count)[start : start + 5]) for start in range(0, 40, 4)}
    epochs = [seen[start : start + 10] for start in range(0, 100, 10)]
    assert all(set(epoch) == windows for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10
    targets = [token for window in epochs[0] for token in window[1:]]
    assert sorted(targets) == list(numbered(41))[1:]


def test_order_depends_on_the_seed_and_no_epoch_of_one_seed_is_an_epoch_of_the_next(make_file):
    file = make_file(numbered(4 * 9 + 1))
    orders = {seed: rows(first_batches(file, 12, seed=seed)) for seed in range(4)}
    assert orders[0] == rows(first_batches(file, 12, seed=0))
    epochs = [tuple(order[start : start + 9]) for order in orders.values() for start in range(0, 36, 9)]
    assert len(set(epochs)) == len(epochs)


@pytest.mark.parametrize("seed", range(5))
def test_segments_count_the_documents_of_the_window(make_file, seed):
    for batch in first_batches(make_file(random_stream(seed, 200)), 10, context=16):
        for tokens, segments in zip(batch["tokens"].tolist(), batch["segments"].tolist(), strict=True):
            assert segments == [tokens[: i + 1].count(END) for i in range(len(tokens))]


@pytest.mark.parametrize("processes", [2, 3, 6])
def test_global_batch_does_not_depend_on_the_number_of_processes(make_file, processes):
    file = make_file(numbered(4 * 10 + 1))
    settings = {"batch_size": 6, "seed": 5}
    whole = first_batches(file, 8, **settings)
    shares = [
        first_batches(file, 8, process_index=index, process_count=processes, **settings) for index in range(processes)
    ]
    for step, batch in enumerate(whole):
        parts = [share[step] for share in shares]
        assert all(part["tokens"].shape == (6 // processes, 5) for part in parts)
        assert sorted(rows(parts)) == sorted(rows([batch]))


def test_batch_that_processes_cannot_share_is_the_users_error(make_file):
    with pytest.raises(UserError, match=r"^data\.batch_size: .*got 3; a multiple of 2"):
        first_batches(make_file(numbered(50)), 1, process_count=2)


@pytest.mark.parametrize("process_count", [1, 3])
@pytest.mark.parametrize("step", [0, 1, 7, 40])
def test_fresh_iterator_resumes_exactly(make_file, step, process_count):
    settings = {"end_of_document": END, "context": 4, "batch_size": 3, "seed": 1, "process_count": process_count}
    file = make_file(random_stream(0, 90))
    with closing(train_batches(file, **settings)) as running:
        for _ in range(step):
            next(running)
        state = json.loads(json.dumps(running.get_state()))
        expected = [next(running) for _ in range(20)]
    with closing(train_batches(file, **settings)) as fresh:
        next(fresh)
        fresh.set_state(state)
        resumed = [next(fresh) for _ in range(20)]
    for before, after in zip(expected, resumed, strict=True):
        np.testing.assert_array_equal(before["tokens"], after["tokens"])
        np.testing.assert_array_equal(before["segments"], after["segments"])


def token_data(train: TokenFile, validation: TokenFile) -> TokenData:
    return TokenData(ByteTokenizer(), train, validation, {"text": "some hash", "format": 1})


def test_fingerprint_tells_apart_what_gives_other_batches(make_file):
    file = make_file(numbered(100))
    tokens = token_data(file, file)
    settings = {"context": 4, "batch_size": 3, "seed": 0}
    changed = dataclasses.replace(tokens, fingerprint={"text": "another hash", "format": 1})
    fingerprints = [
        pipeline_fingerprint(tokens, **settings),
        pipeline_fingerprint(changed, **settings),
        *(pipeline_fingerprint(tokens, **(settings | {name: 5})) for name in settings),
    ]
    first, *others = fingerprints
    for name, other in zip(["text", "context", "batch_size", "shuffle_seed"], others, strict=True):
        assert first[name] != other[name]
    assert pipeline_fingerprint(tokens, **settings) == json.loads(json.dumps(first))


def test_fingerprint_holds_the_order_that_training_has(make_file):
    file = make_file(numbered(4 * 64 + 1))
    first = [row[0] for row in rows(first_batches(file, 4, batch_size=2, seed=9))]
    fingerprint = pipeline_fingerprint(token_data(file, file), context=4, batch_size=2, seed=9)
    assert str(fingerprint["first_windows"]) == " ".join(str((token - 1000) // 4) for token in first)


def test_pickled_pipeline_does_not_hold_the_tokens(make_file):
    """Grain pickles the source where worker processes read it."""
    windows = _Windows(make_file(numbered(50_000)), 4)
    expected = windows[3].tolist()
    pickled = pickle.dumps(windows)
    assert len(pickled) < 400
    assert pickle.loads(pickled)[3].tolist() == expected


def test_context_must_fit_into_both_splits(make_file):
    shorter, longer = make_file(numbered(8)), make_file(numbered(9), "longer.bin")
    check_length(token_data(longer, longer), 8, "book.txt")
    with pytest.raises(UserError) as caught:
        check_length(token_data(longer, shorter), 8, "book.txt")
    (problem,) = caught.value.problems
    assert problem.startswith("model.context: sequence longer than the data")
    assert all(
        words in problem for words in ["9 tokens needed", "8 found", "validation", "book.txt", "got 8; at most 7"]
    )
    with pytest.raises(UserError) as caught:
        check_length(token_data(shorter, shorter), 8, "book.txt")
    assert ["training" in problem for problem in caught.value.problems] == [True, False]


@pytest.mark.parametrize("context", [1, 4, 7])
@pytest.mark.parametrize("max_tokens", [1, 8, 27, 28, 29, 10_000])
def test_evaluation_has_every_target_once_in_order(make_file, context, max_tokens):
    stream = random_stream(max_tokens, 29)
    windows = validation_windows(make_file(stream), ByteTokenizer(), context, max_tokens)
    inputs, targets = windows.tokens[:, :-1], windows.tokens[:, 1:]
    counts = windows.weights == 1
    expected = stream[: min(max_tokens, 28) + 1]
    np.testing.assert_array_equal(targets[counts], expected[1:])
    np.testing.assert_array_equal(inputs[counts], expected[:-1])
    assert np.all(windows.weights[~counts] == 0) and np.all(targets[~counts] == END)
    assert counts.any(axis=1).all()
    np.testing.assert_array_equal(windows.segments, np.cumsum(windows.tokens == END, axis=1))
    assert (windows.tokens.dtype, windows.segments.dtype, windows.weights.dtype) == (np.int32, np.int32, np.float32)


def test_evaluation_counts_the_bytes_of_its_targets(make_file):
    """The first token is no target, and an end of a document is a target without bytes."""
    text = "héllo\n".encode()
    stream = [END, *text, END, *b"wor", END]
    whole = validation_windows(make_file(stream), ByteTokenizer(), 4, 100)
    assert (whole.bytes, whole.weights.sum()) == (len(text) + 3, len(stream) - 1)
    assert validation_windows(make_file(stream), ByteTokenizer(), 4, 3).bytes == 3
    assert validation_windows(make_file(stream), ByteTokenizer(), 4, len(text) + 1).bytes == len(text)
    assert validation_windows(make_file(stream[1:]), ByteTokenizer(), 4, 100).bytes == len(text) - 1 + 3
