"""The instruments: what they say is true, training is the same with them, and off they leave nothing behind."""

import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import make_workspace, run_here
from conftest import LENGTH, SIZES, Tiny, by_path, random_batch, tiny

from angpt_jax import config, measure, metrics, model, optim, parts
from angpt_jax.instruments import make_observer
from angpt_jax.step import TrainState, first_state, make_train_step
from angpt_jax.train import train

DESIGNS = ["angpt", "gpt_plus", "ngpt", "pre_ln", "hybrid_norm"]
EVERYWHERE = {"norms", "entropy", "update_ratio", "update_angle", "first_moment_variance", "gradient_norm"}
WITH_ALPHA = {"alpha", "logit_scale", "on_bound"}


def chain(tiny_model: Tiny) -> optax.GradientTransformation:
    """The recipe's own, at a rate that moves rows onto the bound and off it."""
    arch = tiny_model.model.arch
    settings = optim.with_recommendations(config.OptimConfig(1e-2), arch.optimizer)
    return optim.build(settings, optax.constant_schedule(1e-2), arch.constraint, tiny_model.axes)


@cache
def stepped(recipe: str, instruments: bool, remat: str = "none") -> tuple[TrainState, TrainState, dict[str, Any]]:
    """The state before and after one step, and its metrics as NumPy arrays."""
    built = tiny(recipe)
    decoder, tx = built.model.clone(remat=remat), chain(built)
    observe = make_observer(built.axes, built.model.arch.constraint) if instruments else None
    step = jax.jit(make_train_step(decoder, tx, optax.constant_schedule(1e-2), observe))
    before = first_state(tx, built.initial)
    after, seen = step(before, random_batch())
    return before, after, jax.tree.map(np.asarray, seen)


def record(recipe: str) -> dict[str, Any]:
    return stepped(recipe, instruments=True)[2]["instruments"]


@pytest.mark.parametrize("recipe", ["angpt", "hybrid_norm"])
def test_training_is_the_same_with_instruments(recipe):
    _, plain, plain_metrics = stepped(recipe, instruments=False)
    _, watched, watched_metrics = stepped(recipe, instruments=True)
    assert watched_metrics["loss"] == pytest.approx(plain_metrics["loss"], rel=1e-6)
    for path, leaf in by_path(plain.params).items():
        np.testing.assert_allclose(by_path(watched.params)[path], leaf, atol=1e-5, err_msg=path)


def test_off_they_leave_nothing_in_the_program(monkeypatch):
    """The program is, letter for letter, that of a model that measures nothing."""

    def program() -> str:
        built = tiny("angpt")
        tx = chain(built)
        step = jax.jit(make_train_step(built.model, tx, optax.constant_schedule(1e-2)))
        return step.lower(first_state(tx, built.random), random_batch()).as_text()

    as_shipped = program()
    for module in (model, parts.residual, parts.head):
        monkeypatch.setattr(module, "measure", lambda *_: None)
    jax.clear_caches()
    assert program() == as_shipped


@pytest.mark.parametrize("recipe", DESIGNS)
def test_each_design_has_the_instruments_that_it_can_have(recipe):
    expected = EVERYWHERE | (WITH_ALPHA if recipe in ("angpt", "ngpt") else set())
    assert set(record(recipe)) == expected | ({"nu_alpha"} if recipe == "angpt" else set())


@pytest.mark.parametrize("recipe", DESIGNS)
def test_every_number_is_finite_and_stands_once_or_once_a_layer(recipe):
    for path, values in by_path(record(recipe)).items():
        kind, name, *_ = path.split("/")
        once = ("final_stream", "head", "embedding", "final_norm", "logits")
        assert values.shape == ((1,) if name in once else (SIZES.layers,)), path
        assert np.isfinite(values).all(), path


def test_norms_are_those_of_the_forward_pass():
    """Against a plain computation of the first layer."""
    built = tiny("angpt")
    params, tokens = built.initial, random_batch()["tokens"][:, :-1]
    norms = record("angpt")["norms"]
    h_BLD = np.asarray(params["embedding"])[tokens]
    w_DF = np.asarray(params["layers"]["mlp"]["up"])
    assert norms["attention_stream"]["mean"][0] == pytest.approx(1, rel=1e-5)
    assert norms["attention_stream"]["std"][0] == pytest.approx(0, abs=1e-5)
    w_DE = np.asarray(params["layers"]["attention"]["query"])[0]
    q_BLHK = (built.model.arch.nu.query * h_BLD @ w_DE).reshape(*tokens.shape, SIZES.heads, SIZES.head_width)
    q = np.linalg.norm(q_BLHK, axis=-1)
    assert norms["q"]["mean"][0] == pytest.approx(q.mean(), rel=1e-4)
    assert norms["q"]["std"][0] == pytest.approx(q.std(), rel=1e-3)
    assert w_DF.shape[0] == len(norms["u"]["mean"])


def test_the_stream_of_ngpt_has_norm_one_everywhere():
    norms = record("ngpt")["norms"]
    for name in ("mlp_stream", "final_stream", "attention_branch", "mlp_branch"):
        np.testing.assert_allclose(norms[name]["mean"], 1, rtol=1e-5)


@pytest.mark.parametrize("remat", ["full"])
def test_remat_measures_the_same(remat):
    plain = by_path(record("angpt"))
    for path, values in by_path(stepped("angpt", True, remat)[2]["instruments"]).items():
        np.testing.assert_allclose(values, plain[path], rtol=2e-4, atol=1e-7, err_msg=path)


def test_micro_batches_measure_the_mean_of_their_own():
    """Of as many tokens each: the mean of the whole batch."""
    built = tiny("angpt")
    observe = make_observer(built.axes, built.model.arch.constraint)
    step = make_train_step(built.model, chain(built), optax.constant_schedule(1e-2), observe, micro_batches=2)
    seen = jax.jit(step)(first_state(chain(built), built.initial), random_batch())[1]["instruments"]
    for name, norm in record("angpt")["norms"].items():
        np.testing.assert_allclose(seen["norms"][name]["mean"], norm["mean"], rtol=1e-5, err_msg=name)
    for path, ratio in record("angpt")["update_ratio"].items():
        np.testing.assert_allclose(seen["update_ratio"][path], ratio, rtol=1e-3, err_msg=path)


def test_attention_entropy_is_that_of_uniform_weights_where_queries_are_zero():
    built, tokens = tiny("angpt"), random_batch()["tokens"][:, :-1]
    params = jax.tree_util.tree_map_with_path(
        lambda path, w: w * 0 if "query" in jax.tree_util.keystr(path) else w, built.random
    )
    seen = built.model.apply({"params": params}, tokens, np.zeros_like(tokens), mutable=[measure.COLLECTION])[1]
    entropy: Any = seen[measure.COLLECTION]["layers"]["attention"]["entropy"]
    uniform = np.log(np.arange(1, LENGTH + 1))  # query l sees l keys
    np.testing.assert_allclose(entropy["mean"], uniform.mean(), rtol=1e-5)
    np.testing.assert_allclose(entropy["std"], uniform.std(), rtol=1e-5)


def test_alpha_and_nu_of_alpha_are_the_parts_own():
    seen, settings = record("angpt"), tiny("angpt").model.arch.residual.at("mlp")
    alpha = settings["alpha_init"]
    for name in ("attention", "mlp"):
        np.testing.assert_allclose(seen["alpha"][name]["mean"], alpha, rtol=1e-5)
        np.testing.assert_allclose(seen["nu_alpha"][name]["mean"], 1 / np.hypot(alpha, 1 - alpha), rtol=1e-5)
    np.testing.assert_allclose(seen["logit_scale"]["head"]["mean"], 1, rtol=1e-5)


@pytest.mark.parametrize("recipe", ["angpt", "ngpt"])
def test_the_share_on_the_bound_is_counted_over_the_constrained_vectors(recipe):
    after = by_path(stepped(recipe, True)[1].params)
    for path, axes in by_path(tiny(recipe).axes).items():
        if axes.is_matrix:
            along = axes.along(tiny(recipe).model.arch.constraint.along)
            norms = np.linalg.norm(np.asarray(after[path], np.float64), axis=along if len(along) > 1 else along[0])
            rows = norms.reshape(SIZES.layers if path.startswith("layers/") else 1, -1)
            np.testing.assert_allclose(record(recipe)["on_bound"][path], (rows > 1 - 1e-4).mean(axis=1), atol=1e-6)
    shares = np.concatenate(list(record("angpt")["on_bound"].values()))
    assert 0 < shares.min() < shares.max() <= 1


@pytest.mark.parametrize("recipe", DESIGNS)
def test_update_ratio_and_angle_are_those_of_the_two_states(recipe):
    before, after = (by_path(state.params) for state in stepped(recipe, True)[:2])
    for path, ratios in record(recipe)["update_ratio"].items():
        layers = SIZES.layers if path.startswith("layers/") else 1
        w, new = (np.asarray(tree[path], np.float64).reshape(layers, -1) for tree in (before, after))
        sizes, new_sizes = np.linalg.norm(w, axis=1), np.linalg.norm(new, axis=1)
        np.testing.assert_allclose(ratios, np.linalg.norm(new - w, axis=1) / sizes, rtol=1e-3, err_msg=path)
        angle = np.degrees(np.arccos((w * new).sum(axis=1) / sizes / new_sizes))
        np.testing.assert_allclose(record(recipe)["update_angle"][path], angle, rtol=1e-3, err_msg=path)


@pytest.mark.parametrize("recipe", ["angpt", "gpt_plus"])
def test_variance_of_the_first_moment_is_by_parameter(recipe):
    moments = by_path(optax.tree.get(stepped(recipe, True)[1].opt_state, "mu"))
    assert set(moments) == set(record(recipe)["first_moment_variance"])
    for path, variance in record(recipe)["first_moment_variance"].items():
        layers = SIZES.layers if path.startswith("layers/") else 1
        expected = np.asarray(moments[path], np.float64).reshape(layers, -1).var(axis=1)
        np.testing.assert_allclose(variance, expected, rtol=1e-3, atol=1e-20, err_msg=path)


@pytest.mark.parametrize("recipe", ["angpt", "gpt_plus"])
def test_gradient_norms_add_up_to_the_norm_of_the_step(recipe):
    seen = stepped(recipe, True)[2]
    parts_of_it = np.concatenate(list(seen["instruments"]["gradient_norm"].values()))
    assert seen["instruments"]["gradient_norm"]["layers"].shape == (SIZES.layers,)
    assert np.sqrt((parts_of_it**2).sum()) == pytest.approx(float(seen["grad_norm"]), rel=1e-5)


def test_a_run_writes_them_every_k_steps_and_resumes_without_a_step_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_workspace(tmp_path / "ws"))
    flags = "--config tiny.yaml --run.dir runs/watched --run.instrument_every_steps 3".split()
    here = {"monkeypatch": monkeypatch, "capsys": capsys}
    assert run_here(train, config.Config, "train", *flags, "--run.stop_at_step", "7", **here).code == 0
    assert run_here(train, config.Config, "train", *flags, **here).code == 0
    lines = metrics.read(tmp_path / "ws/runs/watched/instruments.jsonl")
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    assert lines[0]["tokens"] == 3 * 8 * 32 and len(lines[0]["norms"]["q"]["mean"]) == 2
    assert json.loads((tmp_path / "ws/runs/watched/summary.json").read_text())["steps"] == 14


def test_a_run_without_them_has_no_such_file(tmp_path):
    with metrics.MetricsWriter(tmp_path, 0) as writer:
        writer.write({"step": 1, "loss": jnp.float32(1.0).item()})
    assert not (tmp_path / "instruments.jsonl").exists()
