"""What saves memory changes no number: micro-batches, a loss in chunks, arrays computed again, small moments."""

import re
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import EVEN, Tiny, by_path, even_batch, loss_and_gradients, tiny

from angpt_jax import ops, optim, sharding
from angpt_jax.archs import RECIPES
from angpt_jax.axes import Axes
from angpt_jax.config import SAVEABLE, MeshConfig, OptimConfig
from angpt_jax.layout import Layout, Place
from angpt_jax.step import _parts, first_state, make_train_step, nats

BASIC = ["angpt", "gpt_plus", "ngpt"]


def uneven_batch() -> dict[str, Any]:
    """Rows that count differently: some targets are padding, one row is all padding."""
    weights = np.random.default_rng(1).integers(0, 2, (8, 12)).astype(np.float32)
    weights[3] = 0
    return even_batch() | {"weights": weights}


def after_a_step(model: Tiny, micro_batches: int) -> tuple[dict[str, Any], Any]:
    """Parameters after a step of plain SGD, so that they show the gradient itself, and the metrics."""
    tx = optax.sgd(1.0)
    step = jax.jit(make_train_step(model.model, tx, optax.constant_schedule(1.0), micro_batches=micro_batches))
    state, metrics = step(first_state(tx, model.random), uneven_batch())
    return by_path(state.params), metrics


@pytest.mark.parametrize("micro_batches", [2, 8])
@pytest.mark.parametrize("recipe", BASIC)
def test_micro_batches_make_the_step_of_the_whole_batch(recipe, micro_batches):
    model = tiny(recipe, EVEN)
    (expected, whole), (actual, parts) = after_a_step(model, 1), after_a_step(model, micro_batches)
    assert {name: float(x) for name, x in parts.items()} == pytest.approx(
        {name: float(x) for name, x in whole.items()}, rel=1e-6
    )
    for path, leaf in expected.items():
        moved = np.abs(leaf - by_path(model.random)[path]).max()
        assert moved > 0, path
        np.testing.assert_allclose(actual[path], leaf, rtol=0, atol=5e-6 * moved + 1e-7, err_msg=path)


def test_micro_batches_need_less_memory():
    model, tx = tiny("angpt", replace(EVEN, layers=8)), optax.sgd(1.0)

    def temporary(micro_batches: int) -> int:
        step = make_train_step(model.model, tx, optax.constant_schedule(1.0), micro_batches=micro_batches)
        state = jax.eval_shape(lambda: first_state(tx, nn.meta.unbox(model.boxed)))
        memory: Any = jax.jit(step).lower(state, even_batch()).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporary(8) < 0.4 * temporary(1)


@pytest.mark.parametrize("chunk", [1, 8, 32, 64])
@pytest.mark.parametrize("recipe, tied", [*((recipe, False) for recipe in BASIC), ("angpt", True)])
def test_a_loss_in_chunks_is_the_loss(recipe, tied, chunk):
    whole, chunked = (tiny(recipe, EVEN, tied_embeddings=tied, loss_vocab_chunk=size) for size in (None, chunk))
    (loss, gradients), (loss_in_chunks, gradients_in_chunks) = loss_and_gradients(whole), loss_and_gradients(chunked)
    assert float(loss_in_chunks) == pytest.approx(float(loss), rel=1e-6)
    for path, gradient in by_path(gradients).items():
        actual = by_path(gradients_in_chunks)[path]
        np.testing.assert_allclose(actual, gradient, rtol=0, atol=3e-6 * np.abs(gradient).max(), err_msg=path)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_chunks_take_as_many_entries_from_each_part_of_a_split_vocabulary(parts):
    """Column v of the identity has its one at v, so that a wrong column shows."""
    mesh = jax.make_mesh((parts,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:parts])
    place = Layout(mesh, (("vocab", ("tensor",)),)).of(Axes("head", ("embed", "vocab"), inputs=("embed",)))
    h_BLD = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 16)), jnp.float32)
    targets_BL = jnp.array([[0, 5, 15], [8, 9, 3]])
    expected = ops.cross_entropy(h_BLD, targets_BL)
    chunked = jax.jit(lambda h, w: ops.chunked_cross_entropy(h, w, targets_BL, 4, jnp.float32, place))
    np.testing.assert_allclose(chunked(h_BLD, jnp.eye(16)), expected, rtol=1e-6)


def test_chunks_of_a_split_vocabulary_move_nothing():
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    here = Layout(mesh, (("vocab", ("tensor",)),))
    place = here.of(Axes("head", ("embed", "vocab"), inputs=("embed",)))
    targets_BL = jnp.zeros((2, 3), jnp.int32)
    chunked = jax.jit(lambda h, w: ops.chunked_cross_entropy(h, w, targets_BL, 8, jnp.float32, place))
    w_DV = jax.device_put(jnp.ones((5, 32)), here.sharding("embed", "vocab"))
    program: Any = chunked.lower(jnp.ones((2, 3, 5)), w_DV).compile()
    assert set(re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", program.as_text())) == {"all-reduce"}


def test_micro_batches_move_no_row():
    here = sharding.make_layout(MeshConfig())
    x = jax.device_put(jnp.arange(64).reshape(32, 2), here.sharding("batch", None))
    split = jax.jit(lambda x: here.lay(_parts(4, x), here.spec(None, "batch", None)))
    assert re.findall(r" (all-\w+|collective-\w+|reduce-scatter)\(", str(split.lower(x).compile().as_text())) == []
    rows = sorted(np.asarray(split(x)).reshape(32, 2).tolist())
    assert split(x).shape == (4, 8, 2) and rows == np.arange(64).reshape(32, 2).tolist()


def largest_array(vocab: int, chunk: int | None) -> int:
    """Entries of the largest float32 array of tokens in the loss and its gradient, but for the head's own shape."""
    h_BLD, targets_BL = jnp.zeros((4, 64, 8)), jnp.zeros((4, 64), jnp.int32)

    def loss(h_BLD: Any, w_DV: Any) -> Any:
        if chunk is None:
            return ops.cross_entropy(ops.linear(h_BLD, w_DV, 1.0, jnp.float32), targets_BL).sum()
        return ops.chunked_cross_entropy(h_BLD, w_DV, targets_BL, chunk, jnp.float32).sum()

    program: Any = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(h_BLD, jnp.zeros((8, vocab))).compile().as_text()
    shapes = [tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", program)]
    return max(int(np.prod(shape)) for shape in shapes if 4 in shape or 256 in shape)


def test_the_memory_of_the_loss_does_not_grow_with_the_vocabulary_beyond_its_chunk():
    assert largest_array(1024, None) == 4 * 64 * 1024
    assert {largest_array(vocab, 128) for vocab in (512, 1024, 4096)} == {4 * 64 * 128}


@pytest.mark.parametrize("remat", [("attention",), ("query", "key", "value", "up"), SAVEABLE])
def test_a_layer_with_named_saves_gives_the_same_loss_and_gradients(remat):
    kept, again = (tiny("angpt", EVEN, remat=how) for how in ("none", remat))
    (loss, gradients), (loss_again, gradients_again) = loss_and_gradients(kept), loss_and_gradients(again)
    assert float(loss_again) == pytest.approx(float(loss), rel=1e-6)
    for path, gradient in by_path(gradients).items():
        actual = by_path(gradients_again)[path]
        np.testing.assert_allclose(actual, gradient, rtol=0, atol=2e-6 * np.abs(gradient).max(), err_msg=path)


def test_every_array_that_can_be_kept_has_its_name():
    model = tiny("angpt", EVEN)
    program = str(jax.make_jaxpr(lambda params, batch: nats(model.model, params, batch))(model.random, even_batch()))
    assert {name for name in SAVEABLE if f"name[name={name}]" in program} == set(SAVEABLE)


def products(remat: Any) -> int:
    """Matrix products of the loss and its gradient, all layers being one body."""
    model = tiny("angpt", EVEN, remat=remat)
    gradient = jax.grad(lambda params, batch: nats(model.model, params, batch).mean())
    return str(jax.make_jaxpr(gradient)(nn.meta.unbox(model.boxed), even_batch())).count("dot_general")


def test_each_array_that_is_kept_saves_the_product_that_makes_it():
    """Seven maps, scores and averages are nine products. The scores are always computed again."""
    none, full = products("none"), products("full")
    assert full - none == 9
    saved = {name: full - products((name,)) for name in SAVEABLE}
    assert saved == dict.fromkeys(SAVEABLE, 1) | {"hidden": 0}
    assert products(SAVEABLE) - none == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_moments_in_bfloat16_are_kept_so_and_change_little(recipe):
    model = tiny(recipe, EVEN)
    gradients = loss_and_gradients(model)[1]
    results = {}
    for dtype in ("float32", "bfloat16"):
        config = OptimConfig(1e-3, schedule="constant", weight_decay=0.0, clip_norm="none", moments_dtype=dtype)
        tx = optim.build(config, optim.learning_rate(config, 4), model.model.arch.constraint, model.axes)
        params, state = model.random, tx.init(model.random)
        for _ in range(3):
            updates, state = jax.jit(tx.update)(gradients, state, params)
            params = optax.apply_updates(params, updates)
        for name in ("mu", "nu"):
            assert {str(leaf.dtype) for leaf in jax.tree.leaves(optax.tree.get(state, name))} == {dtype}
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
        results[dtype] = by_path(params)
    for path, leaf in results["float32"].items():
        np.testing.assert_allclose(results["bfloat16"][path], leaf, rtol=0, atol=3 * 1e-3 * 2**-7, err_msg=path)


def test_small_moments_are_computed_with_in_float32():
    adam = optax.scale_by_adam(0.9, 0.95)
    tx, params = optim.kept_as("bfloat16", adam), {"w": jnp.linspace(-1, 1, 7)}
    gradients = {"w": jnp.linspace(0.1, 1.7, 7)}
    state = tx.update(gradients, tx.init(params), params)[1]
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state)
    expected = adam.update(gradients, exact, params)[0]
    np.testing.assert_array_equal(tx.update(gradients, state, params)[0]["w"], expected["w"])  # pyright: ignore


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_backward_products_take_operands_of_the_compute_dtype(dtype):
    x_BLD, w_DF = jnp.ones((2, 3, 8), jnp.float32), jnp.ones((8, 4), jnp.float32)
    gradient = jax.grad(lambda x, w: ops.linear(x, w, 1.5, dtype, jnp.float32).sum(), argnums=(0, 1))
    program = jax.jit(gradient).lower(x_BLD, w_DF).as_text()
    operands = re.findall(
        r"dot_general.* : \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\) -> tensor<[\dx]+x(\w+)>", program
    )
    name = "bf16" if dtype == jnp.bfloat16 else "f32"
    assert operands and set(operands) == {(name, name, "f32")}
    assert [g.dtype for g in gradient(x_BLD, w_DF)] == [jnp.float32, jnp.float32]


@pytest.mark.parametrize("inner, outer", [(8, 3), (3, 8)])
def test_the_gradients_of_a_product_are_those_of_numpy(inner, outer):
    rng = np.random.default_rng(0)
    shapes = (2, 5, inner), (inner, outer), (2, 5, outer)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    dx, dw = jax.vjp(lambda x, w: ops.product(x, w, Place()), x, w)[1](jnp.asarray(dy))
    np.testing.assert_allclose(dx, dy @ w.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw, np.einsum("bld,blf->df", x, dy), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner, outer", [(64, 256), (256, 64)])
def test_on_a_cpu_the_gradient_of_a_weight_turns_the_narrower_side(inner, outer):
    x, dy, w = jnp.ones((2, 96, inner)), jnp.ones((2, 96, outer)), jnp.ones((inner, outer))
    lowered = jax.jit(lambda x, w, dy: jax.vjp(lambda w: ops.product(x, w, Place()), w)[1](dy)).lower(x, w, dy)
    program = str(lowered.compile().as_text())
    assert "f32[64,192]" in program and "f32[256,192]" not in program
    assert "lhs_contracting_dims={0}" not in program
