"""What a training step shows of the inside: norms, scales, bounds, updates, moments, gradients, layer by layer.

A record is a tree of arrays, one entry per layer, or a single one for what the model has once:

    norms, entropy, alpha, nu_alpha, logit_scale    name → {mean, std} over tokens (over channels for α, ν(α), s_Z)
    on_bound                                        matrix → share of its vectors that sit on the constraint's bound
    update_ratio, update_angle                      matrix → ‖ΔW‖/‖W‖, and the angle between W and W + ΔW in degrees
    first_moment_variance                           parameter → variance over the entries of Adam's first moment
    gradient_norm                                   layers, embedding, head, … → norm of the gradient
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from angpt_jax.arch import Constraint
from angpt_jax.axes import LAYERS, Axes
from angpt_jax.optim import squared_norms
from angpt_jax.step import Observation

Record = dict[str, dict[str, Any]]
ON_BOUND = 1 - 1e-4  # a projected row has norm 1 to about 1e-7; rows further inside than this are free
NORMS = ("attention_stream", "mlp_stream", "attention_branch", "mlp_branch", "q", "k", "u", "a", "final_stream")


def make_observer(axes: Any, constraint: Constraint) -> Callable[[Observation], Record]:
    """The record of a step of parameters annotated by `axes`."""

    def observe(step: Observation) -> Record:
        moved = jax.tree.map(jnp.subtract, step.after, step.before)
        record = _measured(step.measured) | {
            "update_ratio": _matrices(_update_ratio, axes, step.before, moved),
            "update_angle": _matrices(_update_angle, axes, step.before, step.after),
            "first_moment_variance": _by_path(_variance, axes, optax.tree.get(step.opt_state, "mu")),
            "gradient_norm": _gradient_norm(axes, step.gradients),
        }
        if constraint.norm != "none":
            record["on_bound"] = _matrices(lambda axis, w: _on_bound(axis, w, constraint), axes, step.after)
        return {name: values for name, values in record.items() if values}

    return observe


def _measured(measured: Any) -> Record:
    """The model's own measurements, sorted by kind."""
    layers = measured["layers"]
    everywhere = measured | layers | layers["attention"] | layers["mlp"]
    residuals = {name: layers.get(f"{name}_residual", {}) for name in ("attention", "mlp")}
    record = {
        "norms": {name: everywhere[name] for name in NORMS},
        "entropy": {"attention": layers["attention"]["entropy"]},
    }
    if "logits" in measured:
        record["logit_scale"] = {"head": measured["logits"]["logit_scale"]}
    for kind in ("alpha", "nu_alpha"):
        record[kind] = {name: residual[kind] for name, residual in residuals.items() if kind in residual}
    return jax.tree.map(jnp.atleast_1d, record)


def _by_path(compute: Callable[..., Any], axes: Any, *trees: Any) -> dict[str, Any]:
    """path → compute(axes, leaves) of each parameter."""
    leaves = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): compute(axis, *values)
        for (path, axis), values in zip(jax.tree_util.tree_leaves_with_path(axes), leaves, strict=True)
    }


def _matrices(compute: Callable[..., Array], axes: Any, *trees: Any) -> dict[str, Array]:
    """path → compute(axes, leaves) of each matrix."""

    def of_a_matrix(axis: Axes, *values: Array) -> Array | None:
        return compute(axis, *values) if axis.is_matrix else None

    return {path: value for path, value in _by_path(of_a_matrix, axes, *trees).items() if value is not None}


def _within(axis: Axes) -> tuple[int, ...]:
    """The axes of one layer's array."""
    return tuple(i for i, name in enumerate(axis.names) if name != LAYERS)


def _norm(axis: Axes, x: Array) -> Array:
    """Norm of each layer's array."""
    return jnp.atleast_1d(jnp.sqrt(jnp.sum(jnp.square(x), axis=_within(axis))))


def _update_ratio(axis: Axes, before: Array, moved: Array) -> Array:
    return _norm(axis, moved) / _norm(axis, before)


def _update_angle(axis: Axes, before: Array, after: Array) -> Array:
    """2 asin(‖ŵ' − ŵ‖/2), which keeps its digits where the angle is small."""

    def unit(w: Array) -> Array:
        return w / jnp.sqrt(jnp.sum(jnp.square(w), axis=_within(axis), keepdims=True))

    return jnp.degrees(2 * jnp.arcsin(_norm(axis, unit(after) - unit(before)) / 2))


def _variance(axis: Axes, moment: Array) -> Array:
    return jnp.atleast_1d(jnp.var(moment, axis=_within(axis)))


def _on_bound(axis: Axes, w: Array, constraint: Constraint) -> Array:
    on_it = squared_norms(w, axis, constraint.along) >= ON_BOUND**2
    return jnp.atleast_1d(jnp.mean(on_it, axis=_within(axis), dtype=jnp.float32))


def _gradient_norm(axes: Any, gradients: Any) -> dict[str, Array]:
    """Of all parameters of each layer, and of each parameter outside of them by the name of its module."""
    squares: dict[str, Array] = {}
    for path, square in _by_path(lambda axis, g: jnp.square(_norm(axis, g)), axes, gradients).items():
        group = path.partition("/")[0]
        squares[group] = squares.get(group, jnp.zeros(())) + square
    return {group: jnp.sqrt(square) for group, square in squares.items()}
