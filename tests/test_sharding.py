"""A step on any mesh is the step on one device, and every array lies where its axes say."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import by_path, random_batch, tiny
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from angpt_jax import optim, sharding
from angpt_jax.arch import Sizes
from angpt_jax.config import MeshConfig, OptimConfig
from angpt_jax.step import TrainState, make_train_step

SIZES = Sizes(width=16, layers=2, heads=2, feed_forward=32, vocab=64)
BATCH, LENGTH = 8, 12
MESHES = {"8x1x1": MeshConfig(8, 1, 1), "2x2x2": MeshConfig(2, 2, 2), "1x4x2": MeshConfig(1, -1, 2)}
RECIPES = ["angpt", "ngpt", "gpt_plus"]
SHARDS = {  # of each parameter of anGPT on 1x4x2: D is split in 4; heads, F and V in 2
    "embedding": (32, 4),
    "head": (4, 32),
    "layers/attention/query": (2, 4, 1, 8),
    "layers/attention/key": (2, 4, 1, 8),
    "layers/attention/value": (2, 4, 1, 8),
    "layers/attention/attention_out": (2, 1, 8, 4),
    "layers/attention_residual/alpha": (2, 4),
    "layers/mlp/up": (2, 4, 16),
    "layers/mlp/gate": (2, 4, 16),
    "layers/mlp/down": (2, 16, 4),
    "layers/mlp_residual/alpha": (2, 4),
    "logits/logit_scale": (32,),
}


def mesh_of(name: str) -> Mesh:
    if name == "1 device":
        return jax.make_mesh((1, 1, 1), sharding.MESH_AXES, (AxisType.Auto,) * 3, devices=jax.devices()[:1])
    return sharding.make_mesh(MESHES[name])


@cache
def one_step(recipe: str, mesh_name: str) -> tuple[Any, TrainState, dict[str, float]]:
    """The shardings of the parameters, the state after one step with the recipe's own chain, and its metrics."""
    model, mesh = tiny(recipe, SIZES), mesh_of(mesh_name)
    config = optim.with_recommendations(OptimConfig(1e-3, schedule="constant"), model.model.arch.optimizer)
    schedule = optim.learning_rate(config, 100)
    tx = optim.build(config, schedule, model.model.arch.constraint, model.axes)
    params = sharding.parameter_shardings(model.axes, mesh)
    opt_state = sharding.optimizer_shardings(tx, model.random, params, mesh)
    state = TrainState(jnp.int32(0), model.random, tx.init(model.random))
    shardings = dataclasses.replace(
        state, step=NamedSharding(mesh, PartitionSpec()), params=params, opt_state=opt_state
    )
    state = jax.device_put(state, shardings)
    batch = sharding.batch_putter(mesh)(random_batch(SIZES, BATCH, LENGTH))
    step = jax.jit(make_train_step(model.model, tx, schedule), out_shardings=(shardings, None))
    state, metrics = step(state, batch)
    return params, state, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_on_a_mesh_is_the_step_on_one_device(recipe, mesh):
    _, expected, expected_metrics = one_step(recipe, "1 device")
    shardings, actual, metrics = one_step(recipe, mesh)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    for path, leaf in by_path(expected.params).items():
        np.testing.assert_allclose(by_path(actual.params)[path], leaf, rtol=0, atol=1e-5, err_msg=path)
    moments = [optax.tree.get(actual.opt_state, name) for name in ("mu", "nu")]
    for tree in (actual.params, *moments):  # all of it lies where it lay
        assert jax.tree.map(lambda x: x.sharding, tree) == shardings


@pytest.mark.parametrize("name", SHARDS)
def test_parameters_are_split_along_the_right_axes(name):
    parameter = by_path(one_step("angpt", "1x4x2")[1].params)[name]
    assert {shard.data.shape for shard in parameter.addressable_shards} == {SHARDS[name]}
    whole = by_path(one_step("angpt", "8x1x1")[1].params)[name]
    assert {shard.data.shape for shard in whole.addressable_shards} == {whole.shape}


def test_a_batch_is_split_over_replicas_and_fsdp():
    rows = random_batch(SIZES, BATCH, LENGTH)["tokens"]
    for mesh, rows_each in {"8x1x1": 1, "2x2x2": 2, "1x4x2": 2}.items():
        batch = sharding.batch_putter(mesh_of(mesh))({"tokens": rows})["tokens"]
        assert {shard.data.shape for shard in batch.addressable_shards} == {(rows_each, LENGTH + 1)}
        np.testing.assert_array_equal(batch, rows)


@pytest.mark.parametrize(
    "config, devices, shape",
    [
        (MeshConfig(), 8, (1, 8, 1)),
        (MeshConfig(), 1, (1, 1, 1)),
        (MeshConfig(2, -1, 4), 16, (2, 2, 4)),
        (MeshConfig(-1, 2, 2), 8, (2, 2, 2)),
        (MeshConfig(2, 2, 2), 8, (2, 2, 2)),
    ],
)
def test_minus_one_takes_the_devices_that_are_left(config, devices, shape):
    assert sharding.mesh_shape(config, devices) == shape


def test_every_axis_has_a_rule():
    names: set[Any] = {
        name for recipe in RECIPES for axes in by_path(tiny(recipe).axes).values() for name in axes.names
    }
    assert names == set(sharding.RULES)
