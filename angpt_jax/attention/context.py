"""Attention on a mesh, each device by itself: its sequences, its heads, its part of the window."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from angpt_jax import ops
from angpt_jax.layout import Layout

Local = Callable[..., Array]  # *shared, q_BLHK, k_BMGK, v_BMGK, segments_BM | None, queries_L | None → y_BLHK


def on_each_device(
    local: Local,
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array | None,
    layout: Layout,
    shared: tuple[Any, ...] = (),
    shared_specs: tuple[Any, ...] = (),
) -> Array:
    """y_BLHK, split as q is: `local` of a device's queries and of the keys and values of the whole window.

    Where a window is split, keys, values and segments are gathered along it, and their gradients are brought back to
    parts: no device holds another's queries, or scores of them. The work of a causal kernel isn't even: the last part
    sees almost all keys, the mean is half of them.
    """
    axes = layout.over("length") if layout.parts("length") > 1 else ()

    def on_device(shared: Any, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array | None) -> Array:
        if not axes:
            return local(*shared, q_BLHK, k_BLGK, v_BLGK, segments_BL, None)

        def whole(x: Array) -> Array:
            return jax.lax.all_gather(x, axes, axis=1, tiled=True)

        length = q_BLHK.shape[1]
        queries_L = jax.lax.axis_index(axes) * length + jnp.arange(length)
        segments_BM = None if segments_BL is None else whole(segments_BL)
        return local(*shared, q_BLHK, whole(k_BLGK), whole(v_BLGK), segments_BM, queries_L)

    key_heads = math.lcm(k_BLGK.shape[2], layout.parts("heads"))  # each device needs the keys of its own queries
    k_BLGK, v_BLGK = (ops.repeat_heads(x, key_heads) for x in (k_BLGK, v_BLGK))
    spec = layout.spec("batch", "length", "heads", None)
    segments_spec = PartitionSpec() if segments_BL is None else layout.spec("batch", "length")
    mapped = jax.shard_map(
        on_device,
        mesh=layout.mesh,
        in_specs=(shared_specs, spec, spec, spec, segments_spec),
        out_specs=spec,
        check_vma=False,  # the kernels don't say over which axes their results vary
    )
    return mapped(shared, q_BLHK, k_BLGK, v_BLGK, segments_BL)
