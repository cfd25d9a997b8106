"""Checkpoints: what is saved comes back bit for bit, and the right ones are kept."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest

from angpt_jax.checkpoint import Checkpoints

Tree = dict[str, jax.Array]


def state(step: int) -> Tree:
    return {"step": jnp.asarray(step), "w": jax.random.normal(jax.random.key(step), (4, 3))}


def abstract() -> Tree:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state(0))


def save(folder: Path, steps: range, **keep: int) -> None:
    with Checkpoints(folder, **{"keep_latest": 2, **keep}) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"iterator": {"next_index": step}})


def test_state_and_data_position_come_back(tmp_path: Path) -> None:
    save(tmp_path, range(5, 6))
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.latest_step() == 5
        restored, data = checkpoints.restore(5, abstract())
    chex.assert_trees_all_equal(restored, state(5))
    assert data == {"iterator": {"next_index": 5}}


@pytest.mark.parametrize(
    ("keep", "kept"), [({}, {9, 10}), ({"keep_latest": 3}, {8, 9, 10}), ({"keep_every_steps": 4}, {4, 8, 9, 10})]
)
def test_the_newest_and_every_kth_are_kept(tmp_path: Path, keep: dict[str, int], kept: set[int]) -> None:
    save(tmp_path, range(1, 11), **keep)
    assert {int(path.name) for path in tmp_path.iterdir()} == kept


def test_the_last_save_is_committed_on_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(1, state(1), {})
        raise RuntimeError("stop")
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_saving_a_step_twice_keeps_the_first(tmp_path: Path) -> None:
    save(tmp_path, range(3, 4))
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(3, state(7), {})
        chex.assert_trees_all_equal(checkpoints.restore(3, abstract())[0], state(3))


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "new", 2) as checkpoints:
        assert checkpoints.latest_step() is None
