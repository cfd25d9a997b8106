"""Analytic FLOPs. XLA's cost analysis counts the body of a scan once, so MFU is never taken from it."""

from typing import Any

import jax

from angpt_jax import chips


def parameter_count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def product_weights(params: Any, axes: Any, tied_embeddings: bool) -> int:
    """Weights that a token is multiplied with: all matrices but the embedding, which is a look-up unless it is the
    head too."""
    sizes = jax.tree.map(
        lambda w, axis: w.size if axis.is_matrix and (tied_embeddings or axis.role != "embedding") else 0, params, axes
    )
    return sum(jax.tree.leaves(sizes))


def utilization(tflops_per_device: float) -> float | None:
    """MFU on the devices here, or None for a device that is not in the table."""
    chip = chips.find(jax.devices()[0].device_kind)
    return None if chip is None else tflops_per_device / chip.tflops
