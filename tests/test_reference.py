"""Every recipe, and what can be switched in it, against the float64 NumPy reference, which was written from the
equations alone."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import pytest
import reference
from conftest import SIZES, Tiny, by_path, path_of, random_batch, tiny
from reference_designs import FORWARD

from angpt_jax.arch import Arch, Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.model import Decoder
from angpt_jax.places import override
from angpt_jax.step import nats

pytestmark = pytest.mark.usefixtures("strict_dtypes")
PLACES = {  # of the modules whose scales may be stored as something else than their value
    "attention_residual": "residual",
    "mlp_residual": "residual",
    "qk": "qk",
    "gating": "gate",
    "logits": "head",
}


def effective(arch: Arch, module: str, leaf: str, stored: np.ndarray) -> np.ndarray:
    """s = ŝ · init/stored, from the settings of the part that holds ŝ; itself if there are none."""
    if module not in PLACES:
        return stored
    part = getattr(arch, PLACES[module]).at("attention" if module == "attention_residual" else "mlp")
    kind = "alpha" if leaf == "alpha" else "scale"
    return stored if part[f"{kind}_stored"] is None else stored * (part[f"{kind}_init"] / part[f"{kind}_stored"])


def out_by_in(name: str, kernel: np.ndarray) -> np.ndarray:
    """A matrix as W; the look-up table stays (V, D)."""
    if name == "embedding":
        return kernel
    return (kernel.reshape(-1, kernel.shape[-1]) if name == "attention_out" else kernel.reshape(len(kernel), -1)).T


def nested(arch: Arch, leaves: dict[str, np.ndarray]) -> dict[str, Any]:
    """`attention/query` → ["query"], `attention/qk/query_gain` → ["qk"]["query_gain"]."""
    result: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *modules, name = (part for part in path.split("/") if part not in ("attention", "mlp", "norm"))
        if modules:
            (module,) = modules
            result.setdefault(module, {})[name] = effective(arch, module, name, leaf)
        else:
            result[name] = out_by_in(name, leaf)
    return result


def as_reference(model: Decoder, params: Any) -> dict[str, Any]:
    """The package's parameters as the reference takes them: W as (out, in), scales in their effective value."""
    stack, top = {}, {}
    for path, leaf in by_path(params).items():
        (stack if path.startswith("layers/") else top)[path.removeprefix("layers/")] = leaf
    result = nested(model.arch, top)
    if model.tied_embeddings:
        result["head"] = result["embedding"]
    layers = range(model.sizes.layers)
    return result | {"layers": [nested(model.arch, {path: leaf[n] for path, leaf in stack.items()}) for n in layers]}


@dataclass(frozen=True)
class Case:
    """A model, and what its reference must be told beside the parameters."""

    model: Tiny
    switches: dict[str, Any] = field(default_factory=dict)

    def reference_logits(self, params: Any, tokens_BL: np.ndarray, segments_BL: np.ndarray | None) -> np.ndarray:
        """logits_BLV in float64; `params` in the package's layout, float64."""
        model, sizes = self.model.model, self.model.model.sizes
        translated = as_reference(model, params)
        documents = [None] * len(tokens_BL) if segments_BL is None else segments_BL
        rows = [
            reference.Sequence(tokens, sizes.heads, sizes.rope_theta, segments)
            for tokens, segments in zip(tokens_BL, documents, strict=True)
        ]
        return np.stack([FORWARD[model.arch.name](translated, row, **self.switches) for row in rows])

    def reference_loss(self, params: Any) -> float:
        batch, vocab = random_batch(self.model.model.sizes), self.model.model.sizes.vocab
        logits_BLV = self.reference_logits(params, batch["tokens"][:, :-1], batch["segments"][:, :-1])
        return reference.loss(logits_BLV.reshape(-1, vocab), batch["tokens"][:, 1:].reshape(-1))

    def slope(self, name: str, direction: np.ndarray, step: float = 1e-4) -> float:
        """Central difference of the reference's loss along `direction` in the leaf `name`."""

        def loss_at(distance: float) -> float:
            def move(path: Any, x: np.ndarray) -> np.ndarray:
                return x + distance * direction if path_of(path) == name else x

            return self.reference_loss(jax.tree_util.tree_map_with_path(move, float64(self.model.random)))

        return (loss_at(step) - loss_at(-step)) / (2 * step)


def float64(params: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def assert_logits_agree(case: Case, with_segments: bool) -> None:
    batch = random_batch(case.model.model.sizes)
    tokens, segments = batch["tokens"][:, :-1], batch["segments"][:, :-1] if with_segments else None
    params = case.model.random
    expected = case.reference_logits(float64(params), tokens, segments)
    actual = case.model.logits(params, tokens, segments)
    assert np.abs(actual - expected).max() <= 1e-5 * expected.std()


def assert_gradients_agree(case: Case) -> None:
    """Of every parameter of the model, along two directions each; one that the reference ignores has slope 0."""
    model, batch = case.model, random_batch(case.model.model.sizes)
    gradients = jax.jit(jax.grad(lambda params: nats(model.model, params, batch).mean()))(model.random)
    wrong = {}
    for name, gradient in by_path(gradients).items():
        got = np.asarray(gradient, np.float64)
        directions = np.random.default_rng(3).standard_normal((2, *got.shape))
        expected = np.array([case.slope(name, d / np.linalg.norm(d)) for d in directions])
        actual = np.array([(got * d).sum() / np.linalg.norm(d) for d in directions])
        size = np.linalg.norm(expected)
        if size < 1e-5 or np.linalg.norm(actual - expected) > 2e-5 * size:
            wrong[name] = (actual, expected)
    assert not wrong


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_agree_with_the_reference(recipe, with_segments):
    assert_logits_agree(Case(tiny(recipe)), with_segments)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_every_parameter_agree_with_finite_differences(recipe):
    assert_gradients_agree(Case(tiny(recipe)))


@pytest.mark.parametrize("heads, feed_forward", [(4, 16), (8, 64), (1, 8)])
def test_logits_agree_where_sizes_coincide(heads, feed_forward):
    """H = K, F = D and a single head: no shape may be taken for another."""
    sizes = Sizes(width=16, layers=1, heads=heads, feed_forward=feed_forward, vocab=16, rope_theta=100.0)
    assert_logits_agree(Case(tiny("angpt", sizes)), with_segments=True)


def test_every_window_has_several_documents():
    assert (np.ptp(random_batch()["segments"][:, :-1], axis=1) > 0).all()


def test_every_parameter_is_translated():
    """As many numbers on both sides, the stacked layers' too."""
    for recipe in RECIPES:
        params = tiny(recipe).random
        translated = as_reference(tiny(recipe).model, params)
        assert sum(x.size for x in jax.tree.leaves(translated)) == sum(x.size for x in jax.tree.leaves(params)), recipe


GROUPED = Sizes(width=48, layers=2, heads=6, feed_forward=40, vocab=31, kv_heads=3)  # again no two are equal


@pytest.mark.parametrize(
    "recipe, sizes",
    [("angpt", replace(SIZES, kv_heads=1))]
    + [(recipe, GROUPED) for recipe in ("angpt", "ngpt", "normformer", "hybrid_norm")],
)
def test_logits_agree_with_grouped_queries(recipe, sizes):
    assert_logits_agree(Case(tiny(recipe, sizes)), with_segments=True)


def test_gradients_agree_with_grouped_queries():
    assert_gradients_agree(Case(tiny("ngpt", GROUPED)))


def test_logits_and_gradients_agree_with_tied_embeddings():
    tied = Case(Tiny(replace(tiny("angpt").model, tied_embeddings=True)))
    assert "head" not in tied.model.random
    assert_logits_agree(tied, with_segments=True)
    assert_gradients_agree(tied)


SWITCHES = {
    "no_nu_alpha": ({"residual": {"part": "lerp"}}, {"join": reference.lerp}),
    "exact_joins": ({"residual": {"part": "exact_lerp"}}, {"join": reference.exact_lerp}),
    "signed_alpha": ({"residual": {"alpha_sign": "signed"}}, {"sign": np.positive}),
    "alpha_of_a_layer": ({"residual": {"alpha_per": "layer"}}, {}),
    "scale_of_a_channel": ({"head": {"scale_per": "channel"}}, {"scale_per": "channel"}),
}


def switched(switch: str) -> Case:
    places, told = SWITCHES[switch]
    return Case(tiny("angpt", arch=override(RECIPES["angpt"](SIZES), places, SIZES)), told)


@pytest.mark.parametrize("switch", SWITCHES)
def test_logits_agree_with_a_switch_turned(switch):
    assert_logits_agree(switched(switch), with_segments=True)


@pytest.mark.parametrize("switch", ["signed_alpha", "alpha_of_a_layer"])
def test_gradients_agree_with_a_switch_turned(switch):
    assert_gradients_agree(switched(switch))


def test_alpha_has_either_sign_and_one_of_a_layer_is_a_number_a_layer():
    alpha = tiny("angpt").random["layers"]["attention_residual"]["alpha"]
    assert (alpha < 0).any() and (alpha > 0).any()
    of_a_layer = switched("alpha_of_a_layer").model.random["layers"]["mlp_residual"]["alpha"]
    assert of_a_layer.shape == (SIZES.layers,)
