"""Attention in blocks of queries, each with the keys up to its last: on a CPU the others cost as much as those seen."""

import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops

LONGEST, SHORTEST, MOST = 128, 64, 8  # queries of a block, fastest of 32 … 512; and how many blocks a program gets


def attention(
    q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, segments_BL: Array | None, queries_L: Array | None, *, scale: float
) -> Array:
    """`ops.attention`, of which it skips what no query of a block may see: almost half of the scores. Where a window is
    split, a device's queries, those at `queries_L`, are one block, which may lie anywhere.

    The sums of a block leave out terms that are 0: results differ from those of the whole by rounding alone.
    """
    length = k_BLGK.shape[1]
    if queries_L is not None:
        mask_BLM = ops.attention_mask(length, segments_BL, queries_L)
        return ops.attention(q_BLHK, k_BLGK, v_BLGK, mask_BLM, scale)
    size = block(length)
    # Heads in front of the keys, turned once and not by each product, into which XLA would take the turn.
    k_BGMK, v_BGMK = (jax.lax.optimization_barrier(jnp.swapaxes(x, 1, 2)) for x in (k_BLGK, v_BLGK))

    def part(begin: int) -> Array:
        end = min(begin + size, length)
        segments_BM = None if segments_BL is None else segments_BL[:, :end]
        mask_BLM = ops.attention_mask(end, segments_BM, jnp.arange(begin, end))
        return ops.cached_attention(q_BLHK[:, begin:end], k_BGMK[:, :, :end], v_BGMK[:, :, :end], mask_BLM, scale)

    return jnp.concatenate([part(begin) for begin in range(0, length, size)], axis=1)


def block(length: int) -> int:
    """Queries of a block."""
    return max(min(LONGEST, length // 2), SHORTEST, -(-length // MOST))
