"""The constraints keep the vectors that the papers name inside their sets, and touch nothing else."""

import doctest
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import SIZES, by_path, path_of, random_batch, tiny

from angpt_jax import optim
from angpt_jax.arch import Constraint
from angpt_jax.archs import RECIPES
from angpt_jax.axes import Axes
from angpt_jax.config import OptimConfig
from angpt_jax.errors import UserError
from angpt_jax.places import override
from angpt_jax.step import first_state, make_train_step

# Axes that a row of W runs along: its input side. Kernels are stored (in, out), with the layers in front.
INPUT_SIDE = {
    "embedding": (1,),  # (V, D)
    "head": (0,),  # (D, V)
    "layers/attention/query": (1,),  # (N, D, H·K)
    "layers/attention/key": (1,),
    "layers/attention/value": (1,),
    "layers/attention/attention_out": (1,),  # (N, H·K, D)
    "layers/mlp/up": (1,),  # (N, D, F)
    "layers/mlp/gate": (1,),
    "layers/mlp/down": (1,),  # (N, F, D)
}
# The embedding dimension D: what nGPT normalizes; for the two maps that write to the stream it is the output side.
EMBEDDING_DIMENSION = INPUT_SIDE | {"layers/attention/attention_out": (2,), "layers/mlp/down": (2,)}
ROWS = {  # of W, the output side: what a matrix with unit rows has the Frobenius norm of, squared
    "embedding": SIZES.vocab,
    "head": SIZES.vocab,
    "layers/attention/query": SIZES.width,
    "layers/attention/key": SIZES.width,
    "layers/attention/value": SIZES.width,
    "layers/attention/attention_out": SIZES.width,
    "layers/mlp/up": SIZES.feed_forward,
    "layers/mlp/gate": SIZES.feed_forward,
    "layers/mlp/down": SIZES.width,
}
BALL, SPHERE = optim.project_rows_to_unit_ball, optim.normalize_rows_to_unit_sphere
CASES: dict[str, tuple[str, Any, Any, Any]] = {
    "ball, rows of W": ("angpt", BALL, "inputs", INPUT_SIDE),
    "ball, embedding dimension": ("ngpt", BALL, "embed", EMBEDDING_DIMENSION),
    "sphere, embedding dimension": ("ngpt", SPHERE, "embed", EMBEDDING_DIMENSION),
    "sphere, rows of W": ("angpt", SPHERE, "inputs", INPUT_SIDE),
}
every_case = pytest.mark.parametrize("case", CASES)
every_matrix = pytest.mark.parametrize("name", INPUT_SIDE)


def norms(w: Any, axes: tuple[int, ...]) -> np.ndarray:
    return np.sqrt((np.asarray(w, np.float64) ** 2).sum(axis=axes, keepdims=True))


def small_updates(params: Any) -> Any:
    """Random updates of a tenth of the size of the parameters."""
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda w: jnp.asarray(0.1 * rng.standard_normal(w.shape) * norms(w, ()), w.dtype), params)


@cache
def constrained(case: str, dtype: Any = jnp.float32, jit: bool = True) -> tuple[dict[str, Any], ...]:
    """Parameters (matrices on the sphere), updates and constrained updates by path."""
    recipe, transform, along, axes = CASES[case]

    def start(path: Any, w: Any) -> Any:
        name = path_of(path)
        return jnp.asarray(w / norms(w, axes[name]) if name in axes else w, dtype)

    params = jax.tree_util.tree_map_with_path(start, tiny(recipe).random)
    tx = transform(tiny(recipe).axes, along)
    update, updates = jax.jit(tx.update) if jit else tx.update, small_updates(params)
    with jax.numpy_dtype_promotion("strict"):
        return by_path(params), by_path(updates), by_path(update(updates, tx.init(params), params)[0])


@every_matrix
@every_case
def test_the_constraint_is_that_of_numpy_along_the_right_axes(case, name):
    _, transform, _, axes = CASES[case]
    w, u, actual = (np.asarray(tree[name], np.float64) for tree in constrained(case))
    norm = norms(w + u, axes[name])
    expected = (w + u) / (np.maximum(1, norm) if transform is BALL else norm) - w
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@every_matrix
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("ball")])
def test_rows_inside_the_ball_are_left_alone_bit_for_bit(case, dtype, name):
    axes = CASES[case][3][name]
    w, u, actual = (np.asarray(tree[name].astype(jnp.float32)) for tree in constrained(case, dtype))
    inside = np.broadcast_to(norms(w + u, axes) < 1 - 1e-6, u.shape)
    assert 0.1 < inside.mean() < 0.9
    np.testing.assert_array_equal(actual[inside], u[inside])
    assert (actual[~inside] != u[~inside]).any()


@every_case
def test_scales_are_not_constrained(case):
    _, updates, actual = constrained(case)
    scales = updates.keys() - INPUT_SIDE.keys()
    assert len(scales) == len(updates) - 9 >= 3
    for name in scales:
        np.testing.assert_array_equal(actual[name], updates[name])


@every_case
def test_bfloat16_parameters_stay_bfloat16_and_in_the_set_as_far_as_they_can_tell(case):
    _, transform, _, axes = CASES[case]
    params, _, updates = constrained(case, jnp.bfloat16)
    for name in INPUT_SIDE:
        assert updates[name].dtype == jnp.bfloat16
        norm = norms((params[name] + updates[name]).astype(jnp.float32), axes[name])
        assert norm.max() <= 1 + 2**-7 and (transform is BALL or norm.min() >= 1 - 2**-7), name


@every_case
def test_jit_changes_nothing(case):
    jitted, plain = constrained(case)[2], constrained(case, jit=False)[2]
    for name, update in plain.items():
        np.testing.assert_allclose(jitted[name], update, rtol=0, atol=2**-22)  # two roundings of a number near 1


@every_case
def test_contract_of_an_optax_transform(case):
    recipe, transform, along, _ = CASES[case]
    params, tx = tiny(recipe).random, transform(tiny(recipe).axes, along)
    state = tx.init(params)
    with pytest.raises(ValueError, match="params"):
        tx.update(params, state)
    updates, new_state = jax.eval_shape(tx.update, params, state, params)
    assert isinstance(tx, optax.GradientTransformation) and not jax.tree.leaves(state)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    chain = optax.chain(optax.adam(0.1), tx)
    chained = jax.eval_shape(chain.update, params, jax.eval_shape(chain.init, params), params)[0]
    assert jax.tree.structure(chained) == jax.tree.structure(params)


def test_examples_in_the_docstrings():
    result = doctest.testmod(optim)
    assert result.attempted >= 14 and result.failed == 0


@cache
def trained(recipe: str, along: Any = None, steps: int = 20, peak_lr: float = 0.03) -> list[dict[str, np.ndarray]]:
    """Parameters by path, at init and after each step of the recipe's own chain on real gradients, at a high rate;
    `along` replaces the recipe's."""
    arch = RECIPES[recipe](SIZES)
    model = tiny(recipe, arch=override(arch, {"constraint": {"along": along}}, SIZES) if along else arch)
    config = optim.with_recommendations(OptimConfig(peak_lr, schedule="constant"), model.model.arch.optimizer)
    schedule = optim.learning_rate(config, steps)
    tx = optim.build(config, schedule, model.model.arch.constraint, model.axes)
    train_step = jax.jit(make_train_step(model.model, tx, schedule))
    state = jax.jit(partial(first_state, tx))(model.initial)
    states, batch = [state], random_batch()
    for _ in range(steps):
        states.append(train_step(states[-1], batch)[0])
    return [by_path(jax.tree.map(np.asarray, state.params)) for state in states]


@every_matrix
def test_angpt_starts_with_unit_rows_and_stays_in_the_ball(name):
    steps = [norms(params[name], INPUT_SIDE[name]) for params in trained("angpt")]
    np.testing.assert_allclose(steps[0], 1, atol=1e-6)
    assert max(norm.max() for norm in steps) <= 1 + 1e-6
    assert 0.1 < (steps[1] < 0.999).mean() < 0.9, "the first step takes some rows inside, and would take some outside"


@every_matrix
def test_ngpt_starts_and_stays_on_the_sphere(name):
    for params in trained("ngpt"):
        np.testing.assert_allclose(norms(params[name], EMBEDDING_DIMENSION[name]), 1, atol=1e-6)


def layers_of(w: Any, name: str) -> np.ndarray:
    """A matrix a layer; embedding and head are one."""
    return np.asarray(w)[None] if name in ("embedding", "head") else np.asarray(w)


def sizes_of_matrices(w: Any, name: str) -> np.ndarray:
    """Frobenius norm of each layer's matrix over that of one with unit rows, √(number of rows)."""
    layers = layers_of(w, name).astype(np.float64)
    return np.sqrt((layers**2).sum(axis=tuple(range(1, layers.ndim))) / ROWS[name])


def factors_of(name: str, factors: tuple[float, float]) -> tuple[float, ...]:
    """One for each layer of a matrix; the first for the embedding, the second for the head."""
    return {"embedding": factors[:1], "head": factors[1:]}.get(name, factors)


@cache
def bounded_matrices(transform: Any, factors: tuple[float, float]) -> tuple[dict[str, Any], ...]:
    """Parameters, updates and constrained updates by path; each matrix has its factor times the norm of one with
    unit rows."""

    def start(path: Any, w: Any) -> Any:
        name = path_of(path)
        if name not in ROWS:
            return w
        layers = layers_of(w, name)
        wanted = np.asarray(factors_of(name, factors)) / sizes_of_matrices(w, name)
        return jnp.asarray(layers * wanted.reshape(-1, *[1] * (layers.ndim - 1)), jnp.float32).reshape(w.shape)

    params = jax.tree_util.tree_map_with_path(start, tiny("angpt").random)
    tx, updates = transform(tiny("angpt").axes, "matrix"), small_updates(params)
    return by_path(params), by_path(updates), by_path(jax.jit(tx.update)(updates, tx.init(params), params)[0])


@every_matrix
@pytest.mark.parametrize("factors", [(0.7, 1.2), (1.2, 0.7)])
def test_a_whole_matrix_is_brought_back_and_one_inside_is_left_alone(factors, name):
    w, u, actual = (layers_of(tree[name], name) for tree in bounded_matrices(BALL, factors))
    for factor, before, update, after in zip(factors_of(name, factors), w, u, actual, strict=True):
        if factor < 1:
            np.testing.assert_array_equal(after, update)
        else:
            moved = before.astype(np.float64) + update
            expected = moved * np.sqrt(ROWS[name]) / np.linalg.norm(moved) - before
            np.testing.assert_allclose(after, expected, atol=1e-6)


@every_matrix
@pytest.mark.parametrize("factors", [(0.7, 1.2), (1.2, 0.7)])
def test_on_the_sphere_every_matrix_has_the_norm_of_one_with_unit_rows(factors, name):
    params, _, updates = bounded_matrices(SPHERE, factors)
    np.testing.assert_allclose(sizes_of_matrices(params[name] + updates[name], name), 1, atol=1e-6)


@pytest.mark.parametrize("transform", [BALL, SPHERE])
def test_scales_are_not_bounded_with_matrices(transform):
    _, updates, actual = bounded_matrices(transform, (0.7, 1.2))
    for name in updates.keys() - ROWS.keys():
        np.testing.assert_array_equal(actual[name], updates[name])


@every_matrix
def test_the_frobenius_norm_stays_bounded_while_rows_leave_the_unit_ball(name):
    steps = [params[name] for params in trained("angpt", along="matrix")]
    sizes = np.array([sizes_of_matrices(w, name) for w in steps])
    np.testing.assert_allclose(sizes[0], 1, atol=1e-6)
    assert sizes.max() <= 1 + 1e-6
    assert norms(steps[-1], INPUT_SIDE[name]).max() > 1.01


@pytest.mark.parametrize("recipe", ["angpt", "ngpt"])
def test_every_parameter_moves(recipe):
    first, last = trained(recipe)[0], trained(recipe)[-1]
    assert [name for name in first if np.abs(last[name] - first[name]).max() < 0.1] == []


AXES = {"w": Axes("up", ("embed", "feed_forward"), inputs=("embed",)), "s": Axes("alpha", ("embed",))}
PARAMS = {"w": jnp.full((4, 3), 0.25), "s": jnp.full(4, 0.5)}
GRADIENTS = {"w": jnp.full((4, 3), 30.0), "s": jnp.full(4, -40.0)}


def first_update(optim_config: OptimConfig, gradients: Any, norm: Any = "none") -> tuple[Any, Any]:
    """Updates and state of the first step at a constant learning rate of 0.01."""
    tx = optim.build(optim_config, optax.constant_schedule(0.01), Constraint(norm), AXES)
    return tx.update(gradients, tx.init(PARAMS), PARAMS)


def config(clip_norm: Any = "none", weight_decay: float = 0.0) -> OptimConfig:
    return OptimConfig(0.01, clip_norm=clip_norm, weight_decay=weight_decay, beta1=0.9)


def test_weight_decay_reaches_matrices_alone():
    updates, _ = first_update(config(weight_decay=0.1), jax.tree.map(jnp.zeros_like, GRADIENTS))
    np.testing.assert_allclose(updates["w"], -0.01 * 0.1 * PARAMS["w"], rtol=1e-6)
    np.testing.assert_array_equal(updates["s"], 0)


@pytest.mark.parametrize("clip_norm, expected", [("none", 1.0), (1e6, 1.0), (0.5, 0.5)])
def test_gradients_are_clipped_before_adam_sees_them(clip_norm, expected):
    _, state = first_update(config(clip_norm), GRADIENTS)
    norm = optax.tree.norm(GRADIENTS) if expected == 1.0 else 1.0
    moment = optax.tree.norm(optax.tree.get(state, "mu"))
    np.testing.assert_allclose(moment, (1 - 0.9) * expected * norm, rtol=1e-6)


def test_a_factor_reaches_the_weights_of_its_role_alone():
    plain, _ = first_update(config(weight_decay=0.1), GRADIENTS)
    updates, _ = first_update(replace(config(weight_decay=0.1), lr_factors={"up": 0.25}), GRADIENTS)
    np.testing.assert_allclose(updates["w"], 0.25 * plain["w"], rtol=1e-6)
    np.testing.assert_array_equal(updates["s"], plain["s"])


def test_a_factor_of_no_role_is_refused_with_the_nearest_one():
    with pytest.raises(UserError) as caught:
        optim.build(replace(config(), lr_factors={"ups": 2.0}), optax.constant_schedule(0.01), Constraint(), AXES)
    line = "optim.lr_factors.ups: is the role of no weight here, got 2.0; did you mean up?"
    assert caught.value.problems == (line,)


def test_the_constraint_comes_last():
    updates, _ = first_update(config(weight_decay=0.1), jax.tree.map(lambda g: -1e3 * g, GRADIENTS), norm="one")
    moved: Any = optax.apply_updates(PARAMS, updates)
    np.testing.assert_allclose(norms(moved["w"], (0,)), 1, atol=1e-6)
    np.testing.assert_allclose(moved["s"], 0.5 - 0.01, rtol=1e-6)
