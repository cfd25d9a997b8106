"""The same run twice gives the same bits, and a state moves to other devices and back without losing one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import make_workspace, run_here
from conftest import EVEN, by_path, random_batch
from kills import numbers
from states import digest

from angpt_jax import experiment, sharding, train
from angpt_jax.checkpoint import Checkpoints
from angpt_jax.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig
from angpt_jax.experiment import Experiment
from angpt_jax.restore import newest_valid

CONFIG = Config(
    ModelConfig("angpt", EVEN.width, EVEN.layers, EVEN.heads, EVEN.vocab, 12, EVEN.feed_forward),
    OptimConfig(1e-2, warmup_steps=5),
    DataConfig(8),
    RunConfig(20),
)
MESHES = {  # and how many devices each takes
    "2x4": (MeshConfig(2, 4), 8),
    "1x8": (MeshConfig(1, 8), 8),
    "1x4": (MeshConfig(1, 4), 4),
    "1x1": (MeshConfig(1, 1), 1),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """Trains in a workspace, with flags, and gives the run directory."""
    monkeypatch.chdir(make_workspace(tmp_path / "w"))

    def run(name: str, *flags: str) -> Path:
        given = ("--config", "tiny.yaml", "--run.dir", f"runs/{name}", *flags)
        done = run_here(train.train, Config, "train", *given, monkeypatch=monkeypatch, capsys=capsys)
        assert done.code == 0, done.err
        return tmp_path / "w" / "runs" / name

    return run


def test_two_runs_are_equal_bit_for_bit(run) -> None:
    """States, and all that was logged but times."""
    first, second = run("first"), run("second")
    assert digest(first) == digest(second)
    assert numbers(first) == numbers(second)


def test_a_resume_goes_on_in_the_schedule(run) -> None:
    """Stopped in the warm-up: the learning rate does not start again, and the metrics show each step once, also behind
    half a line."""
    flags = ("--optim.warmup_steps", "10", "--run.eval_every_steps", "4")
    whole = run("whole", *flags)
    parts = run("parts", *flags, "--run.stop_at_step", "8")
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    run("parts", *flags)
    rates = [record["lr"] for record in numbers(parts) if "lr" in record]
    assert rates[:10] == sorted(rates[:10]) and len(set(rates[:10])) == 10
    assert numbers(parts) == numbers(whole) and digest(parts) == digest(whole)


def built_on(mesh: str) -> tuple[Experiment, Config]:
    sizes, devices = MESHES[mesh]
    config, arch, shape = experiment.resolved(replace(CONFIG, mesh=sizes))
    return experiment.build(config, arch, shape, jax.devices()[:devices]), config


@pytest.fixture(scope="module")
def trainers() -> dict[str, tuple[Experiment, Any, Any]]:
    """What was built, the compiled step and what brings batches to the devices, by mesh."""
    made = {}
    for mesh in MESHES:
        built, config = built_on(mesh)
        made[mesh] = built, experiment.compiled_step(built, config), sharding.batch_putter(built.layout, 8)
    return made


def batches(start: int) -> Iterator[dict[str, np.ndarray]]:
    for number in range(start, start + 5):
        rng = np.random.default_rng(number)
        batch = random_batch(EVEN, batch=8, length=12)
        yield batch | {"tokens": rng.integers(0, EVEN.vocab, batch["tokens"].shape, dtype=np.int32)}


def go_on(trainer: tuple[Experiment, Any, Any], state: Any, start: int) -> tuple[Any, list[float], list[bytes]]:
    """State after five steps, their losses, and their batches as the devices have them."""
    _, step, put = trainer
    losses, seen = [], []
    for batch in batches(start):
        on_devices = put(batch)
        seen.append(b"".join(np.asarray(on_devices[name]).tobytes() for name in sorted(on_devices)))
        state, told = step(state, on_devices)
        losses.append(float(told["loss"]))
    return state, losses, seen


def moved(folder: Path, state: Any, built: Experiment, step: int) -> Any:
    """Saved from where it is, and restored to where `built` has it."""
    with Checkpoints(folder, 2) as checkpoints:
        checkpoints.save(step, state, {"fingerprint": {}})
    found = newest_valid(folder, built.abstract)
    assert found and found.step == step
    return found.state


def bits(state: Any) -> dict[str, bytes]:
    return {path: np.asarray(leaf).tobytes() for path, leaf in by_path(state).items()}


@pytest.mark.parametrize("mesh", ["1x8", "1x4", "1x1"])
def test_a_state_goes_to_another_mesh_and_back(tmp_path: Path, trainers, mesh: str) -> None:
    """Bit for bit, split as that mesh has it; and training goes on there with the same batches and losses."""
    home, away = trainers["2x4"], trainers[mesh]
    state, *_ = go_on(home, experiment.initial_state(home[0], CONFIG), 0)
    saved = bits(state)
    there = moved(tmp_path / "there", state, away[0], 5)
    assert bits(there) == saved
    assert jax.tree.map(lambda x: x.sharding, there) == away[0].shardings
    back = moved(tmp_path / "back", there, home[0], 5)
    assert bits(back) == saved
    assert jax.tree.map(lambda x: x.sharding, back) == home[0].shardings
    _, losses, seen = go_on(away, there, 5)
    _, at_home, seen_at_home = go_on(home, back, 5)
    assert seen == seen_at_home
    assert losses == pytest.approx(at_home, rel=1e-5)
    _, without, _ = go_on(home, state, 5)
    assert at_home == without


def test_a_state_is_plain_numbers(trainers) -> None:
    """No typed random key, which some formats can't restore: nothing in training draws after the init."""
    for path, leaf in by_path(trainers["1x1"][0].abstract).items():
        assert jnp.issubdtype(leaf.dtype, jnp.number), path


def test_the_largest_seed_draws_other_weights_than_0(trainers) -> None:
    built = trainers["1x1"][0]
    first, last = (
        experiment.initial_state(built, replace(CONFIG, run=replace(CONFIG.run, seed=seed))) for seed in (0, 2**32 - 1)
    )
    assert bits(first)["params/embedding"] != bits(last)["params/embedding"]
