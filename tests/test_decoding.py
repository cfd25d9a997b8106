"""Decoding with a cache: the logits of whole windows, whatever stands in the other rows; draws; the loop's program."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SIZES, Tiny, tiny
from jax import Array

from angpt_jax import fold
from angpt_jax.arch import Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.decoding import Caches, Decoding, Draw, Steps, drawn
from angpt_jax.generate import as_read
from angpt_jax.how import How

END, KNOWN = 30, 29  # of 31 entries, the last but one stands for nothing
DRAWN = 5
GROUPED = Sizes(width=24, layers=2, heads=4, feed_forward=40, vocab=31, kv_heads=2)


def prompts() -> list[list[int]]:
    """Of several lengths, one of two documents."""
    rng = np.random.default_rng(0)
    rows = [[END, *rng.integers(0, KNOWN, length).tolist()] for length in (2, 7, 10)]
    rows[1][4] = END
    return rows


@dataclass(frozen=True)
class Told(Steps):
    """Keeps the newest logits behind the caches."""

    def extended(self, params: Any, caches: Caches, *args: Any, **kwargs: Any) -> tuple[Array, Caches]:
        logits_BV, caches = super().extended(params, caches[: self.model.sizes.layers], *args, **kwargs)
        return logits_BV, [*caches, (logits_BV, logits_BV)]


def steps_of(model: Tiny, kind: type[Steps] = Told) -> Steps:
    return kind(model.model.clone(layers_apart=True), KNOWN, END, Draw(), 16)


def read(model: Tiny, steps: Steps, rows: list[list[int]]) -> tuple[Any, Decoding]:
    """Parameters as the loop reads them, and the state behind the prompts."""
    params, places = as_read(model.model, model.random), 16
    tokens_BP = np.array([[END] * (places - len(row)) + row for row in rows], np.int32)
    length_B, limit_B = np.array([len(row) for row in rows], np.int32), np.full(len(rows), 20, np.int32)
    keys_B = jax.random.split(jax.random.key(0), len(rows))
    return params, jax.jit(steps.first, static_argnames="slots")(params, tokens_BP, length_B, limit_B, keys_B, slots=24)


def continued(model: Tiny, rows: list[list[int]]) -> tuple[list[list[int]], np.ndarray]:
    """The rows with DRAWN likeliest tokens, and the logits_BNV that each was drawn from."""
    steps, rows, logits = steps_of(model), [list(row) for row in rows], []
    params, state = read(model, steps, rows)
    following = jax.jit(steps.next)
    for _ in range(DRAWN):
        logits.append(np.asarray(state.caches[-1][0]))
        for row, token in zip(rows, np.asarray(state.id_B).tolist(), strict=True):
            row.append(token)
        state = following(params, state)
    return rows, np.stack(logits, axis=1)


def assert_same_logits(model: Tiny, tolerance: float = 1e-5) -> None:
    rows, logits_BNV = continued(model, prompts())
    tokens_BL = np.zeros((len(rows), 16), np.int32)
    for whole, row in zip(tokens_BL, rows, strict=True):
        whole[: len(row)] = row
    window_BLV = model.logits(model.random, tokens_BL, np.cumsum(tokens_BL == END, axis=1))
    assert np.isneginf(logits_BNV[..., KNOWN:]).all()
    for row, logits_NV, window_LV in zip(rows, logits_BNV, window_BLV, strict=True):
        expected_NV = window_LV[len(row) - 1 - DRAWN : len(row) - 1, :KNOWN]
        np.testing.assert_allclose(logits_NV[:, :KNOWN], expected_NV, rtol=0, atol=tolerance * np.abs(window_BLV).max())
        assert logits_NV[:, :KNOWN].argmax(axis=-1).tolist() == row[-DRAWN:]


@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_with_the_cache_are_those_of_a_window(recipe: str) -> None:
    assert_same_logits(tiny(recipe))


OPTIONS: dict[str, dict[str, Any]] = {
    "grouped queries": {"sizes": GROUPED},
    "tied": {"tied_embeddings": True},
    "attention across documents": {"attend_across_documents": True},
    "unrolled": {"scan_layers": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_also_with(options: dict[str, Any]) -> None:
    assert_same_logits(tiny("angpt", **options))


def test_in_bfloat16_it_rounds_as_a_window_does() -> None:
    assert_same_logits(tiny("gpt_plus", how=How(jnp.bfloat16)), tolerance=0.02)


def test_other_rows_and_padding_change_nothing() -> None:
    together, logits_BNV = continued(tiny("angpt"), prompts())
    for number, prompt in enumerate(prompts()):
        alone, alone_1NV = continued(tiny("angpt"), [prompt])
        assert alone[0] == together[number]
        np.testing.assert_allclose(alone_1NV[0], logits_BNV[number], rtol=0, atol=1e-5)


def test_the_loop_draws_what_single_steps_draw() -> None:
    model = tiny("angpt")
    steps = steps_of(model, Steps)
    params, state = read(model, steps, prompts())
    rows, _ = continued(model, prompts())
    _, ids_BN = jax.jit(steps.more)(params, state, np.int32(DRAWN - 1))
    assert np.asarray(ids_BN)[:, : DRAWN - 1].tolist() == [row[1 - DRAWN :] for row in rows]


def test_a_row_that_is_done_gives_the_end_of_the_document() -> None:
    model = tiny("angpt")
    steps = steps_of(model, Steps)
    params, state = read(model, steps, prompts())
    state = state.replace(limit_B=jnp.array([1, 3, 20]), done_B=jnp.array([True, False, False]))  # pyright: ignore
    state, ids_BN = jax.jit(steps.more)(params, state, np.int32(6))
    assert np.asarray(state.done_B).tolist() == [True, True, False]
    assert [(row == END).sum() for row in np.asarray(ids_BN)[:, :6]] == [6, 4, 0]


def test_the_folded_loop_has_no_root_and_no_sum_but_the_softmax() -> None:
    model = tiny("angpt")
    plain = Tiny(model.model.clone(arch=fold.plain(model.model.arch)))
    params = jax.jit(partial(fold.folded, model.model.arch, SIZES))(model.random)
    state = jax.eval_shape(partial(read, model, steps_of(model, Steps), prompts()))[1]
    more = jax.jit(steps_of(plain, Steps).more)
    text: Any = more.lower(as_read(plain.model, params), state, np.int32(1)).compile().as_text()
    assert "sqrt" not in text and "tanh" not in text
    of_floats = re.findall(r"= f32\[[\d,]*\]\S* reduce\(.*op_name=\"(.*?)\"", text)
    assert sorted(name.split("/")[-3:] for name in of_floats) == [
        *([f"layer_{layer}", "attention", f"reduce_{kind}"] for layer in (1, 2) for kind in ("max", "sum")),
        ["while", "body", "reduce_max"],  # of the likeliest token
    ]


LOGITS_V = jnp.log(jnp.array([0.3, 0.5, 0.15, 0.05]))


def frequencies(draw: Draw, draws: int = 4000) -> np.ndarray:
    keys_B = jax.random.split(jax.random.key(0), draws)
    return np.bincount(np.asarray(drawn(keys_B, jnp.tile(LOGITS_V, (draws, 1)), draw)), minlength=4) / draws


def test_temperature_zero_takes_the_likeliest() -> None:
    np.testing.assert_array_equal(frequencies(Draw(0.0, 2, 0.1)), [0, 1, 0, 0])


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (Draw(1.0), [0.3, 0.5, 0.15, 0.05]),
        (Draw(1.0, top_k=2), [0.375, 0.625, 0, 0]),
        (Draw(1.0, top_k=9), [0.3, 0.5, 0.15, 0.05]),
        (Draw(0.5), [0.09 / 0.365, 0.25 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (Draw(1.0, top_p=0.4), [0, 1, 0, 0]),
        (Draw(1.0, top_p=0.6), [0.375, 0.625, 0, 0]),
        (Draw(1.0, top_p=0.9), [0.3 / 0.95, 0.5 / 0.95, 0.15 / 0.95, 0]),
        (Draw(1.0, top_k=3, top_p=0.99), [0.3 / 0.95, 0.5 / 0.95, 0.15 / 0.95, 0]),
        (Draw(0.5, top_p=0.9), [0.09 / 0.34, 0.25 / 0.34, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_their_probability(draw: Draw, expected: list[float]) -> None:
    np.testing.assert_allclose(frequencies(draw), expected, atol=0.025)
