"""Drawing a token from logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angpt_jax.sample import draw

LOGITS_V = jnp.log(jnp.array([0.3, 0.5, 0.15, 0.05]))


def frequencies(temperature: float, top_k: int | None, draws: int = 4000) -> np.ndarray:
    ids = draw(jax.random.key(0), jnp.tile(LOGITS_V, (draws, 1)), temperature, top_k)
    return np.bincount(np.asarray(ids), minlength=4) / draws


def test_temperature_zero_takes_the_likeliest() -> None:
    np.testing.assert_array_equal(frequencies(0.0, None), [0, 1, 0, 0])


@pytest.mark.parametrize(
    ("temperature", "top_k", "expected"),
    [
        (1.0, None, [0.3, 0.5, 0.15, 0.05]),
        (1.0, 2, [0.375, 0.625, 0, 0]),
        (1.0, 9, [0.3, 0.5, 0.15, 0.05]),
        (0.5, None, [0.09 / 0.365, 0.25 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_tokens_come_as_often_as_their_probability(
    temperature: float, top_k: int | None, expected: list[float]
) -> None:
    np.testing.assert_allclose(frequencies(temperature, top_k), expected, atol=0.025)
