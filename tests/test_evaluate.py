"""The validation loss: the same number for any batch size and number of devices, and right."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angpt_jax.config import MeshConfig
from angpt_jax.data.pipeline import ValidationSet
from angpt_jax.evaluate import evaluate, make_window_nats
from angpt_jax.sharding import batch_putter, make_mesh


class Bigram(nn.Module):
    """Logits that depend on the last token only."""

    @nn.compact
    def __call__(self, tokens_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
        return self.param("table", nn.initializers.normal(1.0), (7, 7))[tokens_BL]


@pytest.fixture
def validation() -> ValidationSet:
    """11 windows of 6 targets, the last with 4 that do not count."""
    tokens = np.random.default_rng(0).integers(0, 7, (11, 7)).astype(np.int32)
    weights = np.ones((11, 6), np.float32)
    weights[-1, 2:] = 0
    return ValidationSet(tokens, np.zeros_like(tokens), weights, bytes=100)


def expected(params: dict, validation: ValidationSet) -> float:
    """The sum in nats, in float64."""
    logits = np.asarray(params["table"], float)[validation.tokens[:, :-1]]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, validation.tokens[:, 1:, None], axis=-1)[..., 0]
    return float((nats * validation.weights).sum())


@pytest.mark.parametrize("batch_size", [8, 16, 24])
def test_the_same_loss_for_any_batch_size_on_eight_devices_and_on_one(
    validation: ValidationSet, batch_size: int
) -> None:
    model = Bigram()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), int), jnp.zeros((1, 1), int))["params"]
    total = expected(params, validation)
    puts = [batch_putter(make_mesh(MeshConfig())), lambda arrays: arrays]
    for put in puts:
        result = evaluate(make_window_nats(model), params, validation, batch_size, put)
        assert result.loss == pytest.approx(total / 62, rel=1e-6)
        assert result.bits_per_byte == pytest.approx(total / math.log(2) / 100, rel=1e-6)
