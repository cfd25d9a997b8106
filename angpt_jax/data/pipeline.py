"""Batches for training, in an order that depends on the seed and the step only, and the windows of an evaluation."""

from dataclasses import dataclass
from functools import cached_property

import grain
import numpy as np

from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.data.tokens import Fingerprint, TokenData, TokenFile
from angpt_jax.errors import UserError

Batch = dict[str, np.ndarray]

_READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
_ORDER_SAMPLE = 8


@dataclass(frozen=True, eq=False)
class ValidationSet:
    """Windows in which each of the first targets of the validation stream is a target exactly once.

    Args:
        tokens: ids (W, L+1); targets are the last L columns; end-of-document ids after the end of the text
        segments: number of the document within its window (W, L+1)
        weights: 1 for a target that counts, 0 for what fills the last window up (W, L)
        bytes: bytes of text that the targets that count stand for
    """

    tokens: np.ndarray
    segments: np.ndarray
    weights: np.ndarray
    bytes: int


def train_batches(
    train: TokenFile,
    end_of_document: int,
    context: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Endless batches of this process: `tokens` and `segments`, int32 (batch_size / process_count, context + 1).

    An epoch is a shuffle of the windows [k L, (k + 1) L + 1) of the stream, so every target comes once per epoch. The
    rows of global batch k, over all processes, depend on seed and k only, so the iterator's state is one number.
    Close the iterator to end its threads.
    """
    if batch_size % process_count:
        raise UserError(
            f"data.batch_size: can't be shared by {process_count} processes, got {batch_size}; "
            f"a multiple of {process_count}"
        )

    def batch(tokens: np.ndarray) -> Batch:
        return {"tokens": tokens, "segments": _segments(tokens, end_of_document)}

    windows = _shuffled(grain.MapDataset.source(_Windows(train, context)), seed)
    return iter(
        windows[process_index::process_count]
        .batch(batch_size // process_count, drop_remainder=True)
        .map(batch)
        .to_iter_dataset(_READ_OPTIONS)
    )


def pipeline_fingerprint(tokens: TokenData, context: int, batch_size: int, seed: int) -> Fingerprint:
    """All that decides which tokens batch k holds; a saved iterator state means the same only where this is equal."""
    order = _shuffled(grain.MapDataset.range(_window_count(tokens.train, context)), seed)
    first_windows = " ".join(str(order[i]) for i in range(_ORDER_SAMPLE))  # another grain may shuffle differently
    return {
        **tokens.fingerprint,
        "context": context,
        "batch_size": batch_size,
        "shuffle_seed": seed,
        "first_windows": first_windows,
    }


def check_length(tokens: TokenData, context: int, source: str) -> None:
    """Raises a UserError unless both splits hold at least one window."""
    splits = {"training": tokens.train, "validation": tokens.validation}
    problems = [
        f"model.context: sequence longer than the data, {context + 1} tokens needed and {file.count} found "
        f"in the {name} split of data.source {source}, got {context}; at most {file.count - 1}, or more text"
        for name, file in splits.items()
        if _window_count(file, context) < 1
    ]
    if problems:
        raise UserError(*problems)


def validation_windows(validation: TokenFile, tokenizer: Tokenizer, context: int, max_tokens: int) -> ValidationSet:
    """The first max_tokens targets of the validation stream, or all of them, as windows that share no target."""
    stream = validation.open()
    targets = min(max_tokens, validation.count - 1)
    windows = -(-targets // context)
    padded = np.full(windows * context + 1, tokenizer.end_of_document, np.int32)
    padded[: targets + 1] = stream[: targets + 1]
    tokens = padded[np.arange(windows)[:, None] * context + np.arange(context + 1)]
    weights = (np.arange(windows * context) < targets).astype(np.float32).reshape(windows, context)
    text_bytes = int(tokenizer.byte_lengths[padded[1 : targets + 1]].sum())
    return ValidationSet(tokens, _segments(tokens, tokenizer.end_of_document), weights, text_bytes)


class _Windows:
    """Random access to the windows of a stream: context + 1 ids, the first of them the last of the window before."""

    def __init__(self, file: TokenFile, context: int):
        self._file = file
        self._context = context

    @cached_property
    def _stream(self) -> np.memmap:
        return self._file.open()

    def __reduce__(self):
        return type(self), (self._file, self._context)  # without the memmap

    def __len__(self) -> int:
        return _window_count(self._file, self._context)

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self._context
        return self._stream[start : start + self._context + 1].astype(np.int32)


def _window_count(file: TokenFile, context: int) -> int:
    return (file.count - 1) // context


def _shuffled(windows: grain.MapDataset, seed: int) -> grain.MapDataset:
    """Endless epochs, each in its own order. With `shuffle(seed)` epoch 1 of a seed would be epoch 0 of the next."""
    return windows.seed(seed).shuffle().repeat()


def _segments(tokens: np.ndarray, end_of_document: int) -> np.ndarray:
    """Number of the document of each token within its window: an end-of-document id opens the document behind it."""
    return np.cumsum(tokens == end_of_document, axis=-1, dtype=np.int32)
