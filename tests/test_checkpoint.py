"""Checkpoints: what is saved comes back bit for bit, the right ones are kept, and no failure of a save is lost."""

import errno
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from angpt_jax.checkpoint import Checkpoints
from angpt_jax.errors import StorageError, UserError
from angpt_jax.restore import Restored, newest_valid

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("nothing_is_left_to_others"),
]


Tree = dict[str, jax.Array]


def state(step: int) -> Tree:
    return {"step": jnp.asarray(step), "w": jax.random.normal(jax.random.key(step), (4, 3))}


def abstract(tree: Any, sharding: Any = None) -> Any:
    sharding = sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def save(folder: Path, steps: range, **keep: int) -> None:
    with Checkpoints(folder, keep.get("keep_latest", 2), keep.get("keep_every_steps")) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"iterator": {"next_index": step}})


def newest(folder: Path, like: Any = None, sharding: Any = None) -> Restored:
    found = newest_valid(folder, abstract(like or state(0), sharding))
    assert found is not None
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_state_and_data_position_come_back(tmp_path: Path) -> None:
    save(tmp_path, range(5, 6))
    found = newest(tmp_path)
    assert (found.step, found.data) == (5, {"iterator": {"next_index": 5}})
    chex.assert_trees_all_equal(found.state, state(5))


@pytest.mark.parametrize(
    ("keep", "kept"), [({}, {9, 10}), ({"keep_latest": 3}, {8, 9, 10}), ({"keep_every_steps": 4}, {4, 8, 9, 10})]
)
def test_the_newest_and_every_kth_are_kept(tmp_path: Path, keep: dict[str, int], kept: set[int]) -> None:
    save(tmp_path, range(1, 11), **keep)
    assert {int(path.name) for path in tmp_path.iterdir()} == kept
    save(tmp_path, range(11, 12), **keep)  # a later run counts those that were there
    assert max(kept) in {int(path.name) for path in tmp_path.iterdir()}
    assert len(names(tmp_path)) == len(kept)


def test_none_of_the_newest_two_goes_before_the_next_is_committed(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, 2) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state(step), {})
            whole = {name for name in names(tmp_path) if name.isdecimal()}
            assert {str(s) for s in range(max(1, step - 2), step)} <= whole


def test_damaged_and_failed_ones_are_never_counted_as_kept(tmp_path: Path) -> None:
    save(tmp_path, range(1, 3))
    (tmp_path / "7.damaged").mkdir()
    (tmp_path / "8.orbax-checkpoint-tmp").mkdir()
    save(tmp_path, range(3, 4))
    assert names(tmp_path) == {"2", "3", "7.damaged"}


def test_the_newest_is_taken_however_bad_its_loss_is(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, 2) as checkpoints:
        for step, loss in ((1, 1.0), (2, 2.0), (3, float("inf"))):
            checkpoints.save(step, state(step), {"val_loss": str(loss)})
    assert newest(tmp_path).step == 3


@pytest.mark.parametrize("error", [RuntimeError("stop"), SystemExit(0), SystemExit(3), KeyboardInterrupt()])
def test_the_last_save_is_committed_on_the_way_out(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(1, state(1), {})
        raise error
    assert names(tmp_path) == {"1"}
    chex.assert_trees_all_equal(newest(tmp_path).state, state(1))


def break_folder(folder: Path) -> None:
    """Nothing can be written there any more, whoever tries."""
    folder.rename(folder.with_name("moved"))
    folder.write_text("a file")


def test_a_save_that_fails_says_so_and_the_ones_before_stay(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(StorageError, match=r"run\.dir: can't save step 3, got '.*checkpoints' \("):
        with Checkpoints(folder, 2) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state(step), {})
            checkpoints._finish()
            break_folder(folder)
            checkpoints.save(3, state(3), {})
    assert names(tmp_path / "moved") == {"1", "2"}
    assert newest(tmp_path / "moved").step == 2


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the manifest, which Orbax does in the background, meets a full disk."""

    async def fails(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ocp.JsonCheckpointHandler, "_save_fn", fails)


def test_the_error_of_a_pending_save_surfaces_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """And not before the save: training goes on until it is known."""
    save(tmp_path, range(1, 2))
    fill_disk(monkeypatch)
    with pytest.raises(StorageError, match=r"can't save step 2, .*No space left on device"):
        with Checkpoints(tmp_path, 2) as checkpoints:
            checkpoints.save(2, state(2), {})
            for _ in range(100):
                checkpoints.check()
                time.sleep(0.05)
            pytest.fail("nobody said that the save failed")
    assert names(tmp_path) == {"1"}
    assert "Traceback" not in capfd.readouterr().err


def test_a_failed_save_is_no_success_and_hides_no_other_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fill_disk(monkeypatch)
    for error, raised in ((None, StorageError), (SystemExit(0), StorageError), (RuntimeError("bug"), RuntimeError)):
        with pytest.raises(raised), Checkpoints(tmp_path, 2) as checkpoints:
            checkpoints.save(2, state(2), {})
            if error:
                raise error
    assert capsys.readouterr().err.startswith("angpt_jax: warning: run.dir: can't save step 2")
    assert names(tmp_path) == set()


def test_saving_a_step_twice_keeps_the_first(tmp_path: Path) -> None:
    save(tmp_path, range(3, 4))
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(3, state(7), {})
        checkpoints.save(4, state(4), {})
        checkpoints.save(4, state(7), {})
    chex.assert_trees_all_equal(newest(tmp_path).state, state(4))
    shutil.rmtree(tmp_path / "4")
    chex.assert_trees_all_equal(newest(tmp_path).state, state(3))


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "new", abstract(state(0))) is None
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("is_folder", [True, False])
def test_the_rest_of_a_killed_save_does_not_stop_the_next(
    tmp_path: Path, is_folder: bool, capsys: pytest.CaptureFixture
) -> None:
    rest = tmp_path / "20.orbax-checkpoint-tmp"
    if is_folder:
        (rest / "state").mkdir(parents=True)
        (rest / "state" / "half").touch()
    else:
        rest.touch()
    save(tmp_path, range(20, 21))
    assert names(tmp_path) == {"20"}
    assert newest(tmp_path).step == 20
    assert capsys.readouterr().err.startswith(
        f"angpt_jax: warning: run.dir: removed the rest of a save that did not end, got '{rest}'"
    )


def test_donated_states_are_saved_as_they_were(tmp_path: Path) -> None:
    """A save at each step, while the next steps overwrite the memory."""

    @partial(jax.jit, donate_argnums=0)
    def step(w: jax.Array) -> jax.Array:
        return w * 1.25 + 1

    w, expected = jnp.zeros((512, 256)), {}
    with Checkpoints(tmp_path, 20) as checkpoints:
        for number in range(1, 21):
            w = step(w)
            expected[number] = np.array(w, copy=True)
            checkpoints.save(number, {"w": w}, {})
    for number in range(20, 0, -1):
        found = newest(tmp_path, {"w": w})
        assert found.step == number
        np.testing.assert_array_equal(found.state["w"], expected[number])
        shutil.rmtree(tmp_path / str(number))


def test_random_keys_come_back(tmp_path: Path) -> None:
    tree = {"key": jax.random.key(7), "w": jnp.ones(3)}
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(1, tree, {})
    key = newest(tmp_path, tree).state["key"]
    np.testing.assert_array_equal(jax.random.normal(key, (4,)), jax.random.normal(tree["key"], (4,)))


def test_a_relative_folder_is_the_one_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Checkpoints(Path("runs/x"), 2) as checkpoints:
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoints.save(1, state(1), {})
    assert names(tmp_path / "runs/x") == {"1"} and names(tmp_path / "elsewhere") == set()


def test_a_sharded_checkpoint_is_read_on_other_devices_and_back(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec("a", "b"))
    tree = {"w": jax.device_put(jax.random.normal(jax.random.key(0), (16, 12)), split)}
    with Checkpoints(tmp_path / "8", 2) as checkpoints:
        checkpoints.save(1, tree, {})
    alone = newest(tmp_path / "8", tree).state
    assert len(alone["w"].devices()) == 1
    with Checkpoints(tmp_path / "1", 2) as checkpoints:
        checkpoints.save(1, alone, {})
    again = newest(tmp_path / "1", tree, split).state
    assert again["w"].sharding == split
    for found in (alone, again):
        np.testing.assert_array_equal(found["w"], tree["w"])


def test_another_tree_shape_or_dtype_is_listed_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, range(4, 5))
    other = {"step": jnp.asarray(0), "w": jnp.zeros((4, 5)), "v": jnp.zeros(2)}
    monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", lambda *given, **more: pytest.fail("it was loaded"))
    with pytest.raises(UserError) as error:
        newest(tmp_path, other)
    assert error.value.problems == (
        f"run.dir: the checkpoint of step 4 does not fit the config, got '{tmp_path}/4', which differs in "
        "w (saved: float32[4, 3], wanted: float32[4, 5]); v (saved: none, wanted: float32[2]); use the config that "
        "saved it, or another --run.dir",
    )
    with pytest.raises(UserError, match=r"w \(saved: float32\[4, 3\], wanted: bfloat16\[4, 3\]\)"):
        newest(tmp_path, {**state(0), "w": jnp.zeros((4, 3), jnp.bfloat16)})
    assert names(tmp_path) == {"4"}


def test_a_checkpoint_of_another_project_is_refused(tmp_path: Path) -> None:
    save(tmp_path, range(1, 2))
    with ocp.StandardCheckpointer() as other:
        other.save(tmp_path / "2", {"w": jnp.ones(3)})
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "model.safetensors").touch()
    with pytest.raises(UserError, match="holds a checkpoint that this version did not write, got .*/3' .*safetensors"):
        newest(tmp_path)
    shutil.rmtree(tmp_path / "3")
    with pytest.raises(UserError, match="holds a checkpoint that this version did not write, got .*/2'"):
        newest(tmp_path)
    assert names(tmp_path) == {"1", "2"}
