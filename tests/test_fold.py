"""anGPT folded into a plain decoder: the same logits, no norm and no factor left, refused where it can't be."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import SIZES, Tiny, is_box, random_batch, tiny
from test_hlo import FEATURES

from angpt_jax import fold
from angpt_jax.arch import NOTHING, Arch, Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.axes import Annotated
from angpt_jax.how import How
from angpt_jax.model import Decoder
from angpt_jax.nu import Nu
from angpt_jax.part import part
from angpt_jax.parts.residual import Add
from angpt_jax.places import SUBLAYERS, override

FOLDABLE: dict[str, dict[str, Any]] = {
    "as it is": {},
    "QK-norm": {"qk": {"part": "qk_norm"}},
    "unit q and k": {"qk": {"part": "unit_qk"}},
    "a factor for each q and k": {"qk": {"part": "scaled_unit_qk", "scale_init": 1.5, "scale_stored": 0.2}},
    "one α a layer": {"residual": {"alpha_per": "layer"}},
    "signed α": {"residual": {"alpha_sign": "signed"}},
    "no ν(α)": {"residual": {"part": "lerp"}},
    "another join of the MLP": {"residual": {"mlp": {"part": "add"}}},
    "s_Z by channel": {"head": {"scale_per": "channel"}},
    "no s_Z": {"head": {"part": "plain"}},
    "another ν": {"nu": {"query": 1.1, "key": 0.9, "value": 1.2, "attention_out": 0.8, "up": 1.3, "down": 0.7}},
    "a factor for each head": {"value": {"part": "head_scale"}},
    "a norm of the values": {"value": {"part": "unit_norm"}},
    "a norm of the hidden units": {"hidden_norm": {"part": "unit_norm"}},
    "a factor of the hidden units": {"hidden_norm": {"part": "learnable_scale"}},
    "a factor of the embedding": {"embedding_norm": {"part": "learnable_scale"}},
    "a factor before the sublayers": {"input_norm": {"part": "learnable_scale"}},
    "a factor behind one": {"branch_norm": {"attention": {"part": "learnable_scale"}}},
    "a factor before the head": {"final_norm": {"part": "learnable_scale"}},
    "scaled gates": {"gate": {"part": "scaled_gated"}},
    "no gate": {"gate": {"part": "plain"}},
}
GROUPED = Sizes(width=24, layers=3, heads=4, feed_forward=40, vocab=31, kv_heads=2)


def plain_logits(model: Tiny, params: Any) -> np.ndarray:
    """Of the folded decoder."""
    folded = jax.jit(partial(fold.folded, model.model.arch, model.model.sizes))(params)
    return Tiny(model.model.clone(arch=fold.plain(model.model.arch))).logits(folded, *tokens())


def tokens() -> tuple[Any, Any]:
    batch = random_batch()
    return batch["tokens"][:, :-1], batch["segments"][:, :-1]


@pytest.mark.parametrize("places", FOLDABLE.values(), ids=FOLDABLE)
def test_the_plain_decoder_gives_the_same_logits(places: dict[str, Any]) -> None:
    model = tiny("angpt", arch=override(RECIPES["angpt"](SIZES), places, SIZES))
    logits = model.logits(model.random, *tokens())
    np.testing.assert_allclose(plain_logits(model, model.random), logits, rtol=0, atol=1e-5 * np.abs(logits).max())


def test_grouped_queries_fold() -> None:
    model = tiny("angpt", GROUPED)
    logits = model.logits(model.random, *tokens())
    np.testing.assert_allclose(plain_logits(model, model.random), logits, rtol=0, atol=1e-5 * np.abs(logits).max())


def in_float64(model: Tiny) -> Any:
    """The random parameters, each entry with a rest that float32 has no room for."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda w: np.asarray(w, np.float64) * (1 + 1e-9 * rng.standard_normal(w.shape)), model.random)


def test_in_float64_it_is_exact() -> None:
    model, params = tiny("angpt"), in_float64(tiny("angpt"))
    with jax.enable_x64(True):
        folded = jax.tree.map(np.asarray, fold.folded(model.model.arch, SIZES, params))
    assert {leaf.dtype for leaf in jax.tree.leaves(folded)} == {np.dtype(np.float64)}
    sequence = reference.Sequence(tokens()[0][0], SIZES.heads)
    expected = reference.angpt(in_numpy(params, model.model.arch), sequence)
    np.testing.assert_allclose(plain_decoder(folded, sequence), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def in_numpy(params: Any, arch: Arch) -> dict[str, Any]:
    """Parameters of anGPT as the reference takes them: rows of W, scales in their effective value."""

    def layer(number: int) -> dict[str, Any]:
        of_layer = jax.tree.map(lambda w: w[number], params["layers"])
        matrices = {role: w.T for role, w in (of_layer["attention"] | of_layer["mlp"]).items()}
        for sublayer in SUBLAYERS:
            settings = arch.residual.at(sublayer)
            alpha = of_layer[f"{sublayer}_residual"]["alpha"] * (settings["alpha_init"] / settings["alpha_stored"])
            matrices[f"{sublayer}_residual"] = {"alpha": np.abs(alpha)}
        return matrices

    logit_scale = params["logits"]["logit_scale"] * (arch.head["scale_init"] / arch.head["scale_stored"])
    return {
        "embedding": params["embedding"],
        "head": params["head"].T,
        "logits": {"logit_scale": logit_scale},
        "layers": [layer(number) for number in range(SIZES.layers)],
    }


def plain_decoder(params: Any, s: reference.Sequence) -> np.ndarray:
    """A Transformer of plain sums, in NumPy: no norm, no factor, softmax of q kᵀ itself."""
    h = params["embedding"][s.tokens]
    for number in range(SIZES.layers):
        layer = jax.tree.map(lambda w, number=number: w[number], params["layers"])
        q, k, v = (
            reference.split_heads(h @ layer["attention"][role], SIZES.head_width) for role in ("query", "key", "value")
        )
        y = reference.attention(reference.rope(q, s.theta), reference.rope(k, s.theta), v, 1.0, None)
        h = h + y @ layer["attention"]["attention_out"]
        mlp = layer["mlp"]
        h = h + (h @ mlp["up"] * reference.silu(h @ mlp["gate"])) @ mlp["down"]
    return h @ params["head"]


def test_what_is_left_is_plain() -> None:
    arch = fold.plain(RECIPES["angpt"](SIZES))
    assert arch.nu == Nu() and arch.residual == part(Add) and arch.qk["softmax_scale"] == 1.0
    assert arch.input_norm == arch.branch_norm == arch.final_norm == arch.embedding_norm == NOTHING
    model = tiny("angpt")
    folded = jax.eval_shape(partial(fold.folded, model.model.arch, SIZES), model.random)
    assert set(folded) == {"embedding", "head", "layers"} and set(folded["layers"]) == {"attention", "mlp"}
    assert all(leaf.ndim >= 2 for leaf in jax.tree.leaves(folded))


def test_its_program_has_no_root_and_reduces_only_for_the_softmax() -> None:
    model = Decoder(fold.plain(RECIPES["angpt"](SIZES)), SIZES)
    tokens_BL = jnp.zeros((4, 13), jnp.int32)
    params = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens_BL, tokens_BL))
    text: Any = jax.jit(model.apply).lower(params, tokens_BL, tokens_BL).compile().as_text()
    assert "sqrt" not in text
    reduced = [line for line in text.splitlines() if " reduce(" in line]
    assert len(reduced) == 2 and not any(f"dimensions={{{axis}}}" in line for line in reduced for axis in (0, 1, 2))
    assert not FEATURES & {13}


OBSTACLES = {
    "gpt_plus": "input_norm: RMSNorm depends on the vector that it is given",
    "ngpt": "branch_norm: UnitNorm depends on the vector that it is given",
    "post_ln": "residual: NormedAdd depends on the vectors that it joins",
    "dyt": "input_norm: DyT depends on the vector that it is given",
    "geo_norm": "embedding_norm: UnitNorm depends on the vector that it is given",
    "simple_norm": "branch_norm: UnitNorm depends on the vector that it is given",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_can_not_be_folded_says_why(recipe: str) -> None:
    obstacles = list(fold.obstacles(RECIPES[recipe](SIZES), tied_embeddings=False))
    assert bool(obstacles) == (recipe != "angpt")
    assert OBSTACLES.get(recipe, "") in "".join(obstacles[:1])


def test_tied_embeddings_can_not_be_folded() -> None:
    assert list(fold.obstacles(RECIPES["angpt"](SIZES), tied_embeddings=True)) == [
        "model.tied_embeddings: one matrix can't be the embedding and take the factors of the head"
    ]


def test_an_alpha_of_one_shows() -> None:
    model = tiny("angpt")
    stored = model.model.arch.residual.at("mlp")
    params = jax.tree.map(lambda w: w, model.random)
    ones = jnp.full_like(params["layers"]["mlp_residual"]["alpha"], stored["alpha_stored"] / stored["alpha_init"])
    params["layers"]["mlp_residual"]["alpha"] = ones
    folded = fold.folded(model.model.arch, SIZES, params)
    assert not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(folded))


def relative_error(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))


def test_in_bfloat16_it_errs_no_more_than_the_model_itself() -> None:
    """Both round as often: the ratio of their errors is 1 but for chance, 0.998 in the mean of 15 larger models."""
    sizes = Sizes(width=128, layers=4, heads=4, feed_forward=512, vocab=256)
    exact, rough = tiny("angpt", sizes), tiny("angpt", sizes, how=How(jnp.bfloat16))
    plain = Tiny(rough.model.clone(arch=fold.plain(exact.model.arch)))
    folded = jax.jit(partial(fold.folded, exact.model.arch, sizes))
    tokens_BL = np.random.default_rng(0).integers(0, sizes.vocab, (8, 32), dtype=np.int32)
    errors = []
    for seed in range(8):
        params = redrawn(exact, seed)
        logits = exact.logits(params, tokens_BL)
        of_folded, of_itself = plain.logits(folded(params), tokens_BL), rough.logits(params, tokens_BL)
        errors.append((relative_error(of_folded, logits), relative_error(of_itself, logits)))
    of_folded, of_itself = np.mean(errors, axis=0)
    assert of_folded <= 1.01 * of_itself < 0.05


def redrawn(model: Tiny, seed: int) -> Any:
    """Like `random`, with other matrices."""
    rng = np.random.default_rng(seed)

    def draw(box: Annotated, leaf: Any) -> Any:
        if not box.axes.is_matrix:
            return leaf
        (inputs,) = box.axes.along("inputs")
        return jnp.asarray(rng.standard_normal(leaf.shape) / np.sqrt(leaf.shape[inputs]), jnp.float32)

    return jax.tree.map(draw, model.boxed, model.random, is_leaf=is_box)
