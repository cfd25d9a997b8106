"""What the papers say of their designs, or what follows from their equations in a line of algebra."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LENGTH, SIZES, by_path, is_box, path_of, random_batch, tiny
from jax import Array

from angpt_jax import ops
from angpt_jax.arch import Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.how import How
from angpt_jax.measure import COLLECTION
from angpt_jax.model import Block, Decoder
from angpt_jax.parts.pointwise import Derf, DyT, HeadScale
from angpt_jax.parts.residual import Geodesic
from angpt_jax.seen import Window

pytestmark = pytest.mark.usefixtures("strict_dtypes")
TOKENS_BL = random_batch()["tokens"][:, :-1]


def at_start(recipe: str) -> Any:
    """Scales as the recipe starts them, and random matrices, equal by path for all recipes."""
    model, matrices = tiny(recipe), by_path(tiny("gpt_plus").random)
    return jax.tree_util.tree_map_with_path(
        lambda path, _, first: matrices[path_of(path)] if first is None else first,
        model.boxed,
        model.first_scales,
        is_leaf=is_box,
    )


@cache
def instruments_of(recipe: str) -> Callable[[Any], Any]:
    """Parameters → what the model of test size tells of its insides."""
    model = tiny(recipe).model

    @jax.jit
    def run(params: Any) -> Any:
        return model.apply({"params": params}, TOKENS_BL, np.zeros_like(TOKENS_BL), mutable=[COLLECTION])[1]

    return lambda params: run(params)[COLLECTION]


def assert_stream_has_norm(measured: Any, expected: float) -> None:
    """Of each token, behind each join: mean right and spread zero."""
    layers, final = measured["layers"], measured["final_stream"]
    for stream in (jax.tree.map(lambda x: x[1:], layers["attention_stream"]), layers["mlp_stream"], final):
        np.testing.assert_allclose(stream["mean"], expected, rtol=1e-5)
        np.testing.assert_allclose(stream["std"], 0, atol=1e-5 * expected)


@cache
def block_calls(recipe: str) -> Callable[[Any, float], dict[str, tuple[Any, Array]]]:
    """(parameters, number of the layer) → positional arguments and result of each module of the first block, by name,
    over a random stream with mean 0.7 and standard deviation 2."""
    model, length = tiny(recipe).model, LENGTH
    h_BLD = jnp.asarray(np.random.default_rng(1).normal(0.7, 2.0, (2, length, SIZES.width)), jnp.float32)

    @jax.jit
    def run(params: Any, layer: Array) -> dict[str, Any]:
        seen = {}

        def remember(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            result = call(*args, **kwargs)
            if context.module.name and context.method_name == "__call__":
                seen[context.module.name] = tuple(x for x in args if isinstance(x, Array)), result
            return result

        variables = {"params": jax.tree.map(lambda x: x[0], params["layers"])}
        angles = ops.rotary_angles(jnp.arange(length), SIZES.head_width, 10_000.0)
        with nn.intercept_methods(remember):
            Block(model.arch, model.sizes, How()).apply(variables, h_BLD, layer, Window(None, angles))
        return seen

    return lambda params, layer: run(params, jnp.float32(layer))


def rms(x: Any) -> np.ndarray:
    return np.sqrt(np.mean(np.asarray(x, np.float64) ** 2, axis=-1))


@pytest.mark.parametrize("recipe", ["ngpt", "ngpt_bound"])
def test_the_stream_of_ngpt_has_norm_one_behind_every_join(recipe):
    assert_stream_has_norm(instruments_of(recipe)(tiny(recipe).random), 1.0)


@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0, 30.0])
def test_the_stream_of_geo_norm_keeps_norm_root_width_whatever_the_branches(factor):
    params = tiny("geo_norm").random
    layers = params["layers"]
    attention = layers["attention"] | {"attention_out": factor * layers["attention"]["attention_out"]}
    layers = layers | {"attention": attention, "mlp": layers["mlp"] | {"down": factor * layers["mlp"]["down"]}}
    measured = instruments_of("geo_norm")(params | {"layers": layers})
    assert_stream_has_norm(measured, math.sqrt(SIZES.width))
    np.testing.assert_allclose(measured["layers"]["attention_stream"]["mean"], math.sqrt(SIZES.width), rtol=1e-5)
    assert (measured["layers"]["mlp_branch"]["mean"] >= 0.1 * factor).all()


@pytest.mark.parametrize("layer", [1, 4])
def test_geodesic_turns_by_the_part_across_the_stream_alone(layer):
    rng = np.random.default_rng(2)
    h, across = (jnp.asarray(x, jnp.float32) for x in rng.standard_normal((2, 1, 5, 8)))
    across -= jnp.sum(h * across, -1, keepdims=True) / jnp.sum(h * h, -1, keepdims=True) * h
    results: Any = (Geodesic().apply({}, h, x + 3 * h, jnp.float32(layer)) for x in (across, 0 * across))
    turned, still = results
    np.testing.assert_allclose(still, h, rtol=1e-5)
    cosine = jnp.sum(turned * h, -1) / jnp.sum(h * h, -1)
    angle = jnp.linalg.norm(across, axis=-1) / jnp.linalg.norm(h, axis=-1) / math.sqrt(layer)
    np.testing.assert_allclose(cosine, jnp.cos(angle), atol=1e-5)


@pytest.mark.parametrize("layers, stream_scale, gain", [(2, 1.41421356, 0.5), (18, 2.44948974, 0.28867513)])
def test_deep_norm_has_the_constants_of_a_decoder(layers, stream_scale, gain):
    """α = (2N)^¼ and β = (8N)^−¼."""
    arch = RECIPES["deep_norm"](Sizes(width=24, layers=layers, heads=3, feed_forward=40, vocab=31))
    assert arch.residual.at("attention")["stream_scale"] == pytest.approx(stream_scale)
    assert arch.residual.at("mlp")["stream_scale"] == pytest.approx(stream_scale)
    assert arch.init["gain"] == pytest.approx(gain)


def test_deep_norm_draws_the_gained_xavier_init():
    """std = g · √(2/(in + out)); g = (8 · 2)^−¼ = ½, but 1 for queries and keys."""
    sizes = Sizes(width=192, layers=2, heads=6, kv_heads=2, feed_forward=512, vocab=640)
    expected = {
        "embedding": math.sqrt(1 / 192),
        "head": math.sqrt(1 / 192),
        "layers/attention/query": math.sqrt(2 / (192 + 192)),
        "layers/attention/key": math.sqrt(2 / (192 + 64)),
        "layers/attention/value": 0.5 * math.sqrt(2 / (192 + 64)),
        "layers/attention/attention_out": 0.5 * math.sqrt(2 / (192 + 192)),
        "layers/mlp/up": 0.5 * math.sqrt(2 / (192 + 512)),
        "layers/mlp/down": 0.5 * math.sqrt(2 / (192 + 512)),
    }
    drawn = by_path(tiny("deep_norm", sizes).initial)
    assert {path: float(jnp.std(drawn[path])) for path in expected} == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("layer", [1, 2, 9])
def test_what_enters_the_sublayers_of_ln_scaling_has_rms_one_over_root_layer(layer):
    calls = block_calls("ln_scaling")(at_start("ln_scaling"), layer)
    for sublayer in ("attention", "mlp"):
        np.testing.assert_allclose(rms(calls[sublayer][0][0]), 1 / math.sqrt(layer), rtol=1e-5)


@pytest.mark.parametrize("recipe", ["post_ln", "deep_norm"])
def test_the_stream_behind_a_join_of_post_ln_has_mean_zero_and_variance_one(recipe):
    calls = block_calls(recipe)(at_start(recipe), 1)
    for join in ("attention_residual", "mlp_residual"):
        result = np.asarray(calls[join][1], np.float64)
        np.testing.assert_allclose(result.mean(axis=-1), 0, atol=1e-6)
        np.testing.assert_allclose(result.var(axis=-1), 1, atol=1e-4)  # less ε = 1e-5 over the variance


def test_what_the_mlp_of_hybrid_norm_reads_is_what_its_branch_is_added_to():
    calls = block_calls("hybrid_norm")(at_start("hybrid_norm"), 1)
    read, (stream, branch, *_), joined = calls["mlp"][0][0], *calls["mlp_residual"]
    np.testing.assert_array_equal(read, stream)
    np.testing.assert_allclose(rms(read), 1, rtol=1e-5)
    np.testing.assert_allclose(joined, stream + branch, rtol=1e-6)


POINTWISE = {  # class, its parameters but for gain and bias, slope at 0 over the stored slope
    "dyt": (DyT, {}, 1.0),
    "derf": (Derf, {"shift": jnp.float32(0)}, 2 / math.sqrt(math.pi)),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_dyt_and_derf_saturate_at_their_gain_and_have_their_slope_at_zero(name):
    kind, rest, slope = POINTWISE[name]
    gain = jnp.asarray([0.5, -1.5, 2.0], jnp.float32)
    params = {"slope": jnp.float32(0.4), "gain": gain, "bias": jnp.zeros(3), **rest}

    def function(x: Array) -> Any:
        return kind().apply({"params": params}, x)

    np.testing.assert_allclose(function(jnp.full(3, 1e3)), gain, rtol=1e-6)
    np.testing.assert_allclose(function(jnp.full(3, -1e3)), -gain, rtol=1e-6)
    assert (jnp.abs(function(jnp.linspace(-50, 50, 99)[:, None] * jnp.ones(3))) <= jnp.abs(gain) * (1 + 1e-6)).all()
    np.testing.assert_allclose(jax.jvp(function, [jnp.zeros(3)], [jnp.ones(3)])[1], 0.4 * slope * gain, rtol=1e-5)


@pytest.mark.parametrize("recipe", POINTWISE)
def test_dyt_and_derf_start_from_tokens_times_root_width_and_slope_one_half(recipe):
    first = by_path(tiny(recipe).first_scales)
    assert float(first["embedding_norm/gain"]) == pytest.approx(math.sqrt(SIZES.width))
    for place in ("layers/attention_norm", "layers/mlp_norm", "final_norm"):
        np.testing.assert_array_equal(first[f"{place}/slope"], np.float32(0.5))


@pytest.mark.parametrize("recipe, tolerance", [("see_dnorm", 1e-6), ("scale_norm", 1e-4)])  # ε differs in ScaleNorm
def test_see_dnorm_and_scale_norm_start_as_gpt_plus(recipe, tolerance):
    expected = tiny("gpt_plus").logits(at_start("gpt_plus"), TOKENS_BL)
    actual = tiny(recipe).logits(at_start(recipe), TOKENS_BL)
    np.testing.assert_allclose(actual, expected, atol=tolerance * expected.std())


@pytest.mark.parametrize("recipe", ["gpt_plus", "ngpt"])
def test_the_bound_changes_no_bit_of_a_forward_pass(recipe):
    one, other = tiny(recipe), tiny(f"{recipe}_bound")
    assert one.model.arch.constraint != other.model.arch.constraint
    np.testing.assert_array_equal(other.logits(one.random, TOKENS_BL), one.logits(one.random, TOKENS_BL))


def test_scaling_the_values_of_a_head_scales_its_output():
    """Also where two heads of queries share one of values."""
    rng = np.random.default_rng(4)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 7, heads, 6)), jnp.float32) for heads in (4, 2, 2))
    gain = jnp.asarray([0.5, -3.0], jnp.float32)
    mask = ops.attention_mask(7, None)
    scaled: Any = HeadScale().apply({"params": {"gain": gain}}, v)
    expected = jnp.repeat(gain, 2)[:, None] * ops.attention(q, k, v, mask, 0.5)
    np.testing.assert_allclose(ops.attention(q, k, scaled, mask, 0.5), expected, rtol=1e-5, atol=1e-6)


def test_simple_norm_does_not_see_the_length_of_the_matrices_of_a_layer():
    params = tiny("simple_norm").random
    layers = params["layers"]
    longer = {name: jax.tree.map(lambda w: 5 * w, layers[name]) for name in ("attention", "mlp")}
    expected = tiny("simple_norm").logits(params, TOKENS_BL)
    actual = tiny("simple_norm").logits(params | {"layers": layers | longer}, TOKENS_BL)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * expected.std())


WIDE = Sizes(width=1024, layers=2, heads=16, feed_forward=4096, vocab=256)


@cache
def wide_matrices() -> Any:
    return tiny("angpt", WIDE).initial


@cache
def wide(recipe: str) -> tuple[Any, np.ndarray, np.ndarray]:
    """Instruments, final stream and logits over 128 distinct tokens, of the weights that anGPT draws."""
    model = Decoder(RECIPES[recipe](WIDE), WIDE)
    tokens_BL = np.random.default_rng(0).permutation(WIDE.vocab)[None, :128].astype(np.int32)

    @jax.jit
    def run(params: Any) -> Any:
        return model.apply(
            {"params": params},
            tokens_BL,
            np.zeros_like(tokens_BL),
            capture_intermediates=lambda module, _: module.name == "final_norm",
            mutable=[COLLECTION, "intermediates"],
        )

    logits_BLV, seen = run(wide_matrices())
    (final,) = jax.tree.leaves(seen["intermediates"])
    return seen[COLLECTION], np.asarray(final), np.asarray(logits_BLV)


def test_simple_norm_starts_from_the_weights_of_angpt():
    drawn, expected = by_path(tiny("simple_norm").initial), by_path(tiny("angpt").initial)
    assert drawn.keys() == expected.keys()
    for path in drawn:
        np.testing.assert_array_equal(drawn[path], expected[path], err_msg=path)


def test_simple_norm_starts_within_five_percent_of_angpt():
    """Every norm but that of attention's branch: anGPT's shrinks like 1/√t, the mean of t values; simple_norm's is 1.

    simple_norm leaves ν_acf to the norm of the branch, and its instruments see u before its norm. Final stream and
    logits are within 1.5 %: with α = 0.01, all branches together are only 2 % of the stream.
    """
    nu = RECIPES["angpt"](WIDE).nu
    (expected, stream, logits), (actual, its_stream, its_logits) = wide("angpt"), wide("simple_norm")
    exact, approximate = actual["layers"], expected["layers"]
    np.testing.assert_allclose(approximate["mlp"]["u"]["mean"], 1, rtol=0.05)
    np.testing.assert_allclose(nu.activation * exact["mlp"]["a"]["mean"], approximate["mlp"]["a"]["mean"], rtol=0.05)
    for name in ("q", "k"):
        np.testing.assert_allclose(
            exact["attention"][name]["mean"], approximate["attention"][name]["mean"], rtol=0.05, err_msg=name
        )
    for name in ("attention_stream", "mlp_stream", "mlp_branch"):
        np.testing.assert_allclose(exact[name]["mean"], approximate[name]["mean"], rtol=0.05, err_msg=name)
    assert np.linalg.norm(its_stream - stream) < 0.015 * np.linalg.norm(stream)
    assert np.linalg.norm(its_logits - logits) < 0.015 * np.linalg.norm(logits)
