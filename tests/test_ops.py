"""The array functions against plain loops and against what they promise."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angpt_jax import ops

pytestmark = pytest.mark.usefixtures("strict_dtypes")
B, L, H, K = 2, 11, 3, 8
THETA = 10_000.0


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rotated(x_K: np.ndarray, length: int = L) -> np.ndarray:
    """The same vector at every position, turned: (L, K)."""
    x_BLHK = jnp.asarray(np.broadcast_to(x_K, (1, length, 1, K)))
    return np.asarray(ops.rotate(x_BLHK, ops.turns(ops.rotary_angles(jnp.arange(length), K, THETA))))[0, :, 0]


def test_rotation_keeps_norms():
    x = normal(0, B, L, H, K)
    turned = np.asarray(ops.rotate(jnp.asarray(x), ops.turns(ops.rotary_angles(jnp.arange(L), K, THETA))))
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])
    assert np.abs(turned[:, 1:] - x[:, 1:]).max(axis=-1).min() > 0.1


def test_products_of_rotated_vectors_depend_on_the_distance_alone():
    products = rotated(normal(1, K)) @ rotated(normal(2, K)).T
    diagonals = [np.diagonal(products, offset) for offset in range(1 - L, L)]
    for diagonal in diagonals:
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.unique([round(float(diagonal[0]), 3) for diagonal in diagonals]).size == 2 * L - 1


def test_angles_are_those_of_the_rope_paper():
    expected = [[p * THETA ** (-2 * i / K) for i in range(K // 2)] for p in range(L)]
    np.testing.assert_allclose(ops.rotary_angles(jnp.arange(L), K, THETA), expected, rtol=1e-6)


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray, scale: float) -> np.ndarray:
    """One query at a time over the keys that it may see, in float64."""
    out = np.zeros(v.shape)
    for b, row, h in np.ndindex(B, L, H):
        seen = [m for m in range(row + 1) if segments[b, m] == segments[b, row]]
        weights = np.exp(scale * k[b, seen, h].astype(float) @ q[b, row, h])
        out[b, row, h] = weights @ v[b, seen, h] / weights.sum()
    return out


ONE_DOCUMENT = np.zeros((B, L), np.int32)
DOCUMENTS = np.array([[0] * 4 + [1] + [2] * 6, [5] * 10 + [3]], np.int32)


@pytest.mark.parametrize("segments", [None, ONE_DOCUMENT, DOCUMENTS])
def test_attention_sees_the_earlier_tokens_of_its_document(segments):
    q, k, v = (normal(seed, B, L, H, K) for seed in (1, 2, 3))
    mask = ops.attention_mask(L, None if segments is None else jnp.asarray(segments))
    out = ops.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), mask, 0.7)
    expected = plain_attention(q, k, v, ONE_DOCUMENT if segments is None else segments, 0.7)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_attention_in_bfloat16_keeps_scores_and_softmax_in_float32():
    q, k, v = (jnp.asarray(normal(seed, B, L, H, K), jnp.bfloat16) for seed in (1, 2, 3))
    out = ops.attention(q, k, v, ops.attention_mask(L, None), 20.0)
    exact_q, exact_k, exact_v = (np.asarray(x, np.float32) for x in (q, k, v))
    exact = plain_attention(exact_q, exact_k, exact_v, ONE_DOCUMENT, 20.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=2**-7)


@pytest.mark.parametrize(
    "x_shape, kernel_shape, contracted",
    [
        ((B, L, 24), (24, 40), "bld,df->blf"),
        ((B, L, 16), (16, 16), "bld,df->blf"),  # square: only the order of the axes tells them apart
        ((L, 24), (24, 40), "ld,df->lf"),
    ],
)
def test_linear_contracts_the_input_side(x_shape, kernel_shape, contracted):
    x, w = normal(1, *x_shape), normal(2, *kernel_shape)
    expected = 1.25 * np.einsum(contracted, x.astype(float), w)
    actual = ops.linear(jnp.asarray(x), jnp.asarray(w), 1.25, jnp.float32)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_linear_multiplies_nu_in_float32_before_it_rounds():
    nu = 1.0512  # bfloat16 has 1.0547
    x, w = jnp.asarray(normal(1, B, L, 64), jnp.bfloat16), jnp.asarray(normal(2, 64, 48), jnp.bfloat16)
    product = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    actual = ops.linear(x, w, nu, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(actual, product * nu, rtol=1e-5, atol=1e-5)
    rounded = ops.linear(x, w, nu, jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, actual.astype(jnp.bfloat16))


def test_linear_rounds_its_operands_to_the_compute_dtype():
    x, w = jnp.asarray(normal(1, B, L, 16)), jnp.asarray(normal(2, 16, 4))
    rounded = ops.linear(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), 1.0, jnp.bfloat16)
    np.testing.assert_array_equal(ops.linear(x, w, 1.0, jnp.bfloat16), rounded)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_are_taken_in_float32_over_the_last_axis(dtype):
    x = jnp.asarray(100 * normal(1, 5, 24), dtype)
    exact = np.asarray(x, np.float64)
    unit, rms = ops.unit_norm(x), ops.rms_norm(x, 1e-6)
    assert unit.dtype == rms.dtype == jnp.float32
    np.testing.assert_allclose(unit, exact / np.linalg.norm(exact, axis=-1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(rms, math.sqrt(24) * np.asarray(unit), rtol=1e-5)


def test_norms_of_zero_are_zero_with_finite_gradients():
    for norm in (ops.unit_norm, lambda x: ops.rms_norm(x, 1e-6)):
        value, gradient = jax.value_and_grad(lambda x, norm=norm: norm(x).sum())(jnp.zeros(8))
        assert value == 0 and bool(jnp.isfinite(gradient).all())


def test_cross_entropy_is_minus_the_log_probability_of_the_target():
    logits, targets = normal(1, B, L, 7), np.random.default_rng(0).integers(0, 7, (B, L))
    probabilities = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(probabilities, targets[..., None], axis=-1)[..., 0])
    np.testing.assert_allclose(ops.cross_entropy(jnp.asarray(logits), jnp.asarray(targets)), expected, atol=1e-6)


def test_cross_entropy_is_stable_at_large_logits():
    logits = jnp.asarray([[[1e4, 0.0, -1e4], [1e4, 1e4, -1e4]]])
    nats = ops.cross_entropy(logits, jnp.asarray([[1, 0]]))
    np.testing.assert_allclose(nats, [[1e4, math.log(2)]], atol=1e4 * 2**-23)
    assert ops.cross_entropy(logits.astype(jnp.bfloat16), jnp.asarray([[1, 0]])).dtype == jnp.float32
