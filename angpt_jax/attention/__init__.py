"""One interface for attention, several implementations: `choice` says which can do what, `context` splits a window."""

from functools import partial

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from angpt_jax import ops
from angpt_jax.attention import blocks, context, splash
from angpt_jax.attention.choice import Implementation as Implementation
from angpt_jax.attention.choice import choose as choose
from angpt_jax.layout import Layout


def attend(
    implementation: Implementation,
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array | None,
    scale: float,
    layout: Layout,
) -> Array:
    """y_BLHK = softmax(scale · q kᵀ) v over the keys m ≤ l of the same segment (of all, if there are no segments).

    Scores and softmax are float32; y has the dtype of v and the name `attention` for `model.remat`.
    """
    if implementation == "splash":
        return splash.attention(q_BLHK, k_BLGK, v_BLGK, segments_BL, scale, layout)
    local = {"reference": reference, "blocks": blocks.attention, "xla": xla, "cudnn": cudnn}[implementation]
    arrays = q_BLHK, k_BLGK, v_BLGK, segments_BL
    if layout.parts("length") > 1 or (implementation == "cudnn" and layout.mesh is not None):
        y_BLHK = context.on_each_device(partial(local, scale=scale), *arrays, layout)
    else:
        y_BLHK = local(*arrays, None, scale=scale)
    return checkpoint_name(y_BLHK, "attention")


def reference(
    q_BLHK: Array, k_BMGK: Array, v_BMGK: Array, segments_BM: Array | None, queries_L: Array | None, *, scale: float
) -> Array:
    """The equation as it stands: all scores exist at once. The queries are those at `queries_L` (all)."""
    mask_BLM = ops.attention_mask(k_BMGK.shape[1], segments_BM, queries_L)
    return ops.attention(q_BLHK, k_BMGK, v_BMGK, mask_BLM, scale)


def xla(
    q_BLHK: Array, k_BMGK: Array, v_BMGK: Array, segments_BM: Array | None, queries_L: Array | None, *, scale: float
) -> Array:
    """JAX's own, which doesn't repeat grouped keys; the queries are those at `queries_L` (all)."""
    mask_BLM = ops.attention_mask(k_BMGK.shape[1], segments_BM, queries_L)
    return jax.nn.dot_product_attention(
        q_BLHK, k_BMGK, v_BMGK, mask=mask_BLM[:, None], scale=scale, implementation="xla"
    )


def cudnn(
    q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array | None, queries_L: Array | None, *, scale: float
) -> Array:
    """cuDNN's fused kernel: whole windows of one segment, in bfloat16. On each device by itself, as its own rule for
    a mesh wants grouped keys split as their queries are. Its statistics have no name that `model.remat` could keep."""
    assert segments_BL is None
    return jax.nn.dot_product_attention(q_BLHK, k_BLGK, v_BLGK, scale=scale, is_causal=True, implementation="cudnn")
