"""One optimizer step as a pure function of the state and a batch.

Equal states and batches give equal bits wherever the compiled step is the same: same packages, XLA flags, kind and
number of devices, mesh, and (on a CPU, whose threads share out the sums) number of cores. So two runs of one config
agree bit for bit, and so do a run and one that was killed and resumed. On another mesh, or with another number of
processes, losses agree to about 1e-6. On a GPU, XLA must be told: `XLA_FLAGS=--xla_gpu_deterministic_ops=true`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from angpt_jax.measure import COLLECTION

# tokens and segments, int32 (B, L+1): targets are the tokens shifted by one; weights, float32 (B, L): which count
Batch = dict[str, Array]


@flax.struct.dataclass
class TrainState:
    """Where a run is.

    Args:
        step: steps done, bad ones too: the position in the data
        params: float32 master parameters
        opt_state: the optimizer's; its counts, and so the learning rate, stand still on a bad step
        skipped: steps that were bad: loss or gradient norm not finite
        in_a_row: those of them since the last good one
    """

    step: Array
    params: Any
    opt_state: Any
    skipped: Array
    in_a_row: Array


def init_state(model: nn.Module, tx: optax.GradientTransformation, seed: Array | int, context: int) -> TrainState:
    """The state before the first step; jit it (an eager init of a scanned model is slow)."""
    tokens_BL = jnp.zeros((1, context), jnp.int32)
    params = nn.meta.unbox(model.init(jax.random.key(seed), tokens_BL, tokens_BL))["params"]
    return first_state(tx, params)


def first_state(tx: optax.GradientTransformation, params: Any) -> TrainState:
    """The state before the first step of these parameters."""
    none = jnp.zeros((), jnp.int32)
    return TrainState(none, params, tx.init(params), none, none)


def nats(model: nn.Module, params: Any, batch: Batch) -> Array:
    """Cross-entropy nats_BL of every target of the batch."""
    return _nats_and_measured(model, params, batch, measured=False)[0]


def _nats_and_measured(model: nn.Module, params: Any, batch: Batch, measured: bool) -> tuple[Array, Any]:
    """nats_BL, and what the model tells of its insides (nothing unless `measured`)."""
    tokens, segments = batch["tokens"], batch["segments"]
    nats_BL, seen = model.apply(
        {"params": params},
        tokens[:, :-1],
        segments[:, :-1],
        tokens[:, 1:],
        mutable=[COLLECTION] if measured else [],
        method="nats",
    )
    return cast(Array, nats_BL), seen.get(COLLECTION, {})


@dataclass(frozen=True)
class Observation:
    """What one step has in hand: trees of parameters before and after it, gradients, and the model's measurements."""

    before: Any
    after: Any
    gradients: Any
    opt_state: optax.OptState
    measured: Any


def make_train_step(
    model: nn.Module,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    observe: Callable[[Observation], Any] | None = None,
    micro_batches: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """state, batch → state after one step, and the loss, gradient norm and learning rate of that step, and how many
    steps were skipped, in all and in a row; with `observe` also what that makes of the step, as `instruments`.

    A step whose loss or gradient norm is not finite is skipped: only the counts move, and training goes on as if the
    batch had not been there. `micro_batches` parts of the batch are computed one after the other; the step is that of
    the whole batch, and one bad part makes it bad.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        total = jnp.sum(batch["weights"])

        def share_of_mean(params: Any, part: Batch) -> tuple[Array, Any]:
            nats_BL, measured = _nats_and_measured(model, params, part, measured=observe is not None)
            return jnp.sum(nats_BL * part["weights"]) / total, measured

        slope = partial(jax.value_and_grad(share_of_mean, has_aux=True), state.params)
        (loss, measured), gradients = _added_up(slope, batch, micro_batches)
        norm = optax.tree.norm(gradients)
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        made = optax.apply_updates(state.params, updates), opt_state
        params, opt_state = jax.tree.map(partial(jnp.where, good), made, (state.params, state.opt_state))
        skipped, in_a_row = state.skipped + ~good, jnp.where(good, 0, state.in_a_row + 1)
        metrics = {"loss": loss, "grad_norm": norm, "lr": schedule(state.step - state.skipped)}
        metrics |= {"skipped_steps": skipped, "skipped_in_a_row": in_a_row}
        if observe:
            metrics["instruments"] = observe(Observation(state.params, params, gradients, opt_state, measured))
        return TrainState(state.step + 1, params, opt_state, skipped, in_a_row), metrics

    return train_step


@jax.jit
def is_finite(state: Any) -> Array:
    """Whether all of a state, or of a part of it, is. A good step can end elsewhere: a finite gradient times a learning
    rate of 1e38."""
    numbers = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in numbers]))


Slope = tuple[tuple[Array, Any], Any]  # (loss, what the model measured), gradients


def _added_up(slope: Callable[[Batch], Slope], batch: Batch, micro_batches: int) -> Slope:
    """Losses and gradients of the parts of the batch, added up in float32; of what was measured, the mean."""
    if micro_batches == 1:
        return slope(batch)

    def add(total: Any, part: Batch) -> tuple[Any, Any]:
        (loss, measured), gradients = slope(part)
        return jax.tree.map(jnp.add, total, (loss, gradients)), measured

    parts = jax.tree.map(partial(_parts, micro_batches), batch)
    (loss, _), gradients = jax.eval_shape(slope, jax.tree.map(lambda x: x[0], parts))
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (loss, gradients))
    (loss, gradients), measured = jax.lax.scan(add, nothing, parts)
    return (loss, jax.tree.map(lambda x: jnp.mean(x, axis=0), measured)), gradients


def _parts(count: int, x: Array) -> Array:
    """(B, …) → (count, B/count, …). Rows that lie side by side go to different parts, so that each device has its share
    of every part and none moves."""
    return jnp.moveaxis(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 1, 0)
