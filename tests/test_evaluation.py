"""The validation loss: the same number for any batch size and number of devices, and right."""

import math
from dataclasses import replace
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EVEN, tiny
from token_streams import write_stream

from angpt_jax import ops
from angpt_jax.config import MeshConfig
from angpt_jax.data.pipeline import Order, Packing, ValidationSet, train_batches, validation_windows
from angpt_jax.data.tokenizer import ByteTokenizer
from angpt_jax.data.tokens import Weighted
from angpt_jax.errors import UserError
from angpt_jax.evaluation import Evaluation, Evaluator, as_record, evaluate, make_window_nats, mean_and_error
from angpt_jax.sharding import batch_putter, make_layout

BYTES = 257


class Bigram(nn.Module):
    """Logits that depend on the last token only."""

    vocab: int = 7

    @nn.compact
    def __call__(self, tokens_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
        return self.param("table", nn.initializers.normal(1.0), (self.vocab, self.vocab))[tokens_BL]

    def nats(self, tokens_BL: jax.Array, segments_BL: jax.Array, targets_BL: jax.Array) -> jax.Array:
        return ops.cross_entropy(self(tokens_BL, segments_BL), targets_BL)


def parameters(model: nn.Module) -> Any:
    nothing = jnp.zeros((1, 1), int)
    return jax.jit(model.init)(jax.random.key(0), nothing, nothing)["params"]


def as_they_are(arrays: Any) -> Any:
    """Brings nothing to other devices."""
    return arrays


@pytest.fixture
def validation() -> ValidationSet:
    """11 windows of 6 targets, the last with 4 that do not count."""
    return random_windows(seed=0)


def random_windows(seed: int) -> ValidationSet:
    tokens = np.random.default_rng(seed).integers(0, 7, (11, 7)).astype(np.int32)
    weights = np.ones((11, 6), np.float32)
    weights[-1, 2:] = 0
    return ValidationSet(tokens, np.zeros_like(tokens), weights, bytes=100)


def expected(params: dict, tokens: np.ndarray, weights: np.ndarray) -> float:
    """The sum in nats, in float64."""
    logits = np.asarray(params["table"], float)[tokens[:, :-1]]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    return float((nats * weights).sum())


@pytest.mark.parametrize("batch_size", [8, 16, 24])
def test_the_same_loss_for_any_batch_size_on_eight_devices_and_on_one(
    validation: ValidationSet, batch_size: int
) -> None:
    """Of the targets that count, each as much as any other."""
    model = Bigram()
    params = parameters(model)
    total = expected(params, validation.tokens, validation.weights)
    puts = [batch_putter(make_layout(MeshConfig()), batch_size), as_they_are]
    for put in puts:
        result = evaluate(make_window_nats(model), params, validation, batch_size, put)
        assert result.loss == pytest.approx(total / 62, rel=1e-6)
        assert result.bits_per_byte == pytest.approx(total / math.log(2) / 100, rel=1e-6)


def test_a_decoder_has_the_same_loss_for_any_batch_size_and_number_of_devices(tmp_path):
    """Of documents side by side, the last window filled up."""
    model = tiny("angpt", replace(EVEN, vocab=BYTES))
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, length) for length in (30, 0, 7, 19, 41)]
    windows = validation_windows(write_stream(tmp_path, documents), ByteTokenizer(), 12, 10_000)
    window_nats = make_window_nats(model.model)
    losses = [evaluate(window_nats, model.random, windows, batch_size, as_they_are).loss for batch_size in (1, 3, 8)]
    losses.append(evaluate(window_nats, model.random, windows, 8, batch_putter(make_layout(MeshConfig()), 8)).loss)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    whole: Any = {"tokens": windows.tokens, "segments": windows.segments, "weights": windows.weights}
    total = float(np.asarray(window_nats(model.random, whole), float).sum())
    assert losses[0] == pytest.approx(total / (30 + 7 + 19 + 41 + 5), rel=1e-6)


@pytest.fixture(scope="module")
def bytes_bigram() -> tuple[nn.Module, Any]:
    model = Bigram(BYTES)
    return model, parameters(model)


def test_bits_per_byte_are_those_of_the_text(tmp_path, bytes_bigram):
    """Closing a document costs bits, but is no byte."""
    model, params = bytes_bigram
    texts = ["héllo, wörld\n", "", "two words"]
    tokenizer = ByteTokenizer()
    windows = validation_windows(write_stream(tmp_path, tokenizer.encode(texts)), tokenizer, 5, 10_000)
    result = evaluate(make_window_nats(model), params, windows, 4, as_they_are)
    total = expected(params, windows.tokens, windows.weights)
    text_bytes = sum(len(text.encode()) for text in texts)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / text_bytes, rel=1e-6)
    assert result.loss == pytest.approx(total / (text_bytes + len(texts)), rel=1e-6)


@pytest.mark.parametrize("packing", get_args(Packing))
def test_an_epoch_of_training_has_the_nats_of_an_evaluation_of_the_same_text(tmp_path, bytes_bigram, packing):
    """However its documents are packed: every target counts once, and padding never."""
    model, params = bytes_bigram
    rng = np.random.default_rng(0)
    stream = write_stream(tmp_path, [rng.integers(0, 256, length) for length in (3, 25, 0, 9, 14, 2)])
    windows = validation_windows(stream, ByteTokenizer(), 10, 10_000)
    window_nats = make_window_nats(model)
    result = evaluate(window_nats, params, windows, 4, as_they_are)
    batches = train_batches([Weighted("text", stream)], Order(10, 1, 0, packing))
    total = targets = 0
    while targets < stream.count - 1:
        batch: Any = next(batches)
        total += float(window_nats(params, batch)[0])
        targets += int(batch["weights"].sum())
    batches.close()
    assert targets == stream.count - 1
    assert total / targets == pytest.approx(result.loss, rel=1e-6)


def test_several_sets_are_evaluated_and_the_last_result_is_of_the_first(validation: ValidationSet) -> None:
    model = Bigram()
    params, window_nats = parameters(model), make_window_nats(model)
    sets = {"validation": validation, "code": random_windows(seed=1)}
    evaluator = Evaluator(window_nats, sets, 8, as_they_are)
    assert evaluator.last is None
    results = evaluator.evaluate(params)
    assert list(results) == ["validation", "code"] and evaluator.last == results["validation"]
    for name, windows in sets.items():
        assert results[name] == evaluate(window_nats, params, windows, 8, as_they_are)
    assert results["code"].loss != results["validation"].loss


def test_record_names_the_sets_behind_the_first() -> None:
    record = as_record({"validation": Evaluation(1.0, 2.0), "code": Evaluation(3.0, 4.0)})
    values = {"val_loss": 1.0, "val_bits_per_byte": 2.0, "code/val_loss": 3.0, "code/val_bits_per_byte": 4.0}
    assert values.items() <= record.items()


def test_the_standard_error_of_equal_windows_is_that_of_a_mean() -> None:
    nats_W = np.array([3.0, 5.0, 4.0, 8.0])
    mean, error = mean_and_error(nats_W, np.full(4, 2.0))
    assert mean == pytest.approx((nats_W / 2).mean())
    assert error == pytest.approx((nats_W / 2).std(ddof=1) / 2)
    assert math.isnan(mean_and_error(nats_W[:1], np.ones(1))[1])


def test_the_standard_error_is_the_spread_of_the_mean_over_many_samples() -> None:
    """Of windows with different numbers of tokens."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 60, (4000, 50)).astype(float)
    nats = counts * 3 + rng.normal(size=counts.shape) * counts**0.5 * 4
    found = np.array([mean_and_error(*row) for row in zip(nats, counts, strict=True)])
    assert found[:, 1].mean() == pytest.approx(found[:, 0].std(), rel=0.05)


def test_an_evaluation_says_how_much_it_saw(validation: ValidationSet) -> None:
    model = Bigram()
    result = evaluate(make_window_nats(model), parameters(model), validation, 4, as_they_are)
    sums = [expected(parameters(model), validation.tokens[[w]], validation.weights[[w]]) for w in range(11)]
    _, error = mean_and_error(np.array(sums), validation.weights.sum(axis=1))
    assert (result.tokens, result.bytes) == (62, 100)
    assert result.standard_error == pytest.approx(error, rel=1e-5) and error > 0


@pytest.mark.parametrize("lengths, most", [([], None), ([0, 0], None), ([0, 5], 1)])
def test_a_set_without_text_is_refused(tmp_path, lengths: list[int], most: int | None) -> None:
    stream = write_stream(tmp_path, [np.zeros(length, int) for length in lengths])
    with pytest.raises(UserError, match=r"^sets.x: holds no text in its first \d tokens, got .*; text to evaluate on$"):
        validation_windows(stream, ByteTokenizer(), 4, most, "sets.x")


def test_perplexity_is_the_exponential_of_the_loss() -> None:
    assert Evaluation(math.log(50), 1.0).perplexity == pytest.approx(50)
    assert Evaluation(1e5, 1.0).perplexity == math.inf
