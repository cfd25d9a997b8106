"""The four recipes against the float64 NumPy reference, which was written from the equations alone."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import reference
from conftest import SIZES, Tiny, by_path, path_of, random_batch, tiny

from angpt_jax.arch import Arch, Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.part import Part
from angpt_jax.step import nats

pytestmark = pytest.mark.usefixtures("strict_dtypes")
MATRICES = """embedding head layers/attention/query layers/attention/key layers/attention/value
    layers/attention/attention_out layers/mlp/up layers/mlp/gate layers/mlp/down"""
GAINS = "final_norm/gain layers/attention_norm/gain layers/mlp_norm/gain"
QK_GAINS = "layers/attention/qk/query_gain layers/attention/qk/key_gain"
ALPHAS = "layers/attention_residual/alpha layers/mlp_residual/alpha logits/logit_scale"
NGPT_SCALES = "layers/attention/qk/query_key_scale layers/mlp/gating/up_scale layers/mlp/gating/gate_scale"
LEAVES = {
    "angpt": f"{MATRICES} {ALPHAS}".split(),
    "gpt_plus": f"{MATRICES} {GAINS} {QK_GAINS}".split(),
    "gpt_plus_no_qk_norm": f"{MATRICES} {GAINS}".split(),
    "ngpt": f"{MATRICES} {ALPHAS} {NGPT_SCALES}".split(),
}


@pytest.fixture(scope="module", autouse=True)
def constants_once() -> Iterator[None]:
    """The reference integrates ν in every layer of every pass; here once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "nu_angpt", cache(reference.nu_angpt))
        yield


def effective(place: Part, stored: np.ndarray, init: str, scale: str) -> np.ndarray:
    """s = ŝ · init/stored, from the settings of the part that holds ŝ."""
    return stored * (place[init] / place[scale])


def as_reference(model: Tiny, params: Any) -> dict[str, Any]:
    """The package's parameters as `reference.forward` takes them: W as (out, in), scales in their effective value."""
    arch, width = model.model.arch, model.model.sizes.width
    result = {"embedding": params["embedding"], "head": params["head"].T}
    if "final_norm" in params:
        result["final_norm"] = params["final_norm"]["gain"]
    if "logits" in params:
        result["logit_scale"] = effective(arch.head, params["logits"]["logit_scale"], "scale_init", "scale_stored")
    result["layers"] = []
    for n in range(model.model.sizes.layers):
        stack = jax.tree.map(lambda x, n=n: x[n], params["layers"])
        attention, mlp = stack["attention"], stack["mlp"]
        layer = {name: attention[name].reshape(width, -1).T for name in ("query", "key", "value")}
        layer["attention_out"] = attention["attention_out"].reshape(-1, width).T
        layer |= {name: mlp[name].T for name in ("up", "gate", "down")}
        result["layers"].append(layer | scales_as_reference(arch, stack))
    return result


def scales_as_reference(arch: Arch, stack: Any) -> dict[str, np.ndarray]:
    """Gains and scales of one layer."""
    qk, gating, scales = stack["attention"].get("qk", {}), stack["mlp"].get("gating", {}), {}
    if "attention_norm" in stack:
        scales |= {"attention_norm": stack["attention_norm"]["gain"], "mlp_norm": stack["mlp_norm"]["gain"]}
    for name in ("attention", "mlp"):
        if f"{name}_residual" in stack:
            stored = stack[f"{name}_residual"]["alpha"]
            scales[f"alpha_{name}"] = effective(arch.residual, stored, "alpha_init", "alpha_stored")
    if "query_gain" in qk:
        scales |= {"query_norm": qk["query_gain"], "key_norm": qk["key_gain"]}
    if "query_key_scale" in qk:
        scales["query_key_scale"] = effective(arch.qk, qk["query_key_scale"], "scale_init", "scale_stored")
    for name in gating:
        scales[name] = effective(arch.gate, gating[name], "scale_init", "scale_stored")
    return scales


def reference_logits(model: Tiny, params: Any, tokens_BL: np.ndarray, segments_BL: np.ndarray | None) -> np.ndarray:
    """logits_BLV in float64; `params` in the package's layout, float64."""
    sizes, name = model.model.sizes, model.model.arch.name
    arch, translated = name.removesuffix("_no_qk_norm"), as_reference(model, params)
    documents = [None] * len(tokens_BL) if segments_BL is None else segments_BL
    rows = [
        reference.forward(arch, translated, tokens, sizes.heads, sizes.rope_theta, segments, qk_norm=arch == name)
        for tokens, segments in zip(tokens_BL, documents, strict=True)
    ]
    return np.stack(rows)


def float64(params: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def assert_logits_agree(model: Tiny, with_segments: bool) -> None:
    batch = random_batch(model.model.sizes)
    tokens, segments = batch["tokens"][:, :-1], batch["segments"][:, :-1] if with_segments else None
    expected = reference_logits(model, float64(model.random), tokens, segments)
    actual = model.logits(model.random, tokens, segments)
    assert np.abs(actual - expected).max() <= 1e-5 * expected.std()


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_agree_with_the_reference(recipe, with_segments):
    assert_logits_agree(tiny(recipe), with_segments)


@pytest.mark.parametrize("heads, feed_forward", [(4, 16), (8, 64), (1, 8)])
def test_logits_agree_where_sizes_coincide(heads, feed_forward):
    """H = K, F = D and a single head: no shape may be taken for another."""
    sizes = Sizes(width=16, layers=1, heads=heads, feed_forward=feed_forward, vocab=16, rope_theta=100.0)
    assert_logits_agree(tiny("angpt", sizes), with_segments=True)


def test_every_window_has_several_documents():
    assert (np.ptp(random_batch()["segments"][:, :-1], axis=1) > 0).all()


@cache
def gradient(recipe: str) -> dict[str, np.ndarray]:
    model, batch = tiny(recipe), random_batch()
    return by_path(jax.jit(jax.grad(lambda params: nats(model.model, params, batch).mean()))(model.random))


def reference_loss(recipe: str, params: Any) -> float:
    batch = random_batch()
    logits_BLV = reference_logits(tiny(recipe), params, batch["tokens"][:, :-1], batch["segments"][:, :-1])
    return reference.loss(logits_BLV.reshape(-1, SIZES.vocab), batch["tokens"][:, 1:].reshape(-1))


def slope(recipe: str, name: str, direction: np.ndarray, step: float = 1e-4) -> float:
    """Central difference of the reference's loss along `direction` in the leaf `name`."""

    def loss_at(distance: float) -> float:
        def move(path: Any, x: np.ndarray) -> np.ndarray:
            return x + distance * direction if path_of(path) == name else x

        return reference_loss(recipe, jax.tree_util.tree_map_with_path(move, float64(tiny(recipe).random)))

    return (loss_at(step) - loss_at(-step)) / (2 * step)


@pytest.mark.parametrize("recipe, name", [(recipe, name) for recipe in RECIPES for name in LEAVES[recipe]])
def test_gradient_agrees_with_finite_differences(recipe, name):
    got = np.asarray(gradient(recipe)[name], np.float64)
    directions = np.random.default_rng(3).standard_normal((3, *got.shape))
    expected = np.array([slope(recipe, name, d / np.linalg.norm(d)) for d in directions])
    actual = np.array([(got * d).sum() / np.linalg.norm(d) for d in directions])
    assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_parameter_is_left_out_above(recipe):
    assert sorted(LEAVES[recipe]) == sorted(by_path(tiny(recipe).axes))
