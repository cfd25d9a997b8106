"""ν are Python floats, and the ones that the sizes ask for."""

import math
from dataclasses import astuple, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import nu_angpt

from angpt_jax.arch import Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.nu import ACTIVATIONS, Nu, activation_nu, approximate_nu, lerp_nu, linear_nu
from angpt_jax.parts.residual import ApproximateLerp

# D, H, F and ν of: query, key and value; attention_out; up and gate; down; activation.
AT_SIZES = {
    (256, 4, 1024): (2.0, 0.5, 0.5, 2.0, 3.7203),
    (1024, 16, 4096): (4.0, 0.25, 0.5, 2.0, 3.7203),
    (768, 12, 768): (12**0.5, 12**-0.5, 1.0, 1.0, 1.6765),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_nu_is_a_python_float(recipe):
    nu = RECIPES[recipe](Sizes(width=48, layers=2, heads=3, feed_forward=100, vocab=11)).nu
    assert {type(value) for value in astuple(nu)} == {float}


@pytest.mark.parametrize("sizes, expected", AT_SIZES.items())
def test_nu_at_known_sizes(sizes, expected):
    to_head, out, to_feed_forward, down, activation = expected
    wanted = Nu(to_head, to_head, to_head, out, to_feed_forward, to_feed_forward, down, activation)
    assert astuple(approximate_nu(*sizes)) == pytest.approx(astuple(wanted), abs=5e-5)


def test_nu_of_the_activation_does_not_depend_on_the_width():
    assert {round(approximate_nu(d, 4, 4 * d).activation, 12) for d in (64, 256, 1024)} == {
        round(activation_nu("silu", 0.5), 12)
    }


@pytest.mark.parametrize(
    "width, heads, feed_forward", [(24, 3, 40), (256, 4, 1024), (256, 8, 683), (96, 2, 96), (64, 4, 32)]
)
def test_nu_agrees_with_the_reference(width, heads, feed_forward):
    expected = nu_angpt(width, width // heads, feed_forward)
    names = {"query": "qkv", "key": "qkv", "value": "qkv", "attention_out": "p", "up": "uz", "gate": "uz"}
    names |= {"down": "d", "activation": "acf"}
    nu = approximate_nu(width, heads, feed_forward)
    for field in fields(nu):
        assert getattr(nu, field.name) == pytest.approx(expected[f"nu_{names[field.name]}"], rel=1e-7), field.name


@pytest.mark.parametrize("input_std", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nu_of_an_activation_is_that_of_dense_integration(activation, input_std):
    g = np.linspace(-12, 12, 100_001)
    density = np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
    mean_square = np.trapezoid(ACTIVATIONS[activation].exact(input_std * g) ** 2 * density, g)
    assert activation_nu(activation, input_std) == pytest.approx(1 / math.sqrt(mean_square), rel=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_both_forms_of_an_activation_agree(activation):
    x = np.linspace(-8, 8, 101)
    traced = np.asarray(ACTIVATIONS[activation].traced(jnp.asarray(x, jnp.float32)))
    np.testing.assert_allclose(traced, ACTIVATIONS[activation].exact(x), atol=1e-6, rtol=1e-5)


def unit_vectors(count: int, length: int) -> np.ndarray:
    """`count` rows of norm 1, drawn anew for each count and length."""
    x = np.random.default_rng([count, length]).standard_normal((count, length))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_a_linear_map_with_unit_rows_keeps_norms():
    x = linear_nu(256, 96) * unit_vectors(96, 256) @ unit_vectors(2000, 256).T
    assert (x**2).sum(axis=0).mean() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_a_gate_only_the_activation_has_another_nu_and_the_mlp_keeps_norms(activation):
    gated, plain = (approximate_nu(96, 3, 160, activation, inputs=inputs) for inputs in (("up", "gate"), ("up",)))
    assert plain.activation == pytest.approx(gated.activation / math.sqrt(160))
    assert replace(plain, activation=gated.activation) == gated
    u = plain.up * unit_vectors(160, 96) @ unit_vectors(4000, 96).T
    a = plain.activation * ACTIVATIONS[activation].exact(math.sqrt(96) * u)
    assert (a**2).sum(axis=0).mean() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("alpha, expected", [(0.01, 1.010049), (0.05, 1.051177), (0.5, math.sqrt(2)), (1.0, 1.0)])
def test_nu_of_a_join_is_that_of_the_part(alpha, expected):
    assert lerp_nu(alpha) == pytest.approx(expected, rel=1e-6)
    h, x = jnp.eye(4)[:2, None, None]  # across each other: ‖h + α(x − h)‖ is 1/ν(α) exactly
    joined = ApproximateLerp(alpha_init=alpha, alpha_stored=1.0).init_with_output(
        jax.random.key(0), h, x, jnp.float32(1)
    )[0]
    np.testing.assert_allclose(joined, lerp_nu(alpha) * (h + alpha * (x - h)), rtol=1e-6)
    assert float(jnp.linalg.norm(joined)) == pytest.approx(1, rel=1e-6)
