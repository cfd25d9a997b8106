"""Whether a state is the one that was saved: the manifest lists path, shape, dtype and checksum of every leaf.

written = manifest(state, {"fingerprint": ...})          # JSON; it holds a digest of itself
differences(written, abstract)                           # before loading: [] or lines
wrong_leaves(written, state)                             # after loading: [] or paths
"""

import hashlib
import json
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

FORMAT = 1  # of the manifest
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes of an element

Manifest = dict[str, Any]


def manifest(state: Any, data: dict[str, Any]) -> Manifest:
    """What is stored with `state` to know it again; `data` goes along."""
    leaves = [
        [*leaf, checksum] for leaf, checksum in zip(described(state).items(), checksums(state).tolist(), strict=True)
    ]
    body = {"format": FORMAT, "leaves": leaves, "data": data}
    return body | {"sha256": _digest(body)}


def is_whole(stored: Any) -> bool:
    """Whether a manifest is as it was written."""
    return isinstance(stored, dict) and stored.get("sha256") == _digest(
        {key: value for key, value in stored.items() if key != "sha256"}
    )


def differences(stored: Manifest, abstract: Any, under: str = "") -> list[str]:
    """A line for each leaf that is not in both trees with the same shape and dtype; of what was stored, only paths that
    begin with `under` count."""
    saved = {path: kind for path, kind, _ in stored["leaves"] if path.startswith(under)}
    wanted = described(abstract)
    paths = [path for path in saved | wanted if saved.get(path) != wanted.get(path)]
    return [f"{path} (saved: {saved.get(path, 'none')}, wanted: {wanted.get(path, 'none')})" for path in paths]


def wrong_leaves(stored: Manifest, state: Any) -> list[str]:
    """Paths of the leaves of `state`, which has the stored tree or a part of it, that don't have the stored
    checksum."""
    by_path = {path: checksum for path, _, checksum in stored["leaves"]}
    return [
        path
        for path, checksum in zip(described(state), checksums(state).tolist(), strict=True)
        if by_path[path] != checksum
    ]


def described(tree: Any) -> dict[str, str]:
    """Dtype and shape by path, such as `float32[2, 32]`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def checksums(tree: Any) -> np.ndarray:
    """uint32 for each leaf: Σ mix(bits of an element, its index), wrapped around.

    The same on every mesh, as integers may be added in any order; `mix` is one to one in the bits, so that a change of
    one element is always seen. A collective: all processes of a run come.
    """
    lies = jax.tree.leaves(tree)[0].sharding
    everywhere = NamedSharding(lies.mesh, PartitionSpec()) if isinstance(lies, NamedSharding) else None
    return np.asarray(_summing(everywhere)(tree))


@cache
def _summing(everywhere: NamedSharding | None) -> Any:
    def sums(tree: Any) -> Array:
        return jnp.stack([_checksum(leaf) for leaf in jax.tree.leaves(tree)])

    return jax.jit(sums, out_shardings=everywhere)


def _checksum(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(leaf, UNSIGNED[leaf.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        stride = jnp.uint32(math.prod(bits.shape[axis + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * stride
    return jnp.sum(_mix(bits ^ (index * jnp.uint32(0x9E3779B9))), dtype=jnp.uint32)


def _mix(x: Array) -> Array:
    """The finalizer of MurmurHash3 (Appleby 2011): every bit of the result hangs on every bit of `x`."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
