"""The four recipes against the float64 NumPy reference, which was written from the equations alone."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from conftest import LENGTH, SIZES, Tiny, by_path, path_of, random_batch, tiny
from reference import forward, loss

from angpt_jax.archs import RECIPES
from angpt_jax.part import Part
from angpt_jax.step import nats

DIRECTIONS = 3


def effective(place: Part, stored: np.ndarray, init: str, scale: str) -> np.ndarray:
    """s = ŝ · init/stored, from the settings of the part that holds ŝ."""
    settings = {name: getattr(place.kind, name, None) for name in (init, scale)} | dict(place.settings)
    return stored * (settings[init] / settings[scale])


def as_reference(model: Tiny, params: Any) -> dict[str, Any]:
    """The package's parameters as `reference.forward` takes them: W as (out, in), scales in their effective value."""
    arch, layers = model.model.arch, params["layers"]
    heads_by_width = SIZES.heads * SIZES.head_width
    result = {"embedding": params["embedding"], "head": params["head"].T, "layers": []}
    if "final_norm" in params:
        result["final_norm"] = params["final_norm"]["gain"]
    if "logits" in params:
        result["logit_scale"] = effective(arch.head, params["logits"]["logit_scale"], "scale_init", "scale_stored")
    for n in range(SIZES.layers):
        attention, mlp = (jax.tree.map(lambda x, n=n: x[n], layers[name]) for name in ("attention", "mlp"))
        layer = {name: attention[name].reshape(SIZES.width, heads_by_width).T for name in ("query", "key", "value")}
        layer["attention_out"] = attention["attention_out"].reshape(heads_by_width, SIZES.width).T
        layer |= {name: mlp[name].T for name in ("up", "gate", "down")}
        if "attention_norm" in layers:
            layer |= {name: layers[name]["gain"][n] for name in ("attention_norm", "mlp_norm")}
        if "attention_residual" in layers:
            for name in ("attention", "mlp"):
                alpha = layers[f"{name}_residual"]["alpha"][n]
                layer[f"alpha_{name}"] = effective(arch.residual, alpha, "alpha_init", "alpha_stored")
        if "query_gain" in attention.get("qk", {}):
            layer |= {"query_norm": attention["qk"]["query_gain"], "key_norm": attention["qk"]["key_gain"]}
        if "query_key_scale" in attention.get("qk", {}):
            stored = attention["qk"]["query_key_scale"]
            layer["query_key_scale"] = effective(arch.qk, stored, "scale_init", "scale_stored")
        for name, stored in mlp.get("gating", {}).items():
            layer[name] = effective(arch.gate, stored, "scale_init", "scale_stored")
        result["layers"].append(layer)
    return result


def reference_logits(recipe: str, params: Any, tokens_BL: np.ndarray, segments_BL: np.ndarray | None) -> np.ndarray:
    """logits_BLV in float64; `params` in the package's layout, float64."""
    arch = recipe.removesuffix("_no_qk_norm")
    run = partial(forward, arch, as_reference(tiny(recipe), params), heads=SIZES.heads, qk_norm=arch == recipe)
    return np.stack([run(tokens, segments=s) for tokens, s in zip(tokens_BL, documents(tokens_BL, segments_BL))])


def documents(tokens_BL: np.ndarray, segments_BL: np.ndarray | None) -> list[Any]:
    return [None] * len(tokens_BL) if segments_BL is None else list(segments_BL)


def float64(params: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_agree_with_the_reference(recipe, with_segments):
    batch = random_batch()
    tokens, segments = batch["tokens"][:, :-1], batch["segments"][:, :-1] if with_segments else None
    expected = reference_logits(recipe, float64(tiny(recipe).random), tokens, segments)
    actual = tiny(recipe).logits(tiny(recipe).random, tokens, segments)
    assert np.abs(actual - expected).max() <= 1e-5 * expected.std()


def test_the_batch_has_windows_with_several_documents():
    assert (random_batch()["segments"][:, LENGTH - 1] >= 2).all()


@cache
def gradient(recipe: str) -> dict[str, np.ndarray]:
    model, batch = tiny(recipe), random_batch()
    return by_path(jax.jit(jax.grad(lambda params: nats(model.model, params, batch).mean()))(model.random))


def reference_loss(recipe: str, params: Any) -> float:
    batch = random_batch()
    logits_BLV = reference_logits(recipe, params, batch["tokens"][:, :-1], batch["segments"][:, :-1])
    return loss(logits_BLV.reshape(-1, SIZES.vocab), batch["tokens"][:, 1:].reshape(-1))


def slope(recipe: str, name: str, direction: np.ndarray, step: float = 1e-4) -> float:
    """Central difference of the reference's loss along `direction` in the leaf `name`."""

    def at(distance: float) -> float:
        params = float64(tiny(recipe).random)
        moved = jax.tree_util.tree_map_with_path(
            lambda path, x: x + distance * direction if path_of(path) == name else x, params
        )
        return reference_loss(recipe, moved)

    return (at(step) - at(-step)) / (2 * step)


@pytest.mark.parametrize("recipe, name", [(recipe, name) for recipe in RECIPES for name in by_path(tiny(recipe).axes)])
def test_gradient_agrees_with_finite_differences(recipe, name):
    rng = np.random.default_rng(3)
    got = np.asarray(gradient(recipe)[name], np.float64)
    directions = [d / np.linalg.norm(d) for d in rng.standard_normal((DIRECTIONS, *got.shape))]
    expected = np.array([slope(recipe, name, d) for d in directions])
    actual = np.array([(got * d).sum() for d in directions])
    assert np.linalg.norm(actual - expected) <= 1e-4 * np.linalg.norm(expected)
