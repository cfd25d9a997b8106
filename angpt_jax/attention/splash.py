"""Splash attention: the kernel for TPUs that never has all scores at once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)

from angpt_jax.attention import context
from angpt_jax.layout import Layout

LANES = 128  # of a TPU's vector unit: a block of queries or keys is a multiple
LARGEST_BLOCK = 512


def attention(
    q_BLHK: Array,
    k_BLGK: Array,
    v_BLGK: Array,
    segments_BL: Array | None,
    scale: float,
    layout: Layout,
    interpret: bool = False,
) -> Array:
    """y_BLHK from JAX's Pallas kernel: block by block (arXiv 2205.14135), without blocks that no query may see.

    The kernel has no scale: it multiplies q, in float32. Its result and log Σ exp have the name `attention`. It takes
    heads of any width.
    `interpret` runs the kernel without a TPU, for tests.
    """
    q_BLHK = (q_BLHK.astype(jnp.float32) * scale).astype(k_BLGK.dtype)
    length, heads = q_BLHK.shape[1:3]
    kernel = make_kernel(length, heads, layout.parts("length"), layout.parts("heads"), interpret)
    arrays = q_BLHK, k_BLGK, v_BLGK, segments_BL
    if layout.mesh is None:
        return _local(kernel, *arrays, None)
    lies = layout.sharding("heads", "length")
    return context.on_each_device(_local, *arrays, layout, (kernel,), (kernel.manual_sharding_spec(lies),))


def _local(
    kernel: Any, q_BLHK: Array, k_BMGK: Array, v_BMGK: Array, segments_BM: Array | None, queries_L: Array | None
) -> Array:
    q_BHLK, k_BGMK, v_BGMK = (jnp.swapaxes(x, 1, 2) for x in (q_BLHK, k_BMGK, v_BMGK))
    segments = None
    if segments_BM is not None:
        segments = SegmentIds(segments_BM if queries_L is None else segments_BM[:, queries_L], segments_BM)
    return jnp.swapaxes(jax.vmap(kernel)(q_BHLK, k_BGMK, v_BGMK, segments), 1, 2).astype(v_BMGK.dtype)


def make_kernel(length: int, heads: int, length_parts: int, head_parts: int, interpret: bool) -> Any:
    """(q_HLK, k_GMK, v_GMK, segments) → y_HLK, causal. Which blocks are seen is worked out here (and kept by JAX), for
    each part of the window.

    The backward pass has one kernel for q and one for k and v: the fused one keeps a gradient of q for each block of
    keys, in the dtype of q.
    """
    queries, keys = block(length // length_parts), block(length)
    sizes = BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )
    return make_splash_mha(
        MultiHeadMask([CausalMask((length, length))] * heads),
        block_sizes=sizes,
        head_shards=head_parts,
        q_seq_shards=length_parts,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )


def block(length: int) -> int:
    """The largest block that divides `length`."""
    assert length % LANES == 0, f"`choose` lets no such length pass: {length}"
    return max(size for size in range(LANES, LARGEST_BLOCK + 1, LANES) if length % size == 0)
