"""One interface for attention, several implementations."""

from typing import Literal

from jax import Array

from angpt_jax import ops
from angpt_jax.layout import Layout

Implementation = Literal["reference", "xla", "cudnn", "splash"]


def choose(wanted: str, layout: Layout, dtype: str, attend_across_documents: bool) -> Implementation:
    """The implementation that `wanted` stands for on the devices of `layout`; a UserError if it can't do it there."""
    return "reference"


def attend(
    implementation: Implementation,
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array | None,
    scale: float,
    layout: Layout,
) -> Array:
    """y_BLHK = softmax(scale · q kᵀ) v over the keys m ≤ l of the same segment (of all, if there are no segments)."""
    return ops.attention(q_BLHK, k_BLGK, v_BLGK, ops.attention_mask(q_BLHK.shape[1], segments_BL), scale)
