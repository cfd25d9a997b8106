"""What holds for the skeleton with every recipe in it."""

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BATCH, LENGTH, SIZES, by_path, random_batch, tiny

from angpt_jax.archs import RECIPES
from angpt_jax.axes import Axes
from angpt_jax.model import Decoder
from angpt_jax.step import nats

pytestmark = pytest.mark.usefixtures("strict_dtypes")
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
TOKENS_BL = random_batch()["tokens"][:, :-1]


def another(tokens: np.ndarray) -> np.ndarray:
    """Tokens that differ everywhere."""
    return (tokens + 1 + tokens % 5) % SIZES.vocab


@every_recipe
@pytest.mark.parametrize("position", [1, 6, LENGTH - 1])
def test_a_token_changes_no_logits_before_it(recipe, position):
    model = tiny(recipe)
    changed = TOKENS_BL.copy()
    changed[:, position] = another(changed[:, position])
    before, after = model.logits(model.random, TOKENS_BL), model.logits(model.random, changed)
    np.testing.assert_array_equal(after[:, :position], before[:, :position])
    assert (np.abs(after - before)[:, position:].max(axis=-1) > 1e-4).all()


@every_recipe
def test_a_document_changes_no_logits_of_another(recipe):
    model = tiny(recipe)
    segments = np.broadcast_to(np.array([0] * 4 + [1] * 5 + [2] * 4, np.int32), TOKENS_BL.shape)
    changed = np.where(segments == 1, TOKENS_BL, another(TOKENS_BL))
    before, after = (model.logits(model.random, tokens, segments) for tokens in (TOKENS_BL, changed))
    np.testing.assert_array_equal(after[segments == 1], before[segments == 1])
    assert (np.abs(after - before)[segments != 1].max(axis=-1) > 1e-4).all()


@every_recipe
def test_rows_of_a_batch_do_not_meet(recipe):
    model = tiny(recipe)
    changed = TOKENS_BL.copy()
    changed[1] = another(changed[1])
    before, after = model.logits(model.random, TOKENS_BL), model.logits(model.random, changed)
    np.testing.assert_array_equal(np.delete(after, 1, axis=0), np.delete(before, 1, axis=0))


def test_attention_crosses_documents_only_where_it_is_told_to():
    model, batch = tiny("angpt"), random_batch()
    segments_BL = batch["segments"][:, :-1]
    across = replace(model, model=replace(model.model, attend_across_documents=True))
    np.testing.assert_array_equal(
        across.logits(model.random, TOKENS_BL, segments_BL), model.logits(model.random, TOKENS_BL)
    )
    isolated = model.logits(model.random, TOKENS_BL, segments_BL)
    assert np.abs(isolated - model.logits(model.random, TOKENS_BL)).max() > 1e-3


@every_recipe
def test_unrolled_layers_are_the_scanned_ones(recipe):
    scanned, unrolled = tiny(recipe), tiny(recipe, scan_layers=False)
    assert jax.tree.map(jnp.shape, unrolled.boxed) == jax.tree.map(jnp.shape, scanned.boxed)
    assert unrolled.axes == scanned.axes
    expected = scanned.logits(scanned.random, TOKENS_BL)
    np.testing.assert_allclose(unrolled.logits(scanned.random, TOKENS_BL), expected, atol=1e-6 * np.abs(expected).max())


@every_recipe
def test_parameters_and_logits_are_float32(recipe):
    for dtype in (jnp.float32, jnp.bfloat16):
        model = tiny(recipe, dtype=dtype)
        for path, leaf in by_path(nn.meta.unbox(model.boxed)).items():
            assert leaf.dtype == jnp.float32 and not leaf.weak_type, path
        logits_BLV = model.logits(model.random, TOKENS_BL)
        assert logits_BLV.shape == (BATCH, LENGTH, SIZES.vocab) and logits_BLV.dtype == np.float32
        assert np.isfinite(logits_BLV).all()


@every_recipe
def test_bfloat16_is_close_to_float32(recipe):
    exact, rounded = (tiny(recipe, dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16))
    expected = exact.logits(exact.random, TOKENS_BL)
    error = rounded.logits(exact.random, TOKENS_BL) - expected
    assert 1e-4 < error.std() / expected.std() < 0.02  # a single rounding: up to 2⁻⁹ = 0.002


@every_recipe
def test_equal_models_are_traced_once(recipe):
    traces = []

    @partial(jax.jit, static_argnums=0)
    def apply(model: Decoder, params: Any) -> Any:
        traces.append(model)
        return model.apply({"params": params}, TOKENS_BL, TOKENS_BL)

    for scan_layers in (True, True, False):
        sizes = replace(SIZES)
        jax.eval_shape(
            partial(apply, Decoder(RECIPES[recipe](sizes), sizes, scan_layers=scan_layers)), tiny(recipe).random
        )
    assert len(traces) == 2


@every_recipe
def test_every_axis_of_every_parameter_has_a_name(recipe):
    shapes, axes = by_path(nn.meta.unbox(tiny(recipe).boxed)), by_path(tiny(recipe).axes)
    assert shapes.keys() == axes.keys()
    for path, axis in axes.items():
        assert isinstance(axis, Axes) and len(axis.names) == shapes[path].ndim, path
        assert set(axis.inputs) <= set(axis.names) and axis.role == path.rpartition("/")[2], path


def test_no_two_recipes_compute_the_same():
    """On the same values for the parameters that they share."""
    logits = {recipe: tiny(recipe).logits(tiny(recipe).random, TOKENS_BL) for recipe in RECIPES}
    for one, other in combinations(logits, 2):
        assert np.abs(logits[one] - logits[other]).max() > 0.1, (one, other)


@every_recipe
def test_the_loss_reaches_every_parameter_of_every_layer(recipe):
    model, batch = tiny(recipe), random_batch()
    gradients = jax.jit(jax.grad(lambda params: nats(model.model, params, batch).mean()))(model.random)
    for path, gradient in by_path(gradients).items():
        layers = gradient if path.startswith("layers/") else gradient[None]
        sizes = np.sqrt((np.asarray(layers) ** 2).reshape(len(layers), -1).sum(axis=1))
        assert np.isfinite(sizes).all() and (sizes > 1e-4).all(), path
