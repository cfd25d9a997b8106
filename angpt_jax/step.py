"""One optimizer step as a pure function of the state and a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import Array

from angpt_jax import ops
from angpt_jax.measure import COLLECTION

# tokens and segments, int32 (B, L+1): targets are the tokens shifted by one; weights, float32 (B, L): which count
Batch = dict[str, Array]


@flax.struct.dataclass
class TrainState:
    """Steps done, float32 master parameters, optimizer state."""

    step: Array
    params: Any
    opt_state: Any


def init_state(model: nn.Module, tx: optax.GradientTransformation, seed: Array | int, context: int) -> TrainState:
    """The state before the first step; jit it (an eager init of a scanned model is slow)."""
    tokens_BL = jnp.zeros((1, context), jnp.int32)
    params = nn.meta.unbox(model.init(jax.random.key(seed), tokens_BL, tokens_BL))["params"]
    return first_state(tx, params)


def first_state(tx: optax.GradientTransformation, params: Any) -> TrainState:
    """The state before the first step of these parameters."""
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))


def nats(model: nn.Module, params: Any, batch: Batch) -> Array:
    """Cross-entropy nats_BL of every target of the batch."""
    return _nats_and_measured(model, params, batch, measured=False)[0]


def _nats_and_measured(model: nn.Module, params: Any, batch: Batch, measured: bool) -> tuple[Array, Any]:
    """nats_BL, and what the model tells of its insides (nothing unless `measured`)."""
    tokens, segments = batch["tokens"], batch["segments"]
    mutable = [COLLECTION] if measured else []
    logits_BLV, seen = model.apply({"params": params}, tokens[:, :-1], segments[:, :-1], mutable=mutable)
    return ops.cross_entropy(cast(Array, logits_BLV), tokens[:, 1:]), seen.get(COLLECTION, {})


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
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    """state, batch → state after one step, and the loss, gradient norm and learning rate of that step; with `observe`
    also what that makes of the step, as `instruments`."""

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        def mean_nats(params: Any) -> tuple[Array, Any]:
            nats_BL, measured = _nats_and_measured(model, params, batch, measured=observe is not None)
            return jnp.sum(nats_BL * batch["weights"]) / jnp.sum(batch["weights"]), measured

        (loss, measured), gradients = jax.value_and_grad(mean_nats, has_aux=True)(state.params)
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradients), "lr": schedule(state.step)}
        params = optax.apply_updates(state.params, updates)
        if observe:
            metrics["instruments"] = observe(Observation(state.params, params, gradients, opt_state, measured))
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step
