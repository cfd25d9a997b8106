"""Loss on a fixed set of tokens: the same number for any batch size and any number of devices."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils

from angpt_jax.data.pipeline import ValidationSet
from angpt_jax.step import Batch, nats

WindowNats = Callable[[Any, Batch], Array]


@dataclass(frozen=True)
class Evaluation:
    """Mean nats per token, and bits per byte of the original text."""

    loss: float
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        """exp of the loss; infinite where a float has no room for it."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def make_window_nats(model: nn.Module) -> WindowNats:
    """params, batch → nats_B: the sum over the targets of each window that count."""

    def window_nats(params: Any, batch: Batch) -> Array:
        return (nats(model, params, batch) * batch["weights"]).sum(axis=1)

    return jax.jit(window_nats)


def evaluate(
    window_nats: WindowNats, params: Any, validation: ValidationSet, batch_size: int, put: Callable[[Any], Any]
) -> Evaluation:
    """Sums window by window, in float64 on the host; in all processes alike. `put` brings a batch, which each process
    has as a whole, to the devices."""
    total = 0.0
    for batch in _batches(validation, batch_size):
        nats_B = multihost_utils.process_allgather(window_nats(params, put(batch)), tiled=True)
        total += float(np.asarray(nats_B, float).sum())
    count = float(validation.weights.sum(dtype=np.float64))
    return Evaluation(total / count, total / math.log(2) / validation.bytes)


class _Cut(Exception):
    """A stop request came between two batches."""


class Evaluator:
    """Evaluates parameters on several sets; `last` is the newest result on the first of them."""

    def __init__(
        self, window_nats: WindowNats, sets: dict[str, ValidationSet], batch_size: int, put: Callable[[Any], Any]
    ):
        self._window_nats, self._sets, self._batch_size, self._put = window_nats, sets, batch_size, put
        self.last: Evaluation | None = None

    def evaluate(self, params: Any, stop: Callable[[], Any] = lambda: None) -> dict[str, Evaluation]:
        """The results by set; none at all if `stop`, asked before each batch, says so."""

        def window_nats(params: Any, batch: Batch) -> Array:
            if stop():
                raise _Cut
            return self._window_nats(params, batch)

        try:
            results = {
                name: evaluate(window_nats, params, windows, self._batch_size, self._put)
                for name, windows in self._sets.items()
            }
        except _Cut:
            return {}
        self.last = next(iter(results.values()))
        return results


def as_record(results: dict[str, Evaluation]) -> dict[str, float]:
    """val_loss and val_bits_per_byte of the first set, NAME/val_loss and so on of the others."""
    record = {}
    for number, (name, result) in enumerate(results.items()):
        prefix = f"{name}/" if number else ""
        record |= {f"{prefix}val_loss": result.loss, f"{prefix}val_bits_per_byte": result.bits_per_byte}
    return record


def _batches(validation: ValidationSet, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches of windows; the last one is filled up with windows of weight 0."""
    arrays = {"tokens": validation.tokens, "segments": validation.segments, "weights": validation.weights}
    for start in range(0, len(validation.tokens), batch_size):
        rows = {name: array[start : start + batch_size] for name, array in arrays.items()}
        missing = batch_size - len(rows["tokens"])
        yield {name: np.pad(array, ((0, missing), (0, 0))) for name, array in rows.items()}
