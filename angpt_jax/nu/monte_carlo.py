"""The norms that ν brings to 1, measured on random matrices and vectors. NumPy alone, float32 products.

Vectors are columns: x_DS holds S of them. Only norms along a row of W and along a vector are ever taken, so that the
rows of a matrix are drawn, used and dropped a block at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from angpt_jax.nu import ACTIVATIONS, Nu, approximate_nu, lerp_nu

# With unit rows the mean of ‖Wx‖² over x is the same for each W, so that vectors that share a W count as independent.
VECTORS_PER_MATRIX = 64
BLOCK_ENTRIES = 2**19  # of a matrix, at a time

Array = np.ndarray


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer (D, K, F), its activation f, and whether f sits on a gate: u ⊙ f(√D·z), or else f(√D·u)."""

    width: int
    head_width: int
    feed_forward: int
    activation: str
    gated: bool

    @property
    def heads(self) -> int:
        return self.width // self.head_width

    @property
    def inputs(self) -> tuple[str, ...]:
        """The maps that feed the activation."""
        return ("up", "gate") if self.gated else ("up",)

    @property
    def nu(self) -> Nu:
        return approximate_nu(self.width, self.heads, self.feed_forward, self.activation, self.inputs)

    def at(self, width: int) -> "Layer":
        """The same at another width: K stays, F grows with D."""
        feed_forward = max(1, round(self.feed_forward * width / self.width))
        return Layer(width, self.head_width, feed_forward, self.activation, self.gated)


def norms(layer: Layer, samples: int, seed: int) -> dict[str, Array]:
    """`samples` norms behind each ν of the layer, and as "x_M" those of W_d on its own activations."""
    rng = np.random.default_rng([seed, layer.width])
    counts = [min(VECTORS_PER_MATRIX, samples - start) for start in range(0, samples, VECTORS_PER_MATRIX)]
    nu = layer.nu
    drawn = [dict(_norms(layer, nu, count, rng)) for count in counts]
    return {name: np.concatenate([part[name] for part in drawn]) for name in drawn[0]}


def join_norms(width: int, alpha: float, samples: int, seed: int) -> Array:
    """‖ν(α)(h + α(x − h))‖ for independent unit h and x."""
    rng = np.random.default_rng([seed, width])
    h_DS, x_DS = (unit_vectors(rng, width, samples).astype(np.float64) for _ in range(2))
    return np.linalg.norm(lerp_nu(alpha) * (h_DS + alpha * (x_DS - h_DS)), axis=0)


def _norms(layer: Layer, nu: Nu, count: int, rng: Generator) -> Iterator[tuple[str, Array]]:
    """One random matrix of each kind, met by `count` random vectors."""
    x_DS = unit_vectors(rng, layer.width, count)
    for name in ("query", "key", "value"):
        yield name, np.linalg.norm(getattr(nu, name) * unit_rows(rng, layer.head_width, x_DS), axis=0)
    y_DS = np.concatenate([unit_vectors(rng, layer.head_width, count) for _ in range(layer.heads)])
    yield "attention_out", np.linalg.norm(nu.attention_out * unit_rows(rng, layer.width, y_DS), axis=0)
    fed = [getattr(nu, name) * unit_rows(rng, layer.feed_forward, x_DS) for name in layer.inputs]
    for name, u_FS in zip(layer.inputs, fed, strict=True):
        yield name, np.linalg.norm(u_FS, axis=0)
    f_FS = ACTIVATIONS[layer.activation].exact(math.sqrt(layer.width) * fed[-1].astype(np.float64))
    a_FS = nu.activation * (fed[0] * f_FS if layer.gated else f_FS)
    yield "activation", np.linalg.norm(a_FS, axis=0)
    both = np.hstack([unit_vectors(rng, layer.feed_forward, count), a_FS.astype(np.float32)])
    down = np.linalg.norm(nu.down * unit_rows(rng, layer.width, both), axis=0)
    yield "down", down[:count]
    yield "x_M", down[count:]


def unit_vectors(rng: Generator, length: int, count: int) -> Array:
    """`count` random unit vectors, as columns."""
    x = rng.standard_normal((length, count), dtype=np.float32)
    return x / np.linalg.norm(x, axis=0)


def unit_rows(rng: Generator, outputs: int, x: Array) -> Array:
    """W x of a random W whose rows are unit vectors."""
    step, products = max(1, BLOCK_ENTRIES // len(x)), []
    for start in range(0, outputs, step):
        w = rng.standard_normal((min(step, outputs - start), len(x)), dtype=np.float32)
        products.append((w @ x) / np.linalg.norm(w, axis=1, keepdims=True))
    return np.concatenate(products)
