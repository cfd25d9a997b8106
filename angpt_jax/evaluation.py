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
    """What a model makes of a set of tokens.

    Args:
        loss: mean nats per token
        bits_per_byte: of the original text
        standard_error: of the loss (`mean_and_error`)
        tokens: targets that count
        bytes: of text that they stand for
    """

    loss: float
    bits_per_byte: float
    standard_error: float = math.nan
    tokens: int = 0
    bytes: int = 0

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
    parts = [
        np.asarray(multihost_utils.process_allgather(window_nats(params, put(batch)), tiled=True), float)
        for batch in _batches(validation, batch_size)
    ]
    counts_W = validation.weights.sum(axis=1, dtype=np.float64)
    nats_W = np.concatenate(parts)[: len(counts_W)]
    loss, error = mean_and_error(nats_W, counts_W)
    bits_per_byte = float(nats_W.sum()) / math.log(2) / validation.bytes
    return Evaluation(loss, bits_per_byte, error, int(counts_W.sum()), validation.bytes)


def mean_and_error(nats_W: np.ndarray, counts_W: np.ndarray) -> tuple[float, float]:
    """Mean nats per token, and its standard error, from the nats s_w and the tokens n_w of W windows.

        mean = Σ s_w / Σ n_w            error² = W/(W−1) · Σ (s_w − mean · n_w)² / (Σ n_w)²

    The windows are the sample: tokens of one window depend on each other. Since windows may hold different numbers of
    tokens, the mean is a ratio of two sums, and this is the variance of such a ratio to first order (Cochran, Sampling
    Techniques, 1977, section 6.4, without the finite population); with equal n_w it is that of a mean of W numbers. Two
    windows of one long document depend on each other as well, which is left out. Not a number for a single window.
    """
    windows, tokens = len(nats_W), float(counts_W.sum())
    mean = float(nats_W.sum()) / tokens
    if windows < 2:
        return mean, math.nan
    spread = float(((nats_W - mean * counts_W) ** 2).sum())
    return mean, math.sqrt(windows / (windows - 1) * spread) / tokens


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
