"""What an architecture is: the sizes of the decoder, and what fills each of its places."""

from dataclasses import dataclass, fields
from typing import Literal

from angpt_jax.axes import Along
from angpt_jax.nu import Nu
from angpt_jax.part import Part, Split, part
from angpt_jax.parts.norms import Identity


@dataclass(frozen=True)
class Sizes:
    """D, N, H, F, V of the decoder, heads of keys and values (G; None: as many as queries), base of rotary angles."""

    width: int
    layers: int
    heads: int
    feed_forward: int
    vocab: int
    kv_heads: int | None = None
    rope_theta: float = 10_000.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """G, also where kv_heads is None."""
        return self.heads if self.kv_heads is None else self.kv_heads


@dataclass(frozen=True)
class Constraint:
    """The set that every vector of a matrix is brought back to after each optimizer step.

    Args:
        norm: none, at_most_one (the unit ball) or one (the unit sphere)
        along: which vectors: the input side (rows of W), the embedding dimension, or the whole matrix, whose
            Frobenius norm is then bounded by that of a matrix with unit rows, √(number of rows)
    """

    norm: Literal["none", "at_most_one", "one"] = "none"
    along: Along = "inputs"


@dataclass(frozen=True)
class Recommended:
    """What a recipe recommends where the config leaves a field of `optim` null."""

    warmup_fraction: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | Literal["none"] = "none"


NOTHING = part(Identity)


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A filled skeleton: hashable, printable, equal by value.

    Args:
        name: of the recipe
        init: draws the matrices
        embedding_norm: on the embedded tokens
        input_norm: before a sublayer
        qk: on queries and keys, with the softmax scale
        value: on the values
        gate: the activation of the MLP
        hidden_norm: on what it gives, times ν
        branch_norm: on what a sublayer gives, before the join
        residual: joins branch and stream
        final_norm: before the head
        head: on W_head
        nu: static factors
        constraint: of the matrices after a step
        optimizer: what is recommended
    """

    name: str
    init: Part
    embedding_norm: Part = NOTHING
    input_norm: Part | Split
    qk: Part
    value: Part = NOTHING
    gate: Part
    hidden_norm: Part = NOTHING
    branch_norm: Part | Split = NOTHING
    residual: Part | Split
    final_norm: Part
    head: Part
    nu: Nu = Nu()
    constraint: Constraint = Constraint()
    optimizer: Recommended = Recommended()

    def __str__(self) -> str:
        return "\n".join(f"{f.name:>14}  {getattr(self, f.name)}" for f in fields(self))
