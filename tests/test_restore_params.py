"""The parameters of a checkpoint, read alone: of the moments no byte is needed and none is looked at."""

import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from weight_runs import flip

from angpt_jax.checkpoint import Checkpoints
from angpt_jax.errors import UserError
from angpt_jax.restore import newest_params, newest_valid

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("nothing_is_left_to_others"),
]
BYTES_READ = "/tensorstore/kvstore/file/bytes_read"


def state(step: int) -> dict[str, Any]:
    """Parameters, and moments that are a hundred times larger."""
    draw = np.random.default_rng(step).standard_normal
    params = {"layers": {"up": draw((16, 24), np.float32)}, "scale": draw(16, np.float32)}
    return {"step": np.int32(step), "params": params, "opt_state": {"mu": draw((160, 240), np.float32)}}


def abstract(values: Any, sharding: Any = None) -> Any:
    sharding = sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), values)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 3 and 6, below `checkpoints`."""
    with Checkpoints(tmp_path / "checkpoints", 2) as checkpoints:
        for step in (3, 6):
            checkpoints.save(step, jax.tree.map(jnp.asarray, state(step)), {"about": step})
    return tmp_path


def bytes_read() -> int:
    """So far, by TensorStore."""
    (metric,) = tensorstore.experimental_collect_matching_metrics(BYTES_READ)
    return metric["values"][0]["value"]


def test_they_come_back_bit_for_bit_and_the_moments_are_not_read(run: Path) -> None:
    before = bytes_read()
    found = newest_params(run / "checkpoints", abstract(state(0)["params"]))
    read = bytes_read() - before
    assert found is not None and (found.step, found.data) == (6, {"about": 6})
    chex.assert_trees_all_equal(jax.device_get(found.state), state(6)["params"])
    moments = state(0)["opt_state"]["mu"].nbytes
    assert 0 < read < moments / 5
    newest_valid(run / "checkpoints", abstract(state(0)))
    assert bytes_read() - before - read > moments / 2


def test_moments_that_are_damaged_are_not_seen_and_the_whole_state_sees_them(run: Path) -> None:
    flip(run, 6)  # in the middle of what is nearly all moments
    found = newest_params(run / "checkpoints", abstract(state(0)["params"]))
    assert found is not None and found.step == 6
    whole = newest_valid(run / "checkpoints", abstract(state(0)), rename=False)
    assert whole is not None and whole.step == 3


def test_damaged_ones_are_passed_over_with_a_warning_and_keep_their_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints" / "6" / "state" / "ocdbt.process_0")
    found = newest_params(run / "checkpoints", abstract(state(0)["params"]), field="run.init_from")
    assert found is not None and found.step == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("angpt_jax: warning: run.init_from: the checkpoint of step 6 is damaged (")
    assert line.endswith(f"), got '{run}/checkpoints/6'; going on with step 3")
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"3", "6"}


def test_a_bit_that_changed_on_the_way_is_seen(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restore = ocp.PyTreeCheckpointHandler.restore

    def with_a_wrong_bit(*given: Any, **more: Any) -> Any:
        read = restore(*given, **more)
        wrong = np.array(read["params"]["scale"])
        wrong.view(np.uint32)[5] ^= 1
        return {"params": read["params"] | {"scale": jnp.asarray(wrong)}}

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", with_a_wrong_bit)
    with pytest.raises(UserError, match=r"^run\.dir: none of its .*step 6: params/scale: not what was saved; step 3: "):
        newest_params(run / "checkpoints", abstract(state(0)["params"]))


def test_other_parameters_are_listed_before_anything_is_read(run: Path) -> None:
    wanted = {"layers": {"up": np.zeros((16, 8), np.float32)}, "bias": np.zeros(16, np.float32)}
    before = bytes_read()
    with pytest.raises(UserError) as error:
        newest_params(run / "checkpoints", abstract(wanted), field="run.init_from")
    assert error.value.problems == (
        f"run.init_from: the checkpoint of step 6 does not fit the config, got '{run}/checkpoints/6', which differs in "
        "params/layers/up (saved: float32[16, 24], wanted: float32[16, 8]); params/scale (saved: float32[16], wanted: "
        "none); params/bias (saved: none, wanted: float32[16]); use the config that saved it, or another "
        "--run.init_from",
    )
    assert bytes_read() - before < 1000


def test_they_lie_as_the_mesh_says(run: Path) -> None:
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, PartitionSpec(("a", "b")))
    found = newest_params(run / "checkpoints", abstract(state(0)["params"], split))
    assert found is not None
    assert {leaf.sharding for leaf in jax.tree.leaves(found.state)} == {split}
    chex.assert_trees_all_equal(jax.device_get(found.state), state(6)["params"])


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert newest_params(tmp_path / "checkpoints", abstract(state(0)["params"])) is None
