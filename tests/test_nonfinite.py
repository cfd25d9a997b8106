"""A step whose loss or gradients are not finite is skipped, as if its batch had not been there; too many end it all."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import TINY, Outcome, make_workspace, run_here
from conftest import EVEN, by_path, random_batch, tiny
from processes import errors
from states import digest, state_of

from angpt_jax import cli, metrics, optim, sharding, train
from angpt_jax.config import Config, MeshConfig, OptimConfig
from angpt_jax.experiment import build, compiled_step, initial_state, resolved
from angpt_jax.how import How
from angpt_jax.step import TrainState, first_state, is_finite, make_train_step

STEPS = 6
CASES = {  # recipe, micro-batches, on a mesh
    "one device": ("angpt", 1, False),
    "micro-batches": ("angpt", 4, False),
    "a mesh": ("angpt", 1, True),
    "micro-batches on a mesh": ("gpt_plus", 2, True),  # clips and decays
}
ONLY_COUNTS = {"step", "skipped", "in_a_row"}


def good_batch(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    batch = random_batch(EVEN, batch=16, length=12)
    return batch | {"tokens": rng.integers(0, EVEN.vocab, batch["tokens"].shape, dtype=np.int32)}


def poisoned(batch: dict[str, Any], how: str) -> dict[str, Any]:
    """The last row but one makes the loss, or loss and gradient, NaN or infinite."""
    batch = {name: array.copy() for name, array in batch.items()}
    if how == "a token beyond the vocabulary":
        batch["tokens"][-2, 5] = EVEN.vocab
    elif how == "nothing counts":
        batch["weights"][:] = 0
    else:
        batch["weights"][-2, 3] = float(how)
    return batch


POISONS = ["nan", "inf", "a token beyond the vocabulary", "nothing counts"]


@cache
def stepper(case: str) -> tuple[Any, TrainState]:
    """The compiled step, with a schedule that changes with each step, and the first state."""
    recipe, micro_batches, on_mesh = CASES[case]
    model = tiny(recipe, EVEN)
    settings = optim.with_recommendations(OptimConfig(1e-2, warmup_steps=2), model.model.arch.optimizer)
    settings = replace(settings, warmup_fraction=None)
    schedule = optim.learning_rate(settings, STEPS)
    tx = optim.build(settings, schedule, model.model.arch.constraint, model.axes)
    state = jax.jit(partial(first_state, tx))(model.random)
    decoder, put, shardings = model.model, lambda batch: batch, None
    if on_mesh:
        layout = sharding.make_layout(MeshConfig(1, 4, 2))
        decoder, put = decoder.clone(how=How(layout=layout)), sharding.batch_putter(layout, 16)
        of_params = sharding.parameter_shardings(model.axes, layout)
        of_optimizer = sharding.optimizer_shardings(tx, model.random, of_params, layout)
        counts = dict.fromkeys(ONLY_COUNTS, sharding.everywhere(layout))
        shardings = replace(state, params=of_params, opt_state=of_optimizer, **counts)
        state = jax.device_put(state, shardings)
    made = make_train_step(decoder, tx, schedule, micro_batches=micro_batches)
    step = jax.jit(made, out_shardings=(shardings, None) if shardings else None)
    return lambda state, batch: step(state, put(batch)), state


def trained(case: str, batches: list[dict[str, Any]]) -> tuple[TrainState, list[dict[str, float]]]:
    step, state = stepper(case)
    seen = []
    for batch in batches:
        state, told = step(state, batch)
        seen.append({name: float(value) for name, value in told.items()})
    return state, seen


def assert_same_but_counts(actual: TrainState, expected: TrainState) -> None:
    """Bit for bit, NaN being equal to nothing."""
    leaves = by_path(expected)
    for path, leaf in by_path(actual).items():
        if path not in ONLY_COUNTS:
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(leaves[path]), err_msg=path)
            assert np.isfinite(leaf).all(), path


@pytest.mark.parametrize("how", POISONS)
@pytest.mark.parametrize("case", CASES)
def test_a_bad_step_changes_nothing_but_the_counts(case, how):
    """Wherever it comes; loss or gradient tells."""
    step, state = stepper(case)
    for number in range(3):
        after, told = step(state, poisoned(good_batch(number), how))
        assert not np.isfinite(told["loss"])
        assert_same_but_counts(after, state)
        assert (int(after.step), int(after.skipped), int(after.in_a_row)) == (number + 1, 1, 1)
        state, told = step(state, good_batch(number))
        assert np.isfinite(told["loss"]) and (int(state.step), int(state.skipped)) == (number + 1, 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bad", [(0,), (1, 2, 5)])
def test_training_goes_on_as_if_the_bad_batches_had_not_been_there(case, bad):
    """State, losses, gradient norms and learning rates are, bit for bit, those of a run without them."""
    batches = [good_batch(number) for number in range(STEPS)]
    mixed = [poisoned(b, POISONS[n % 3]) if n in bad else b for n, b in enumerate(batches)]
    state, seen = trained(case, mixed)
    expected, expected_seen = trained(case, [b for n, b in enumerate(batches) if n not in bad])
    assert_same_but_counts(state, expected)
    assert (int(state.step), int(state.skipped)) == (STEPS, len(bad))
    names = ("loss", "grad_norm", "lr")
    good = [[one[name] for name in names] for n, one in enumerate(seen) if n not in bad]
    assert good == [[one[name] for name in names] for one in expected_seen]
    assert len({rate for *_, rate in good}) > 1
    running = [sum(b <= n for b in bad) for n in range(STEPS)]
    assert [one["skipped_steps"] for one in seen] == running


def test_the_learning_rate_told_is_the_one_that_the_optimizer_takes():
    """After skipped steps too: a step of plain SGD shows it."""
    model, schedule = tiny("angpt", EVEN), optax.linear_schedule(1.0, 0.0, 10)
    tx = optax.sgd(schedule)
    step = jax.jit(make_train_step(model.model, tx, schedule))
    state = first_state(tx, model.random)
    for number in range(3):
        state, _ = step(state, poisoned(good_batch(number), "nan"))
    after, told = step(state, good_batch(0))
    assert float(told["lr"]) == 1.0
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, after.params, state.params))
    assert float(moved) == pytest.approx(float(told["grad_norm"]), rel=1e-5)


def test_a_state_is_finite_or_not():
    _, state = stepper("one device")
    assert is_finite(state)
    for value in (np.nan, np.inf):
        scale = state.params["logits"]["logit_scale"].at[3].set(value)
        assert not is_finite(replace(state, params=state.params | {"logits": {"logit_scale": scale}}))


def test_the_check_keeps_the_state_in_place(tmp_path: Path):
    """Each array of the new state takes the place of the old one."""
    config, arch, sizes = resolved(run_config(tmp_path))
    built = build(config, arch, sizes, jax.devices()[:1])
    compiled = compiled_step(built, config)
    memory: Any = compiled.memory_analysis()
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(built.abstract))
    assert memory.alias_size_in_bytes == state_bytes
    state = initial_state(built, config)
    rows = (config.data.batch_size, config.model.context)
    tokens, weights = np.zeros((rows[0], rows[1] + 1), np.int32), np.full(rows, np.nan, np.float32)
    before = jax.tree.map(np.array, state)
    after, _ = compiled(state, {"tokens": tokens, "segments": tokens, "weights": weights})
    assert_same_but_counts(after, before)


def run_config(folder: Path) -> Config:
    make_workspace(folder / "w")
    return cli.parse(Config, ["--config", str(folder / "w" / "tiny.yaml")], command="train", default_config=None)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("nonfinite"))


FLAGS = ("--run.steps", "40", "--optim.warmup_steps", "5", "--run.eval_every_steps", "100")


@pytest.fixture
def run(workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Trains with flags; the batches of the steps `bad` make it NaN, those of the steps `left_out` never come."""

    def run(
        name: str,
        *flags: str,
        bad: tuple[int, ...] = (),
        left_out: tuple[int, ...] = (),
        config: str = "tiny.yaml",
    ) -> Outcome:
        def changed(batches, put, count=2):
            for step, batch in enumerate(batches, 1):
                if step in bad:
                    batch["weights"] = np.full_like(batch["weights"], np.nan)
                if step not in left_out:
                    yield put(batch)

        monkeypatch.chdir(workspace)
        monkeypatch.setattr(sharding, "ahead", changed)
        given = ("--config", config, *FLAGS, "--run.dir", f"runs/{name}", *flags)
        return run_here(train.train, Config, "train", *given, monkeypatch=monkeypatch, capsys=capsys)

    return run


def records(workspace: Path, name: str) -> list[dict[str, Any]]:
    return [r for r in metrics.read(workspace / "runs" / name / "metrics.jsonl") if "loss" in r]


def test_a_run_skips_a_bad_batch_and_counts_it(workspace: Path, run):
    done = run("bad", "--run.stop_at_step", "8", bad=(3, 6))
    assert done.code == 0, done.err
    assert "step 3: loss is nan, skipped; 1 in a row, 10 end the run" in done.out
    assert run("without", "--run.stop_at_step", "6", left_out=(3, 6)).code == 0
    assert [r["skipped_steps"] for r in records(workspace, "bad")] == [0, 0, 1, 1, 1, 2, 2, 2]
    pairs = zip(
        [r for r in records(workspace, "bad") if r["step"] not in (3, 6)], records(workspace, "without"), strict=True
    )
    assert all(a[name] == b[name] for a, b in pairs for name in ("loss", "lr", "grad_norm"))
    counts = tuple(ONLY_COUNTS)
    runs = [workspace / "runs" / name for name in ("bad", "without")]
    assert digest(runs[0], without=counts) == digest(runs[1], without=counts)
    assert "NaN" not in (runs[0] / "metrics.jsonl").read_text()


def saved(workspace: Path, name: str) -> list[int]:
    return sorted(int(path.name) for path in (workspace / "runs" / name / "checkpoints").iterdir())


def test_too_many_in_a_row_end_the_run_with_3_and_the_last_good_checkpoint_stays(workspace: Path, run):
    """Neither a save that was due nor the end pushes it out."""
    flags = ("--optim.max_bad_steps", "3", "--run.checkpoint_every_steps", "1")
    done = run("ended", *flags, bad=(2, 5, 6, 7, 8, 9))
    assert done.code == 3
    assert errors(done) == [
        "optim.max_bad_steps: training diverged, loss is nan at step 7, got 3 such steps in a row; "
        "see the data of these steps, or lower optim.peak_lr in another run.dir. The last checkpoint is from before"
    ]
    assert saved(workspace, "ended") == [3, 4]
    assert run("until", "--run.stop_at_step", "4", bad=(2,)).code == 0
    assert digest(workspace / "runs/ended") == digest(workspace / "runs/until")


def test_twelve_bad_batches_in_a_row_are_never_applied(workspace: Path, run):
    """Optax's apply_if_finite would give up and take the NaN."""
    done = run("twelve", "--run.checkpoint_every_steps", "2", bad=tuple(range(4, 16)))
    assert done.code == 3 and "got 10 such steps in a row" in done.err and "at step 13" in done.err
    assert saved(workspace, "twelve") == [2]
    assert all(np.isfinite(x).all() for x in state_of(workspace / "runs/twelve").values())
    assert run("allowed", "--optim.max_bad_steps", "13", "--run.stop_at_step", "18", bad=tuple(range(4, 16))).code == 0
    assert records(workspace, "allowed")[-1]["skipped_steps"] == 12
    assert np.isfinite(records(workspace, "allowed")[-1]["loss"])


def test_a_step_that_ends_outside_the_numbers_is_not_saved(workspace: Path, run):
    """Its own loss and gradient were finite."""
    (workspace / "gpt_plus.yaml").write_text(
        TINY.replace("arch: angpt", "arch: gpt_plus").replace(", places: {head: {scale_init: 5.6}}", "")
    )
    rates = ("--optim.peak_lr", "3e38", "--optim.weight_decay", "1e38", "--run.checkpoint_every_steps", "1")
    done = run("outside", *rates, config="gpt_plus.yaml")
    assert done.code == 3
    assert errors(done) == [
        "optim.peak_lr: training diverged, parameters or moments are not finite after step 1, got "
        "3e+38; lower it in another run.dir. The last checkpoint is from before"
    ]
    assert saved(workspace, "outside") == []
