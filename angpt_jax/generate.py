"""New tokens behind prompts, batch by batch.

    generator = Generator(model, params, tokenizer, context)
    generator.batch(prompts, most=100, draw=Draw(temperature=0.8))      # new ids of each prompt

Prompts of a batch are padded on the left, so that all end at the same place; each row has the positions, sees the
tokens and draws the numbers that it would alone. Lengths are rounded up to buckets: another prompt of the same bucket
compiles nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from angpt_jax.axes import Axes, axes_of
from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.decoding import Decoding, Draw, Steps
from angpt_jax.how import How
from angpt_jax.model import Decoder, apart
from angpt_jax.parts.head import PlainLogits

SHORTEST = 16  # bucket of prompts; the next ones double
SLOTS = 16  # places for new tokens are a multiple of this
CHUNK = 16  # tokens of each row between two looks at what was drawn
MANY_ROWS = 8  # from which on a CPU's own products decode faster than those of the library that XLA takes for them
GREEDY = Draw()
Prompts = Sequence[Sequence[int]]
Stop = Callable[[list[int]], bool]


class Generator:
    """Draws behind prompts of at least one token, with the same compiled programs for all of a bucket."""

    def __init__(self, model: Decoder, params: Any, tokenizer: Tokenizer, context: int) -> None:
        self._model = model.clone(layers_apart=True, remat="none")
        self._params = as_read(model, params)
        self._known, self._end = tokenizer.size, tokenizer.end_of_document
        self._context = context
        self.programs = cache(self._compiled)

    def _compiled(self, draw: Draw, rows: int) -> tuple[Any, Any]:
        steps = Steps(self._model, self._known, self._end, draw, CHUNK)
        how = own_products() if rows >= MANY_ROWS and jax.default_backend() == "cpu" else None
        more = jax.jit(steps.more, donate_argnames="state", compiler_options=how)
        return jax.jit(steps.first, static_argnames="slots"), more

    def batch(
        self, prompts: Prompts, most: int, draw: Draw = GREEDY, seed: int = 0, stop: Stop | None = None
    ) -> list[list[int]]:
        """New ids of each prompt: at most `most`, as far as the context goes, up to the end of the document (not
        included) or until `stop` of them is true."""
        rows: list[list[int]] = [[] for _ in prompts]
        for new in self.stream(prompts, most, draw, seed, stop):
            for row, ids in zip(rows, new, strict=True):
                row += ids
        return rows

    def stream(
        self, prompts: Prompts, most: int, draw: Draw = GREEDY, seed: int = 0, stop: Stop | None = None
    ) -> Iterator[list[list[int]]]:
        """The same bit by bit: each time what is new behind each prompt."""
        rows = [_Row(min(most, self._context - len(prompt)), self._end, stop) for prompt in prompts]
        for ids_BN in self._chunks(prompts, most, draw, seed):
            yield [row.taken(ids) for row, ids in zip(rows, ids_BN.tolist(), strict=False)]
            if all(row.ended for row in rows):
                return

    def _chunks(self, prompts: Prompts, most: int, draw: Draw, seed: int) -> Iterator[np.ndarray]:
        """Drawn ids_BN: one token of each row, then a chunk at a time. There may be more rows than prompts."""
        parts = self._model.how.layout.parts("batch")
        rows = [*prompts, *[prompts[0]] * (-len(prompts) % parts)]
        first, more = self.programs(draw, len(rows))
        length_B = np.array([len(row) for row in rows], np.int32)
        most = min(most, self._context - int(length_B.min()))
        places = bucket(int(length_B.max()))
        tokens_BP = np.full((len(rows), places), self._end, np.int32)
        for number, row in enumerate(rows):
            tokens_BP[number, places - len(row) :] = row
        keys_B = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(len(rows)))
        limit_B = np.minimum(most, self._context - length_B)
        state: Decoding = first(
            self._params, tokens_BP, length_B, limit_B, keys_B, slots=places + -(-most // SLOTS) * SLOTS
        )
        yield np.asarray(state.id_B)[:, None]
        for count in range(1, most, CHUNK):
            new = min(CHUNK, most - count)
            state, ids_BN = more(self._params, state, np.int32(new))
            yield np.asarray(ids_BN)[:, :new]


class _Row:
    """The new ids behind one prompt, as far as they count."""

    def __init__(self, limit: int, end: int, stop: Stop | None) -> None:
        self._limit, self._end, self._stop = limit, end, stop
        self._ids: list[int] = []
        self.ended = limit < 1

    def taken(self, ids: list[int]) -> list[int]:
        """Those of `ids` that count."""
        before = len(self._ids)
        for token in ids:
            self.ended = self.ended or token == self._end
            if self.ended:
                break
            self._ids.append(token)
            self.ended = len(self._ids) >= self._limit or (self._stop is not None and self._stop(self._ids))
        return self._ids[before:]


@cache
def own_products() -> dict[str, str] | None:
    """How XLA is told to keep products on a CPU to itself; None where it knows no other."""
    how = {"xla_cpu_experimental_ynn_fusion_type": ""}
    try:
        jax.jit(jnp.negative, compiler_options=how).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # no such option
        return None
    return how


def bucket(length: int) -> int:
    """The number of places for prompts of up to `length` tokens: SHORTEST times a power of two."""
    return SHORTEST << max(0, (length - 1) // SHORTEST).bit_length()


def as_read(model: Decoder, params: Any) -> Any:
    """The parameters as the loop reads them: each layer by itself, matrices of products in the dtype of the products,
    which they would be cast to at each step."""
    dtype = model.how.dtype

    def cast(path: tuple[Any, ...], axes: Axes, w: Array) -> Array:
        made_from = path[0].key == "head" and model.arch.head.kind is not PlainLogits  # of float32, at each step
        return w.astype(dtype) if axes.is_matrix and path[0].key != "embedding" and not made_from else w

    tokens_BL = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    boxed = jax.eval_shape(model.clone(how=How(dtype)).init, jax.random.key(0), tokens_BL, tokens_BL)["params"]

    @jax.jit
    def read(params: Any) -> Any:
        return apart(jax.tree_util.tree_map_with_path(cast, axes_of(boxed), params), model.sizes.layers)

    return read(params)
