"""Log-probabilities of many token sequences under a decoder, in few shapes, so that little is compiled.

    scorer = Scorer(model, params, tokenizer, context=2048, batch_size=8)
    scorer.scores([([1, 2, 3], [4, 5])])          # log p(4, 5 | 1, 2, 3), and whether 4 and 5 are the likeliest

Sequences are sorted by length; each batch has `batch_size` rows as long as the smallest of a few lengths that holds
them (`lengths`). So there are at most as many compiled programs as lengths.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from angpt_jax import ops
from angpt_jax.data.packing import PADDING
from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.model import Decoder
from angpt_jax.sharding import batch_putter

SHORTEST = 128  # tokens of the shortest rows: what the attention of a TPU takes


class Window(NamedTuple):
    """Ids, of which the last `scored` are targets that count."""

    ids: list[int]
    scored: int


class Score(NamedTuple):
    """Log-probability in nats, and whether each target is the likeliest entry where it stands."""

    log_p: float
    is_greedy: bool


def windows(context: Sequence[int], target: Sequence[int], length: int) -> Iterator[Window]:
    """Windows of at most `length` inputs in which each id of `target` is a target once, behind at least one of
    `context`. Whatever does not fit is cut off on the left; the last of several windows reaches back over ids that
    were targets before, so that it is full."""
    ids = [*context, *target]
    done = len(context)
    while done < len(ids):
        stop = min(done + length, len(ids))
        yield Window(ids[max(stop - length - 1, 0) : stop], stop - done)
        done = stop


def lengths(context: int, parts: int = 1, shortest: int = SHORTEST) -> list[int]:
    """The lengths that rows may have: powers of two of which each of `parts` devices holds a multiple of `shortest`,
    and the context."""
    powers = (shortest << doubled for doubled in range(context.bit_length()))
    return [*(power for power in powers if power < context and power % (shortest * parts) == 0), context]


class Scorer:
    """Scores sequences under a model as it lies on its devices; in float32 behind the model's own products.

    Args:
        model: the decoder
        params: its parameters
        tokenizer: entries of the vocabulary behind its last id count as impossible
        context: inputs of a window
        batch_size: rows of a batch; its devices can share them
        shortest: see `lengths`
    """

    def __init__(
        self,
        model: Decoder,
        params: Any,
        tokenizer: Tokenizer,
        context: int,
        batch_size: int,
        shortest: int = SHORTEST,
    ):
        self.compiled = 0
        self._params, self._context, self._batch_size = params, context, batch_size
        layout = model.how.layout
        self._lengths = lengths(context, layout.parts("length"), shortest)
        self._put = batch_putter(layout, batch_size) if layout.mesh else lambda arrays: arrays
        self._end = tokenizer.end_of_document

        def of_targets(params: Any, tokens_BM: Array, segments_BM: Array) -> tuple[Array, Array]:
            self.compiled += 1  # when it is traced
            logits_BLV = cast(Array, model.apply({"params": params}, tokens_BM[:, :-1], segments_BM[:, :-1]))
            logits_BLV = jnp.where(jnp.arange(logits_BLV.shape[-1]) < tokenizer.size, logits_BLV, -jnp.inf)
            targets_BL = tokens_BM[:, 1:]
            return -ops.cross_entropy(logits_BLV, targets_BL), jnp.argmax(logits_BLV, axis=-1) == targets_BL

        self._of_targets = jax.jit(of_targets)

    def scores(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
        """Of the second ids of each pair, behind the first, of which there is at least one; nothing has score 0."""
        cut = [
            (number, window)
            for number, (context, target) in enumerate(pairs)
            for window in windows(context, target, self._context)
        ]
        cut.sort(key=lambda numbered: len(numbered[1].ids))
        log_p, is_greedy = [0.0] * len(pairs), [True] * len(pairs)
        for start in range(0, len(cut), self._batch_size):
            numbers, batch = zip(*cut[start : start + self._batch_size], strict=True)
            for number, score in zip(numbers, self._scores_of(batch), strict=True):
                log_p[number] += score.log_p
                is_greedy[number] &= score.is_greedy
        return [Score(*score) for score in zip(log_p, is_greedy, strict=True)]

    def _scores_of(self, batch: Sequence[Window]) -> Iterator[Score]:
        """Of one batch, which may have fewer rows than others; sums over tokens are in float64."""
        longest = max(len(window.ids) for window in batch) - 1
        length = next(length for length in self._lengths if length >= longest)
        tokens_BM = np.full((self._batch_size, length + 1), self._end, np.int32)
        segments_BM = np.full_like(tokens_BM, PADDING)
        for row, window in enumerate(batch):
            tokens_BM[row, : len(window.ids)], segments_BM[row, : len(window.ids)] = window.ids, 1
        log_p_BL, is_greedy_BL = map(np.asarray, self._of_targets(self._params, *self._put((tokens_BM, segments_BM))))
        for row, window in enumerate(batch):
            last = len(window.ids) - 1
            here = slice(last - window.scored, last)
            yield Score(float(log_p_BL[row, here].sum(dtype=float)), bool(is_greedy_BL[row, here].all()))
