"""Loss on a fixed set of tokens: the same number for any batch size and any number of devices."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax import Array

from angpt_jax.data.pipeline import ValidationSet
from angpt_jax.step import Batch, nats

WindowNats = Callable[[Any, Batch, Array], Array]


@dataclass(frozen=True)
class Evaluation:
    """Mean nats per token, and bits per byte of the original text."""

    loss: float
    bits_per_byte: float


def make_window_nats(model: nn.Module) -> WindowNats:
    """params, batch, weights_BL → nats_B: the weighted sum over the targets of each window."""

    def window_nats(params: Any, batch: Batch, weights_BL: Array) -> Array:
        return (nats(model, params, batch) * weights_BL).sum(axis=1)

    return jax.jit(window_nats)


def evaluate(
    window_nats: WindowNats, params: Any, validation: ValidationSet, batch_size: int, put: Callable[[Any], Any]
) -> Evaluation:
    """Sums window by window, in float64 on the host. `put` brings a batch of arrays to the devices."""
    total = 0.0
    for arrays in _batches(validation, batch_size):
        tokens, segments, weights = put(arrays)
        total += float(np.asarray(window_nats(params, {"tokens": tokens, "segments": segments}, weights), float).sum())
    count = float(validation.weights.sum(dtype=np.float64))
    return Evaluation(total / count, total / math.log(2) / validation.bytes)


def _batches(validation: ValidationSet, batch_size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches of windows; the last one is filled up with windows of weight 0."""
    arrays = (validation.tokens, validation.segments, validation.weights)
    for start in range(0, len(validation.tokens), batch_size):
        rows = [array[start : start + batch_size] for array in arrays]
        missing = batch_size - len(rows[0])
        yield tuple(np.pad(row, ((0, missing), (0, 0))) for row in rows)
