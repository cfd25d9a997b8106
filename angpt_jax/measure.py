"""What a model tells of its insides while it runs, for the instruments: a flax collection that is off by default.

A measurement is only computed where the collection is mutable: `model.apply(…, mutable=[measure.COLLECTION])`.
Off, it leaves nothing in the program.
"""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

COLLECTION = "instruments"
Measured = dict[str, Array]


def measure(module: nn.Module, name: str, compute: Callable[[], Measured]) -> None:
    """Keeps `compute()` as `name` of this module, one value per layer under a scan."""
    if module.is_mutable_collection(COLLECTION) and not module.is_initializing():
        module.sow(COLLECTION, name, compute(), init_fn=dict, reduce_fn=lambda _, new: new)


def norms(x: Array) -> Measured:
    """Mean and standard deviation of ‖x‖ over all axes but the last (tokens, heads)."""
    return spread(jnp.linalg.norm(x.astype(jnp.float32), axis=-1))


def spread(x: Array) -> Measured:
    """Mean and standard deviation of all entries."""
    return {"mean": jnp.mean(x), "std": jnp.std(x)}
