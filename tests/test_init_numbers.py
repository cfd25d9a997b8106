"""The numbers of anGPT at init that follow from its equations: norms, scores, the stream, the first loss."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import by_path, tiny

from angpt_jax import ops
from angpt_jax.arch import Sizes
from angpt_jax.archs.angpt import angpt
from angpt_jax.how import How
from angpt_jax.model import MLP, Block, Decoder
from angpt_jax.places import override
from angpt_jax.seen import Window

pytestmark = pytest.mark.usefixtures("strict_dtypes")
VOCAB = 1024
HEAD_WIDTH = 64


def sizes(width: int, layers: int = 1) -> Sizes:
    return Sizes(width=width, layers=layers, heads=width // HEAD_WIDTH, feed_forward=4 * width, vocab=VOCAB)


def distinct_tokens(length: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(VOCAB)[None, :length].astype(np.int32)


@cache
def initial(width: int, layers: int) -> Any:
    model = Decoder(angpt(sizes(width, layers)), sizes(width, layers))
    tokens_BL = distinct_tokens(8)
    return jax.jit(lambda: nn.meta.unbox(model.init(jax.random.key(0), tokens_BL, tokens_BL))["params"])()


def mean_norm(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64), axis=-1).mean())


@cache
def first_layer(width: int, length: int) -> dict[str, Any]:
    """What flows through the first layer: q and k before and after the place `qk`, u, a, x_A and x_M."""
    arch, params, seen = angpt(sizes(width)), initial(width, 1), {}

    def remember(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        if context.module.name == "qk":
            seen.update(q=args[0], k=args[1], rotated=result)
        elif context.module.name == "gating":
            seen.update(u=args[0], a=arch.nu.activation * result)
        elif context.module.name == "attention":
            seen["x_A"], _ = result
        elif context.module.name == "mlp":
            seen["x_M"] = result
        return result

    def run(params: Any) -> dict[str, Any]:
        seen.clear()
        h_BLD = params["embedding"][distinct_tokens(length)]
        layer = {"params": jax.tree.map(lambda x: x[0], params["layers"])}
        angles, how = ops.rotary_angles(jnp.arange(length), HEAD_WIDTH, 10_000.0), How()
        with nn.intercept_methods(remember):
            Block(arch, sizes(width), how).apply(layer, h_BLD, jnp.float32(1), Window(None, angles))
        return dict(seen)

    return jax.jit(run)(params)


@pytest.mark.parametrize("name", ["q", "k", "u", "a", "x_M"])
@pytest.mark.parametrize("width", [256, 512])
def test_norms_are_one_in_the_first_layer(width, name):
    assert mean_norm(first_layer(width, 256)[name]) == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("length, expected", [(256, 0.18), (1024, 0.10)])
def test_averaging_values_shrinks_the_attention_branch(length, expected):
    assert mean_norm(first_layer(256, length)["x_A"]) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(
    "places, expected, tolerance",
    [({}, 1.0, 0.02), ({"qk": {"softmax_scale": 1 / math.sqrt(HEAD_WIDTH)}}, 0.016, 5e-4)],
)
@pytest.mark.parametrize("width", [256, 512])
def test_scores_have_std_one_only_with_the_right_softmax_scale(width, places, expected, tolerance):
    scale = override(angpt(sizes(width)), places, sizes(width)).qk["softmax_scale"]
    q_LHK, k_LHK = (np.asarray(x[0], np.float64) for x in first_layer(width, 256)["rotated"])
    scores_HLM = scale * np.einsum("lhk,mhk->hlm", q_LHK, k_LHK)
    seen = np.tril(np.ones((256, 256), dtype=bool))
    assert scores_HLM[:, seen].std() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    "alpha, with_nu, dtype, expected",
    [
        (0.01, True, jnp.float32, 0.999),
        (0.01, True, jnp.bfloat16, 0.999),  # the joins are float32: in bfloat16 they drift to 1.15
        (0.05, True, jnp.float32, 0.968),
        (0.01, False, jnp.float32, 0.618),
        (0.05, False, jnp.float32, 0.086),
    ],
)
def test_norm_of_the_stream_after_24_layers(alpha, with_nu, dtype, expected):
    residual = {"part": "approximate_lerp" if with_nu else "lerp", "alpha_init": alpha}
    arch = override(angpt(sizes(256, 24)), {"residual": residual}, sizes(256, 24))
    model = Decoder(arch, sizes(256, 24), how=How(dtype))

    @jax.jit
    def stream(params: Any) -> Any:
        def is_last(module: nn.Module, _: str) -> bool:
            return module.name == "final_norm"

        tokens_BL = distinct_tokens(256)
        seen = model.apply(
            {"params": params},
            tokens_BL,
            np.zeros_like(tokens_BL),
            capture_intermediates=is_last,
            mutable=["intermediates"],
        )[1]
        return jax.tree.leaves(seen)[0]

    assert mean_norm(stream(initial(256, 24))) == pytest.approx(expected, abs=0.003)


@pytest.mark.parametrize("width", [256, 512])
def test_logits_have_std_one_over_root_width_and_the_first_loss_is_that_of_a_uniform_guess(width):
    model = Decoder(angpt(sizes(width)), sizes(width))
    tokens_BL = distinct_tokens(257)
    apply = jax.jit(lambda params: model.apply({"params": params}, tokens_BL[:, :-1], np.zeros((1, 256), np.int32)))
    logits_BLV = apply(initial(width, 1))
    assert np.asarray(logits_BLV).std() == pytest.approx(1 / math.sqrt(width), rel=0.02)
    loss = ops.cross_entropy(logits_BLV, jnp.asarray(tokens_BL[:, 1:])).mean()
    assert float(loss) == pytest.approx(math.log(VOCAB), abs=0.01)


@cache
def activation_norms(width: int, gate_scale: float | None = None) -> np.ndarray:
    """‖a‖ of 512 random unit vectors; `gate_scale` replaces √D."""
    arch = angpt(sizes(width))
    if gate_scale is not None:
        arch = override(arch, {"gate": {"gate_scale": gate_scale}}, sizes(width))

    @jax.jit
    def run() -> Any:
        x_BLD = jax.random.normal(jax.random.key(1), (1, 512, width))
        mlp = MLP(arch, sizes(width), How())
        seen: Any = mlp.init_with_output(jax.random.key(0), ops.unit_norm(x_BLD), capture_intermediates=True)[1]
        return arch.nu.activation * seen["intermediates"]["gating"]["__call__"][0]

    return np.linalg.norm(np.asarray(run(), np.float64), axis=-1)


def spread_in_theory(width: int) -> float:
    """½ √((E[a⁴]/E[a²]² − 1)/F) of F independent a = u · SiLU(z), u and z normal, z of std ½."""
    g = np.linspace(-10, 10, 20_001)
    density = np.exp(-(g**2) / 2)
    silu = (g / 2) / (1 + np.exp(-g / 2))
    second, fourth = ((silu**n * density).sum() / density.sum() for n in (2, 4))
    return 0.5 * math.sqrt((3 * fourth / second**2 - 1) / (4 * width))


@pytest.mark.parametrize("width, rounded", [(256, 0.0626), (512, 0.0443), (1024, 0.0313)])
def test_norms_concentrate_like_one_over_root_width(width, rounded):
    norms = activation_norms(width)
    assert spread_in_theory(width) == pytest.approx(rounded, abs=5e-5)
    assert norms.mean() == pytest.approx(1, rel=0.02)
    assert norms.std() / norms.mean() == pytest.approx(rounded, rel=0.1)  # 512 draws know it to 3 %


@pytest.mark.parametrize("width, expected", [(256, 0.058), (512, 0.041), (1024, 0.029)])
def test_activations_vanish_without_root_width_on_the_gate(width, expected):
    assert activation_norms(width, gate_scale=1.0).mean() == pytest.approx(expected, abs=0.001)


ROOT = 1 / math.sqrt(24)  # 1/√D
STARTS = {  # what is stored at step 0
    "angpt": {"alpha": ROOT, "logit_scale": ROOT},
    "ngpt": {"alpha": ROOT, "logit_scale": ROOT, "query_key_scale": ROOT, "up_scale": 1.0, "gate_scale": 1.0},
    "gpt_plus": {"gain": 1.0, "query_gain": 1.0, "key_gain": 1.0},
    "gpt_plus_no_qk_norm": {"gain": 1.0},
}
MEANS = {  # and in value: alpha, logit_scale, query_key_scale, up_scale and gate_scale
    "angpt": {"residual": (0.01, ROOT), "head": (1.0, ROOT)},
    "ngpt": {"residual": (0.05, ROOT), "head": (1.0, ROOT), "qk": (1.0, ROOT), "gate": (1.0, 1.0)},
}


@pytest.mark.parametrize("recipe", STARTS)
def test_scales_start_where_they_should(recipe):
    stored = {}
    for path, values in by_path(tiny(recipe).first_scales).items():
        stored.setdefault(path.rpartition("/")[2], set()).update(np.unique(values).tolist())
    assert {name: tuple(values) for name, values in stored.items()} == {
        name: (pytest.approx(value),) for name, value in STARTS[recipe].items()
    }


@pytest.mark.parametrize("recipe, place", [(recipe, place) for recipe, places in MEANS.items() for place in places])
def test_scales_mean_what_they_should(recipe, place):
    part_there = getattr(tiny(recipe).model.arch, place)
    name = "alpha" if place == "residual" else "scale"
    assert (part_there[f"{name}_init"], part_there[f"{name}_stored"]) == pytest.approx(MEANS[recipe][place])
