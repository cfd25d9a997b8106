"""Batches for training, in an order that depends on the seed and the step only, and the windows of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import grain
import numpy as np
from absl import flags

from angpt_jax.data.packing import PackedRows, Windows, filled
from angpt_jax.data.shards import TokenStream
from angpt_jax.data.text_cache import Fingerprint
from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.data.tokens import TokenData, Weighted
from angpt_jax.errors import UserError

Batch = dict[str, np.ndarray]
Packing = Literal["concatenate", "best_fit"]

_READ_OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
_ORDER_SAMPLE = 8


@dataclass(frozen=True, eq=False)
class ValidationSet:
    """Windows in which each of the first targets of the validation stream is a target exactly once.

    Args:
        tokens: ids (W, L+1); targets are the last L columns; end-of-document ids after the end of the text
        segments: number of the document within its window, 0 for padding (W, L+1)
        weights: 1 for a target that counts, 0 for what fills the last window up (W, L)
        bytes: bytes of text that the targets that count stand for
    """

    tokens: np.ndarray
    segments: np.ndarray
    weights: np.ndarray
    bytes: int


@dataclass(frozen=True)
class Order:
    """What decides, with the data, which tokens global batch k holds.

    Args:
        context: inputs of a row
        batch_size: rows of a batch over all processes
        seed: of the shuffle
        packing: concatenate (windows of the stream) or best_fit (whole documents)
    """

    context: int
    batch_size: int
    seed: int
    packing: Packing = "concatenate"


def train_batches(
    train: Sequence[Weighted],
    order: Order,
    *,
    start: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 0,
) -> grain.DatasetIterator[Batch]:
    """Endless batches of this process from batch number `start` on: `tokens` and `segments`, int32
    (batch_size / process_count, context + 1), and `weights`, float32 (…, context).

    An epoch of a stream is a shuffle of its rows, in which every target comes once. Global batch k is a function of the
    data and `order`: neither the number of processes nor that of workers changes it, and there is no other state.
    Close the iterator to end its threads and workers.
    """
    if order.batch_size % process_count:
        raise UserError(
            f"data.batch_size: can't be shared by {process_count} processes, got {order.batch_size}; "
            f"a multiple of {process_count}"
        )
    mine = _rows(train, order)[process_index::process_count]
    batches = mine.batch(order.batch_size // process_count, drop_remainder=True)  # else grain's count of 1s overflows
    read = batches[start:].to_iter_dataset(_READ_OPTIONS)
    if workers:
        flags.FLAGS.mark_as_parsed()  # grain's workers read flags of their own
        read = read.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(read)


def _rows(train: Sequence[Weighted], order: Order) -> grain.MapDataset:
    """Endless epochs of each stream, each in its own order, mixed by weight."""
    kind = {"concatenate": Windows, "best_fit": PackedRows}[order.packing]
    endless = [_shuffled(grain.MapDataset.source(kind(part.stream, order.context)), order.seed) for part in train]
    return grain.MapDataset.mix(endless, [part.weight for part in train]) if len(endless) > 1 else endless[0]


def _shuffled(rows: grain.MapDataset, seed: int) -> grain.MapDataset:
    """Endless epochs. With `shuffle(seed)` epoch 1 of a seed would be epoch 0 of the next."""
    return rows.seed(seed).shuffle().repeat()


def pipeline_fingerprint(tokens: TokenData, order: Order) -> Fingerprint:
    """All that decides which tokens batch k holds; a step number means the same data only where this is equal."""
    shuffled = _shuffled(grain.MapDataset.range(1009), order.seed)
    return {
        **tokens.fingerprint,
        "context": order.context,
        "batch_size": order.batch_size,
        "shuffle_seed": order.seed,
        "packing": order.packing,
        "shuffle": " ".join(str(shuffled[i]) for i in range(_ORDER_SAMPLE)),  # another grain may shuffle differently
    }


def check_length(tokens: TokenData, context: int) -> None:
    """Raises a UserError unless every stream holds at least one full window, and text that it can be judged by."""
    streams = {f"training data of {part.name}": part.stream for part in tokens.train}
    streams |= {f"validation set {name}": stream for name, stream in tokens.validation.items()}
    problems = [
        f"model.context: sequence longer than the data, {context + 1} tokens needed and {stream.count} found "
        f"in the {name}, got {context}; at most {stream.count - 1}, or more text"
        for name, stream in streams.items()
        if stream.count <= context
    ]
    problems += [
        _no_text(f"validation set {name}", stream, stream.count - 1)
        for name, stream in tokens.validation.items()
        if stream.count > context and not stream.text_bytes
    ]
    if problems:
        raise UserError(*problems)


def _no_text(key: str, stream: TokenStream, targets: int) -> str:
    return f"{key}: holds no text in its first {targets:,} tokens, got {stream.folder}; text to evaluate on"


def validation_windows(
    validation: TokenStream, tokenizer: Tokenizer, context: int, max_tokens: int | None, key: str = "validation set"
) -> ValidationSet:
    """The first max_tokens targets of the validation stream, or all of them, as windows that share no target; a
    UserError under `key` if they stand for no text."""
    targets = validation.count - 1 if max_tokens is None else min(max_tokens, validation.count - 1)
    ids = validation.open().read(0, targets + 1)
    text_bytes = int(tokenizer.byte_lengths[ids[1:]].sum())
    if not text_bytes:
        raise UserError(_no_text(key, validation, targets))
    rows = [
        filled([ids[start : start + context + 1]], context, tokenizer.end_of_document)
        for start in range(0, targets, context)
    ]
    tokens, segments, weights = (np.stack([row[name] for row in rows]) for name in ("tokens", "segments", "weights"))
    return ValidationSet(tokens, segments, weights, text_bytes)
