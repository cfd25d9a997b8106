"""Decoding with a KV cache, as pure functions: prompts are read in one pass, then a loop draws a token a step."""

from dataclasses import dataclass
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax import ops
from angpt_jax.model import Decoder
from angpt_jax.seen import Cached

NOTHING = -1  # segment of slots that no token sees
Caches = list[tuple[Array, Array]]  # k_BGMK and v_BGMK of each layer


@dataclass(frozen=True)
class Draw:
    """How a token is drawn from logits.

    Args:
        temperature: divides the logits; 0 takes the likeliest token
        top_k: draws among the k likeliest tokens only
        top_p: and among the likeliest whose probabilities add up to this
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


def drawn(keys_B: Array, logits_BV: Array, draw: Draw) -> Array:
    """One id for each row of logits, from its own key."""
    if draw.temperature == 0:
        return likeliest(logits_BV)
    most = logits_BV.shape[-1]
    top_k = min(draw.top_k or most, most)
    if top_k == most and draw.top_p is None:
        return _categorical(keys_B, logits_BV / draw.temperature)
    likeliest_BK, ids_BK = jax.lax.top_k(logits_BV / draw.temperature, top_k)
    if draw.top_p is not None:
        p_BK = jax.nn.softmax(likeliest_BK, axis=-1)
        before_BK = jnp.cumsum(p_BK, axis=-1) - p_BK
        likeliest_BK = jnp.where(before_BK < draw.top_p, likeliest_BK, -jnp.inf)
    chosen_B1 = _categorical(keys_B, likeliest_BK)[:, None]
    return jnp.take_along_axis(ids_BK, chosen_B1, axis=-1)[:, 0]


def likeliest(logits_BV: Array) -> Array:
    """The first entry that no other exceeds: argmax as two reductions of numbers, which a CPU does in a quarter of the
    time that it needs for one of pairs."""
    most_B1, vocab = jnp.max(logits_BV, axis=-1, keepdims=True), logits_BV.shape[-1]
    return jnp.min(jnp.where(logits_BV == most_B1, jnp.arange(vocab, dtype=jnp.int32), vocab - 1), axis=-1)


def _categorical(keys_B: Array, logits_BV: Array) -> Array:
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


@flax.struct.dataclass
class Decoding:
    """Where a batch is.

    Args:
        caches: keys and values of each layer, by slot
        segments_BM: document of the token in each slot
        slot: of the next token
        position_B: its position in its row
        id_B: the token that was drawn last, the end of the document where a row is done
        count: how many were drawn
        limit_B: how many there may be in each row
        turns_MR: of all positions
        done_B: rows that have all their tokens
        keys_B: of the draws
    """

    caches: Caches
    segments_BM: Array
    slot: Array
    position_B: Array
    id_B: Array
    count: Array
    limit_B: Array
    turns_MR: ops.Turns
    done_B: Array
    keys_B: Array


@dataclass(frozen=True)
class Steps:
    """What a batch goes through.

    Args:
        model: a decoder with `layers_apart`
        known: entries of the vocabulary that stand for something
        end: id that ends a document
        draw: how a token is drawn
        chunk: tokens of each row that `more` draws at most
    """

    model: Decoder
    known: int
    end: int
    draw: Draw
    chunk: int

    def first(
        self, params: Any, tokens_BP: Array, length_B: Array, limit_B: Array, keys_B: Array, slots: int
    ) -> Decoding:
        """Reads prompts, which end at the last of P places, into `slots` slots, and draws a token behind each."""
        rows, places = tokens_BP.shape
        position_BP = jnp.arange(places) - (places - length_B)[:, None]
        segments_BP = jnp.cumsum((tokens_BP == self.end) & (position_BP >= 0), axis=1)
        if self.model.attend_across_documents:
            segments_BP = jnp.zeros_like(segments_BP)
        segments_BP = jnp.where(position_BP >= 0, segments_BP, NOTHING)
        segments_BM = jnp.pad(segments_BP, ((0, 0), (0, slots - places)), constant_values=NOTHING)
        mask_BPM = ops.attention_mask(slots, segments_BM, jnp.arange(places))
        sizes = self.model.sizes
        turns_MR = ops.turns(ops.rotary_angles(jnp.arange(slots), sizes.head_width, sizes.rope_theta))
        seen = of_positions(turns_MR, jnp.maximum(position_BP, 0))
        logits_BV, caches = self.extended(params, self.empty(rows, slots), tokens_BP, jnp.int32(0), seen, mask_BPM)
        id_B = drawn(_of_draw(keys_B, 0), logits_BV, self.draw)
        done_B = (id_B == self.end) | (limit_B <= 1)
        places, count = jnp.int32(places), jnp.int32(1)
        return Decoding(caches, segments_BM, places, length_B, id_B, count, limit_B, turns_MR, done_B, keys_B)

    def more(self, params: Any, state: Decoding, most: Array) -> tuple[Decoding, Array]:
        """Draws `most` more tokens of each row, at most a chunk, fewer once all are done: ids_BN, N of a chunk."""

        def unfinished(carry: tuple[Decoding, Array, Array]) -> Array:
            state, _, number = carry
            return (number < most) & ~jnp.all(state.done_B)

        def step(carry: tuple[Decoding, Array, Array]) -> tuple[Decoding, Array, Array]:
            state, ids_BN, number = carry
            state = self.next(params, state)
            return state, ids_BN.at[:, number].set(state.id_B), number + 1

        ids_BN = jnp.full((len(state.id_B), self.chunk), self.end, jnp.int32)
        state, ids_BN, _ = jax.lax.while_loop(unfinished, step, (state, ids_BN, jnp.int32(0)))
        return state, ids_BN

    def next(self, params: Any, state: Decoding) -> Decoding:
        """The token that was drawn last goes into the cache, and the next is drawn."""
        segment_B1 = jnp.take(state.segments_BM, state.slot - 1, axis=1)[:, None]
        segments_BM = jax.lax.dynamic_update_slice_in_dim(state.segments_BM, segment_B1, state.slot, axis=1)
        mask_B1M = ops.attention_mask(segments_BM.shape[1], segments_BM, state.slot[None])
        turns_B1R = of_positions(state.turns_MR, state.position_B[:, None])
        logits_BV, caches = self.extended(params, state.caches, state.id_B[:, None], state.slot, turns_B1R, mask_B1M)
        id_B = drawn(_of_draw(state.keys_B, state.count), logits_BV, self.draw)
        id_B, count = jnp.where(state.done_B, self.end, id_B), state.count + 1
        return Decoding(
            caches,
            segments_BM,
            state.slot + 1,
            state.position_B + 1,
            id_B,
            count,
            state.limit_B,
            state.turns_MR,
            state.done_B | (id_B == self.end) | (count >= state.limit_B),
            state.keys_B,
        )

    def empty(self, rows: int, slots: int) -> Caches:
        """Caches that hold nothing.

        On a CPU they have two rows at least: XLA drops axes of length 1 there and then copies the caches at each step.
        """
        sizes, how = self.model.sizes, self.model.how
        rows = max(rows, 2) if jax.default_backend() == "cpu" else rows
        empty_BGMK = jnp.zeros((rows, sizes.key_value_heads, slots, sizes.head_width), how.dtype)
        empty_BGMK = how.layout.constrain(empty_BGMK, "batch", "kv_heads", None, None)
        return [(empty_BGMK, empty_BGMK) for _ in range(sizes.layers)]

    def extended(
        self, params: Any, caches: Caches, tokens_BL: Array, slot: Array, turns_BLR: ops.Turns, mask_BLM: Array
    ) -> tuple[Array, Caches]:
        """logits_BV behind the last token, −∞ where an entry stands for nothing; and the caches with the tokens."""
        seen = [Cached(k_BGMK, v_BGMK, slot, mask_BLM, turns_BLR) for k_BGMK, v_BGMK in caches]
        logits_BV, seen = cast(Any, self.model.apply({"params": params}, tokens_BL, seen, method="extend"))
        logits_BV = jnp.where(jnp.arange(self.model.sizes.vocab) < self.known, logits_BV, -jnp.inf)
        return logits_BV, [(layer.k_BGMK, layer.v_BGMK) for layer in seen]


def of_positions(turns_MR: ops.Turns, position_BL: Array) -> ops.Turns:
    """The turns_BLR of tokens at these positions."""
    cos_MR, sin_MR = turns_MR
    return cos_MR[position_BL], sin_MR[position_BL]


def _of_draw(keys_B: Array, number: Array | int) -> Array:
    """The keys of one draw, from those of the rows."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys_B, number)
