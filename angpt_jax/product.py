"""W x, and what its backward pass computes: the one place where matrices are multiplied with activations."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from angpt_jax.layout import Place


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: Array, kernel: Array, place: Place) -> Array:
    """W x in float32, from operands in the dtype of x; so are the two products of the backward pass, whose gradient of
    the kernel stays float32.

    The kernel is cast, then gathered from its `place`, and again in the backward pass: only its parts are kept. Its
    gradient is brought back to parts at once (ZeRO-3, arXiv 1910.02054).
    """
    return _contract(x, place.gathered(kernel.astype(x.dtype)), x.ndim - 1, 0)


def _forward(x: Array, kernel: Array, place: Place) -> tuple[Array, tuple[Array, Array]]:
    return product(x, kernel, place), (x, kernel)


def _backward(place: Place, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    w, dy = place.gathered(kernel.astype(x.dtype)), dy.astype(x.dtype)
    dx = _contract(dy, w, x.ndim - 1, 1)
    dw = place.added_up(_over_tokens, x, dy)
    return dx.astype(x.dtype), dw.astype(kernel.dtype)


product.defvjp(_forward, _backward)


def _over_tokens(x: Array, dy: Array) -> Array:
    """dW = Σ x dyᵀ over all tokens."""
    x_TI, dy_TO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return jax.lax.platform_dependent(x_TI, dy_TO, cpu=_turned_over_tokens, default=partial(_contract, a=0, b=0))


def _turned_over_tokens(x_TI: Array, dy_TO: Array) -> Array:
    """The same sums, for a CPU: its products of a matrix whose columns are contracted run at half speed, so the
    narrower of the two is turned first, and behind barriers, or XLA would take the turn back into the product."""
    if x_TI.shape[1] <= dy_TO.shape[1]:
        return _contract(_turned(x_TI), dy_TO, 1, 0)
    return _turned(_contract(_turned(dy_TO), x_TI, 1, 0))


def _turned(x: Array) -> Array:
    return jax.lax.optimization_barrier(jax.lax.optimization_barrier(x).T)


def _contract(x: Array, y: Array, a: int, b: int) -> Array:
    """Σ over axis `a` of x and `b` of y, in float32."""
    return jax.lax.dot_general(x, y, (((a,), (b,)), ((), ())), preferred_element_type=jnp.float32)
