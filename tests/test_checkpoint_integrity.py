"""No damage goes unseen: bits that flip, files that go, checkpoints that are not there."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
from angpt_jax.errors import UserError
from angpt_jax.integrity import checksums
from angpt_jax.restore import newest_valid

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("nothing_is_left_to_others"),
]


KINDS = ("float32", "bfloat16", "float16", "int32", "uint8", "bool")


def tree() -> dict[str, Any]:
    """Like a train state: matrices, a few scales, zeros, counts."""
    draw = np.random.default_rng(0).standard_normal
    return {
        "params": {"w": draw((64, 48), np.float32), "scale": np.ones(64, np.float32)},
        "mu": draw((64, 48), np.float32) * 1e-3,
        "nothing": np.zeros((64, 48), np.float32),
        "step": np.int32(7),
    }


def on_device(values: Any) -> Any:
    return jax.tree.map(jnp.asarray, values)


def abstract(values: Any) -> Any:
    lies = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies), values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checksum_sees_each_bit_and_each_exchange(kind: str) -> None:
    values = jnp.asarray(np.arange(24).reshape(4, 6) % 5 * (np.arange(4)[:, None] > 0), kind)
    before = checksums([values])[0]
    raw = np.array(values)
    for place in range(raw.size):
        for bit in range(1 if kind == "bool" else raw.itemsize * 8):
            changed = raw.copy()
            changed.reshape(-1).view(np.uint8)[place * raw.itemsize + bit // 8] ^= 1 << bit % 8
            assert checksums([jnp.asarray(changed)])[0] != before, (place, bit)
    assert checksums([values.at[0].set(values[1]).at[1].set(values[0])])[0] != before
    assert checksums([values.reshape(6, 4)])[0] == before


@pytest.mark.parametrize("axes", [(1, 8), (2, 4), (8, 1)])
def test_a_checksum_is_the_same_on_every_mesh(axes: tuple[int, int]) -> None:
    mesh = jax.make_mesh(axes, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    values = np.random.default_rng(1).standard_normal((3, 16, 8)).astype(np.float32)
    alone = checksums([jnp.asarray(values)])
    for spec in (PartitionSpec(None, "a", "b"), PartitionSpec(None, None, ("b", "a")), PartitionSpec()):
        assert checksums([jax.device_put(values, NamedSharding(mesh, spec))]) == alone


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of step 7."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder, 2) as checkpoints:
        checkpoints.save(7, on_device(tree()), {"fingerprint": {"text": "abc"}})
    return folder


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    content = path.read_bytes()
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(content)


def flip(saved: Path, count: int, seed: int, only: str | None = None) -> dict[str, int]:
    """Flips random bits, one at a time, each equally likely; how many were detected, and how many meant nothing."""
    files = [path for path in sorted((saved / "7").rglob("*")) if path.is_file()]
    files = [path for path in files if only is None or path.parent.name == only]
    sizes = [8 * path.stat().st_size for path in files]
    outcome, rng = {"detected": 0, "unused": 0}, random.Random(seed)
    for _ in range(count):
        (path,) = rng.choices(files, sizes)
        with flipped(path, rng.randrange(8 * path.stat().st_size)):
            try:
                found = newest_valid(saved, abstract(tree()), rename=False)
            except UserError:
                outcome["detected"] += 1
                continue
            assert found is not None and found.data == {"fingerprint": {"text": "abc"}}, path
            chex.assert_trees_all_equal(jax.device_get(found.state), tree())
            outcome["unused"] += 1
    return outcome


def test_bits_that_flip_are_detected_or_mean_nothing(saved: Path) -> None:
    assert flip(saved, 20, seed=0, only="d")["detected"] >= 18
    flip(saved, 10, seed=1)


@pytest.mark.long
def test_a_hundred_bits_that_flip_are_detected_or_mean_nothing(saved: Path) -> None:
    data, any_file = flip(saved, 100, seed=2, only="d"), flip(saved, 100, seed=3)
    print(f"data files: {data}; all files: {any_file}")
    assert data["detected"] >= 90


def test_weights_that_changed_on_the_way_are_detected(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no file is to blame: only the checksum tells."""
    restore = ocp.StandardCheckpointHandler.restore

    def with_a_wrong_bit(*given: Any, **more: Any) -> Any:
        state = restore(*given, **more)
        wrong = np.array(state["mu"])
        wrong.view(np.uint32)[5, 5] ^= 1
        return state | {"mu": jnp.asarray(wrong)}

    monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", with_a_wrong_bit)
    with pytest.raises(UserError, match="step 7: mu: not what was saved"):
        newest_valid(saved, abstract(tree()))


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def no_manifest(path: Path) -> None:
    shutil.rmtree(path / "manifest")


def no_arrays(path: Path) -> None:
    shutil.rmtree(path / "state" / "ocdbt.process_0")


def half(path: Path) -> None:
    for part in path.rglob("d/*"):
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])


@pytest.mark.parametrize("damage", [empty, file, no_manifest, no_arrays, half])
def test_a_damaged_one_is_named_and_renamed_and_the_one_before_is_used(
    saved: Path, tmp_path: Path, damage: Any, capsys: pytest.CaptureFixture
) -> None:
    """Also if one of that name is damaged already."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    shutil.copytree(folder / "7", folder / "9")
    damage(folder / "9")
    (folder / "9.damaged").mkdir()
    found = newest_valid(folder, abstract(tree()))
    assert found is not None and found.step == 7
    assert {path.name for path in folder.iterdir()} == {"7", "9.damaged", "9.damaged-2"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("angpt_jax: warning: run.dir: the checkpoint of step 9 is damaged (")
    assert line.endswith(f"), got '{folder}/9'; renamed to 9.damaged-2, going on with step 7")
    again = newest_valid(folder, abstract(tree()))
    assert again is not None and again.step == 7


def test_without_a_whole_one_nothing_starts_anew_and_nothing_is_touched(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    half(folder / "7")
    (folder / "9").mkdir()
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"none of its checkpoints is whole, got .* \(step 9: it is empty; step 7: "
        ):
            newest_valid(folder, abstract(tree()))
    assert {path.name for path in folder.iterdir()} == {"7", "9"}
    for step in ("7", "9"):
        (folder / step).rename(folder / f"{step}.damaged")
    with pytest.raises(UserError, match="none of its checkpoints is whole"):
        newest_valid(folder, abstract(tree()))
