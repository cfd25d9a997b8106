"""A step on any mesh is the step on one device, and every array lies where its axes say."""

import dataclasses
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import EVEN, Tiny, by_path, even_batch, loss_and_gradients, tiny

from angpt_jax import meshes, optim, sharding
from angpt_jax.archs import RECIPES
from angpt_jax.config import MeshConfig, OptimConfig
from angpt_jax.errors import UserError
from angpt_jax.how import How
from angpt_jax.layout import Layout
from angpt_jax.step import TrainState, first_state, make_train_step

MESHES = {
    "8 fsdp": MeshConfig(1, 8),
    "4 fsdp, 2 tensor": MeshConfig(1, -1, 2),
    "2 of each": MeshConfig(2, 2, 2),
    "8 tensor": MeshConfig(1, 1, 8),
    "8 replicas": MeshConfig(8, 1),
    "data parallel": MeshConfig(2, 4, preset="data_parallel"),
    "2 fsdp, 2 tensor, 2 context": MeshConfig(1, 2, 2, 2, preset="context"),
    "4 replicas, 2 context": MeshConfig(4, 1, 1, 2, preset="context"),
}
ALL_SPLIT = "2 fsdp, 2 tensor, 2 context"
# EVEN with heads that eight devices can share, as wide as EVEN's: of 1,500 queries and keys of two channels some are
# close to 0, where the gradient of an exact norm feels rounding ten times as much.
EIGHTH = dataclasses.replace(EVEN, width=64, heads=8)
BASIC = ["angpt", "ngpt", "gpt_plus"]  # these on every mesh, the others on that which splits all axes
GROUPED = "ngpt, grouped queries, tied embeddings"
CASES = {recipe: tiny(recipe, EIGHTH if recipe in BASIC else EVEN) for recipe in RECIPES} | {
    GROUPED: tiny("ngpt", dataclasses.replace(EVEN, heads=4, kv_heads=2), tied_embeddings=True)
}
SHARDS = {  # of each parameter of anGPT over 4 fsdp, 2 tensor: D is split in 4; heads, F and V in 2
    "embedding": (32, 16),
    "head": (16, 32),
    "layers/attention/query": (2, 16, 32),
    "layers/attention/key": (2, 16, 32),
    "layers/attention/value": (2, 16, 32),
    "layers/attention/attention_out": (2, 32, 16),
    "layers/attention_residual/alpha": (2, 64),
    "layers/mlp/up": (2, 16, 16),
    "layers/mlp/gate": (2, 16, 16),
    "layers/mlp/down": (2, 16, 16),
    "layers/mlp_residual/alpha": (2, 64),
    "logits/logit_scale": (32,),
}


def layout_of(name: str) -> Layout:
    return sharding.make_layout(MESHES[name])


def chain(model: Tiny) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The recipe's own, of a run too short for a warm-up: the first step has the whole learning rate.

    Adam's ε is 1e-5: with 1e-8 the step of a gradient that is nearly 0 is the sign of its rounding.
    """
    config = OptimConfig(1e-3, schedule="constant", epsilon=1e-5)
    config = optim.with_recommendations(config, model.model.arch.optimizer)
    schedule = optim.learning_rate(config, 4)
    return optim.build(config, schedule, model.model.arch.constraint, model.axes), schedule


@cache
def on_one_device(case: str) -> tuple[TrainState, dict[str, float]]:
    """The state after one step, and its metrics."""
    model, (tx, schedule) = CASES[case], chain(CASES[case])
    loss, gradients = loss_and_gradients(model)
    updates, opt_state = jax.jit(tx.update)(gradients, tx.init(model.random), model.random)
    metrics: Any = {"loss": loss, "grad_norm": optax.tree.norm(gradients), "lr": schedule(0)}
    metrics |= {"skipped_steps": 0, "skipped_in_a_row": 0}
    first, params = first_state(tx, model.random), optax.apply_updates(model.random, updates)
    state = dataclasses.replace(first, step=jnp.int32(1), params=params, opt_state=opt_state)
    return state, jax.tree.map(float, metrics)


@cache
def on_a_mesh(case: str, mesh_name: str) -> tuple[Any, TrainState, dict[str, float]]:
    """The shardings of the parameters, the state after one step, and its metrics."""
    model, layout, (tx, schedule) = CASES[case], layout_of(mesh_name), chain(CASES[case])
    params = sharding.parameter_shardings(model.axes, layout)
    opt_state = sharding.optimizer_shardings(tx, model.random, params, layout)
    state = first_state(tx, model.random)
    counts = dict.fromkeys(("step", "skipped", "in_a_row"), sharding.everywhere(layout))
    shardings = dataclasses.replace(state, params=params, opt_state=opt_state, **counts)
    decoder = model.model.clone(how=How(layout=layout))
    step = jax.jit(make_train_step(decoder, tx, schedule), out_shardings=(shardings, None))
    state, metrics = step(jax.device_put(state, shardings), sharding.batch_putter(layout, 8)(even_batch()))
    return params, state, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    "case, mesh", [(case, mesh) for case in CASES for mesh in MESHES if mesh == ALL_SPLIT or case in BASIC]
)
def test_a_step_on_a_mesh_is_the_step_on_one_device(case, mesh):
    expected, expected_metrics = on_one_device(case)
    shardings, actual, metrics = on_a_mesh(case, mesh)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    for path, leaf in by_path(expected).items():
        squared = "/nu/" in path  # Adam's second moment has twice the relative error of the gradient
        atol = 1e-5 if path.startswith("params") else (2e-5 if squared else 1e-5) * np.abs(leaf).max()
        np.testing.assert_allclose(by_path(actual)[path], leaf, rtol=0, atol=atol, err_msg=path)
    moments = [optax.tree.get(actual.opt_state, name) for name in ("mu", "nu")]
    for tree in (actual.params, *moments):  # all of it lies where it lay
        assert jax.tree.map(lambda x: x.sharding, tree) == shardings


def test_every_parameter_moves_in_that_step():
    """So that the comparison above is not one of two states that nothing happened to."""
    for case in CASES:
        for path, leaf in by_path(on_one_device(case)[0].params).items():
            assert np.abs(leaf - by_path(CASES[case].random)[path]).max() > 5e-4, (case, path)


@pytest.mark.parametrize("name", SHARDS)
def test_parameters_are_split_along_the_right_axes(name):
    parameter = by_path(on_a_mesh("angpt", "4 fsdp, 2 tensor")[1].params)[name]
    assert {shard.data.shape for shard in parameter.addressable_shards} == {SHARDS[name]}
    whole = by_path(on_a_mesh("angpt", "8 replicas")[1].params)[name]
    assert {shard.data.shape for shard in whole.addressable_shards} == {whole.shape}


def test_a_batch_is_split_over_replicas_and_fsdp():
    rows = even_batch()["tokens"]
    for mesh, rows_each in {"8 fsdp": 1, "2 of each": 2, "4 fsdp, 2 tensor": 2, "8 tensor": 8}.items():
        batch = sharding.batch_putter(layout_of(mesh), 8)({"tokens": rows})["tokens"]
        assert {shard.data.shape for shard in batch.addressable_shards} == {(rows_each, rows.shape[1])}
        np.testing.assert_array_equal(batch, rows)


@pytest.mark.parametrize(
    "config, devices, shape",
    [
        (MeshConfig(), 8, (1, 8, 1, 1)),
        (MeshConfig(), 1, (1, 1, 1, 1)),
        (MeshConfig(2, -1, 4), 16, (2, 2, 4, 1)),
        (MeshConfig(-1, 2, 2), 8, (2, 2, 2, 1)),
        (MeshConfig(1, 2, 2, -1), 8, (1, 2, 2, 2)),
        (MeshConfig(2, 2, 2), 8, (2, 2, 2, 1)),
        (MeshConfig(3), 8, (3, None, 1, 1)),
    ],
)
def test_minus_one_takes_the_devices_that_are_left(config, devices, shape):
    assert tuple(meshes.shape(config, devices).values()) == shape


def test_every_axis_has_a_rule_and_every_rule_an_axis():
    names = {name for model in CASES.values() for axes in by_path(model.axes).values() for name in axes.names}
    assert names | {"batch", "length"} == set(meshes.LOGICAL)


def test_processes_read_the_rows_that_their_devices_hold():
    mesh = {"fsdp": 2, "tensor": 2}
    assert sharding.rows_of_process(layout_of("8 fsdp"), 8) == (0, 1)
    assert sharding.parts_of_batch({0: {0, 4}, 1: {8, 12}}, mesh) == [(0, 4), (8, 12)]
    assert sharding.parts_of_batch({0: {8}, 1: {8}, 2: {0}, 3: {0}}, mesh) == [(0,), (8,)]  # pairs share rows
    with pytest.raises(UserError) as caught:
        sharding.parts_of_batch({0: {0, 4}, 1: {4, 8}, 2: {8, 12}}, mesh)
    assert caught.value.problems == (
        "mesh: processes must hold the same rows or different ones, got fsdp 2, tensor 2 over 3 processes; "
        "mesh.tensor * mesh.context must divide the devices of a process, or be a multiple of them",
    )


def test_rules_that_leave_matrices_whole_are_refused():
    model = tiny("angpt", EVEN)
    rules = {"embed": None, "heads": "tensor"}
    layout = sharding.make_layout(MeshConfig(1, 4, 2, rules={**rules, "feed_forward": None, "vocab": None}))
    with pytest.raises(UserError) as caught:
        sharding.check_split(model.axes, nn.meta.unbox(model.boxed), layout)
    assert caught.value.problems == (
        "mesh.rules: leave 70% of the parameters whole on every device (embedding, head, down), got batch: "
        "replica+fsdp, heads: tensor, kv_heads: tensor; at most 2%: split another of their axes, or none "
        "(data_parallel)",
    )
    for fine in (MeshConfig(1, 4, 2), MeshConfig(preset="data_parallel"), MeshConfig(1, 1, 8)):
        sharding.check_split(model.axes, nn.meta.unbox(model.boxed), sharding.make_layout(fine))
