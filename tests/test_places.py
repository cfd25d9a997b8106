"""Every switch of a recipe: what YAML and flags make of it, that it has an effect, and the line that refuses it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import conftest
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from conftest import by_path, path_of
from jax import Array

from angpt_jax import cli, experiment, ops, optim
from angpt_jax.arch import Arch, Constraint, Sizes
from angpt_jax.archs import RECIPES
from angpt_jax.axes import Annotated, Axes
from angpt_jax.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from angpt_jax.errors import UserError
from angpt_jax.form import flatten
from angpt_jax.how import How
from angpt_jax.model import Block, Decoder
from angpt_jax.nu import ACTIVATIONS, Nu, activation_nu
from angpt_jax.part import Part, Split, part, setting_types
from angpt_jax.parts import PARTS, gate, head, norms, pointwise, qk, residual
from angpt_jax.places import OVERRIDABLE, SUBLAYERS, hidden_nu, override
from angpt_jax.seen import Window

SIZES = replace(conftest.SIZES, heads=6, kv_heads=3)  # D = 24, N = 2, K = 4, F = 40
ROOT = 1 / math.sqrt(24)
ANGPT, NGPT, HYBRID = (RECIPES[name](SIZES) for name in ("angpt", "ngpt", "hybrid_norm"))
NUS = [field.name for field in fields(Nu)]
LERP = {"alpha_init": 0.01, "alpha_stored": ROOT}
LOGITS = {"scale_init": 1.0, "scale_stored": ROOT}
GATE = {"activation": "silu", "gate_scale": math.sqrt(24)}
RMS, UNIT, NOTHING = part(norms.RMSNorm), part(norms.UnitNorm), part(norms.Identity)


def joined(**settings: Any) -> dict[str, Part]:
    return {"residual": part(residual.ApproximateLerp, **LERP | settings)}


def bounded(norm: Any, along: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return ("angpt", {"constraint": {"norm": norm, "along": along}}, {"constraint": Constraint(norm, along)})


def normed(place: str, name: str, kind: type, **settings: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    return ("angpt", {place: {"part": name, **settings}}, {place: part(kind, **settings)})


# Recipe, model.places, and the fields of its Arch that are others then.
SWITCHES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{f"no ν of {nu}": ("angpt", {"nu": {nu: 1.0}}, {"nu": replace(ANGPT.nu, **{nu: 1.0})}) for nu in NUS},
    **{
        f"ν of {nu} times 0.9": (
            "angpt",
            {"nu": {f"{nu}_factor": 0.9}},
            {"nu": replace(ANGPT.nu, **{nu: getattr(ANGPT.nu, nu) * 0.9})},
        )
        for nu in NUS
    },
    "a ν that the recipe has not": ("gpt_plus", {"nu": {"down": 2.0}}, {"nu": Nu(down=2.0)}),
    "no ν(α)": ("angpt", {"residual": {"part": "lerp"}}, {"residual": part(residual.Lerp, **LERP)}),
    "an exact norm for ν(α)": (
        "angpt",
        {"residual": {"part": "exact_lerp"}},
        {"residual": part(residual.ExactLerp, **LERP)},
    ),
    "α of a layer": ("angpt", {"residual": {"alpha_per": "layer"}}, joined(alpha_per="layer")),
    "α with its sign": ("angpt", {"residual": {"alpha_sign": "signed"}}, joined(alpha_sign="signed")),
    "α from a number": ("angpt", {"residual": {"alpha_init": 0.2}}, joined(alpha_init=0.2)),
    "α from the depth": ("angpt", {"residual": {"alpha_init": "1/layers"}}, joined(alpha_init=0.5)),
    "α stored as a number": ("angpt", {"residual": {"alpha_stored": 1.0}}, joined(alpha_stored=1.0)),
    "α stored after the width": (
        "ngpt",
        {"residual": {"alpha_init": "1/sqrt(width)", "alpha_stored": "sqrt(width)"}},
        {"residual": NGPT.residual.at("mlp").replace(alpha_init=ROOT, alpha_stored=math.sqrt(24))},
    ),
    "s_Z of a channel": (
        "angpt",
        {"head": {"scale_per": "channel"}},
        {"head": part(head.ScaledLogits, **LOGITS, scale_per="channel")},
    ),
    "s_Z from √D": (
        "angpt",
        {"head": {"scale_init": "sqrt(width)"}},
        {"head": part(head.ScaledLogits, scale_init=math.sqrt(24), scale_stored=ROOT)},
    ),
    "no s_Z": ("angpt", {"head": {"part": "plain"}}, {"head": part(head.PlainLogits)}),
    "QK-norm": ("angpt", {"qk": {"part": "qk_norm"}}, {"qk": part(qk.QKNorm, softmax_scale=2.0)}),
    "unit q and k": ("angpt", {"qk": {"part": "unit_qk"}}, {"qk": part(qk.UnitQK, softmax_scale=2.0)}),
    "scaled unit q and k": (
        "angpt",
        {"qk": {"part": "scaled_unit_qk", "scale_init": 1.5, "scale_stored": "1/sqrt(width)"}},
        {"qk": part(qk.ScaledUnitQK, softmax_scale=2.0, scale_init=1.5, scale_stored=ROOT)},
    ),
    "no QK-norm": ("gpt_plus", {"qk": {"part": "rotary"}}, {"qk": part(qk.Rotary, softmax_scale=0.5)}),
    "softmax scale": ("angpt", {"qk": {"softmax_scale": 0.3}}, {"qk": part(qk.Rotary, softmax_scale=0.3)}),
    "softmax scale 1/√K": (
        "angpt",
        {"qk": {"softmax_scale": "1/sqrt(head_width)"}},
        {"qk": part(qk.Rotary, softmax_scale=0.5)},
    ),
    "no √D on the gate": (
        "angpt",
        {"gate": {"gate_scale": 1.0}},
        {"gate": part(gate.GatedActivation, **GATE | {"gate_scale": 1.0})},
    ),
    "√D on the gate of GPT+": (
        "gpt_plus",
        {"gate": {"gate_scale": "sqrt(width)"}},
        {"gate": part(gate.GatedActivation, **GATE)},
    ),
    "scaled gate": (
        "angpt",
        {"gate": {"part": "scaled_gated", "scale_stored": 0.5}},
        {"gate": part(gate.ScaledGatedActivation, **GATE, scale_stored=0.5)},
    ),
    "no bound": ("angpt", {"constraint": {"norm": "none"}}, {"constraint": Constraint("none", "inputs")}),
    "a bound on GPT+": ("gpt_plus", {"constraint": {"norm": "one"}}, {"constraint": Constraint("one", "inputs")}),
    "bound along D": bounded("at_most_one", "embed"),
    "bound of a matrix": bounded("at_most_one", "matrix"),
    "sphere along the input": bounded("one", "inputs"),
    "sphere along D": bounded("one", "embed"),
    "sphere of a matrix": bounded("one", "matrix"),
    "norm behind the embedding": normed("embedding_norm", "unit_norm", norms.UnitNorm, radius=2.0),
    "norm before the head": normed("final_norm", "rms_norm", norms.RMSNorm),
    "norm before sublayers": normed("input_norm", "depth_scaled_rms_norm", norms.DepthScaledRMSNorm),
    "norm of values": normed("value", "unit_norm", norms.UnitNorm),
    "scale of a head": normed("value", "head_scale", pointwise.HeadScale),
    "norm of hidden units": normed("hidden_norm", "layer_norm", norms.LayerNorm),
    "norm of branches": normed("branch_norm", "unit_norm", norms.UnitNorm),
    "unit branches of attention alone": (
        "angpt",
        {"branch_norm": {"attention": {"part": "unit_norm"}}},
        {"branch_norm": Split(attention=UNIT, mlp=NOTHING)},
    ),
    "plain add of the MLP alone": (
        "angpt",
        {"residual": {"mlp": {"part": "add"}}},
        {"residual": Split(attention=joined()["residual"], mlp=part(residual.Add))},
    ),
    "norm before attention alone": (
        "angpt",
        {"input_norm": {"attention": {"part": "rms_norm"}}},
        {"input_norm": Split(attention=RMS, mlp=NOTHING)},
    ),
    "α of both, and of the MLP": (
        "angpt",
        {"residual": {"alpha_init": 0.2, "mlp": {"alpha_init": "1/layers"}}},
        {"residual": Split(joined(alpha_init=0.2)["residual"], joined(alpha_init=0.5)["residual"])},
    ),
    "one side of a recipe with two joins": (
        "hybrid_norm",
        {"residual": {"attention": {"norm": "layer_norm"}}},
        {"residual": Split(part(residual.NormedAdd, norm="layer_norm"), part(residual.Add))},
    ),
    "one join for a recipe with two": (
        "hybrid_norm",
        {"residual": {"part": "add"}},
        {"residual": part(residual.Add)},
    ),
}
BASE = Config(
    ModelConfig("angpt", 24, 2, 6, 31, context=8, feed_forward=40, kv_heads=3),
    OptimConfig(1e-3),
    DataConfig(batch_size=8),
    RunConfig(10),
)


def parsed(recipe: str, *argv: str, tmp_path: Any) -> Config:
    """BASE with another recipe, as a file, then `argv`."""
    path = tmp_path / "base.yaml"
    path.write_text(cli.to_yaml(replace(BASE, model=replace(BASE.model, arch=recipe))))
    return cli.parse(Config, ["--config", str(path), *argv], command="train")


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_read_from_yaml_and_from_flags_and_has_an_effect(name, tmp_path):
    recipe, places, expected = SWITCHES[name]
    file = tmp_path / "places.yaml"
    file.write_text(yaml.safe_dump({"model": {"places": places}}))
    flags = [(f"--model.places.{'.'.join(path)}", str(value)) for path, value in flatten(places)]
    config = parsed(recipe, "--config", str(file), tmp_path=tmp_path)
    assert parsed(recipe, *(word for flag in flags for word in flag), tmp_path=tmp_path) == config
    arch, sizes = experiment.architecture(config.model)
    assert (arch, sizes) == (replace(RECIPES[recipe](SIZES), **expected), SIZES)
    assert differ(RECIPES[recipe](SIZES), arch)


def test_null_takes_a_switch_of_an_earlier_file_back(tmp_path):
    first, second = (tmp_path / f"{name}.yaml" for name in ("first", "second"))
    first.write_text("model: {places: {residual: {mlp: {part: add}}, nu: {down_factor: 0.9}, head: {part: plain}}}")
    second.write_text("model: {places: {residual: {mlp: null}, nu: {down_factor: null}, head: {part: null}}}")
    config = parsed("angpt", "--config", str(first), "--config", str(second), tmp_path=tmp_path)
    assert experiment.architecture(config.model)[0] == ANGPT


@pytest.mark.parametrize(
    "flags, changed",
    [
        (["--model.kv_heads", "2"], {"layers/attention/key": (2, 24, 8), "layers/attention/value": (2, 24, 8)}),
        (["--model.tied_embeddings", "true"], {"head": None}),
        (
            ["--model.feed_forward", "60"],
            {"layers/mlp/up": (2, 24, 60), "layers/mlp/gate": (2, 24, 60), "layers/mlp/down": (2, 60, 24)},
        ),
        (
            ["--model.feed_forward", "null"],
            {"layers/mlp/up": (2, 24, 96), "layers/mlp/gate": (2, 24, 96), "layers/mlp/down": (2, 96, 24)},
        ),
    ],
)
def test_sizes_of_the_model_change_these_shapes_alone(flags, changed, tmp_path):
    def shapes(*argv: str) -> dict[str, tuple[int, ...]]:
        built = experiment.build(*experiment.resolved(parsed("angpt", *argv, tmp_path=tmp_path)))
        return {path: leaf.shape for path, leaf in by_path(built.abstract.params).items()}

    expected = shapes() | changed
    assert shapes(*flags) == {path: shape for path, shape in expected.items() if shape is not None}


@pytest.mark.parametrize("feed_forward", [24, 40, 96])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["gated", "scaled_gated", "plain"])
def test_the_nu_of_the_activation_follows_gate_activation_and_ratio(name, activation, feed_forward):
    sizes = replace(SIZES, feed_forward=feed_forward)
    arch = override(RECIPES["angpt"](sizes), {"gate": {"part": name, "activation": activation}}, sizes)
    expected = activation_nu(activation, math.sqrt(24 / feed_forward))
    if name == "plain":
        expected /= math.sqrt(feed_forward)
    assert arch.nu == replace(RECIPES["angpt"](sizes).nu, activation=pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["gated", "scaled_gated", "plain"])
def test_that_nu_brings_the_hidden_units_to_norm_one(name, activation):
    sizes = Sizes(width=256, layers=1, heads=4, feed_forward=640, vocab=2)
    arch = override(RECIPES["angpt"](sizes), {"gate": {"part": name, "activation": activation}}, sizes)
    rng = np.random.default_rng(0)

    def rows(count: int) -> np.ndarray:
        w = rng.standard_normal((count, 256)).astype(np.float32)
        return w / np.linalg.norm(w, axis=1, keepdims=True)

    x_LD = rows(256)
    maps = [getattr(arch.nu, role) * (x_LD @ rows(640).T)[None] for role in arch.gate.kind.inputs]
    a_BLF, _ = arch.gate.make(name="gating").init_with_output(jax.random.key(0), *maps)
    norms_L = np.linalg.norm(arch.nu.activation * np.asarray(a_BLF[0], np.float64), axis=-1)
    assert np.mean(norms_L**2) == pytest.approx(1, abs=0.03)


NO_EFFECT = "model.places.nu.{}: has no effect in {}, got {}; {} takes every factor out again"
WRONG: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "ν and its factor": (
        "angpt",
        {"nu": {"down": 2.0, "down_factor": 0.9}},
        ["model.places.nu.down_factor: can't stand beside down, got 0.9; keep one"],
    ),
    "a factor on no ν": (
        "gpt_plus",
        {"nu": {"down_factor": 0.9}},
        ["model.places.nu.down_factor: gpt_plus has no ν there to multiply, got 0.9; give down a value"],
    ),
    "a misspelt factor": (
        "angpt",
        {"nu": {"down_facter": 0.9}},
        ["model.places.nu.down_facter: unknown setting, got 'down_facter'; did you mean down_factor?"],
    ),
    "a factor that is no number": (
        "angpt",
        {"nu": {"down_factor": "0.9"}},
        [
            "model.places.nu.down_factor: expected a finite number, got '0.9'; or one of 1/layers, sqrt(width), "
            "1/sqrt(width), sqrt(head_width), 1/sqrt(head_width)"
        ],
    ),
    "behind QK-norm": (
        "gpt_plus",
        {"nu": {"query": 2.0}},
        [NO_EFFECT.format("query", "gpt_plus", 2.0, "QKNorm of qk")],
    ),
    "behind a norm of values": (
        "hybrid_norm",
        {"nu": {"value": 2.0}},
        [NO_EFFECT.format("value", "hybrid_norm", 2.0, "RMSNorm of value")],
    ),
    "behind norms of branches": (
        "ngpt",
        {"nu": {"value": 2.0, "attention_out": 3.0, "up": 4.0, "activation": 5.0, "down": 6.0}},
        [
            NO_EFFECT.format(name, "ngpt", value, "UnitNorm of branch_norm")
            for name, value in [("value", 2.0), ("attention_out", 3.0), ("up", 4.0), ("activation", 5.0), ("down", 6.0)]
        ],
    ),
    "behind a norm of hidden units": (
        "normformer",
        {"nu": {"activation": 2.0}},
        [NO_EFFECT.format("activation", "normformer", 2.0, "LayerNorm of hidden_norm")],
    ),
    "behind a norm inside the gate": (
        "simple_norm",
        {"nu": {"gate": 2.0}},
        [NO_EFFECT.format("gate", "simple_norm", 2.0, "UnitGatedActivation of gate")],
    ),
    "of a map that is not there": (
        "pre_ln",
        {"nu": {"gate": 2.0}},
        ["model.places.nu.gate: has no effect in pre_ln, got 2.0; PlainActivation has no such map"],
    ),
    "behind a norm of the same override": (
        "angpt",
        {"branch_norm": {"mlp": {"part": "unit_norm"}}, "nu": {"down_factor": 0.9, "attention_out_factor": 0.9}},
        [NO_EFFECT.format("down_factor", "angpt", 0.9, "UnitNorm of branch_norm")],
    ),
    "vectors of no bound": (
        "gpt_plus",
        {"constraint": {"along": "matrix"}},
        ["model.places.constraint.along: has no effect, got 'matrix'; constraint.norm is none"],
    ),
    "vectors of a bound that is taken away": (
        "angpt",
        {"constraint": {"norm": "none", "along": "embed"}},
        ["model.places.constraint.along: has no effect, got 'embed'; constraint.norm is none"],
    ),
    "unknown vectors": (
        "angpt",
        {"constraint": {"along": "columns"}},
        ["model.places.constraint.along: unknown choice, got 'columns'; one of inputs, embed, matrix"],
    ),
    "a word that is no number": (
        "angpt",
        {"residual": {"alpha_init": "1/depth"}},
        [
            "model.places.residual.alpha_init: expected a finite number, got '1/depth'; or one of 1/layers, "
            "sqrt(width), 1/sqrt(width), sqrt(head_width), 1/sqrt(head_width)"
        ],
    ),
    "a number for a choice": (
        "angpt",
        {"residual": {"alpha_per": 1.0}},
        ["model.places.residual.alpha_per: unknown choice, got 1.0; one of channel, layer"],
    ),
    "a sublayer that is no mapping": (
        "angpt",
        {"residual": {"mlp": "add"}},
        ["model.places.residual.mlp: expected a mapping of settings, got 'add'; e.g. {part: NAME}"],
    ),
    "an unknown part of a sublayer": (
        "angpt",
        {"residual": {"mlp": {"part": "ad"}}},
        ["model.places.residual.mlp.part: unknown part, got 'ad'; did you mean add?"],
    ),
    "a setting that one sublayer's part has not": (
        "hybrid_norm",
        {"residual": {"mlp": {"norm": "layer_norm"}}},
        ["model.places.residual.mlp.norm: unknown setting, got 'norm'; this part has none, null drops it"],
    ),
    "the same mistake in both sublayers": (
        "angpt",
        {"residual": {"part": "lurp"}},
        ["model.places.residual.part: unknown part, got 'lurp'; did you mean lerp?"],
    ),
    "a place that sublayers share": (
        "angpt",
        {"gate": {"mlp": {"part": "plain"}}},
        ["model.places.gate.mlp: unknown setting, got 'mlp'; one of activation, gate_scale"],
    ),
}


@pytest.mark.parametrize("recipe, places, lines", WRONG.values(), ids=WRONG)
def test_what_is_wrong_or_could_have_no_effect_is_refused(recipe, places, lines):
    with pytest.raises(UserError) as caught:
        override(RECIPES[recipe](SIZES), places, SIZES)
    assert list(caught.value.problems) == lines


TOKENS_BL = np.random.default_rng(0).integers(0, SIZES.vocab, (2, 5), dtype=np.int32)
STREAM_BLD = np.random.default_rng(1).standard_normal((2, 5, 24)).astype(np.float32) / 24**0.5


@cache
def window() -> Window:
    """One document."""
    return Window(None, ops.rotary_angles(jnp.arange(5), SIZES.head_width, SIZES.rope_theta))


def drawn(boxed: Any) -> Any:
    """Plain arrays that hide nothing: matrices with rows of norm about 1, scales of either sign, 0.5 … 1.5 times what
    they start at, or 0.2 … 0.5 where that is 0."""

    def draw(path: Any, box: Annotated) -> Array:
        first = np.asarray(box.value)
        rng = np.random.default_rng(list(path_of(path[:-1]).encode()))
        if box.axes.is_matrix:
            fan_in = math.prod(first.shape[i] for i in box.axes.along("inputs"))
            values = rng.standard_normal(first.shape) / math.sqrt(fan_in)
        else:
            factor = rng.uniform(0.5, 1.5, first.shape) * rng.choice([-1, 1], first.shape)
            values = np.where(first == 0, factor / 3, factor * first)
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, boxed, is_leaf=conftest.is_box)


def block_output(arch: Arch, variables: Any) -> Array:
    """The stream behind layer 2, op by op: tiny arrays need no compiler."""
    block = Block(arch, SIZES, How())
    outputs: Any = block.apply(variables, STREAM_BLD, jnp.float32(2), window())
    return outputs[0]


def first_variables(arch: Arch) -> Any:
    key, block = jax.random.key(0), Block(arch, SIZES, How())
    return block.init(key, STREAM_BLD, jnp.float32(2), window())


@cache
def block_outcome(arch: Arch) -> dict[str, Any]:
    """Parameters of a layer as they start, and the stream behind it."""
    variables = first_variables(arch)
    return by_path(nn.meta.unbox(variables)) | {"output": block_output(arch, drawn(variables))}


@cache
def rest_outcome(arch: Arch) -> dict[str, Any]:
    """The same for the model without its layers, and its logits."""

    def skip_layers(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        return (args[0], None) if context.module.name == "layers" else call(*args, **kwargs)

    with nn.intercept_methods(skip_layers):
        variables = Decoder(arch, SIZES).init(jax.random.key(0), TOKENS_BL, TOKENS_BL)
        output = Decoder(arch, SIZES).apply(drawn(variables), TOKENS_BL, TOKENS_BL)
    return by_path(nn.meta.unbox(variables)) | {"output": output}


@cache
def step_outcome(constraint: Constraint) -> dict[str, Any]:
    """An update of matrices with short and long vectors."""
    axes = {
        "down": Axes("down", ("feed_forward", "embed"), inputs=("feed_forward",)),
        "query": Axes("query", ("embed", "heads"), inputs=("embed",)),
    }
    rng = np.random.default_rng(0)
    params = {"down": rng.standard_normal((4, 3)), "query": 0.1 * rng.standard_normal((3, 4))}
    params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), params)
    config = OptimConfig(1e-3, weight_decay=0.0, clip_norm="none")
    tx = optim.build(config, optax.constant_schedule(1e-3), constraint, axes)
    return by_path(tx.update(params, tx.init(params), params)[0])


def unequal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if jax.tree.map(jnp.shape, one) != jax.tree.map(jnp.shape, other):
        return True
    return any(np.abs(one[name] - other[name]).max() > 1e-4 * np.abs(one[name]).max() for name in one)


def differ(one: Arch, other: Arch) -> bool:
    """Whether a layer, the rest of the model or an optimizer step of the two differs, at the first step or later."""
    if unequal(step_outcome(one.constraint), step_outcome(other.constraint)):
        return True
    one, other = (replace(arch, name="", constraint=Constraint()) for arch in (one, other))
    return any(unequal(outcome(one), outcome(other)) for outcome in (block_outcome, rest_outcome))


def another(name: str, kind: Any, value: Any) -> Any:
    """Another value of a setting."""
    if kind is float:
        return 3 * value + 0.5
    choices = list(ACTIVATIONS) if name == "activation" else kind.__args__
    return choices[(choices.index(value) + 1) % len(choices)]


def turns(arch: Arch) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every single setting of an architecture, and `places` that turn it."""
    hidden = hidden_nu(arch)
    for place in OVERRIDABLE:
        filled = getattr(arch, place)
        if place == "nu":
            names = [name for name in NUS if name not in hidden]
            yield from ((f"nu.{name}", {"nu": {name: 3 * getattr(filled, name)}}) for name in names)
        elif place == "constraint":
            yield "constraint.norm", {"constraint": {"norm": another("norm", *typed(filled, "norm"))}}
            if filled.norm != "none":
                yield "constraint.along", {"constraint": {"along": another("along", *typed(filled, "along"))}}
        else:
            for sublayer in SUBLAYERS if isinstance(filled, Split) else ("",):
                mine = filled.at(sublayer or "attention")
                for name, kind in setting_types(mine.kind).items():
                    change = {name: another(name, kind, mine[name])}
                    yield (
                        f"{place}.{sublayer}.{name}".replace("..", "."),
                        {place: {sublayer: change} if sublayer else change},
                    )


def typed(constraint: Constraint, name: str) -> tuple[Any, Any]:
    return setting_types(Constraint)[name], getattr(constraint, name)


WITHOUT_EFFECT: dict[str, dict[str, str]] = {
    "simple_norm": {"value.radius": "the exact norm of attention's branch takes it out again"},
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_setting_of_a_recipe_has_an_effect(recipe):
    arch = RECIPES[recipe](SIZES)
    same = [name for name, places in turns(arch) if not differ(arch, override(arch, places, SIZES))]
    assert same == list(WITHOUT_EFFECT.get(recipe, {}))


REQUIRED = {"normal": {"std": 0.1}, "gained_xavier": {"gain": 0.5, "vocab_std": 0.1}}
REQUIRED |= {"scaled_unit_qk": {"scale_init": 1.0, "scale_stored": 1.0}}


def filled(place: str, name: str) -> dict[str, Any]:
    return {place: {"part": name} | REQUIRED.get(name, {})}


@pytest.mark.parametrize("place, name", [(place, name) for place, parts in PARTS.items() for name in parts])
def test_every_part_fits_its_place_and_makes_a_difference(place, name):
    arch = override(ANGPT, filled(place, name), SIZES)
    assert getattr(arch, place).at("mlp").kind is PARTS[place][name]
    assert differ(ANGPT, arch) == (arch != ANGPT)
    for outcome in (block_outcome, rest_outcome):
        assert all(np.isfinite(leaf).all() for leaf in outcome(arch).values())


BEHIND_A_MAP = ("qk", "value", "gate", "hidden_norm", "branch_norm")
UNIT_BRANCHES = {"branch_norm": {"part": "unit_norm"}}
CHAINS: dict[str, dict[str, Any]] = {  # of anGPT: places of which one sees what another lets through
    **{f"{place} {name}": filled(place, name) for place in BEHIND_A_MAP for name in PARTS[place]},
    **{
        f"branch_norm of {sublayer} {name}": {"branch_norm": {sublayer: {"part": name}}}
        for sublayer in SUBLAYERS
        for name in ("unit_norm", "dyt")
    },
    **{
        f"{place} {name}, unit branches": {place: {"part": name}} | UNIT_BRANCHES
        for place, name in [
            ("value", "head_scale"),
            ("value", "rms_norm"),
            ("value", "dyt"),
            ("hidden_norm", "learnable_scale"),
            ("hidden_norm", "layer_norm"),
            ("hidden_norm", "derf"),
            ("gate", "plain"),
            ("gate", "unit_gated"),
        ]
    },
    "gate plain, hidden_norm rms_norm": {"gate": {"part": "plain"}, "hidden_norm": {"part": "rms_norm"}},
    "relu, branch_norm unit_norm": {"gate": {"activation": "relu"}, "branch_norm": {"part": "unit_norm"}},
    "plain relu_squared, branch_norm unit_norm": {
        "gate": {"part": "plain", "activation": "relu_squared"},
        "branch_norm": {"part": "unit_norm"},
    },
}
MIXED = {name: recipe(SIZES) for name, recipe in RECIPES.items()} | {
    f"angpt, {name}": override(ANGPT, places, SIZES) for name, places in CHAINS.items()
}


@pytest.mark.parametrize("name", MIXED)
def test_the_nu_that_are_refused_are_those_that_no_output_depends_on(name):
    arch = MIXED[name]
    variables = drawn(first_variables(arch))
    expected = block_output(arch, variables)

    def moves(nu: str) -> float:
        changed = replace(arch, nu=replace(arch.nu, **{nu: 3 * getattr(arch.nu, nu)}))
        return float(np.abs(block_output(changed, variables) - expected).max() / np.abs(expected).max())

    moved = {nu: moves(nu) for nu in NUS}
    hidden = hidden_nu(arch).keys()
    assert {nu for nu, change in moved.items() if change < 1e-4} == hidden, moved
    assert {nu for nu, change in moved.items() if change < 1e-3} == hidden, "there is a gap between the two kinds"
