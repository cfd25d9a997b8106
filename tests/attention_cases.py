"""What the tests of attention share: queries, keys and values, meshes, and values with gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding

from angpt_jax.attention import Implementation, attend, splash
from angpt_jax.layout import Layout

SCALE = 0.7  # not 1/√K
MESH = ("fsdp", "tensor", "context")
HEADS = "heads", ("tensor",)
RULES = (("batch", ("fsdp",)), HEADS, ("kv_heads", ("tensor",)), ("length", ("context",)))
Attention = Callable[..., Array]


def layout(*shape: int, rules: Any = RULES, devices: Sequence[Any] | None = None) -> Layout:
    """Batch, heads and length over so many devices each."""
    mesh = jax.make_mesh(shape, MESH, axis_types=(AxisType.Auto,) * len(shape), devices=devices)
    return Layout(mesh, rules)


def lies(layout: Layout, *names: str | None) -> NamedSharding:
    """The sharding of an array with these axes."""
    return layout.sharding(*names)


def text_of(compiled: Any) -> str:
    """The program of the devices."""
    return compiled.as_text()


def attention(implementation: Implementation, scale: float, layout: Layout) -> Attention:
    """(q, k, v, segments) → y; the TPU's kernel is interpreted."""

    def compute(q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array | None) -> Array:
        if implementation == "splash":
            return splash.attention(q_BLHK, k_BLGK, v_BLGK, segments_BL, scale, layout, interpret=True)
        return attend(implementation, q_BLHK, k_BLGK, v_BLGK, segments_BL, scale, layout)

    return compute


def with_gradients(compute: Attention) -> Callable[..., Any]:
    """(q, k, v, segments, dy) → (y, dq, dk, dv)."""

    def both(q: Array, k: Array, v: Array, segments: Array | None, dy: Array) -> tuple[Array, ...]:
        y, backward = jax.vjp(lambda q, k, v: compute(q, k, v, segments), q, k, v)
        return (y, *backward(dy))

    return both


def arrays(batch: int, length: int, heads: int, key_heads: int, width: int, dtype: Any = jnp.float32) -> list[Array]:
    """q, k, v and dy of independent unit normal numbers."""
    rng = np.random.default_rng(0)
    counts = heads, key_heads, key_heads, heads
    return [jnp.asarray(rng.standard_normal((batch, length, count, width)), dtype) for count in counts]


def documents(batch: int, length: int) -> Array:
    """segments_BL: three documents in each row, which end anywhere."""
    return jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 3, (batch, length)), axis=1), jnp.int32)
