"""What the tokens of a call see of one another and of those before them: a whole window at once, or a cache.

The decoder hands one of these to each layer, which asks it for the turns of its tokens and for attention, and gets
back what the next call sees.
"""

from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops
from angpt_jax.attention import attend
from angpt_jax.how import How
from angpt_jax.ops import Turns


class Seen(Protocol):
    """What attention needs beside queries, keys and values. `segments_BL` number the documents of the new tokens."""

    segments_BL: Array | None

    @property
    def turns(self) -> Turns:
        """Of the rotary angles of the new tokens, (…, L, R)."""
        ...

    def attend(
        self, how: How, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, scale: float
    ) -> "tuple[Array, Seen | None]":
        """y_BLHK = softmax(scale · q kᵀ) v over all that is seen, and what a next call would see."""
        ...


@flax.struct.dataclass
class Window:
    """All tokens of a window come at once; each sees its own document up to itself (all, without segments)."""

    segments_BL: Array | None
    angles_LR: Array

    @property
    def turns(self) -> Turns:
        return ops.turns(self.angles_LR)

    def attend(self, how: How, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, scale: float) -> tuple[Array, None]:
        return attend(how.attention, q_BLHK, k_BLGK, v_BLGK, self.segments_BL, scale, how.layout), None


@flax.struct.dataclass
class Cached:
    """L new tokens behind those whose keys and values one layer has kept in a cache of M slots.

    Args:
        k_BGMK: keys by slot; there may be more rows than tokens have
        v_BGMK: values by slot
        slot: of the first new token; the others follow
        mask_BLM: the slots that each new token sees, its own among them
        turns: of the new tokens, (B, L, R)
    """

    k_BGMK: Array
    v_BGMK: Array
    slot: Array
    mask_BLM: Array
    turns: Turns
    segments_BL: Array | None = None

    def attend(self, how: How, q_BLHK: Array, k_BLGK: Array, v_BLGK: Array, scale: float) -> "tuple[Array, Cached]":
        def written(cache_BGMK: Array, new_BLGK: Array) -> Array:
            new_BGLK = jnp.swapaxes(new_BLGK, 1, 2).astype(cache_BGMK.dtype)
            cache_BGMK = jax.lax.dynamic_update_slice_in_dim(cache_BGMK, new_BGLK, self.slot, axis=2)
            return how.layout.constrain(cache_BGMK, "batch", "kv_heads", None, None)

        k_BGMK, v_BGMK = written(self.k_BGMK, k_BLGK), written(self.v_BGMK, v_BLGK)
        spare = ((0, len(k_BGMK) - len(q_BLHK)), (0, 0), (0, 0))
        q_BLHK, mask_BLM = jnp.pad(q_BLHK, (*spare, (0, 0))), jnp.pad(self.mask_BLM, spare)
        y_BLHK = ops.cached_attention(q_BLHK, k_BGMK, v_BGMK, mask_BLM, scale)[: len(k_BLGK)]
        return y_BLHK, self.replace(k_BGMK=k_BGMK, v_BGMK=v_BGMK)  # pyright: ignore[reportAttributeAccessIssue]
