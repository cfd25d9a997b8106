"""What holds for the skeleton with every recipe in it."""

import re
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import BATCH, EVEN, LENGTH, SIZES, by_path, even_batch, loss_and_gradients, random_batch, tiny

from angpt_jax import cli, experiment, meshes, optim
from angpt_jax.archs import RECIPES
from angpt_jax.axes import Axes
from angpt_jax.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from angpt_jax.how import How
from angpt_jax.model import Decoder
from angpt_jax.step import nats

pytestmark = pytest.mark.usefixtures("strict_dtypes")
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
TOKENS_BL = random_batch()["tokens"][:, :-1]
PRODUCT = re.compile(r"stablehlo\.dot_general .* : \(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)")
BOUND_ALONE = {"gpt_plus": "gpt_plus_bound", "ngpt": "ngpt_bound"}  # pairs that only the constraint tells apart


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
def test_layers_computed_again_give_the_same_loss_and_gradients(recipe):
    kept, again = tiny(recipe, EVEN), tiny(recipe, EVEN, remat="full")
    assert again.axes == kept.axes
    (loss, gradients), (loss_again, gradients_again) = loss_and_gradients(kept), loss_and_gradients(again)
    assert float(loss_again) == pytest.approx(float(loss), rel=1e-6)
    for path, gradient in by_path(gradients).items():
        actual = by_path(gradients_again)[path]
        np.testing.assert_allclose(actual, gradient, rtol=0, atol=2e-6 * np.abs(gradient).max(), err_msg=path)


def test_layers_computed_again_need_less_memory():
    deep = replace(EVEN, layers=16)

    def temporary(**options: Any) -> int:
        model = tiny("angpt", deep, **options)
        gradients = jax.jit(jax.grad(lambda params, batch: nats(model.model, params, batch).mean()))
        memory: Any = gradients.lower(nn.meta.unbox(model.boxed), even_batch()).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporary(remat="full") < 0.5 * temporary()


@every_recipe
def test_parameters_and_logits_are_float32(recipe):
    for dtype in (jnp.float32, jnp.bfloat16):
        model = tiny(recipe, how=How(dtype))
        for path, leaf in by_path(nn.meta.unbox(model.boxed)).items():
            assert leaf.dtype == jnp.float32 and not leaf.weak_type, path
        logits_BLV = model.logits(model.random, TOKENS_BL)
        assert logits_BLV.shape == (BATCH, LENGTH, SIZES.vocab) and logits_BLV.dtype == np.float32
        assert np.isfinite(logits_BLV).all()


@every_recipe
def test_every_product_takes_operands_of_the_compute_dtype(recipe):
    model = tiny(recipe, how=How(jnp.bfloat16))
    apply = jax.jit(lambda params: model.model.apply({"params": params}, TOKENS_BL, TOKENS_BL))
    program = apply.lower(nn.meta.unbox(model.boxed)).as_text()
    products = PRODUCT.findall(program)
    maps = 4 + len(model.model.arch.gate.kind.inputs) + 1  # of a layer; then scores, averages, head
    assert len(products) == program.count("stablehlo.dot") == maps + 2 + 1
    assert set(products) == {("bf16", "bf16")}


@every_recipe
def test_bfloat16_is_close_to_float32(recipe):
    exact, rounded = (tiny(recipe, how=How(dtype)) for dtype in (jnp.float32, jnp.bfloat16))
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
def test_every_axis_of_every_parameter_has_a_name_and_a_place_on_the_mesh(recipe):
    shapes, axes = by_path(nn.meta.unbox(tiny(recipe).boxed)), by_path(tiny(recipe).axes)
    assert shapes.keys() == axes.keys()
    for path, axis in axes.items():
        assert isinstance(axis, Axes) and len(axis.names) == shapes[path].ndim, path
        assert set(axis.inputs) <= set(axis.names) <= set(meshes.LOGICAL), path
        assert axis.role == path.rpartition("/")[2], path


@every_recipe
def test_a_config_survives_yaml_and_gives_an_equal_architecture(recipe, tmp_path):
    model = ModelConfig(recipe, width=24, layers=2, heads=6, vocab=31, context=8, feed_forward=40, kv_heads=3)
    config = Config(model, OptimConfig(1e-3), DataConfig(batch_size=2), RunConfig(10))
    arch, sizes = experiment.architecture(model)
    assert arch == RECIPES[recipe](sizes)
    for written in (config, experiment.resolved(config)[0]):
        path = Path(tmp_path, "config.yaml")
        path.write_text(cli.to_yaml(written))
        read = cli.parse(Config, ["--config", str(path)], command="train")
        assert read == written
        assert experiment.architecture(read.model) == (arch, sizes)


def test_recipes_compute_different_things():
    """On the same values for the parameters that they share; two of them are another recipe with a bound alone."""
    logits = {recipe: tiny(recipe).logits(tiny(recipe).random, TOKENS_BL) for recipe in RECIPES}
    for one, other in combinations(logits, 2):
        if BOUND_ALONE.get(one) != other:
            assert (logits[one] - logits[other]).std() > 0.1 * logits[one].std(), (one, other)


@pytest.mark.parametrize("recipe, bound", BOUND_ALONE.items())
def test_a_bound_changes_no_forward_pass(recipe, bound):
    params = tiny(recipe).random
    assert tiny(bound).axes == tiny(recipe).axes
    np.testing.assert_array_equal(tiny(bound).logits(params, TOKENS_BL), tiny(recipe).logits(params, TOKENS_BL))


def one_step(recipe: str, params: Any) -> dict[str, np.ndarray]:
    """Parameters after a step of the recipe's own chain, with the parameters as gradients."""
    arch, schedule = tiny(recipe).model.arch, optax.constant_schedule(1e-3)
    config = optim.with_recommendations(OptimConfig(1e-3), arch.optimizer)
    with jax.numpy_dtype_promotion("standard"):  # Adam's
        tx = optim.build(config, schedule, arch.constraint, tiny(recipe).axes)
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    return by_path(jax.tree.map(np.asarray, optax.apply_updates(params, updates)))


def scaled(recipe: str, factor: float) -> Any:
    """`random` with every vector that the recipe's bound looks at of norm `factor`."""
    model = tiny(recipe)
    along = model.model.arch.constraint.along

    def scale(axis: Axes, w: Any) -> Any:
        return factor * w / jnp.linalg.norm(w, axis=axis.along(along), keepdims=True) if axis.is_matrix else w

    return jax.tree.map(scale, model.axes, model.random)


@pytest.mark.parametrize("recipe, bound, factor", [("gpt_plus", "gpt_plus_bound", 1.5), ("ngpt", "ngpt_bound", 0.5)])
def test_a_bound_changes_the_step_where_vectors_are_too_long_or_too_short(recipe, bound, factor):
    params = scaled(bound, factor)
    free, bounded = one_step(recipe, params), one_step(bound, params)
    for path, axis in by_path(tiny(recipe).axes).items():
        changed = np.abs(bounded[path] - free[path])
        assert changed.max(axis=axis.along("embed")).min() > 0.01 if axis.is_matrix else (changed == 0).all(), path


@pytest.mark.parametrize("recipe, bound, factor", [("gpt_plus", "gpt_plus_bound", 0.9), ("ngpt", "ngpt_bound", 1.5)])
def test_elsewhere_the_step_is_the_same(recipe, bound, factor):
    params = scaled(bound, factor)
    free, bounded = one_step(recipe, params), one_step(bound, params)
    for path in free:
        np.testing.assert_allclose(bounded[path], free[path], rtol=0, atol=1e-6, err_msg=path)


@every_recipe
def test_the_loss_reaches_every_parameter_of_every_layer(recipe):
    _, gradients = loss_and_gradients(tiny(recipe, EVEN))
    for path, gradient in by_path(gradients).items():
        layers = gradient if path.startswith("layers/") else gradient[None]
        sizes = np.sqrt((np.asarray(layers) ** 2).reshape(len(layers), -1).sum(axis=1))
        assert np.isfinite(sizes).all() and (sizes > 1e-3).all(), path
