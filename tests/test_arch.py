"""A recipe is a value; `override` replaces its places and says in full what is wrong with a replacement."""

import math
from dataclasses import replace

import pytest
from conftest import SIZES

from angpt_jax.arch import Constraint
from angpt_jax.archs import RECIPES
from angpt_jax.archs.angpt import angpt
from angpt_jax.config import ModelConfig
from angpt_jax.errors import UserError
from angpt_jax.experiment import architecture
from angpt_jax.part import part
from angpt_jax.parts import PARTS, qk, residual
from angpt_jax.places import override

ANGPT = angpt(SIZES)
PLACES = (
    "init, embedding_norm, input_norm, qk, value, gate, hidden_norm, branch_norm, residual, final_norm, head, nu, "
    "constraint"
)
NUMBERS = "; or one of 1/layers, sqrt(width), 1/sqrt(width), sqrt(head_width), 1/sqrt(head_width)"
WRONG = {
    "unknown place": (
        {"spam": {}},
        f"model.places.spam: unknown place, got 'spam'; one of {PLACES}",
    ),
    "misspelt place": (
        {"residuel": {}},
        "model.places.residuel: unknown place, got 'residuel'; did you mean residual?",
    ),
    "not a mapping": (
        {"qk": "qk_norm"},
        "model.places.qk: expected a mapping of settings, got 'qk_norm'; e.g. {part: NAME}",
    ),
    "unknown part": (
        {"head": {"part": "spam"}},
        "model.places.head.part: unknown part, got 'spam'; one of plain, scaled",
    ),
    "misspelt part": (
        {"input_norm": {"part": "rmsnorm"}},
        "model.places.input_norm.part: unknown part, got 'rmsnorm'; did you mean rms_norm?",
    ),
    "part of another place": (
        {"residual": {"part": "qk_norm"}},
        "model.places.residual.part: unknown part, got 'qk_norm'; one of add, normed_add, lerp, approximate_lerp, "
        "exact_lerp, geodesic",
    ),
    "part that is a list": (
        {"head": {"part": ["plain"]}},
        "model.places.head.part: unknown part, got ['plain']; did you mean plain?",
    ),
    "unknown setting": (
        {"residual": {"spam": 1.0}},
        "model.places.residual.spam: unknown setting, got 'spam'; one of alpha_init, alpha_stored, alpha_per, "
        "alpha_sign",
    ),
    "misspelt setting": (
        {"nu": {"activaton": 1.0}},
        "model.places.nu.activaton: unknown setting, got 'activaton'; did you mean activation?",
    ),
    "setting of the part before": (
        {"qk": {"part": "rotary", "epsilon": 1e-6}},
        "model.places.qk.epsilon: unknown setting, got 'epsilon'; one of softmax_scale",
    ),
    "setting of a part that has none": (
        {"residual": {"part": "add", "alpha_init": 0.1}},
        "model.places.residual.alpha_init: unknown setting, got 'alpha_init'; this part has none, null drops it",
    ),
    "text for a number": (
        {"qk": {"softmax_scale": "1.0"}},
        "model.places.qk.softmax_scale: expected a finite number, got '1.0'" + NUMBERS,
    ),
    "infinity": (
        {"nu": {"down": float("inf")}},
        "model.places.nu.down: expected a finite number, got inf" + NUMBERS,
    ),
    "not a number": (
        {"nu": {"down": float("nan")}},
        "model.places.nu.down: expected a finite number, got nan" + NUMBERS,
    ),
    "a truth value": (
        {"nu": {"down": True}},
        "model.places.nu.down: expected a finite number, got True" + NUMBERS,
    ),
    "unknown choice": (
        {"constraint": {"norm": "two"}},
        "model.places.constraint.norm: unknown choice, got 'two'; one of none, at_most_one, one",
    ),
    "unknown side": (
        {"init": {"along": "outputs"}},
        "model.places.init.along: unknown choice, got 'outputs'; one of inputs, embed",
    ),
    "unknown activation": (
        {"gate": {"activation": "sylu"}},
        "model.places.gate.activation: unknown activation, got 'sylu'; did you mean silu?",
    ),
    "activation that is a list": (
        {"gate": {"activation": ["silu"]}},
        "model.places.gate.activation: unknown activation, got ['silu']; did you mean silu?",
    ),
    "missing setting": (
        {"init": {"part": "normal"}},
        "model.places.init.std: is required by the part ScaledNormal; give a value",
    ),
    "the optimizer, which the fields of optim set": (
        {"optimizer": {"clip_norm": 1.0}},
        f"model.places.optimizer: unknown place, got 'optimizer'; one of {PLACES}",
    ),
}


@pytest.mark.parametrize("places, line", WRONG.values(), ids=WRONG)
def test_one_line_says_what_is_wrong(places, line):
    with pytest.raises(UserError) as caught:
        override(ANGPT, places, SIZES)
    assert caught.value.problems == (line,)


def test_all_problems_are_told_at_once():
    with pytest.raises(UserError) as caught:
        override(
            ANGPT, {"spam": {}, "nu": {"down": "x", "spam": 1.0}, "qk": {"part": "scaled_unit_qk"}, "head": {}}, SIZES
        )
    fields = [line.partition(":")[0].removeprefix("model.places.") for line in caught.value.problems]
    assert fields == ["spam", "qk.scale_init", "qk.scale_stored", "nu.down", "nu.spam"]


def test_nothing_to_replace_changes_nothing():
    for places in ({}, {"qk": {}, "nu": {}}, {"nu": None, "residual": {"alpha_init": None, "mlp": None}}):
        assert override(ANGPT, places, SIZES) == ANGPT


def test_another_part_keeps_settings_of_the_same_name():
    qk_norm = override(ANGPT, {"qk": {"part": "qk_norm"}}, SIZES)
    assert qk_norm == replace(ANGPT, qk=part(qk.QKNorm, softmax_scale=ANGPT.qk["softmax_scale"]))
    exact = override(ANGPT, {"residual": {"part": "exact_lerp", "alpha_init": 0.5}}, SIZES)
    stored = ANGPT.residual.at("mlp")["alpha_stored"]
    assert exact.residual == part(residual.ExactLerp, alpha_init=0.5, alpha_stored=stored)


def test_single_settings_of_parts_and_of_dataclasses():
    arch = override(ANGPT, {"nu": {"down": 1.0}, "constraint": {"norm": "one"}, "qk": {"softmax_scale": 0.25}}, SIZES)
    nu, constraint = replace(ANGPT.nu, down=1.0), Constraint("one", "inputs")
    assert arch == replace(ANGPT, nu=nu, constraint=constraint, qk=part(qk.Rotary, softmax_scale=0.25))


@pytest.mark.parametrize(
    "recipe, places, expected",
    [
        ("angpt", {}, ANGPT.nu.activation),
        ("angpt", {"gate": {"activation": "relu"}}, math.sqrt(2 * 40 / 24)),  # E[relu(s·g)²] = s²/2, s² = D/F
        ("angpt", {"gate": {"activation": "relu"}, "nu": {"activation": 1.5}}, 1.5),
        ("angpt", {"nu": {"activation": 1.0}}, 1.0),
        ("gpt_plus", {"gate": {"activation": "relu"}}, 1.0),
    ],
)
def test_the_nu_of_the_activation_follows_the_activation(recipe, places, expected):
    model = ModelConfig(recipe, width=24, layers=2, heads=3, feed_forward=40, vocab=31, context=8, places=places)
    assert architecture(model)[0].nu.activation == pytest.approx(expected, rel=1e-6)


def test_whole_numbers_become_floats():
    """YAML reads `down: 1` as an integer, but ν is a float, and a scale stored as 1 is not an integer parameter."""
    arch = override(ANGPT, {"nu": {"down": 1}, "residual": {"alpha_stored": 1}}, SIZES)
    assert type(arch.nu.down) is float
    assert type(arch.residual.at("mlp")["alpha_stored"]) is float


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_equal_and_hash_by_value(recipe):
    first, second = RECIPES[recipe](SIZES), RECIPES[recipe](replace(SIZES))
    assert first == second and hash(first) == hash(second) and first is not second
    assert RECIPES[recipe](replace(SIZES, width=48)) != first
    assert first.name == recipe


def test_no_two_recipes_are_equal():
    assert len({replace(recipe(SIZES), name="") for recipe in RECIPES.values()}) == len(RECIPES)


def test_the_order_of_settings_does_not_matter():
    assert part(qk.QKNorm, epsilon=1e-6, softmax_scale=1.0) == part(qk.QKNorm, softmax_scale=1.0, epsilon=1e-6)


def test_an_override_is_equal_to_the_same_override():
    places = {"nu": {"down": 1.0}, "residual": {"alpha_init": 0.1}}
    backwards = dict(reversed(places.items()))
    assert override(ANGPT, places, SIZES) == override(ANGPT, backwards, SIZES) != ANGPT


def test_a_recipe_prints_one_place_a_line():
    lines = str(ANGPT).splitlines()
    assert [line.split()[0] for line in lines] == ["name", *PLACES.split(", "), "optimizer"]
    assert "  residual  ApproximateLerp(alpha_init=0.01, alpha_stored=0.20412414523193154)" in lines[9]


def test_every_part_of_every_place_has_its_own_class():
    for place, parts in PARTS.items():
        assert len(set(parts.values())) == len(parts), place
