"""A folder of weights alone: the bits of the run, read like a run, resumed by none, written whole or not at all."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from commands import run_here, tree
from states import state_of
from weight_runs import flip

from angpt_jax import restore, trained, weights, weights_folder
from angpt_jax.config import Config, MeshConfig
from angpt_jax.errors import StorageError, UserError
from angpt_jax.train import train
from angpt_jax.trained import Trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("nothing_is_left_to_others"),
]
EIGHT = MeshConfig()


@pytest.fixture(scope="module")
def model(source_run: Path) -> Trained:
    return trained.load(source_run, EIGHT)


@pytest.fixture(scope="module")
def saved(model: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights alone."""
    folder = tmp_path_factory.mktemp("w") / "weights"
    weights.save_weights(model, folder)
    return folder


@pytest.fixture(scope="module")
def folded(source_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w") / "folded"
    weights.save_weights(trained.load(source_run, EIGHT, folded=True), folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """Weights alone, to be broken."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def assert_equal(left: Any, right: Any) -> None:
    """Bit for bit, wherever they lie."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_it_has_the_layout_of_a_run_and_holds_parameters_alone(source_run: Path, saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"config.yaml", "tokenizer.json", "weights.json", "checkpoints"}
    for name in ("config.yaml", "tokenizer.json"):
        assert (saved / name).read_text() == (source_run / name).read_text()
    assert json.loads((saved / "weights.json").read_text()) == {"folded": False}
    assert [path.name for path in (saved / "checkpoints").iterdir()] == ["6"]
    leaves = restore._manifest(saved / "checkpoints/6", "run.dir")["leaves"]  # bytes on disk differ from save to save
    assert {path.split("/")[0] for path, _, _ in leaves} == {"params"}


def test_its_weights_are_those_of_the_run_bit_for_bit_on_any_mesh(
    source_run: Path, model: Trained, saved: Path
) -> None:
    of_the_run = {path: leaf for path, leaf in state_of(source_run).items() if path.startswith("params/")}
    for mesh in (EIGHT, MeshConfig(tensor=2)):
        found = trained.load(saved, mesh)
        assert (found.step, found.is_folded, found.run_config) == (6, False, model.run_config)
        assert_equal(found.params, model.params)
        assert found.params["head"].sharding.mesh.shape["tensor"] == mesh.tensor
    leaves = jax.tree_util.tree_leaves_with_path({"params": model.params})
    assert len(leaves) == len(of_the_run)
    for path, leaf in leaves:
        np.testing.assert_array_equal(leaf, of_the_run[jax.tree_util.keystr(path, simple=True, separator="/")])


def test_what_was_saved_folded_stays_folded_whatever_is_asked(source_run: Path, folded: Path) -> None:
    assert json.loads((folded / "weights.json").read_text()) == {"folded": True}
    here = trained.load(source_run, EIGHT, folded=True)
    assert here.is_folded and here.model.arch.name == "angpt_folded"
    for asked in (True, None, False):
        found = trained.load(folded, EIGHT, folded=asked)
        assert found.is_folded and found.model == here.model
        assert_equal(found.params, here.params)


def test_a_saved_folder_can_be_saved_again(saved: Path, folded: Path, tmp_path: Path) -> None:
    for folder in (saved, folded):
        again = trained.load(folder, EIGHT)
        weights.save_weights(again, tmp_path / folder.name)
        assert (tmp_path / folder.name / "weights.json").read_text() == (folder / "weights.json").read_text()
        assert_equal(trained.load(tmp_path / folder.name, EIGHT).params, again.params)


def test_it_cannot_be_resumed(
    source_run: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(source_run.parent.parent)
    before = tree(saved)
    flags = ("--config", str(saved / "config.yaml"), "--run.dir", str(saved))
    done = run_here(train, Config, "train", *flags, monkeypatch=monkeypatch, capsys=capsys)
    assert (done.code, done.err) == (
        2,
        f"angpt_jax: error: run.dir: holds weights only, which can't be resumed, got '{saved}'; start another "
        f"--run.dir with --run.init_from {saved}\n",
    )
    assert tree(saved) == before


def test_damaged_weights_are_refused(copy: Path) -> None:
    flip(copy, 6)
    before = tree(copy)
    with pytest.raises(UserError, match=r"^run\.dir: none of its checkpoints is whole, got .* \(step 6: "):
        trained.load(copy, EIGHT)
    assert tree(copy) == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "has a weights.json that does not say whether its weights are folded, got '{copy}'; export them again"),
        ('{"folded": 1}', "has a weights.json that does not say whether its weights are folded, got '{copy}'; export"),
        ('{"folded": true}', "the checkpoint of step 6 does not fit the config, got '{copy}/checkpoints/6', which"),
    ],
)
def test_a_mark_that_is_not_true_is_refused(copy: Path, content: str, said: str) -> None:
    (copy / "weights.json").write_text(content)
    with pytest.raises(UserError) as error:
        trained.load(copy, EIGHT)
    assert str(error.value).startswith("run.dir: " + said.replace("{copy}", str(copy)))


def test_a_mark_against_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """Where both decoders have the same parameters, nothing else tells them apart."""
    weights_folder.mark(tmp_path, True)
    weights_folder.check(tmp_path, True, {"folded": True})
    with pytest.raises(UserError, match=r"^run\.dir: has a checkpoint that is not folded, against its weights\.json"):
        weights_folder.check(tmp_path, True, {"folded": False})
    with pytest.raises(UserError, match=r"^run\.init_from: has a checkpoint that is folded, against"):
        weights_folder.check(tmp_path, False, {"folded": True}, "run.init_from")


@pytest.mark.parametrize("broken", ["angpt_jax.weights.write_whole", "angpt_jax.weights.Checkpoints.save"])
def test_it_is_written_whole_or_not_at_all(
    model: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fails(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(broken, fails)
    with pytest.raises(StorageError) as error:
        weights.save_weights(model, tmp_path / "out")
    assert str(error.value) == (
        f"out: can't be written, got '{tmp_path}/out' (No space left on device); a folder on a disk with room"
    )
    assert list(tmp_path.iterdir()) == []


def test_it_replaces_nothing(model: Trained, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = tree(tmp_path)
    for out in (copy, tmp_path / "file"):
        with pytest.raises(UserError, match=r"^out: is there already, got '.*'; a folder that is new or empty$"):
            weights.save_weights(model, out)
    assert tree(tmp_path) == before
    with pytest.raises(StorageError, match=r"^out: can't be written, got '.*/file/out' \(Not a directory\)"):
        weights.save_weights(model, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    weights.save_weights(model, tmp_path / "empty")
    assert weights_folder.is_one(tmp_path / "empty")


def test_the_config_that_is_kept_is_the_one_of_the_training(saved: Path, source_run: Path) -> None:
    assert yaml.safe_load((saved / "config.yaml").read_text())["data"]["batch_size"] == 8
    elsewhere = trained.load(saved, MeshConfig(tensor=2), compute_dtype="bfloat16")
    assert elsewhere.config.model.compute_dtype == "bfloat16" and elsewhere.config.mesh.tensor == 2
    assert elsewhere.run_config == trained.load(source_run, EIGHT).run_config
