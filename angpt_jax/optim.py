"""The Optax chain: (clip) → Adam → (decay) → learning rate (by role) → constraint. The constraint is the last link, so
that `params + update` lies in the set that the architecture asks for."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from angpt_jax.arch import Constraint, Recommended
from angpt_jax.axes import LAYERS, Along, Axes
from angpt_jax.config import OptimConfig, phase_steps
from angpt_jax.errors import UserError
from angpt_jax.places import nearest


def with_recommendations(optim: OptimConfig, recommended: Recommended) -> OptimConfig:
    """`optim` with every field that is null for "what the recipe recommends" filled in."""
    warmup = recommended.warmup_fraction if optim.warmup_steps is None else None
    return replace(
        optim,
        warmup_fraction=warmup if optim.warmup_fraction is None else optim.warmup_fraction,
        weight_decay=recommended.weight_decay if optim.weight_decay is None else optim.weight_decay,
        clip_norm=recommended.clip_norm if optim.clip_norm is None else optim.clip_norm,
    )


def learning_rate(optim: OptimConfig, steps: int) -> optax.Schedule:
    """step (from 0) → learning rate: linear warm-up, then cosine, wsd or constant; `end_lr_fraction` at `steps`."""
    peak, end = optim.peak_lr, optim.peak_lr * optim.end_lr_fraction
    warmup = phase_steps(optim.warmup_steps, optim.warmup_fraction, steps)
    decay = phase_steps(optim.decay_steps, optim.decay_fraction, steps)
    if optim.schedule == "cosine":
        body = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=optim.end_lr_fraction)
    elif optim.schedule == "wsd":
        body = optax.linear_schedule(peak, end, decay, transition_begin=max(steps - warmup - decay, 0))
    else:
        body = optax.constant_schedule(peak)
    if not warmup:
        return body
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), body], [warmup])


def build(
    optim: OptimConfig, schedule: optax.Schedule, constraint: Constraint, axes: Any
) -> optax.GradientTransformation:
    """The whole chain for parameters annotated by `axes`; `optim` has no null left (`with_recommendations`)."""
    links = []
    if optim.clip_norm not in ("none", None):
        links.append(optax.clip_by_global_norm(optim.clip_norm))
    links.append(kept_as(optim.moments_dtype, optax.scale_by_adam(optim.beta1, optim.beta2, optim.epsilon)))
    if optim.weight_decay:
        links.append(optax.add_decayed_weights(optim.weight_decay, mask=jax.tree.map(lambda a: a.is_matrix, axes)))
    links.append(optax.scale_by_learning_rate(schedule))
    if optim.lr_factors:
        links.append(scale_by_role(optim.lr_factors, axes))
    if constraint.norm == "at_most_one":
        links.append(project_rows_to_unit_ball(axes, constraint.along))
    elif constraint.norm == "one":
        links.append(normalize_rows_to_unit_sphere(axes, constraint.along))
    return optax.chain(*links)


def scale_by_role(factors: Mapping[str, float], axes: Any) -> optax.GradientTransformation:
    """Multiplies the update of each weight by the factor of its role; 1 where `factors` has none.

    Adam moves every entry by about the learning rate, so that an output of fan-in n moves, where the entries agree, by
    about lr · n of itself: with {down: D/F} all maps of a decoder move alike (µP's rule for Adam, arXiv 2203.03466).
    """
    roles = sorted({axis.role for axis in jax.tree.leaves(axes)})
    unknown = [role for role in factors if role not in roles]
    if unknown:
        rule = "is the role of no weight here"
        raise UserError(
            *(f"optim.lr_factors.{role}: {rule}, got {factors[role]}; {nearest(role, roles)}" for role in unknown)
        )

    def scaled(updates: Any, params: Any | None = None) -> Any:
        return jax.tree.map(lambda axis, update: update * factors.get(axis.role, 1.0), axes, updates)

    return optax.stateless(scaled)


def kept_as(dtype: str, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, its state kept in `dtype` between steps and computed with in float32."""
    if dtype == "float32":
        return inner

    def cast(state: Any, to: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def update(updates: Any, state: Any, params: Any | None = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(inner.init(params), dtype), update)


def project_rows_to_unit_ball(axes: Any, along: Along = "inputs") -> optax.GradientTransformation:
    r"""Modifies the updates to keep every row of every matrix inside the unit ball.

    For a row :math:`w` of a matrix and its update :math:`u`, the new update is

    .. math::
      u' = \frac{w + u}{\max(1, \|w + u\|_2)} - w,

    so that a row that would leave the ball is scaled back to norm one, and every other update is left alone, bit for
    bit. Norms are taken in float32. Learnable scales (no input side) are not constrained.

    Args:
      axes: a tree like the parameters with an :class:`angpt_jax.axes.Axes` for each.
      along: which vectors are rows: ``"inputs"`` (rows of W, the vectors that meet the input), ``"embed"``, or
        ``"matrix"``: one matrix as a whole, whose Frobenius norm is held to that of a matrix with unit rows.

    Returns:
      A :class:`optax.GradientTransformation`. Its ``update`` needs ``params`` and comes last in a chain.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from angpt_jax.axes import Axes
      >>> from angpt_jax.optim import project_rows_to_unit_ball
      >>> axes = {"up": Axes("up", ("embed", "feed_forward"), inputs=("embed",))}
      >>> params = {"up": jnp.array([[0.6, 0.3], [0.8, 0.4]])}  # rows of W are columns of the kernel
      >>> tx = optax.chain(optax.sgd(1.0), project_rows_to_unit_ball(axes))
      >>> gradients = {"up": jnp.array([[-0.6, -0.1], [-0.8, 0.0]])}
      >>> updates, _ = tx.update(gradients, tx.init(params), params)
      >>> print(optax.apply_updates(params, updates)["up"])
      [[0.6 0.4]
       [0.8 0.4]]

    References:
      Franke et al., `Learning in Compact Spaces with Approximately Normalized Transformer
      <https://arxiv.org/abs/2505.22014>`_, 2025
    """

    def project(w: Array, u: Array, moved: Array, square: Array) -> Array:
        return jnp.where(square > 1, moved * jax.lax.rsqrt(square) - w, u)

    return _constrain(project, axes, along)


def normalize_rows_to_unit_sphere(axes: Any, along: Along = "embed") -> optax.GradientTransformation:
    r"""Modifies the updates to keep every row of every matrix on the unit sphere.

    For a row :math:`w` of a matrix and its update :math:`u`, the new update is

    .. math::
      u' = \frac{w + u}{\|w + u\|_2} - w.

    Norms are taken in float32. Learnable scales (no input side) are not constrained.

    Args:
      axes: a tree like the parameters with an :class:`angpt_jax.axes.Axes` for each.
      along: which vectors are rows: ``"embed"`` (the embedding dimension, as in nGPT), ``"inputs"`` or ``"matrix"``.

    Returns:
      A :class:`optax.GradientTransformation`. Its ``update`` needs ``params`` and comes last in a chain.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from angpt_jax.axes import Axes
      >>> from angpt_jax.optim import normalize_rows_to_unit_sphere
      >>> axes = {"down": Axes("down", ("feed_forward", "embed"), inputs=("feed_forward",))}
      >>> params = {"down": jnp.array([[0.6, 0.8], [0.0, 1.0]])}
      >>> tx = optax.chain(optax.sgd(1.0), normalize_rows_to_unit_sphere(axes))
      >>> updates, _ = tx.update({"down": jnp.array([[0.6, 0.3], [0.0, 0.5]])}, tx.init(params), params)
      >>> print(optax.apply_updates(params, updates)["down"])
      [[0. 1.]
       [0. 1.]]

    References:
      Loshchilov et al., `nGPT: Normalized Transformer with Representation Learning on the Hypersphere
      <https://arxiv.org/abs/2410.01131>`_, 2024
    """

    def normalize(w: Array, u: Array, moved: Array, square: Array) -> Array:
        return moved * jax.lax.rsqrt(jnp.maximum(square, jnp.finfo(jnp.float32).tiny)) - w

    return _constrain(normalize, axes, along)


def _constrain(
    constrained: Callable[[Array, Array, Array, Array], Array], axes: Any, along: Along
) -> optax.GradientTransformation:
    """`constrained(w, u, w + u, squared norms of its rows)`, in float32, for every matrix; other updates pass."""

    def update(updates: Any, state: optax.OptState, params: Any | None = None) -> tuple[Any, optax.OptState]:
        if params is None:
            raise ValueError("this transformation needs params: pass them to update")

        def one(axis: Axes, w: Array, u: Array) -> Array:
            if not axis.is_matrix:
                return u
            w, dtype, u = w.astype(jnp.float32), u.dtype, u.astype(jnp.float32)
            moved = w + u
            return constrained(w, u, moved, squared_norms(moved, axis, along)).astype(dtype)

        return jax.tree.map(one, axes, params, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def squared_norms(w: Array, axis: Axes, along: Along) -> Array:
    """Σ w² over each vector that `along` names, axes kept; of a whole matrix: the mean over its rows."""
    square = jnp.sum(jnp.square(w), axis=axis.along(along), keepdims=True)
    return square / rows(w.shape, axis) if along == "matrix" else square


def rows(shape: tuple[int, ...], axis: Axes) -> int:
    """Number of rows of W in one layer: its entries that do not lie on the input side."""
    return math.prod(
        size for size, name in zip(shape, axis.names, strict=True) if name != LAYERS and name not in axis.inputs
    )
